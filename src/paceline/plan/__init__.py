"""Which samples train together, and when.

In come the lengths of all samples and the planning settings; out goes the plan of an epoch: micro-batches, their order
and their windows. It is a pure function in numpy and reads no token.
"""
