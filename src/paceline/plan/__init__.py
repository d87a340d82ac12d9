"""The room plan."""
