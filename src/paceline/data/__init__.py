"""Chats become tokens with a loss mask.

In come files of chats and a tokenizer; out go a memory-mapped store of token ids, masks and tags, and padded host
batches for a plan. Nothing here knows the target model, the drafter or the plan that will read the store.
"""
