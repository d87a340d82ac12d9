"""Rows → padded host batches."""
