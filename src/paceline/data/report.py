"""What preparing found: rows in and out by reason, tokens, lengths; sums that merge over parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

REASONS = {
    "invalid_json": "not valid JSON",
    "unreadable": "a column of the table holds a value that cannot be read",
    "no_messages": "no chat, text or tokens in a known form",
    "wrong_roles": "turns with unknown roles, or without content",
    "no_assistant": "no assistant turn after a question",
    "not_text": "a turn holds something other than text",
    "empty_text": "text is empty",
    "bad_tokens": "ready tokens that do not fit",
    "template_refuses": "the chat template refuses the conversation",
    "not_continued": "the answer cannot be found behind the prompt as it is served",
    "no_reasoning": "the generation prompt opens a thought, the row has none",
    "not_written": "the chat template does not write all that an answer holds (thought, text, calls)",
    "tags_disagree": "the template's generation tags mark another text than the one that is served",
    "end_token_inside": "an end token is inside an answer",
    "border": "prompt and answer cannot be split in tokens",
    "cut_answer": "the answer was cut by a token limit when it was generated",
    "rewritten": "an earlier turn that is served otherwise later on (data.on_rewrite: last)",
    "all_supervised": "every token is supervised, the prompt too",
    "nothing_supervised": "no token is supervised",
    "no_anchor": "no two supervised tokens in a row",
    "too_long": "longer than data.max_length",
    "too_long_after_cut": "longer than data.max_length, and nothing to learn is before it",
    "duplicate": "the same tokens came earlier",
    "near_duplicate": "nearly the same tokens came earlier",
    "heldout": "the prompt is in the held-out data",
    "heldout_split": "its document is held out (data.heldout_share)",
    "weight": "left out by the weight of its file",
}
"""Why a row or sample is left out."""

NOTES = {
    "cut": "cut at data.max_length",
    "turns": "the turns beyond data.max_length are left out",
    "history_rewritten": "earlier turns are served otherwise later on: a separate sample for each that changes",
    "only_last_supervised": "earlier turns are served otherwise later on: only what fits the last sample is supervised",
    "text_alone": "thoughts or calls that the template does not write are left out: the text alone is supervised",
    "empty_thought": "the template wrote empty think tags that no generation prompt has; they are not supervised",
    "header_supervised": "the template has no generation prompt: the header of the answer is supervised too",
    "merged_border": "a token would reach from the prompt into the answer; split as a server splits it",
    "closing_is_no_end_token": "turns close with a token at which servers do not stop",
    "no_closing_token": "turns close with no token: the end of an answer is not learned",
    "near_duplicate": "nearly the same tokens came earlier (kept)",
    "heldout_near": "the prompt is nearly one of the held-out data (kept)",
    "cut_answer": "the answer was cut by a token limit when it was generated (kept without its end)",
    "dated": "the template writes today's date, which will be another when the target serves",
    "plain_text": "plain text: every token is supervised",
}
"""What is said about samples that are kept."""


CAPS = (2048, 4096, 8192, 16384)
"""Maximum lengths (tokens) of which it is said what they would keep."""


@dataclass(slots=True)
class Count:
    """How many, and the first of them.

    Attributes:
        count: rows or samples.
        example: place of the first one (`file:line`).
        detail: what was found there.
        lost: supervised tokens that are not trained on because of it; 0 where the row was never tokenized.
        lost_by_tag: the same for each tag.
    """

    count: int = 0
    example: str = ""
    detail: str = ""
    lost: int = 0
    lost_by_tag: dict[str, int] = field(default_factory=dict)

    def add(self, later: Count) -> None:
        """Add what came later; the first example stays."""
        if not self.count:
            self.example, self.detail = later.example, later.detail
        self.count += later.count
        self.lost += later.lost
        for tag, tokens in later.lost_by_tag.items():
            self.lost_by_tag[tag] = self.lost_by_tag.get(tag, 0) + tokens


@dataclass(slots=True)
class TagTokens:
    """Samples and tokens of one tag; `lost` are supervised tokens that a policy or cap left out."""

    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    lost: int = 0


@dataclass(slots=True)
class Cap:
    """What a maximum length would keep, before duplicates are left out.

    Attributes:
        max_length: in tokens.
        samples: that are no longer.
        whole, turns, cut: supervised tokens with `data.on_too_long` drop, turns and cut.
    """

    max_length: int
    samples: int = 0
    whole: int = 0
    turns: int = 0
    cut: int = 0

    def add(self, length: int, spans: np.ndarray, supervised: int) -> None:
        """Add a sample: its tokens, supervised spans (flat start and end) and supervised tokens."""
        if length <= self.max_length:
            self.samples += 1
            self.whole += supervised
            self.turns += supervised
            self.cut += supervised
            return
        starts, ends = spans[::2], spans[1::2]
        self.turns += int((ends - starts)[ends <= self.max_length].sum())
        self.cut += int((np.minimum(ends, self.max_length) - np.minimum(starts, self.max_length)).sum())


@dataclass(slots=True)
class Tally:
    """What one part of the rows came to. Adding tallies in the order of the rows gives that of all rows.

    Attributes:
        rows_in: rows read.
        set_aside: reason → rows or samples that were left out.
        notes: note → samples of which it was said.
        caps: what some maximum lengths would keep; the last is the longest sample's.
    """

    rows_in: int = 0
    set_aside: dict[str, Count] = field(default_factory=dict)
    notes: dict[str, Count] = field(default_factory=dict)
    caps: list[Cap] = field(default_factory=lambda: [Cap(length) for length in (*CAPS, 0)])

    def leave_out(self, reason: str, count: Count) -> None:
        """Count rows or samples that are left out."""
        self.set_aside.setdefault(reason, Count()).add(count)

    def note(self, note: str, count: Count) -> None:
        """Count samples of which something is said."""
        self.notes.setdefault(note, Count()).add(count)

    def measure(self, length: int, spans: np.ndarray, supervised: int) -> None:
        """Add a sample to the caps: its tokens, supervised spans (flat start and end) and supervised tokens."""
        self.caps[-1].max_length = max(self.caps[-1].max_length, length)
        for cap in self.caps:
            cap.add(length, spans, supervised)

    def add(self, other: Tally) -> None:
        """Add a later part's tally."""
        self.rows_in += other.rows_in
        for reason, count in other.set_aside.items():
            self.leave_out(reason, count)
        for note, count in other.notes.items():
            self.note(note, count)
        self.caps[-1].max_length = max(self.caps[-1].max_length, other.caps[-1].max_length)
        for mine, theirs in zip(self.caps, other.caps, strict=True):
            mine.samples += theirs.samples
            mine.whole += theirs.whole
            mine.turns += theirs.turns
            mine.cut += theirs.cut


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """The result of preparing, as it is in the store's manifest.

    Attributes:
        store, fingerprint: where, and the hash of rows, tokenizer, template and settings.
        reused: the store was there already; nothing was done.
        rows_in, rows_used: rows read, and rows of which at least one sample is kept.
        samples: samples shown in an epoch, those that a file's weight repeats counted each time.
        set_aside: reason → what was left out.
        notes: note → kept samples of which it is said.
        tokens, supervised_tokens, eligible_anchors: of the kept samples.
        lost_supervised_tokens: that policies and caps left out or cut away; rows that cannot be tokenized not counted.
        caps: what some maximum lengths would keep, up to the longest sample's.
        length_histogram: [longest length of the bin, samples, tokens], bins by powers of two.
        length_percentiles: percentile → tokens.
        tags: tag → samples and tokens.
        warnings: sentences for people.
        heldout_rows, heldout_documents: rows split off by `data.heldout_share`, and the documents they belong to.
    """

    store: str
    fingerprint: str
    rows_in: int
    rows_used: int
    samples: int
    set_aside: dict[str, Count]
    notes: dict[str, Count]
    tokens: int
    supervised_tokens: int
    eligible_anchors: int
    lost_supervised_tokens: int = 0
    caps: list[Cap] = field(default_factory=list)
    length_histogram: list[list[int]] = field(default_factory=list)
    length_percentiles: dict[str, int] = field(default_factory=dict)
    tags: dict[str, TagTokens] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    reused: bool = False
    heldout_rows: int = 0
    heldout_documents: int = 0


def length_histogram(lengths: np.ndarray, samples: np.ndarray) -> list[list[int]]:
    """[upper length, samples, tokens] for bins whose upper edges are powers of two, the empty ends left out.

    Args:
        lengths: distinct lengths, ascending, int64.
        samples: how many samples have each, int64.
    """
    if not len(lengths):
        return []
    bins = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    rows: list[list[int]] = []
    for exponent in range(int(bins[0]), int(bins[-1]) + 1):
        inside = bins == exponent
        rows.append([2**exponent, int(samples[inside].sum()), int((lengths * samples)[inside].sum())])
    return rows


def length_percentiles(
    lengths: np.ndarray, samples: np.ndarray, percents: Iterable[int] = (1, 10, 50, 90, 99, 100)
) -> dict[str, int]:
    """Lengths at the given percentiles (lower value), in tokens; arguments as of `length_histogram`."""
    if not len(lengths):
        return {}
    upto = np.cumsum(samples)
    return {str(p): int(lengths[np.searchsorted(upto, p * (upto[-1] - 1) // 100, side="right")]) for p in percents}
