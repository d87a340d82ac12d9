"""The room target."""
