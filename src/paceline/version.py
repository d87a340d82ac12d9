"""The version of this package; a separate module, so that every package can read it."""

__version__ = "0.1.0"
