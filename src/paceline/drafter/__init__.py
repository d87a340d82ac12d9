"""The room drafter."""
