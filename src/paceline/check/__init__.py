"""The pre-flight of a run: each check passes, warns or fails before days are spent.

In come settings; out goes a list of results in one line each, made on the real target and data of the run.
"""
