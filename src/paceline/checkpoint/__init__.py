"""The run directory and the checkpoints in it, which appear whole or not at all.

In comes the state of a learner; out goes a folder that a killed run resumes from. When to write one is decided in
`run`.
"""
