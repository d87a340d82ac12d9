"""The report's part on decoding held-out prompts, from evaluation.json; what is not there is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.observe.diagnosis.learning import AGREEMENT, agrees
from paceline.observe.run_history import History
from paceline.report.page import Html, element, joined, table
from paceline.report.values import number, shortened, whole_numbers

MAX_COLUMNS = 8
"""Evaluations in the table."""
MAX_PROMPTS = 30
"""Prompts whose passes are shown."""
MAX_ANSWERS = 12
"""Answers shown as text."""
MAX_TOKENS = 400
"""Tokens shown of one answer."""
MAX_PIECE = 100
"""Characters shown of one token."""
MAX_GROUPS = 60
"""Tags, or context lengths, in a table."""
MAX_PASSES = 60
"""Passes shown of one prompt."""

_FIGURES = (
    ("num_prompts", "prompts"),
    ("passes", "target passes"),
    ("new_tokens", "new tokens"),
    ("tau_micro", "τ over all passes"),
    ("tau_macro", "τ, mean over prompts"),
    ("tree_tau", "τ with draft trees, over all passes"),
    ("training_tau", "τ of the training forward on the same blocks"),
    ("control_tau", "τ without features (near 1 is right)"),
    ("seconds_per_token", "seconds a token"),
    ("plain_seconds_per_token", "seconds a token without drafter"),
    ("dtype", "compute type"),
    ("temperature", "sampling temperature (0 is greedy)"),
)


def decoding(run: History) -> Html:
    """Figures by step, τ by tag and context length, and the passes of the first prompts."""
    if not run.evaluations:
        return Html("")
    shown, more = run.evaluations, None
    if len(shown) > MAX_COLUMNS:
        shown = [shown[0], *shown[1 - MAX_COLUMNS :]]
        more = f"The first and the newest {MAX_COLUMNS - 1} of {len(run.evaluations)} evaluations."
    columns = ("", *(f"step {entry['step']}" for entry in shown))
    rows = [
        (text, *(_cell(entry.get(name)) for entry in shown))
        for name, text in _FIGURES
        if any(entry.get(name) is not None for entry in shown)
    ]
    if any(isinstance(entry.get("lossless"), dict) for entry in shown):
        rows.append(("answers equal to the target's own", *(_lossless(entry) for entry in shown)))
    if any(agrees(entry) is not None for entry in shown):
        words = {True: "yes", False: "no", None: "not measured"}
        rows.append((f"training and decoding within {AGREEMENT * 100:.0f} %", *(words[agrees(e)] for e in shown)))
    newest = run.evaluations[-1]
    return joined(
        (
            table(columns, rows, more),
            _groups(newest, "by_tag", "τ by tag"),
            _groups(newest, "by_context", "τ by context length in tokens"),
            _answers(newest),
            _passes(newest),
        )
    )


def decoded_slots(run: History) -> dict[int, float]:
    """Conditional acceptance by slot in the newest evaluation."""
    slots = run.evaluations[-1].get("slots") if run.evaluations else None
    found = {}
    for slot in slots if isinstance(slots, list) else ():
        if isinstance(slot, dict) and isinstance(slot.get("slot"), int):
            rate = number(slot.get("conditional"))
            if rate is not None:
                found[slot["slot"]] = rate
    return found


def _groups(entry: Mapping[str, Any], key: str, caption: str) -> Html:
    groups = entry.get(key)
    if not isinstance(groups, dict) or not groups:
        return Html("")
    rows = [
        (shortened(str(name), 80), _cell(group.get("tau")), _cell(group.get("passes")), _cell(group.get("tokens")))
        for name, group in groups.items()
        if isinstance(group, dict)
    ]
    more = f"; {len(rows) - MAX_GROUPS} more are left out" if len(rows) > MAX_GROUPS else ""
    return table(("", "τ", "passes", "tokens"), rows[:MAX_GROUPS], caption + more)


def _answers(entry: Mapping[str, Any]) -> Html:
    """The answers as text: drafts that stand are underlined, each pass ends with a stroke; no color needed."""
    rows = entry.get("rows")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    shown = [
        (
            f"{shortened(str(row.get('id', '?')), 80)} (τ {_cell(row.get('tau'))})",
            _marked(row["pieces"], whole_numbers(row["accepted"])),
        )
        for row in rows[:MAX_ANSWERS]
        if isinstance(row.get("pieces"), list) and isinstance(row.get("accepted"), list)
    ]
    if not shown:
        return Html("")
    legend = joined(
        (element("u", "Underlined"), ": drafts that stand. Bold: the target's own tokens. │ ends a target pass.")
    )
    texts = (element("div", element("dt", name), element("dd", text)) for name, text in shown)
    summary = element("summary", f"Answers of the first {len(shown)} of {len(rows)} prompts, drafts marked")
    return element("details", summary, element("p", legend), element("dl", *texts, class_="answers"))


def _marked(pieces: list[Any], accepted: list[int]) -> Html:
    """First the target's own token, then each pass's accepted drafts and its own token; the limit may cut the end."""
    texts, at = [shortened(str(piece), MAX_PIECE) for piece in pieces[:MAX_TOKENS]], 1
    parts = [element("b", *texts[:1])] if texts else []
    for count in accepted:
        drafts, own = texts[at : at + count], texts[at + count : at + count + 1]
        at += count + 1
        if drafts:
            parts.append(element("u", "".join(drafts)))
        if own:
            parts.append(joined((element("b", own[0]), element("i", "│"))))
    return joined((*parts, " …" if len(pieces) > MAX_TOKENS else ""))


def _passes(entry: Mapping[str, Any]) -> Html:
    """Each target pass as a run of marks: one a standing draft, then the target's own token."""
    rows = entry.get("rows")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    shown = [
        (
            shortened(str(row.get("id", "?")), 80),
            _cell(row.get("tau")),
            element("code", " ".join("▮" * min(n, 64) + "▯" for n in whole_numbers(row["accepted"])[:MAX_PASSES])),
        )
        for row in rows[:MAX_PROMPTS]
        if isinstance(row.get("accepted"), list)
    ]
    if not shown:
        return Html("")
    more = f" First {len(shown)} of {len(rows)} prompts." if len(rows) > len(shown) else ""
    caption = f"▮ a draft that stands, ▯ the target's own token that ends a pass; at most {MAX_PASSES} passes.{more}"
    marks = element("div", table(("", "τ", "passes"), shown, caption), class_="passes")
    return element("details", element("summary", "Passes by prompt"), marks)


def _lossless(entry: Mapping[str, Any]) -> str:
    found = entry.get("lossless")
    if not isinstance(found, dict):
        return "–"
    checked = found.get("checked", found.get("prompts"))
    errors = found.get("errors")
    return f"{found.get('equal')} of {checked}" + (f", {errors} beyond rounding" if errors else "")


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"
    return shortened(str(value), 80)
