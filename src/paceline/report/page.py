"""A self-contained HTML page: elements, tables, and a style sheet for light and dark, wide and narrow. No scripts."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import RunDirectoryError
from paceline.report.values import shortened
from paceline.text import readable

MAX_BYTES = 2_900_000
"""Of a page; a report is under 3 MB."""
MAX_ROWS = 1000
"""Of a table of settings or facts."""
MAX_CELL = 300
"""Characters of a name or a value in such a table."""


class Html(str):
    """Markup that is already safe; anything else is escaped when it is put into an element."""

    __slots__ = ()


def element(name: str, *children: Any, **attributes: str | None) -> Html:
    """``<name attributes>children</name>``; an attribute's trailing underscore is dropped, None leaves it out."""
    text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{text}>{joined(children)}</{name}>")


def joined(children: Iterable[Any]) -> Html:
    """Children one after another, escaped unless they are `Html`."""
    return Html("".join(child if isinstance(child, Html) else html.escape(str(child)) for child in children))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str | None = None) -> Html:
    """A table that scrolls sideways on a narrow screen; every column but the first is right-aligned."""
    head = element("tr", *(element("th", column, scope="col") for column in columns))
    body = joined(
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    )
    parts = [element("caption", caption)] if caption else []
    return element("div", element("table", *parts, element("thead", head), element("tbody", body)), class_="scroll")


def tiles(pairs: Iterable[tuple[str, str, str]]) -> Html:
    """Headline numbers: (label, number, small print)."""
    return element(
        "dl",
        *(
            element("div", element("dt", label), element("dd", number, element("small", small) if small else Html("")))
            for label, number, small in pairs
        ),
        class_="tiles",
    )


def figure(svg: str, title: str, caption: str) -> Html:
    """A plot with its title above and what it shows below."""
    drawing = Html(svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1))
    return element("figure", element("h3", title), drawing, element("figcaption", caption))


def section(key: str, title: str, *children: Any) -> Html:
    """A titled part of the page that the table of contents can link to."""
    return element("section", element("h2", title), *children, id=key)


def nested(value: Mapping[str, Any]) -> Html:
    """A nested mapping as a table of dotted names; long values and long tables are cut, and say so."""
    rows = [(shortened(name, MAX_CELL), shortened(text, MAX_CELL)) for name, text in flat(value)]
    caption = f"{len(rows) - MAX_ROWS} more are left out" if len(rows) > MAX_ROWS else None
    return table(("name", "value"), rows[:MAX_ROWS], caption)


def fitted(title: str, parts: Sequence[tuple[str, str, Html]], *, ramp: int, limit: int = MAX_BYTES) -> str:
    """The page of the parts that are there, without its largest ones where it would exceed the limit.

    Args:
        title: of the page.
        parts: (key, title, content); empty ones are dropped.
        ramp: number of bucket colors.
        limit: bytes of the page at most.
    """
    shown = [(key, name, body) for key, name, body in parts if body]
    while True:
        sections = [section(key, name, body) for key, name, body in shown]
        text = page(title, [(key, name) for key, name, _ in shown], sections, ramp)
        if len(text.encode()) <= limit:
            return text
        largest = max(range(len(shown)), key=lambda i: len(shown[i][2]))
        key, name, body = shown[largest]
        size = f"{len(body.encode()) / 1e6:.1f} MB, the page may have {limit / 1e6:.1f} MB"
        shown[largest] = (key, name, element("p", f"This part is left out, it is too large ({size})."))


def check_place(path: Path) -> None:
    """Whether a page may be written there: what is no page, such as a run's metrics, is never written over.

    Raises:
        RunDirectoryError: another file is there.
    """
    try:
        with path.open("rb") as stream:
            start = stream.read(len(_FIRST)) if path.is_file() else _FIRST
    except OSError:
        return  # nothing is there, or writing will say why it cannot be
    if start.lower() not in (_FIRST, b""):
        raise RunDirectoryError(f"{path}: is no page of paceline and would be lost; give another --out")


def save(text: str, path: Path) -> Path:
    """Write a page, whole or not at all.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be written ({error.strerror}); give another --out") from error
    return path


def page(title: str, contents: Sequence[tuple[str, str]], body: Iterable[Any], ramp: int) -> str:
    """The whole document.

    Args:
        title: of the page.
        contents: (key, title) of the sections.
        body: the sections.
        ramp: number of bucket colors.
    """
    links = element("nav", *(element("a", text, href=f"#{key}") for key, text in contents), aria_label="Contents")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
    )
    style = Html(
        _CSS.replace("/*ramp-light*/", _ramp(ramp, _LIGHT_RAMP)).replace("/*ramp-dark*/", _ramp(ramp, _DARK_RAMP))
    )
    return readable(
        f'<!doctype html>\n<html lang="en"><head>{head}{element("title", title)}{element("style", style)}</head>\n'
        f"<body>{element('header', element('h1', title), links)}\n{element('main', *body)}</body></html>\n"
    )


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Dotted name and text of each value of a nested mapping."""
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, Mapping) and inner:
            yield from flat(inner, f"{name}.")
        else:
            yield name, "–" if inner is None else str(inner)


_FIRST = b"<!doctype html>"
_LIGHT_RAMP = ((84, 144, 220), (9, 34, 76))
_DARK_RAMP = ((78, 136, 216), (222, 236, 255))


def _ramp(count: int, ends: tuple[tuple[int, int, int], tuple[int, int, int]]) -> str:
    shares = [i / max(count - 1, 1) for i in range(count)]
    colors = [tuple(round(a + (b - a) * share) for a, b in zip(*ends, strict=True)) for share in shares]
    return "".join(f"--b{i}:rgb({r},{g},{b});" for i, (r, g, b) in enumerate(colors))


_CSS = """
:root{--page:#fbfbf9;--card:#ffffff;--ink:#1c1c1a;--muted:#5f5f59;--grid:#e5e5df;--good:#11735a;--bad:#a8320f;
--s0:#2a6fd0;--s1:#c2541a;--s2:#11805f;--s3:#7452cf;--s4:#b83a76;--s5:#7d6200;/*ramp-light*/}
@media (prefers-color-scheme:dark){:root{--page:#161615;--card:#1e1e1c;--ink:#f0f0ec;--muted:#a8a8a0;--grid:#363631;
--good:#5cc9a4;--bad:#ff9a73;--s0:#6ba4f5;--s1:#f0935a;--s2:#45bd96;--s3:#aa93f2;--s4:#f081b0;--s5:#d8b540;/*ramp-dark*/}}
*{box-sizing:border-box}
html{scroll-behavior:smooth;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
header,main{max-width:76rem;margin:0 auto;padding:0 1rem}
h1{font-size:1.6rem;margin:1.5rem 0 .5rem;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.5rem 0 .75rem;padding-bottom:.25rem;border-bottom:1px solid var(--grid)}
h3{font-size:.95rem;margin:0 0 .5rem}
nav{display:flex;flex-wrap:wrap;gap:.25rem 1rem;font-size:.9rem}
a{color:var(--s0)}
p,li{max-width:48rem}
ul.findings{padding:0;list-style:none}
ul.findings li{margin:.5rem 0;padding:.5rem .75rem;background:var(--card);border:1px solid var(--grid);
border-left:4px solid var(--s0);border-radius:4px}
ul.findings li.warning{border-left-color:var(--bad)}
ul.findings b{display:inline-block;margin-right:.5rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(max(8.5rem,20%),1fr));gap:.75rem;margin:1rem 0}
.tiles div{background:var(--card);border:1px solid var(--grid);border-radius:6px;padding:.6rem .8rem}
.tiles dt{color:var(--muted);font-size:.8rem}
.tiles dd{margin:0;font-size:1.4rem;font-weight:600}
.tiles small{display:block;font-size:.75rem;font-weight:400;color:var(--muted)}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,21rem),1fr));gap:1rem}
figure{margin:0;background:var(--card);border:1px solid var(--grid);border-radius:6px;padding:.8rem;min-width:0}
figcaption{font-size:.8rem;color:var(--muted);margin-top:.4rem}
svg.plot{display:block;width:100%;height:auto;overflow:visible}
svg.plot text{font-family:system-ui,sans-serif}
.scroll{overflow-x:auto;margin:.75rem 0}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--muted);padding-bottom:.25rem}
th,td{padding:.25rem .75rem .25rem 0;text-align:right;border-bottom:1px solid var(--grid);vertical-align:top}
th:first-child{text-align:left;font-weight:500;white-space:nowrap}
thead th{color:var(--muted);font-weight:500}
details{margin:.75rem 0}
summary{cursor:pointer}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.85rem}
.answers dt{font-weight:500;margin-top:.75rem}.answers dd{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}
.answers u{text-decoration-thickness:2px;text-underline-offset:3px}.answers i{color:var(--muted);font-style:normal}
.passes td:last-child{text-align:left}.passes code{letter-spacing:-.05em;overflow-wrap:anywhere}
@media print{nav{display:none}figure{break-inside:avoid}}
"""
