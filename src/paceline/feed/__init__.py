"""The room feed."""
