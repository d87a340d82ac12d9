"""Answers by the target, so that the drafter learns the text it will have to draft.

In come files of prompts or chats; out goes a file of chats whose answers the target wrote, through a server or through
a function that answers prompts on this machine. Masks and tokens of these chats are the work of `data`.
"""
