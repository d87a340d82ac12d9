"""What a person should know of prepared data, in words."""

from __future__ import annotations

from paceline.config import DataConfig
from paceline.data.report import NOTES, PrepareReport
from paceline.data.use import PUBLISHED_EPOCHS, PUBLISHED_ROWS

_MANY = 0.05
"""Share of rows or samples from which a reason or note becomes a warning."""
_RARE = 0.05
"""Share of tokens below which a mode (thinking or not) is too rare to be learned."""
_WORTH_SAYING = (
    "near_duplicate",
    "heldout_near",
    "empty_thought",
    "header_supervised",
    "no_closing_token",
    "closing_is_no_end_token",
    "cut_answer",
    "dated",
)
"""Notes that become warnings: the first held-out prompt nearly met, the others where there are many."""


def warnings_of(report: PrepareReport, settings: DataConfig, *, whole: bool = True) -> list[str]:
    """Sentences about what was left out, what is rare, and what will not be learned.

    Args:
        report: of prepared rows.
        settings: with which they were prepared.
        whole: whether these are all rows of a run; a few of them say nothing about their number.
    """
    found: list[str] = []
    left_out = report.rows_in - report.rows_used - report.heldout_rows
    if report.rows_in and left_out / report.rows_in > _MANY:
        found.append(f"{left_out:,} of {report.rows_in:,} rows ({left_out / report.rows_in:.0%}) are not used")
    for note in _WORTH_SAYING:
        count = report.notes.get(note)
        if count and count.count / report.samples > (0 if note == "heldout_near" else _MANY):
            found.append(f"{count.count:,} of {report.samples:,} samples: {NOTES[note]} (first: {count.example})")
    duplicates = report.set_aside.get("duplicate")
    if duplicates and duplicates.count > _MANY * (report.samples + duplicates.count):
        found.append(f"{duplicates.count:,} samples repeat earlier ones; held-out figures may look better than serving")
    if "heldout" in report.set_aside:
        count = report.set_aside["heldout"]
        found.append(f"{count.count:,} rows ask what held-out data asks and are left out (first: {count.example})")
    if settings.heldout_share and not report.heldout_rows:
        found.append(f"data.heldout_share {settings.heldout_share} holds out no document: there are too few")
    found += _modes(report)
    if report.lost_supervised_tokens:
        share = report.lost_supervised_tokens / (report.lost_supervised_tokens + report.supervised_tokens)
        found.append(
            f"cutting at data.max_length {settings.max_length} lost {report.lost_supervised_tokens:,} supervised "
            f"tokens ({share:.1%}), among them the ends of answers"
        )
    if whole and report.rows_used < PUBLISHED_ROWS[0] // 10:
        (low, high), (short, long) = PUBLISHED_ROWS, PUBLISHED_EPOCHS
        found.append(
            f"{report.rows_used:,} rows are few: published drafters for 8B-class targets learn from "
            f"{low:,} to {high:,} rows in {short} to {long} epochs"
        )
    return found


def _modes(report: PrepareReport) -> list[str]:
    thinking, other = report.tags.get("thinking"), report.tags.get("no-thinking")
    if thinking is None or other is None:
        return []
    total = thinking.supervised_tokens + other.supervised_tokens
    found: list[str] = []
    for name, part in (("thinking", thinking), ("no-thinking", other)):
        share = part.supervised_tokens / total if total else 0.0
        if share < _RARE:
            found.append(
                f"only {share:.1%} of the supervised tokens are tagged {name}; "
                "a mode that is hardly trained is drafted badly"
            )
    return found
