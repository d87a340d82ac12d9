"""What may be wrong with a run, found in its metrics and said in words.

In comes the history of a run; out go findings, the worst first, each with what to do.
"""
