"""Drafter folders that servers read, and back.

In come weights and a spec; out goes a folder in the z-lab or speculators format, verified by reading it again, with a
model card. Measuring the drafter is the work of `evaluate`.
"""
