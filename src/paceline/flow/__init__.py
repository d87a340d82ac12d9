"""The room flow."""
