"""A run from its settings: what is known before a model loads, when to save, what a step is worth.

In come settings; out goes a `Run` with its plan, facts and policies, which `train` starts. Nothing here trains.
"""
