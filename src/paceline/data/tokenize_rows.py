"""One shard of the rows to one part of the store, in any process."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from paceline import atomic_files
from paceline.config import DataConfig
from paceline.data.chat_template import Renderer
from paceline.data.dedup import KEYS, HeldOutPrompts, content_hash, near_keys, prompt_of
from paceline.data.encoder import Encoder
from paceline.data.holdout import part_heldout, row_is_held_out, write_heldout
from paceline.data.loss_mask import Sample, check_generation_tags, plain_sample, ready_sample, samples_of
from paceline.data.readers import Shard, read_shard
from paceline.data.render_limits import limited_memory
from paceline.data.report import Count, Tally
from paceline.data.rows import Conversation, PlainText, ReadyTokens, Row, RowRejected, read_row
from paceline.data.store import PART_SCHEMA, part_name, write_table
from paceline.data.tokenizer import load_tokenizer
from paceline.errors import DataError

_CHECKED_ROWS = 32
"""Rows of a shard on which the loss mask is compared with the template's own generation tags."""
_PROBES = ("a b\n\n c", " lead", "x  y", "naïve 中文 🙂\n")
_CAPPED = ("cut", "turns")
"""Notes of samples that lose what is beyond `data.max_length`."""
_NUMBERS = {"length": "q", "eligible": "q", "supervised": "i", "source": "i", "line": "q", "content_hash": "Q"}
"""Columns of one number a sample, and its type."""


@dataclass(frozen=True, slots=True)
class ShardWorker:
    """What a process needs to tokenize shards; picklable.

    Attributes:
        tokenizer_path, trust_remote_code: of the target.
        settings: lengths and policies.
        count_eligible: eligible anchors of a loss mask.
        folder: of the unfinished store.
        heldout: prompts and tokens that must not be trained on.
    """

    tokenizer_path: str
    trust_remote_code: bool
    settings: DataConfig
    count_eligible: Callable[[np.ndarray], int]
    folder: Path
    heldout: HeldOutPrompts


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
        return Renderer(self.tokenizer, self.settings.thinking, self.settings.template_switches)

    def samples(self, row: Row) -> list[Sample]:
        """Samples of a row, not yet cut to length.

        Raises:
            RowRejected: the row cannot be used.
        """
        if isinstance(row, PlainText):
            return [plain_sample(row, self.encoder)]
        if isinstance(row, ReadyTokens):
            return [ready_sample(row, len(self.tokenizer))]
        return samples_of(row, self.renderer, self.encoder, on_not_written=self.settings.on_not_written)


def _without_end(sample: Sample, encoder: Encoder) -> Sample:
    """The sample without the end token of its last answer, which the target never wrote."""
    ids, spans = sample.ids, sample.spans.copy()
    if len(ids) and int(ids[-1]) in encoder.end_ids | encoder.special_ids and len(spans) and spans[-1] == len(ids):
        ids, spans[-1] = ids[:-1], spans[-1] - 1
    return Sample(ids, spans, (*sample.notes, "cut_answer"), sample.tags)


_state: tuple[ShardWorker, RowTokenizer] | None = None
"""The worker of this process and its tokenizer; set once by `start_worker`."""


def start_worker(worker: ShardWorker) -> None:
    """Load the tokenizer in this process."""
    global _state
    _state = worker, RowTokenizer(worker.tokenizer_path, worker.trust_remote_code, worker.settings)


def store_folder(folder: Path) -> Path:
    """The folder that becomes the store, inside the one of an unfinished store."""
    return folder / "store"


def columns_path(folder: Path, number: int) -> Path:
    """What is known of the samples of one part beside their tokens, in the folder of an unfinished store."""
    return folder / f"part-{number:06d}.columns"


def ids_path(folder: Path, number: int) -> Path:
    """Token ids that occur in one part, int32, ascending."""
    return folder / f"part-{number:06d}.ids"


def tally_path(folder: Path, number: int) -> Path:
    """Tally of one part. It is written last: where it is there, the part is whole."""
    return folder / f"part-{number:06d}.json"


@limited_memory()
def tokenize_shard(shard: Shard) -> None:
    """Write the part of a shard, its columns and held-out rows, and then its tally.

    Raises:
        DataError: the chat template takes more time or memory than any template needs.
    """
    assert _state is not None, "start_worker was called"
    worker, tokenizer = _state
    tally, part = Tally(), PartWriter()
    held: list[Any] = []
    asked: list[tuple[str, bytes]] = []
    for line, values in read_shard(shard):
        tally.rows_in += 1
        where = f"{shard.name}:{line}"
        if row_is_held_out(values, worker.settings.heldout_share):
            tally.leave_out("heldout_split", Count(1, where))
            held.append(values)
            continue
        try:
            for sample, eligible in _usable(values, where, tokenizer, worker, tally, asked):
                tags = tuple(dict.fromkeys((*shard.tags, *sample.tags)))
                part.append(Sample(sample.ids, sample.spans, tags=tags), eligible, shard.source, line)
        except DataError as error:
            raise DataError(*(f"{where}: {text}" for text in error.errors)) from error
    near = worker.heldout.nearly_holds([prompt for _, prompt in asked])
    for where in (where for where, prompt in asked if prompt in near):
        tally.note("heldout_near", Count(1, where))
    part.write(worker.folder, shard.number, near=looks_for_near(worker.settings))
    write_heldout(held, shard.tags, part_heldout(worker.folder, shard.number))
    atomic_files.write_text(tally_path(worker.folder, shard.number), msgspec.json.encode(tally).decode())


def looks_for_near(settings: DataConfig) -> bool:
    """Whether near-duplicates are looked for: where they are left out, or duplicates are."""
    return "drop" in (settings.duplicates, settings.near_duplicates)


def _usable(
    values: Any,
    where: str,
    tokenizer: RowTokenizer,
    worker: ShardWorker,
    tally: Tally,
    asked: list[tuple[str, bytes]],
) -> Iterator[tuple[Sample, int]]:
    """The samples of a row that can be trained on, each with its eligible anchors.

    What is left out or noted is counted in `tally`; the question of each sample is added to `asked`.
    """
    try:
        if isinstance(values, RowRejected):
            raise values
        row = read_row(values)
        prompt = prompt_of(row) if isinstance(row, Conversation) and worker.heldout.prompts else b""
        if prompt and prompt in worker.heldout.prompts:
            raise RowRejected("heldout")
        made = tokenizer.samples(row)
        if any(worker.heldout.holds_tokens(sample.ids) for sample in made):
            raise RowRejected("heldout")
        if isinstance(row, Conversation) and tally.rows_in <= _CHECKED_ROWS and tokenizer.renderer.has_generation_tags:
            check_generation_tags(row, tokenizer.renderer, tokenizer.encoder)
    except RowRejected as found:
        tally.leave_out(found.reason, Count(1, where, found.detail))
        return
    if isinstance(row, Conversation):
        made = _kept(row, made, where, tokenizer, tally)
    for sample in made:
        supervised = sample.supervised
        tally.measure(len(sample.ids), sample.spans, supervised)
        try:
            kept, eligible = _fit(sample, worker)
        except RowRejected as found:
            tally.leave_out(found.reason, _lost(sample, supervised, where, found.detail))
            continue
        for note in kept.notes:
            tally.note(note, _lost(sample, supervised - kept.supervised if note in _CAPPED else 0, where))
        if isinstance(row, Conversation) and tokenizer.renderer.writes_the_date:
            tally.note("dated", Count(1, where))
        if prompt:
            asked.append((where, prompt))
        yield kept, eligible


def _lost(sample: Sample, tokens: int, where: str, detail: str = "") -> Count:
    """A sample that loses supervised tokens."""
    return Count(1, where, detail, tokens, dict.fromkeys(sample.tags, tokens) if tokens else {})


def _kept(row: Conversation, made: list[Sample], where: str, tokenizer: RowTokenizer, tally: Tally) -> list[Sample]:
    """The samples of a conversation that `data.on_cut_answer` and `data.on_rewrite` keep."""
    if row.cut and tokenizer.settings.on_cut_answer == "drop":
        for sample in made:
            tally.leave_out("cut_answer", _lost(sample, sample.supervised, where))
        return []
    if row.cut:
        made[-1] = _without_end(made[-1], tokenizer.encoder)
    if len(made) > 1 and tokenizer.settings.on_rewrite == "last":
        for sample in made[:-1]:
            tally.leave_out("rewritten", _lost(sample, sample.supervised, where))
        notes = tuple("only_last_supervised" if note == "history_rewritten" else note for note in made[-1].notes)
        made = [replace(made[-1], notes=notes)]
    return made


def _fit(sample: Sample, worker: ShardWorker) -> tuple[Sample, int]:
    """The sample within `data.max_length`, and its eligible anchors.

    Raises:
        RowRejected: too long, or nothing to learn is in it.
    """
    limit, policy, length = worker.settings.max_length, worker.settings.on_too_long, len(sample.ids)
    if length > limit:
        if policy == "drop":
            raise RowRejected("too_long", f"{length} tokens, data.max_length is {limit}")
        spans = sample.spans.reshape(-1, 2)
        spans = spans[spans[:, 1] <= limit] if policy == "turns" else np.minimum(spans, limit)[spans[:, 0] < limit]
        end = int(spans[-1, 1]) if policy == "turns" and len(spans) else limit
        sample = replace(sample, ids=sample.ids[:end], spans=spans.ravel(), notes=(*sample.notes, policy))
    mask = sample.mask()
    eligible = worker.count_eligible(mask)
    if eligible < 1 and length > limit:
        raise RowRejected("too_long_after_cut", f"the first {limit} of {length} tokens hold no answer")
    if not mask.any():
        raise RowRejected("nothing_supervised", f"{length} tokens")
    if eligible < 1:
        raise RowRejected("no_anchor", f"{int(mask.sum())} supervised of {length} tokens")
    return sample, eligible


class PartWriter:
    """Samples of one part, packed: about 100 bytes beside the tokens of each."""

    def __init__(self) -> None:
        self._ids, self._id_ends = array("i"), array("i", [0])
        self._spans, self._span_ends = array("i"), array("i", [0])
        self._numbers = {name: array(code) for name, code in _NUMBERS.items()}
        self._tags: list[str] = []
        self._known: dict[str, str] = {}

    def append(self, sample: Sample, eligible: int, source: int, line: int) -> None:
        """Add a sample with its eligible anchors and origin."""
        self._ids.frombytes(sample.ids.tobytes())
        self._id_ends.append(len(self._ids))
        self._spans.frombytes(sample.spans.tobytes())
        self._span_ends.append(len(self._spans))
        tags = ",".join(sample.tags)
        self._tags.append(self._known.setdefault(tags, tags))
        values = (len(sample.ids), eligible, sample.supervised, source, line, content_hash(sample.ids))
        for column, value in zip(self._numbers.values(), values, strict=True):
            column.append(value)

    def write(self, folder: Path, number: int, *, near: bool) -> None:
        """Tokens to the part in the store, the rest to `folder`; with the keys of near-duplicates where asked for."""
        ids, ends = np.asarray(self._ids), np.asarray(self._id_ends)
        lists = (_lists(ids, ends), _lists(np.asarray(self._spans), np.asarray(self._span_ends)))
        write_table(pa.table(lists, schema=PART_SCHEMA), store_folder(folder) / part_name(number))
        columns: dict[str, Any] = {name: np.asarray(values) for name, values in self._numbers.items()}
        columns["tags"] = pa.array(self._tags, pa.string()).dictionary_encode()
        if near:
            keys = near_keys(ids, ends)
            columns |= {f"near{column}": keys[:, column] for column in range(KEYS)}
        write_table(pa.table(columns), columns_path(folder, number))
        ids_path(folder, number).write_bytes(np.flatnonzero(np.bincount(ids)).astype(np.int32).tobytes())


def _lists(values: np.ndarray, ends: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(values))
