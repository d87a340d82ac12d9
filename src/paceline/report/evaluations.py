"""The report's part on decoding held-out prompts, from evaluation.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from paceline.observe.diagnosis.learning import AGREEMENT
from paceline.observe.run_history import History
from paceline.text import fixed, percent, short, shortened

MAX_COLUMNS = 8
"""Evaluations in the table: the first one and the newest."""
MAX_PROMPTS, MAX_PASSES = 30, 60
"""Prompts whose passes are shown; passes shown of one prompt."""
MAX_ANSWERS, MAX_TOKENS = 12, 400
"""Answers shown as text; tokens shown of one answer."""

_FIGURES = (
    ("num_prompts", "prompts"),
    ("passes", "target passes"),
    ("new_tokens", "new tokens"),
    ("tau_micro", "τ over all passes"),
    ("tau_macro", "τ, mean over prompts"),
    ("tree_tau", "τ with draft trees, over all passes"),
    ("training_tau", "τ of the training forward on the same blocks"),
    ("loop_tau", "τ of the decode loop on the same blocks"),
    ("control_tau", "τ without features (near 1 is right)"),
    ("seconds_per_token", "milliseconds a token"),
    ("plain_seconds_per_token", "milliseconds a token without drafter"),
)
_CONDITIONS = (
    ("max_new_tokens", "tokens an answer at most"),
    ("temperature", "sampling temperature (0 is greedy)"),
    ("tree_budget", "nodes of a draft tree"),
    ("dtype", "compute type"),
    ("device", "device"),
    ("files", "prompts from"),
)


def evaluation_part(run: History) -> dict[str, Any]:
    """What the template shows; empty where nothing was decoded."""
    entries = run.evaluations or run.other_evaluations
    if not entries:
        return {}
    newest = entries[-1]
    shown = entries if len(entries) <= MAX_COLUMNS else [entries[0], *entries[1 - MAX_COLUMNS :]]
    rows = [
        (text, *(_figure(entry, name) for entry in shown))
        for name, text in _FIGURES
        if any(entry.get(name) is not None for entry in shown)
    ]
    rows += [
        ("answers equal to the target's", *(_lossless(entry) for entry in shown)),
        (
            f"training and decoding within {percent(AGREEMENT)}",
            *(cell(entry.get("training_agrees")) for entry in shown),
        ),
    ]
    rows += [
        (text, *(cell(entry.get("conditions", {}).get(name)) for entry in shown))
        for name, text in _CONDITIONS
        if any(entry.get("conditions", {}).get(name) is not None for entry in shown)
    ]
    prompts = newest.get("rows", [])
    return {
        "columns": ("", *(f"step {entry['step']}" for entry in shown)),
        "rows": rows,
        "others": [
            (f"step {entry['step']}", fixed(entry.get("tau_micro")), cell(entry.get("num_prompts")), conditions(entry))
            for entry in run.other_evaluations
        ],
        "caption": f"The first and the newest {len(shown) - 1} of {len(entries)} evaluations."
        * (len(shown) < len(entries)),
        "by_tag": groups(newest, "by_tag"),
        "by_context": groups(newest, "by_context"),
        "answers": [
            (row["id"], cell(row["tau"]), marked(row["pieces"], row["accepted"]))
            for row in prompts[:MAX_ANSWERS]
            if row.get("pieces")
        ],
        "passes": [
            (row["id"], cell(row["tau"]), " ".join("▮" * n + "▯" for n in row["accepted"][:MAX_PASSES]))
            for row in prompts[:MAX_PROMPTS]
        ],
    }


def server_part(run: History) -> dict[str, Any]:
    """What the template shows of measured servers, the newest last; empty without any."""
    if not run.server_evaluations:
        return {}
    newest = run.server_evaluations[-1]
    plain = {speed["concurrency"]: speed for speed in newest.get("baseline_speeds") or ()}
    return {
        "newest": newest,
        "columns": (
            "requests at once",
            *_speed_columns(""),
            "τ",
            *(_speed_columns("without drafter: ") if plain else ()),
        ),
        "speeds": [
            (
                str(speed["concurrency"]),
                *_speed_cells(speed),
                fixed(speed.get("tau")),
                *(_speed_cells(plain.get(speed["concurrency"])) if plain else ()),
            )
            for speed in newest["speeds"]
        ],
        "caption": f"Step {newest['step']}, {newest['engine']}: {conditions(newest)}",
        "rows": [
            (
                f"step {entry['step']}, {entry['engine']}",
                fixed(entry["tau_micro"]),
                fixed(entry.get("counted_tau")),
                cell(entry.get("num_drafts")),
                "–" if entry.get("equal_answers") is None else f"{entry['equal_answers']} of {entry['num_prompts']}",
                conditions(entry),
            )
            for entry in run.server_evaluations
        ],
        "notes": newest.get("notes") or [],
    }


def _speed_columns(prefix: str) -> tuple[str, str]:
    return f"{prefix}output tokens/s", f"{prefix}ms to the first token"


def _speed_cells(speed: Mapping[str, Any] | None) -> tuple[str, str]:
    if speed is None:
        return "–", "–"
    return fixed(speed["tokens_per_second"], 1), fixed(1000 * speed["first_token_s"], 1)


def conditions(entry: Mapping[str, Any]) -> str:
    """Under what an evaluation was made, in short: ``64 prompts, ≤ 256 tokens, temperature 0.8, float32``."""
    known = entry.get("conditions", {})
    parts = [f"{entry['num_prompts']} prompts"] if entry.get("num_prompts") is not None else []
    parts += [f"≤ {known['max_new_tokens']} tokens"] if "max_new_tokens" in known else []
    temperature = known.get("temperature", entry.get("temperature"))
    parts += [f"temperature {temperature:g}"] if temperature else ["greedy"] if temperature is not None else []
    parts += [f"trees of {known['tree_budget']}"] if known.get("tree_budget") else []
    parts += [str(known.get("dtype", entry.get("dtype")))] if known.get("dtype", entry.get("dtype")) else []
    return ", ".join(parts) or "–"


def groups(entry: Mapping[str, Any], key: str) -> list[tuple[str, ...]]:
    """τ of groups of passes, without groups that hold all of them and so separate nothing."""
    found, passes = entry.get(key) or {}, entry.get("passes")
    return [
        (name, fixed(group["tau"]), str(group["passes"]), str(group["tokens"]))
        for name, group in found.items()
        if group["passes"] != passes
    ]


def marked(pieces: list[str], accepted: list[int]) -> Markup:
    """An answer: drafts that were accepted underlined, the target's tokens bold, a stroke after each pass.

    First comes the target's first token, then each pass's accepted drafts and its token; the limit may cut the end.
    """
    texts, at = pieces[:MAX_TOKENS], 1
    parts = [Markup("<b>{}</b>").format(text) for text in texts[:1]]
    for count in accepted:
        drafts, own = texts[at : at + count], texts[at + count : at + count + 1]
        at += count + 1
        if drafts:
            parts.append(Markup("<u>{}</u>").format("".join(drafts)))
        parts += [Markup("<b>{}</b><i>│</i>").format(text) for text in own]
    return Markup("").join([*parts, " …" * (len(pieces) > MAX_TOKENS)])


def _figure(entry: Mapping[str, Any], name: str) -> str:
    value = entry.get(name)
    return fixed(value * 1000, 1) if value is not None and name.endswith("seconds_per_token") else cell(value)


def _lossless(entry: Mapping[str, Any]) -> str:
    found = entry.get("lossless")
    if found is None:
        return "–"
    errors = f", {found['errors']} beyond rounding" if found.get("errors") else ""
    return f"{found['equal']} of {found['prompts']}{errors}"


def cell(value: Any) -> str:
    """A value of an evaluation in a table."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) >= 1 else short(value)
    return shortened(", ".join(value) if isinstance(value, list) else str(value), 80)
