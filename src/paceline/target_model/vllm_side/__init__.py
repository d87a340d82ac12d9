"""What runs in vLLM's own interpreter, which knows nothing of paceline: the engine's process and its connector.

The folder of these files is on that interpreter's path, so their names are of no other package.
"""
