"""The report's part on the prepared data, from the manifest of the run's store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.observe.run_history import History
from paceline.text import first_line, parsed_json, percent, short, shortened

MAX_ROWS = 60
"""Of a table."""
_BAR = 40
"""Marks of the fullest bin."""


def prepared_part(run: History) -> dict[str, Any]:
    """What the template shows; empty, and a note, where there is no store."""
    path = Path(run.setting("data", "store") or run.run_dir / "store") / "manifest.json"
    try:
        manifest = parsed_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        run.notes.append(f"{path}: cannot be read ({first_line(error)}): what the data holds is unknown")
        return {}
    report, words = manifest["report"], manifest.get("words", {})
    tokens, supervised, use = report["tokens"], report["supervised_tokens"], manifest.get("use")
    tiles = [
        ("rows read", f"{report['rows_in']:,}", f"{report['rows_used']:,} used"),
        ("samples", f"{report['samples']:,}", "an epoch"),
        ("tokens", short(tokens), f"{percent(supervised / tokens if tokens else 0.0)} supervised"),
        ("eligible anchors", short(report["eligible_anchors"]), "supervised, and the next token too"),
    ]
    if report.get("heldout_rows"):
        tiles.append(("held out", f"{report['heldout_rows']:,}", f"rows of {report['heldout_documents']:,} documents"))
    if use:
        anchors, cap = use["anchors"], f"at most {use['num_anchors']} a sample"
        tiles += [
            ("anchors an epoch", short(anchors["anchors"]), f"{cap}: {anchors['capped_samples']:,} at the cap"),
            ("labels in a block", percent(anchors["covered_labels"]), f"an epoch, blocks of {use['block_size']}"),
        ]
    return {
        "tiles": tiles,
        "passes": f"{use['passes']}." if use else "",
        "warnings": report["warnings"][:MAX_ROWS],
        "set_aside": _counts(report["set_aside"], words.get("set_aside", {})),
        "notes": _counts(report["notes"], words.get("notes", {})),
        "tags": _tags(report["tags"], report["samples"], supervised),
        "lengths": _lengths(report["length_histogram"]),
    }


def _counts(counts: Mapping[str, Any], words: Mapping[str, str]) -> list[tuple[str, ...]]:
    return [
        (
            words.get(key, key),
            f"{found['count']:,}",
            shortened(": ".join(filter(None, (found["example"], found["detail"]))), 200),
        )
        for key, found in list(counts.items())[:MAX_ROWS]
    ]


def _tags(tags: Mapping[str, Any], samples: int, supervised: int) -> list[tuple[str, ...]]:
    """Tags that some samples have and others have not."""
    return [
        (
            tag,
            f"{total['samples']:,}",
            f"{total['tokens']:,}",
            f"{total['supervised_tokens']:,}",
            percent(total["supervised_tokens"] / supervised if supervised else 0.0),
        )
        for tag, total in list(tags.items())[:MAX_ROWS]
        if total["samples"] < samples
    ]


def _lengths(histogram: list[list[int]]) -> list[tuple[str, ...]]:
    most = max((samples for _, samples, _ in histogram), default=0)
    return [
        (f"≤ {upper:,}", f"{samples:,}", f"{tokens:,}", "▮" * (max(1, samples * _BAR // most) if samples else 0))
        for upper, samples, tokens in histogram
    ]
