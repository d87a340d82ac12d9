"""The room data."""
