"""Small real runs."""

from __future__ import annotations

from small_runs import few_chats, make_run, shared_store

__all__ = ["few_chats", "make_run", "shared_store"]
