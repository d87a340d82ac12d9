"""The version of this package; a module of its own, so that every package can read it."""

__version__ = "0.1.0"
