"""The drafter learns: network, attention, losses, optimizer, and the stage of one drafter device.

In come feature batches; out go step reports and the state for a checkpoint. Decoding with a drafter belongs to
`decode`, its file formats to `export`.
"""
