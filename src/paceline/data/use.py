"""How a run uses a store: anchors, and passes against published recipes; noted in the store for the HTML report."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.data.report import AnchorCoverage, anchor_coverage
from paceline.data.store import MANIFEST, open_store

PUBLISHED_ROWS = (800_000, 2_000_000)
"""Rows of the published recipes for 8B-class targets."""
PUBLISHED_EPOCHS = (6, 10)
"""Passes of these recipes over their rows."""


@dataclass(frozen=True, slots=True)
class StoreUse:
    """What the settings of a run make of a store.

    Attributes:
        num_anchors: cap a sample and epoch.
        block_size: slots of a block.
        epochs: passes over the data.
        anchors: what the cap leaves.
        passes: rows times epochs against published recipes, in words.
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
    """Reckon the use of a store and note it in its manifest, where that can be written.

    Raises:
        DataError: no store there.
    """
    opened = open_store(store)
    use = StoreUse(
        num_anchors,
        block_size,
        epochs,
        anchor_coverage(opened.eligible, num_anchors=num_anchors, block_size=block_size),
        passes_sentence(int(opened.manifest["report"]["rows_used"]), epochs),
    )
    noted = {**opened.manifest, "use": asdict(use)}
    if noted != opened.manifest and os.access(store, os.W_OK):
        aside = store / f"{MANIFEST}.{os.getpid()}"
        aside.write_text(json.dumps(noted, indent=2), encoding="utf-8")
        aside.replace(store / MANIFEST)
    return use
