"""A page from a template: one HTML file without scripts, for light and dark, wide and narrow screens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from paceline.atomic_files import write_text
from paceline.errors import RunDirectoryError
from paceline.text import duration, first_line, fixed, masked, percent, readable, short, shortened, size

FIRST = "<!doctype html>"
"""How a page begins."""


def render_page(template: str, title: str, *, refresh_s: int = 0, **values: Any) -> str:
    """A whole page.

    Args:
        template: file name of the body.
        title: of the page.
        refresh_s: seconds after which the browser loads it again; 0 for never.
        values: what the body shows.
    """
    contents: list[tuple[str, str]] = []  # the body's sections add themselves
    body = _templates().get_template(template).render(values, contents=contents)
    page = _templates().get_template("page.html.j2")
    return readable(page.render(title=title, contents=contents, body=Markup(body), refresh_s=refresh_s))


def save_page(text: str, path: Path) -> Path:
    """Write a page, whole or not at all; what is not a page, such as a run's metrics, is never written over.

    Raises:
        RunDirectoryError: it cannot be written, or another file is there.
    """
    try:
        if path.is_file():
            with path.open("rb") as stream:
                if stream.read(len(FIRST)).decode("ascii", "replace").lower() not in (FIRST, ""):
                    raise RunDirectoryError(f"{path}: is not a page and would be lost; give another --out")
        write_text(path, text)
    except RunDirectoryError:
        raise
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be written ({first_line(error)}); give another --out") from error
    return path


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted name and text of each value of a nested mapping, without secrets."""
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, Mapping) and inner:
            yield from flat(inner, f"{name}.")
        else:
            yield name, "–" if inner is None else masked(str(inner))


@lru_cache(maxsize=1)
def _templates() -> Environment:
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "short": short,
        "percent": percent,
        "duration": duration,
        "fixed": fixed,
        "size": size,
        "shortened": shortened,
        "unbroken": _unbroken,
        "sentence": _sentence,
        "count": lambda number: f"{number:,}",
    }
    return found


def _sentence(text: str) -> str:
    """A capital letter first, but in the name of a setting, and a full stop last."""
    return (text if "." in text.split()[0] else text[0].upper() + text[1:]) + "."


def _unbroken(text: str) -> str:
    """Numbers stay on one line with their signs and units."""
    return text.replace(" %", "\u00a0%").replace(" ±", "\u00a0±").replace("± ", "±\u00a0").replace(" nat", "\u00a0nat")
