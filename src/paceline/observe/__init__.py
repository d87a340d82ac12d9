"""The room observe."""
