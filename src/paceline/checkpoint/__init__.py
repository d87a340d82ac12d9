"""The room checkpoint."""
