"""How good a drafter is: prompts are decoded for real and what was accepted is counted.

In come a target, drafters and prompts; out goes a report of acceptance by tag, context and slot, and whether each
answer equals the one of the target alone. The decode loops themselves are in `decode`.
"""
