"""Worker processes, the pool of shared buffers, prefetch, and the hub that joins them."""
