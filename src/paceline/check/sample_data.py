"""What a pre-flight works on: some real rows, tokenized as the run would, and the run's own store where it has one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import Settings
from paceline.data.collate import collate
from paceline.data.files import check_apart, find_files
from paceline.data.holdout import unmeasurable
from paceline.data.prepare import check_store, prepare
from paceline.data.readers import Shard, read_shard, scan
from paceline.data.report import PrepareReport
from paceline.data.rows import RowRejected
from paceline.data.store import TokenStore, open_store
from paceline.drafter.anchors import count_eligible, sample_anchors
from paceline.drafter.spec import DrafterSpec
from paceline.errors import DataError
from paceline.plan.epoch import EpochPlan
from paceline.run.training_plan import epoch_plan
from paceline.types import HostBatch, PlannedBatch, TargetFacts

ROWS = "rows.jsonl"
"""The scratch file of rows."""
STRETCHES = 16
"""Rows are taken from about this many places spread over the files."""
FEW, FEW_TOKENS, FEW_ANCHORS = 8, 512, 16
"""Samples of the small batch, their longest length in tokens, and anchors of each."""


@dataclass(frozen=True, slots=True)
class SampleData:
    """Data of a pre-flight.

    Attributes:
        store: the run's own store where it is there, else the tokenized rows of `chats`.
        whole: whether `store` is the run's own.
        share: of the run's rows that `store` holds, estimated; 1 where it is whole.
        chats: some rows of the training files, as JSON lines; None where the run names none.
        sample: `chats`, tokenized; None where there are none.
        report: of that tokenizing.
        origins: `chats` line number → file:line of the user.
    """

    store: TokenStore
    whole: bool
    share: float
    chats: Path | None
    sample: TokenStore | None
    report: PrepareReport | None
    origins: dict[int, str]


def gather(settings: Settings, folder: Path, rows: int) -> SampleData:
    """Take rows from the training files, tokenize them aside; open the run's store where it is there.

    Args:
        settings: of the run.
        folder: scratch folder.
        rows: about how many rows to take.

    Raises:
        DataError: files missing, nothing usable, or a store that was made from something else.
    """
    target, there = settings.target, settings.store_path.is_dir()
    chats, sample, report, origins, share = None, None, None, {}, 1.0
    if settings.data.train:
        if settings.data.heldout:
            check_apart(find_files(settings.data.train), find_files(settings.data.heldout, "data.heldout"))
        chats = folder / ROWS
        origins, total = take_rows(settings.data.train, chats, rows)
        if not origins:
            raise DataError(f"data.train: no rows in {', '.join(settings.data.train)}; give files with one chat a line")
        share = min(1.0, len(origins) / total)
        try:
            report = prepare(
                [str(chats)],
                folder / "store",
                target.path,
                settings.data.model_copy(update={"workers": 1, "heldout_share": 0.0}),
                count_eligible=count_eligible,
                trust_remote_code=target.trust_remote_code,
            )
        except DataError as error:
            raise DataError(
                *(user_places(line, folder, origins, settings.data.train) for line in error.errors)
            ) from error
        sample = open_store(folder / "store")
        if settings.data.heldout and settings.evaluate.validation_samples:
            _try_heldout(settings, folder, rows)
    elif not there:
        raise DataError(f"data.train: empty, and there is no store at {settings.store_path}; name files of chats")
    if there:
        check_store(settings.store_path, target.path, settings.data, trust_remote_code=target.trust_remote_code)
        return SampleData(open_store(settings.store_path), True, 1.0, chats, sample, report, origins)
    assert sample is not None, "either the store is there or the sample was made"
    return SampleData(sample, False, share, chats, sample, report, origins)


def _try_heldout(settings: Settings, folder: Path, rows: int) -> None:
    """Tokenize some held-out rows, and drop them.

    Raises:
        DataError: there is nothing to measure in them.
    """
    aside = folder / "heldout"
    aside.mkdir()
    origins, _ = take_rows(settings.data.heldout, aside / ROWS, rows)
    try:
        prepare(
            [str(aside / ROWS)],
            aside / "store",
            settings.target.path,
            settings.data.model_copy(update={"workers": 1, "heldout": [], "heldout_share": 0.0, "duplicates": "keep"}),
            count_eligible=count_eligible,
            trust_remote_code=settings.target.trust_remote_code,
        )
    except DataError as error:
        lines = (user_places(line, aside, origins, settings.data.heldout) for line in error.errors)
        raise unmeasurable(DataError(*lines)) from error


def user_places(text: str, folder: Path, origins: dict[int, str], names: list[str]) -> str:
    """A text with the user's files instead of the scratch files.

    Args:
        text: for the user.
        folder: scratch folder.
        origins: line number in `ROWS` → file:line of the user.
        names: the training files.
    """
    chats = re.escape(str(folder / ROWS))
    text = re.sub(rf"{chats}:(\d+)", lambda found: origins.get(int(found[1]), ", ".join(names)), text)
    return re.sub(rf"{re.escape(str(folder))}(/[\w.-]+)*", lambda _: ", ".join(names), text)


def take_rows(names: list[str], into: Path, rows: int) -> tuple[dict[int, str], float]:
    """Rows from stretches spread over data files, written as JSON lines without their own ids.

    Returns:
        Line number → file:line, and about how many rows the files hold.
    """
    files = find_files(names)
    _, pieces = scan(files)
    places = np.unique(np.linspace(0, len(pieces) - 1, min(STRETCHES, len(pieces))).astype(np.int64))
    origins: dict[int, str] = {}
    density: list[float] = []
    with into.open("w", encoding="utf-8") as sink:
        for place in places:
            piece, taken, written = pieces[place], 0, 0
            for line, values in read_shard(piece):
                if taken == -(-rows // len(places)):
                    break
                if isinstance(values, dict):
                    values = {key: value for key, value in values.items() if key != "id"}
                text = "{" if isinstance(values, RowRejected) else json.dumps(values, ensure_ascii=False, default=str)
                sink.write(text + "\n")
                taken, written = taken + 1, written + len(text.encode()) + 1
                origins[len(origins) + 1] = f"{piece.name}:{line}"
            density.append(_rows_of(piece, taken, written))
    return origins, max(float(len(origins)), float(np.mean(density)) * len(pieces))


def _rows_of(piece: Shard, taken: int, written: int) -> float:
    """About how many rows a piece holds."""
    if piece.kind == "jsonl":
        return taken * (piece.stop - piece.start) / written if written else 0.0
    return float(sum(1 for _ in read_shard(piece)))


def plan_of(settings: Settings, spec: DrafterSpec, material: SampleData) -> EpochPlan:
    """The first epoch; of a few rows without weights by tag, for they may lack the tags."""
    if not material.whole:
        settings = settings.model_copy(update={"plan": settings.plan.model_copy(update={"weights": {}})})
    return epoch_plan(settings, spec, material.store, 0)


def few_samples(store: TokenStore, spec: DrafterSpec, facts: TargetFacts, seed: int) -> HostBatch:
    """A small real batch: samples of up to 512 tokens, spread over their lengths; the shortest where all are longer.

    Raises:
        DataError: no sample has an anchor.
    """
    lengths = np.asarray(store.lengths)
    usable = np.flatnonzero(np.asarray(store.eligible) > 0)
    if not len(usable):
        raise DataError(f"{store.path}: no sample has an anchor; look at its masks with `paceline prepare --show 2`")
    by_length = usable[np.argsort(lengths[usable], kind="stable")]
    short = by_length[lengths[by_length] <= FEW_TOKENS]
    pool = short if len(short) >= FEW else by_length[:FEW]
    rows = pool[np.unique(np.linspace(0, len(pool) - 1, min(FEW, len(pool))).astype(np.int64))]
    width, real = int(lengths[rows].max()), int(lengths[rows].sum())
    positions = int(np.minimum(np.asarray(store.eligible)[rows], FEW_ANCHORS).sum()) * spec.block_size
    planned = PlannedBatch(0, 0, 0, 0, 0, 0, rows, width, real, len(rows) * width, positions)
    return collated(planned, store, facts, seed, FEW_ANCHORS)


def collated(planned: PlannedBatch, store: TokenStore, facts: TargetFacts, seed: int, anchors: int) -> HostBatch:
    """A planned batch with its tokens."""
    pad_id = facts.pad_token_id if facts.pad_token_id is not None else 0
    return collate(planned, store, sample_anchors, seed=seed, num_anchors=anchors, pad_id=pad_id)


def tokens_of(store: TokenStore, limit: int = 512) -> np.ndarray:
    """Token ids of up to `limit` rows spread over a store, one after another, int64."""
    rows: Any = np.unique(np.linspace(0, len(store) - 1, min(limit, len(store))).astype(np.int64))
    return np.concatenate([ids for ids, _ in store.read(rows)])
