"""One piece of the rows to one part of the store, in any process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import DataConfig
from paceline.data.chat_template import Encoder, Renderer
from paceline.data.dedup import HeldOut, prompt_of
from paceline.data.holdout import part_heldout, row_is_held_out, write_heldout
from paceline.data.index import PartWriter, columns_path
from paceline.data.loss_mask import Sample, check_generation_tags, plain_sample, ready_sample, samples_of, spans_of
from paceline.data.readers import Shard, read_shard
from paceline.data.report import Tally
from paceline.data.rows import Conversation, PlainText, ReadyTokens, Row, RowRejected, read_row
from paceline.data.store import part_name
from paceline.data.tags import conversation_tags
from paceline.data.tokenizer import load_tokenizer

_CHECKED_ROWS = 32
"""Rows of a piece on which generation tags, and reading by pieces against reading whole, are compared."""


@dataclass(frozen=True, slots=True)
class ShardWorker:
    """What a process needs to tokenize pieces; picklable.

    Attributes:
        tokenizer_path, trust_remote_code: of the target.
        settings: lengths and policies.
        count_eligible: eligible anchors of a loss mask.
        folder: where parts are written.
        heldout: prompts and tokens that must not be trained on.
    """

    tokenizer_path: str
    trust_remote_code: bool
    settings: DataConfig
    count_eligible: Callable[[np.ndarray], int]
    folder: str
    heldout: HeldOut


class RowTokenizer:
    """Rows to samples with one target's tokenizer.

    Args:
        tokenizer_path, trust_remote_code: of the target.
        settings: lengths and policies.
    """

    def __init__(self, tokenizer_path: str, trust_remote_code: bool, settings: DataConfig) -> None:
        self.tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
        self.settings = settings
        self.encoder = Encoder(self.tokenizer, probes=_PROBES)

    @cached_property
    def renderer(self) -> Renderer:
        """Made when the first conversation comes: ready tokens and plain text need no chat template."""
        return Renderer(self.tokenizer, self.settings.thinking)

    def samples(self, row: Row) -> list[Sample]:
        """Samples of a row, not yet cut to length.

        Raises:
            SetAside: the row cannot be used.
        """
        if isinstance(row, PlainText):
            return [plain_sample(row, self.encoder)]
        if isinstance(row, ReadyTokens):
            return [ready_sample(row, len(self.tokenizer))]
        if row.cut and self.settings.on_cut_answer == "drop":
            raise RowRejected("cut_answer")
        made = samples_of(row, self.renderer, self.encoder, on_rewrite=self.settings.on_rewrite)
        if row.cut:
            made[-1] = _without_end(made[-1], self.encoder)
        return made

    def check(self, row: Conversation, where: str) -> None:
        """Compare with the template's own generation tags where it has them.

        Raises:
            DataError: they disagree.
        """
        if self.renderer.has_generation_tags:
            check_generation_tags(row, self.renderer, self.encoder, where)


_PROBES = ("a b\n\n c", " lead", "x  y", "naïve 中文 🙂\n")


def _without_end(sample: Sample, encoder: Encoder) -> Sample:
    """The sample without the end token of its last answer, which the target never wrote."""
    ids, spans = sample.ids, sample.spans.copy()
    if len(ids) and int(ids[-1]) in encoder.end_ids | encoder.special_ids and len(spans) and spans[-1] == len(ids):
        ids, spans[-1] = ids[:-1], spans[-1] - 1
    return Sample(ids, spans, (*sample.notes, "cut_answer"), sample.tags)


_state: dict[str, Any] = {}
"""The worker of this process and its tokenizer; filled once by `start_worker`."""


def start_worker(worker: ShardWorker) -> None:
    """Load the tokenizer in this process."""
    _state["worker"] = worker
    _state["tokenizer"] = RowTokenizer(worker.tokenizer_path, worker.trust_remote_code, worker.settings)


def store_folder(folder: Path) -> Path:
    """The folder that becomes the store, inside the one of an unfinished run."""
    return folder / "store"


def finished(folder: Path, piece: Shard) -> bool:
    """Whether the part of a piece, its columns and its tally are there."""
    number = piece.number
    files = (_tally_path(folder, number), columns_path(folder, number), store_folder(folder) / part_name(number))
    return all(file.exists() for file in files)


def read_tally(folder: Path, number: int) -> Tally:
    """The tally of a finished piece."""
    return Tally.from_json(json.loads(_tally_path(folder, number).read_text(encoding="utf-8")))


def _tally_path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06d}.json"


def tokenize_shard(piece: Shard) -> None:
    """Write the part of a piece and then its tally, whose presence says that the part is whole."""
    worker: ShardWorker = _state["worker"]
    tokeniser: RowTokenizer = _state["tokenizer"]
    tally = Tally()
    part = PartWriter()
    held: list[Any] = []
    for line, values in read_shard(piece):
        if row_is_held_out(values, worker.settings.heldout_share):
            tally.rows_in += 1
            tally.leave_out("heldout_split", f"{piece.path}:{line}")
            held.append(values)
            continue
        for sample, eligible in usable(values, f"{piece.path}:{line}", tokeniser, worker, tally, piece.tags):
            part.append(sample, eligible, piece.source, line)
    folder = Path(worker.folder)
    part.write(folder, store_folder(folder), piece.number)
    write_heldout(held, piece.tags, part_heldout(folder, piece.number))
    file = _tally_path(folder, piece.number)
    aside = file.with_suffix(".tally")
    aside.write_text(json.dumps(tally.to_json()), encoding="utf-8")
    aside.replace(file)


def usable(
    values: Any, where: str, tokeniser: RowTokenizer, worker: ShardWorker, tally: Tally, tags: tuple[str, ...] = ()
) -> Iterator[tuple[Sample, int]]:
    """The samples of a row that can be trained on, each with its eligible anchors.

    What is left out or said is counted in `tally`; `tags` are those of the row's file.
    """
    tally.rows_in += 1
    try:
        if isinstance(values, RowRejected):
            raise values
        row = read_row(values)
        asked = prompt_of(row) if isinstance(row, Conversation) else b""
        if asked and worker.heldout.holds(asked):
            raise RowRejected("heldout")
        made = tokeniser.samples(row)
        if any(worker.heldout.holds_tokens(sample.ids) for sample in made):
            raise RowRejected("heldout")
        seen = conversation_tags(row)
        if isinstance(row, Conversation) and tally.rows_in <= _CHECKED_ROWS:
            tokeniser.check(row, where)
    except RowRejected as found:
        tally.leave_out(found.reason, where, found.detail)
        return
    for sample in made:
        try:
            kept, eligible = _fit(sample, worker, tally, where)
        except RowRejected as found:
            tally.leave_out(found.reason, where, found.detail)
            continue
        for note in kept.notes:
            tally.note(note, where)
        if isinstance(row, Conversation) and tokeniser.renderer.writes_the_date:
            tally.note("dated", where)
        if asked and worker.heldout.nearly_holds(asked):
            tally.note("heldout_near", where)
        all_tags = tuple(dict.fromkeys((*tags, *kept.tags, *seen)))
        yield Sample(kept.ids, kept.spans, kept.notes, all_tags), eligible


def _fit(sample: Sample, worker: ShardWorker, tally: Tally, where: str) -> tuple[Sample, int]:
    limit = worker.settings.max_length
    mask = sample.mask()
    if len(sample.ids) > limit:
        if worker.settings.on_too_long == "drop":
            raise RowRejected("too_long", f"{len(sample.ids)} tokens, data.max_length is {limit}")
        lost = int(mask[limit:].sum())
        mask = mask[:limit]
        if worker.count_eligible(mask) < 1:
            raise RowRejected("too_long_after_cut", f"the first {limit} of {len(sample.ids)} tokens hold no answer")
        tally.lost_supervised_tokens += lost
        notes = (*sample.notes, "cut")
        sample = Sample(sample.ids[:limit], spans_of(mask), notes, sample.tags)
    if not mask.any():
        raise RowRejected("nothing_supervised", f"{len(mask)} tokens")
    eligible = worker.count_eligible(mask)
    if eligible < 1:
        raise RowRejected("no_anchor", f"{int(mask.sum())} supervised of {len(mask)} tokens")
    return sample, eligible
