"""Numbers, times, sizes and errors as people read them, without secrets; every package writes them the same way."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from pathlib import Path
from typing import Any

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def short(value: float | None) -> str:
    """``12345.6`` → ``12.3k``; three significant digits; ``–`` for what is not a number."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    for factor, letter in _PREFIXES:
        if abs(value) >= factor * 0.9995:
            return f"{_three(value / factor)}{letter}"
    return _three(value)


def percent(share: float | None) -> str:
    """``0.0714`` → ``7.1 %``."""
    if share is None or not math.isfinite(share):
        return "–"
    return f"{share * 100:.0f} %" if abs(share) >= 0.0995 or share == 0 else f"{share * 100:.1f} %"


def fixed(value: float | None, digits: int = 2) -> str:
    """``2.5`` → ``2.50``; ``–`` for what is not a number."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def signed(value: float, digits: int) -> str:
    """``-0.5`` → ``−0.50``, ``0.5`` → ``+0.50``."""
    return f"{value:+.{digits}f}".replace("-", "−")


def duration(seconds: float | None) -> str:
    """``3725`` → ``1:02:05``; tenths below ten seconds."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and an ellipsis where it is longer than ``most`` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def readable(text: str) -> str:
    """The text with a question mark for each byte of a file name that is not text; UTF-8 cannot hold those."""
    return text.encode("utf-8", "replace").decode()


_SECRETS = re.compile(
    r"(?P<before>\b[a-z][a-z0-9+.-]*://)[^/\s@]+(?P<after>@)"
    r"|(?P<name>\b(?:api[_-]?key|access[_-]?token|auth[_-]?token|secret|password|passwd)[\"']?\s*[:=]\s*[\"']?)[^\s\"'&,;]+"
    r"|(?P<query>[?&](?:key|token|sig|signature|api_?key)=)[^&\s\"']+"
    r"|(?P<bearer>\bBearer\s+)\S+"
    r"|\b(?:hf_|sk-|ghp_|github_pat_|glpat-|xox[abp]-|AKIA)[A-Za-z0-9_-]{12,}",
    re.IGNORECASE,
)
"""user:password in an address, values of names that say so, and keys by their well-known beginnings."""


def masked(text: str) -> str:
    """The text with passwords and keys as ``***``: ``http://me:pw@host`` → ``http://***@host``."""

    def hidden(found: re.Match[str]) -> str:
        kept = [found.group(name) or "" for name in ("before", "name", "query", "bearer")]
        return "".join(kept) + "***" + (found.group("after") or "")

    return _SECRETS.sub(hidden, text)


def masked_values(value: Any) -> Any:
    """A nested value of mappings and lists whose texts are masked; the names in it are kept."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {name: masked_values(inner) for name, inner in value.items()}
    return [masked_values(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def size(num_bytes: float) -> str:
    """Bytes with a binary prefix: ``1536`` → ``1.5 KiB``."""
    value, names = float(num_bytes), ("B", "KiB", "MiB", "GiB", "TiB")
    for name in names[:-1]:
        if abs(value) < 1023.5:
            return f"{value:.0f} {name}" if name == "B" or abs(value) >= 99.5 else f"{value:.1f} {name}"
        value /= 1024
    return f"{value:.1f} {names[-1]}"


def absent(path: str | os.PathLike[str], kind: str) -> str:
    """Why nothing is there: ``no such file``, or where a link that leads nowhere points to.

    Args:
        path: where nothing is.
        kind: what was looked for, ``file`` or ``folder``.
    """
    if Path(path).is_symlink():
        return f"is a link to {Path(path).readlink()}, which does not exist"
    return f"no such {kind}"


MAX_DEPTH = 200
"""Levels of a JSON text; what people write has a dozen."""
TOO_DEEP = "nested too deeply"


def parsed_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: no JSON, or nested more deeply than anything that is meant.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    check_depth(text, value)
    return value


def check_depth(text: str | bytes, value: Any) -> None:
    """Refuse a JSON text that is nested more deeply than `MAX_DEPTH`: functions that walk through it call themselves.

    Python versions differ in what their parsers refuse by themselves.

    Args:
        text: of the value; one with few brackets is not looked at.
        value: what was read.

    Raises:
        ValueError: it is.
    """
    brackets = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if brackets <= MAX_DEPTH:
        return
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list)))
        level = [part for parts in inner for part in parts]
        if not level:
            return
    raise ValueError(TOO_DEEP)


def first_line(error: BaseException) -> str:
    """An exception in one line: what the system said where it knows, else the first line of its text, else its class.

    The next line is added where the first ends with a colon.
    """
    if isinstance(error, OSError) and error.strerror:
        named = error.errno == errno.ENOENT and isinstance(error.filename, str)
        return absent(error.filename, "file") if named and Path(error.filename).is_symlink() else error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__


def _three(value: float) -> str:
    size = abs(value)
    if size >= 99.95 or (size >= 1 and value == int(value)):
        return f"{value:.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995:
        return f"{value:.2f}"
    if size >= 0.0009995:
        return f"{value:.4f}".rstrip("0").rstrip(".")
    return "0" if value == 0 else f"{value:.1e}"
