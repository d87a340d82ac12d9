"""The report's part on the prepared data, from the manifest of the run's store; what is not there is left out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.observe.run_history import History
from paceline.report.page import Html, element, joined, table, tiles
from paceline.report.values import shortened
from paceline.text import percent, short

MAX_ROWS = 60
"""Of a table."""
MAX_TEXT = 200
"""Characters of a cell."""
_BAR = 40
"""Marks of the fullest bin."""


def prepared_data(run: History) -> Html:
    """Rows in and out by reason, tokens by tag, lengths, anchors, passes and warnings."""
    store = _store(run)
    path = store / "manifest.json"
    if not path.is_file():
        run.notes.append(f"{store}: no prepared store there (manifest.json is missing): what the data holds is unknown")
        return Html("")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        return _section(manifest)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return element("p", f"{path}: cannot be read ({type(error).__name__}: {error})")


def _store(run: History) -> Path:
    named = (run.settings.get("data") or {}).get("store")
    return Path(named) if named and isinstance(named, str) else run.run_dir / "store"


def _section(manifest: Mapping[str, Any]) -> Html:
    report, words = manifest["report"], manifest.get("words", {})
    tokens, supervised = report["tokens"], report["supervised_tokens"]
    use = manifest.get("use")
    pairs = [
        ("rows read", f"{report['rows_in']:,}", f"{report['rows_used']:,} used"),
        ("samples", f"{report['samples']:,}", "an epoch"),
        ("tokens", short(tokens), f"{percent(supervised / tokens if tokens else 0.0)} supervised"),
        ("eligible anchors", short(report["eligible_anchors"]), "supervised, and the next token too"),
    ]
    if report.get("heldout_rows"):
        pairs.append(("held out", f"{report['heldout_rows']:,}", f"rows of {report['heldout_documents']:,} documents"))
    if use:
        anchors, cap = use["anchors"], f"at most {use['num_anchors']} a sample"
        pairs.append(
            ("anchors an epoch", short(anchors["anchors"]), f"{cap}: {anchors['capped_samples']:,} at the cap")
        )
        pairs.append(
            ("labels in a block", percent(anchors["covered_labels"]), f"an epoch, blocks of {use['block_size']}")
        )
    return joined(
        (
            tiles(pairs),
            element("p", use["passes"] + ".") if use else Html(""),
            _warnings(report["warnings"]),
            _counts("Left out", report["set_aside"], words.get("set_aside", {})),
            _counts("Noted of samples that are kept", report["notes"], words.get("notes", {})),
            _tags(report["tags"], supervised),
            _lengths(report["length_histogram"]),
        )
    )


def _warnings(warnings: list[str]) -> Html:
    cut = [shortened(text, MAX_TEXT) for text in warnings[:MAX_ROWS]] + _more(len(warnings))
    rows = [element("li", element("b", "Warning"), text, class_="warning") for text in cut]
    return element("ul", *rows, class_="findings") if rows else Html("")


def _more(count: int) -> list[str]:
    return [f"{count - MAX_ROWS} more are left out"] if count > MAX_ROWS else []


def _counts(title: str, counts: Mapping[str, Any], words: Mapping[str, str]) -> Html:
    rows = [
        (
            shortened(words.get(key, key), MAX_TEXT),
            f"{count['count']:,}",
            shortened(": ".join(filter(None, (count["example"], count["detail"]))), MAX_TEXT),
        )
        for key, count in itertools.islice(counts.items(), MAX_ROWS)
    ]
    rows += [(text, "", "") for text in _more(len(counts))]
    return element("div", table(("", "count", "first"), rows, title), class_="passes") if rows else Html("")


def _tags(tags: Mapping[str, Any], supervised: int) -> Html:
    rows = [
        (
            shortened(tag, MAX_TEXT),
            f"{total['samples']:,}",
            f"{total['tokens']:,}",
            f"{total['supervised_tokens']:,}",
            percent(total["supervised_tokens"] / supervised if supervised else 0.0),
        )
        for tag, total in itertools.islice(tags.items(), MAX_ROWS)
    ]
    rows += [(text, "", "", "", "") for text in _more(len(tags))]
    columns = ("", "samples", "tokens", "supervised tokens", "of supervised tokens")
    return table(columns, rows, "By tag; a sample may have several") if rows else Html("")


def _lengths(histogram: list[list[int]]) -> Html:
    most = max((samples for _, samples, _ in histogram), default=0)
    rows = [
        (
            f"≤ {upper:,}",
            f"{samples:,}",
            f"{tokens:,}",
            element("code", "▮" * (max(1, samples * _BAR // most) if samples else 0)),
        )
        for upper, samples, tokens in histogram[:MAX_ROWS]
    ]
    drawn = table(("tokens a sample", "samples", "tokens", ""), rows, "Lengths; bins by powers of two")
    return element("div", drawn, class_="passes") if rows else Html("")
