"""The one home of decoding: sessions over caches, and the loops that draft and verify.

In come a target, a drafter and the tokens of a prompt; out come the answer and what every pass accepted, for chains,
trees and several prompts at once. What the numbers mean is said in `evaluate`.
"""
