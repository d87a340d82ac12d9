"""The room evaluate."""
