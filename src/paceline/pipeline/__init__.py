"""One process a device, joined by bounded channels.

In come host batches in plan order; out go step reports, whatever the timing of the processes. It moves messages and
buffers and knows no model: target and drafter stages plug in from their own packages.
"""
