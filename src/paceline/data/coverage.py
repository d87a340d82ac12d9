"""What a run makes of a store: what the anchor cap leaves, passes beside published recipes, and what to look at."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from paceline.config import DataConfig
from paceline.data.report import NOTES, REASONS, PrepareReport
from paceline.data.store import TokenStore, open_store, write_manifest
from paceline.errors import DataError
from paceline.text import percent

PUBLISHED_ROWS = (800_000, 2_000_000)
"""Rows of the published recipes for 8B-class targets."""
PUBLISHED_EPOCHS = (6, 10)
"""Passes of these recipes over their rows."""
_MANY = 0.05
"""Share of rows or samples from which a reason or note becomes a warning."""
_RARE = 0.05
"""Share of tokens below which a mode (thinking or not) is too rare to be learned."""
_LOST = 0.01
"""Share of supervised tokens from which a loss becomes a warning."""
_REMEDIES = {
    "too_long": "raise data.max_length, or keep the first turns that fit with data.on_too_long: turns",
    "too_long_after_cut": "raise data.max_length",
    "turns": "raise data.max_length",
    "cut": "raise data.max_length; data.on_too_long: turns keeps the ends of answers",
    "cut_answer": "regenerate them with a higher limit",
    "rewritten": "data.on_rewrite: split keeps them",
}
"""What to do about a loss."""
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


@dataclass(frozen=True, slots=True)
class AnchorCoverage:
    """What the anchor cap leaves of the data in one epoch.

    Attributes:
        anchors: anchors drawn an epoch, at most `num_anchors` a sample.
        eligible: positions that could be anchors.
        covered_labels: expected share of the positions after an eligible anchor that are a label of at least one
            block.
        capped_samples: samples with more eligible positions than the cap.
    """

    anchors: int
    eligible: int
    covered_labels: float
    capped_samples: int


def anchor_coverage(eligible: np.ndarray, *, num_anchors: int, block_size: int) -> AnchorCoverage:
    """Anchors of an epoch and the share of labels that they reach.

    Of a sample with E eligible positions in a row, A = min(E, num_anchors) are drawn without replacement. Label j is
    reached by the w = min(j, block_size - 1) anchors before it: with probability 1 - C(E - w, A) / C(E, A), here with
    its product form over w.

    Args:
        eligible: eligible positions per sample, [num_samples]; taken as one run each.
        num_anchors: cap a sample.
        block_size: slots of a block.
    """
    of_each = np.bincount(eligible)
    counts = np.flatnonzero(of_each)
    samples = of_each[counts]
    drawn = np.minimum(counts, num_anchors)
    reached = 0.0
    for total, anchors, times in zip(counts.tolist(), drawn.tolist(), samples.tolist(), strict=True):
        reach = np.arange(min(block_size - 1, total))
        missed = np.cumprod(np.maximum(total - reach - anchors, 0) / np.maximum(total - reach, 1))
        inner = 1.0 - missed
        reached += times * float(inner.sum() + inner[-1] * (total - len(inner)) if len(inner) else 0.0)
    positions = int((counts * samples).sum())
    return AnchorCoverage(
        anchors=int((drawn * samples).sum()),
        eligible=positions,
        covered_labels=reached / positions if positions else 0.0,
        capped_samples=int(samples[counts > num_anchors].sum()),
    )


@dataclass(frozen=True, slots=True)
class StoreUse:
    """What the settings of a run make of a store.

    Attributes:
        num_anchors: cap a sample and epoch.
        block_size: slots of a block.
        epochs: passes over the data.
        anchors: what the cap leaves.
        passes: rows times epochs against published recipes, as text.
    """

    num_anchors: int
    block_size: int
    epochs: int
    anchors: AnchorCoverage
    passes: str


def passes_sentence(rows: int, epochs: int) -> str:
    """Rows times epochs against published recipes, in one sentence."""
    (few, many), (short, long) = PUBLISHED_ROWS, PUBLISHED_EPOCHS
    share = rows * epochs / (few * short)
    written = f"{share:.1%}" if share >= 0.001 else "less than 0.1%"
    against = f", {written} of the smallest recipe" if share < 1 else ""
    return (
        f"{rows:,} rows × {epochs} epochs = {rows * epochs:,} rows trained{against}; published recipes for 8B-class "
        f"targets: {few:,} to {many:,} rows × {short} to {long} epochs"
    )


def note_use(store: Path, *, num_anchors: int, block_size: int, epochs: int) -> StoreUse:
    """Work out the use of a store, and note it in its manifest where that can be written.

    Raises:
        DataError: no store there.
    """
    opened = open_store(store)
    use = StoreUse(
        num_anchors,
        block_size,
        epochs,
        anchor_coverage(opened.eligible, num_anchors=num_anchors, block_size=block_size),
        passes_sentence(opened.manifest.report.rows_used, epochs),
    )
    if asdict(use) != opened.manifest.use and os.access(store, os.W_OK):
        write_manifest(store, replace(opened.manifest, use=asdict(use)))
    return use


def beyond_positions(store: TokenStore, positions: int | None) -> str | None:
    """A sentence where samples are longer than the target has positions; None where none is, or that is not known."""
    beyond = np.zeros(0, bool) if positions is None else store.lengths > positions
    if not beyond.any():
        return None
    share = percent(store.supervised[beyond].sum() / store.supervised.sum())
    return (
        f"{int(beyond.sum()):,} samples ({share} of the supervised tokens) are longer than the target's "
        f"{positions:,} positions; its features are worth little there: set data.max_length to {positions} or less"
    )


def check_mask_token(store: TokenStore, token: int, vocabulary: int) -> None:
    """Refuse a mask token that occurs in the text: the drafter could not tell a slot to fill from a word.

    Raises:
        DataError: it occurs; names one that does not.
    """
    if not np.isin(token, store.used_ids):
        return
    unused = np.setdiff1d(np.arange(vocabulary), store.used_ids)
    example = f", for example {int(unused[-1])}" if len(unused) else ""
    raise DataError(
        f"drafter.mask_token_id: token {token} occurs in the text of {store.path}; give the id of a token that does "
        f"not{example}"
    )


def warnings_of(report: PrepareReport, settings: DataConfig) -> list[str]:
    """Sentences about what was left out, what is rare, and what will not be learned.

    Args:
        report: of prepared rows.
        settings: with which they were prepared.
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
    found += losses(report)
    return found


def losses(report: PrepareReport) -> list[str]:
    """A sentence for each policy and cap that costs much: supervised tokens, their share, and tags that lose most."""
    total = report.supervised_tokens + report.lost_supervised_tokens
    found: list[str] = []
    for name, count in [*report.set_aside.items(), *report.notes.items()]:
        if not count.lost or count.lost < _LOST * total or name in ("duplicate", "near_duplicate", "weight"):
            continue
        words = REASONS[name] if name in report.set_aside else NOTES[name]
        shares = {tag: tokens / _known(report, tag) for tag, tokens in count.lost_by_tag.items()}
        tags = [f"{tag} {percent(share)}" for tag, share in sorted(shares.items(), key=lambda item: -item[1])[:3]]
        found.append(
            f"{count.lost:,} supervised tokens ({percent(count.lost / total)}) are lost in {count.count:,} samples: "
            + words
            + (f"; by tag: {', '.join(tags)}" if tags else "")
            + (f"; {_REMEDIES[name]}" if name in _REMEDIES else "")
        )
    return found


def _known(report: PrepareReport, tag: str) -> int:
    return report.tags[tag].supervised_tokens + report.tags[tag].lost


def cap_lines(report: PrepareReport) -> list[str]:
    """What some values of `data.max_length` would keep, a line each; none where all samples are short."""
    if len(report.caps) < 2 or not report.caps[-1].whole:
        return []
    everything = report.caps[-1]
    lines = [
        "data.max_length would keep, of the samples and of the supervised tokens with on_too_long drop, turns, cut:"
    ]
    for cap in report.caps:
        tokens = [percent(kept / everything.whole) for kept in (cap.whole, cap.turns, cap.cut)]
        share = percent(cap.samples / everything.samples)
        lines.append(f"  {cap.max_length:>9,}  {share:>6}  {', '.join(f'{text:>6}' for text in tokens)}")
    return lines


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
