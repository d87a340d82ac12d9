"""What enters an epoch: lengths checked, over-length and anchorless samples left out, weights turned into repeats.

Shape letters: N rows of the store, E entries of the epoch (a row may enter several times, or not at all).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

import numpy as np

from paceline.config.schema import MAX_COUNT, PlanConfig
from paceline.errors import PlanError
from paceline.plan.budget import BatchBudget
from paceline.plan.rng import CHUNK, Purpose, index_dtype, random_order, stream


@dataclass(frozen=True, slots=True)
class Groups:
    """Tag or source of every row.

    Attributes:
        codes: group number of each row, integers [N].
        names: name of each group number.
    """

    codes: np.ndarray
    names: Sequence[str]


@dataclass(frozen=True)
class Entries:
    """The samples of one epoch.

    Attributes:
        lengths: tokens of each entry, integers ≥ 1 [E].
        width_multiple: step of the padded widths.
        drafts: draft positions of each entry, int64 [E]; None when no budget asks for them.
        rows: row number of each entry [E]; None when entry i is row i.
        left_out: reason → rows that the epoch does not hold, for those reasons that occur.
        kept_over_length: rows over ``max_length`` that are planned all the same.
    """

    lengths: np.ndarray
    width_multiple: int
    drafts: np.ndarray | None
    rows: np.ndarray | None
    left_out: dict[str, int] = field(default_factory=dict)
    kept_over_length: int = 0

    @property
    def count(self) -> int:
        """Number of entries."""
        return len(self.lengths)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest entry."""
        return int(self.lengths.max())

    @cached_property
    def histogram(self) -> np.ndarray:
        """Entries per padded width: place c counts width (c + 1) · ``width_multiple``, int64."""
        return width_histogram(self.lengths, self.width_multiple)

    def know_histogram(self, counts: np.ndarray) -> None:
        """Takes over a histogram that fell out of other work, instead of counting again."""
        self.__dict__["histogram"] = counts


def groups_of_labels(labels: np.ndarray | Sequence[str]) -> Groups:
    """Groups from one name a row."""
    names, codes = np.unique(np.asarray(labels, dtype=str), return_inverse=True)
    return Groups(codes.astype(np.int32), names.tolist())


def groups_of_tags(tags: Sequence[Sequence[str]], weights: dict[str, float]) -> Groups:
    """Groups from several names a row (its tags and its source): a row belongs to the first that ``weights`` names."""
    known = sorted({tag for row in tags for tag in row})
    number = {name: place for place, name in enumerate(known)}
    codes = [next((number[tag] for tag in row if tag in weights), len(known)) for row in tags]
    return Groups(np.array(codes, np.int32), [*known, ""])


def checked_lengths(lengths: np.ndarray | Sequence[int], name: str = "lengths") -> np.ndarray:
    """Lengths as an integer array [N], not copied when they already are one.

    Raises:
        PlanError: empty, not one-dimensional, NaN, not integers, zero, negative or over 2³¹ − 1; names the first such.
    """
    return _integers(lengths, name, lowest=1, meaning="a length is a whole number of tokens, at least 1")


def checked_eligible(eligible: np.ndarray | Sequence[int], lengths: np.ndarray) -> np.ndarray:
    """Eligible anchors per row as an integer array [N]; the lengths are checked ones.

    Raises:
        PlanError: as for lengths (zero is allowed), not one a row, or more than a sample has tokens.
    """
    count = len(lengths)
    array = _integers(eligible, "eligible", lowest=0, meaning="it counts anchors, at least 0")
    if len(array) != count:
        raise PlanError(f"eligible has {len(array)} entries for {count} lengths; give one count a sample")
    if (array > lengths).any():
        row = int(np.flatnonzero(array > lengths)[0])
        raise PlanError(
            f"eligible[{row}] is {array[row]}, but the sample has {lengths[row]} tokens; an anchor is one of them"
        )
    return array


def _integers(values: np.ndarray | Sequence[int], name: str, lowest: int, meaning: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise PlanError(f"{name}: no array of numbers ({error}); give one whole number a sample") from None
    if array.ndim != 1:
        raise PlanError(f"{name} has shape {array.shape}; give one whole number a sample")
    if not array.size:
        raise PlanError(f"{name} is empty; there is nothing to plan")
    if array.dtype.kind == "f":
        array = _whole(array, name, meaning)
    if array.dtype.kind not in "iu":
        raise PlanError(f"{name} holds {array.dtype} values; {meaning}")
    if array.min() < lowest:
        first = int(np.flatnonzero(array < lowest)[0])
        raise PlanError(f"{name}[{first}] is {array[first]}; {meaning}")
    if array.max() > MAX_COUNT:
        first = int(np.flatnonzero(array > MAX_COUNT)[0])
        raise PlanError(f"{name}[{first}] is {array[first]}; {meaning} and at most {MAX_COUNT}")
    return array


def _whole(array: np.ndarray, name: str, meaning: str) -> np.ndarray:
    bad = ~np.isfinite(array)
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        raise PlanError(f"{name}[{first}] is {'NaN' if np.isnan(array[first]) else array[first]}; {meaning}")
    if (np.abs(array) > 2 * MAX_COUNT).any():
        first = int(np.flatnonzero(np.abs(array) > 2 * MAX_COUNT)[0])
        raise PlanError(f"{name}[{first}] is {array[first]}; {meaning} and at most {MAX_COUNT}")
    whole = array.astype(np.int64)
    if (whole != array).any():
        first = int(np.flatnonzero(whole != array)[0])
        raise PlanError(f"{name}[{first}] is {array[first]}, not a whole number; {meaning}")
    return whole


def check_whole(name: str, value: object) -> None:
    """Refuses what is no integer.

    Raises:
        PlanError: names it.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise PlanError(f"{name} {value} is not a whole number; give an integer")


def eligible_counts(lengths: np.ndarray, eligible: np.ndarray | None, settings: PlanConfig) -> np.ndarray:
    """Eligible anchors per sample as given, or estimated as ``eligible_share`` of the tokens (rounded up), int64."""
    if eligible is not None:
        return eligible.astype(np.int64, copy=False)
    share = Fraction(str(settings.eligible_share)).limit_denominator(1_000_000)
    return -(-lengths.astype(np.int64) * share.numerator // share.denominator)


def draft_positions(eligible: np.ndarray, num_anchors: int, block_size: int) -> np.ndarray:
    """min(cap, eligible) anchors × block slots, int64, same shape."""
    return np.minimum(eligible, num_anchors).astype(np.int64) * block_size


def enter(
    lengths: np.ndarray,
    eligible: np.ndarray | None,
    settings: PlanConfig,
    *,
    num_anchors: int,
    block_size: int,
    seed: int,
    epoch: int,
    groups: Groups | None = None,
    carried: np.ndarray | None = None,
) -> Entries:
    """The entries of one epoch.

    Args:
        lengths: checked lengths [N].
        eligible: checked eligible anchors [N], or None where they are unknown.
        settings: planning settings.
        num_anchors: anchors a sample at most.
        block_size: slots a block.
        seed, epoch: key of the choice among fractional weights.
        groups: tags or sources that ``settings.weights`` names.
        carried: rows that the last epoch handed on; they are entries beside this epoch's own.

    Raises:
        PlanError: nothing remains, a sample exceeds a budget alone, or a weight names no group.
    """
    keep = np.ones(0, bool)
    left_out, kept_over_length = dict[str, int](), 0
    if settings.max_length is not None and int(lengths.max()) > settings.max_length:
        fits = lengths <= settings.max_length
        over = len(lengths) - int(np.count_nonzero(fits))
        if settings.on_over_length == "keep":
            kept_over_length = over
        else:
            left_out["over_length"], keep = over, fits
    if eligible is not None and settings.without_anchors == "drop" and int(eligible.min()) == 0:
        anchored = eligible > 0
        alive = anchored if not keep.size else keep & anchored
        before = len(lengths) if not keep.size else int(np.count_nonzero(keep))
        left_out["without_anchors"], keep = before - int(np.count_nonzero(alive)), alive
    rows = np.flatnonzero(keep).astype(index_dtype(len(lengths))) if keep.size else None
    if settings.weights:
        rows, unplanned = _weighted(rows, len(lengths), settings.weights, groups, seed, epoch)
        if unplanned:
            left_out["weight"] = unplanned
    if carried is not None and carried.size:
        own = np.arange(len(lengths), dtype=index_dtype(len(lengths))) if rows is None else rows
        rows = np.concatenate([own, carried.astype(own.dtype)])
    if rows is not None and not rows.size:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise PlanError(f"all {len(lengths)} samples are left out ({reasons}); there is nothing to plan")
    entering = lengths if rows is None else lengths[rows]
    drafts = None
    if settings.draft_position_budget is not None:
        counts = eligible_counts(lengths, eligible, settings)
        drafts = draft_positions(counts if rows is None else counts[rows], num_anchors, block_size)
    entries = Entries(entering, settings.width_multiple, drafts, rows, left_out, kept_over_length)
    _check_budgets(entries, settings, num_anchors, block_size)
    return entries


def width_histogram(lengths: np.ndarray, width_multiple: int) -> np.ndarray:
    """Entries per padded width: place c counts width (c + 1) · ``width_multiple``, int64."""
    num_classes = -(-int(lengths.max()) // width_multiple)
    counts = np.zeros(num_classes, np.int64)
    for start in range(0, len(lengths), CHUNK):
        part = lengths[start : start + CHUNK].astype(np.int64)
        part -= 1
        if width_multiple > 1:
            part //= width_multiple
        found = np.bincount(part)
        counts[: len(found)] += found
    return counts


def _check_budgets(entries: Entries, settings: PlanConfig, num_anchors: int, block_size: int) -> None:
    limits = BatchBudget.of(settings)
    longest = entries.longest
    width = limits.width(longest)
    if limits.capacity(width) < 1:
        row = _row(entries, int(entries.lengths.argmax()))
        padded = f", {width} at width_multiple {limits.width_multiple}" if width != longest else ""
        cost = f", costing {limits.cost(width)} with attention" if limits.attention_length is not None else ""
        raise PlanError(
            f"token_budget {limits.token_budget} is smaller than the longest sample (row {row}: {longest} tokens"
            f"{padded}{cost}); raise plan.token_budget to {limits.cost(width)}, or leave such samples out with "
            "plan.max_length"
        )
    if entries.drafts is not None and int(entries.drafts.max()) > limits.draft_limit:
        row = _row(entries, int(entries.drafts.argmax()))
        raise PlanError(
            f"draft_position_budget {limits.draft_position_budget} is smaller than the {int(entries.drafts.max())} "
            f"draft positions of row {row} (at most {num_anchors} anchors × block {block_size}); raise "
            "plan.draft_position_budget or lower drafter.num_anchors"
        )


def _row(entries: Entries, entry: int) -> int:
    return entry if entries.rows is None else int(entries.rows[entry])


def _weighted(
    rows: np.ndarray | None, count: int, weights: dict[str, float], groups: Groups | None, seed: int, epoch: int
) -> tuple[np.ndarray, int]:
    """Rows with repeats, ascending, and how many rows do not occur.

    A group of n rows with weight w fills ⌊(epoch + 1)·w·n⌋ − ⌊epoch·w·n⌋ places an epoch, dealt cyclically over a
    fixed random order of its rows: after any number of epochs no row was planned more than once oftener than another of
    its group, and within one epoch every row occurs ⌊w⌋ or ⌈w⌉ times.
    """
    if groups is None:
        named = ", ".join(weights)
        raise PlanError(f"plan.weights names {named}, but the samples carry no tags or sources; drop plan.weights")
    names = list(groups.names)
    for name in weights:
        if name not in names:
            shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
            raise PlanError(f"plan.weights: {name} is no tag or source of the samples; there are {shown}")
    if len(groups.codes) != count:
        raise PlanError(f"groups has {len(groups.codes)} entries for {count} lengths; give one group a sample")
    pool = np.arange(count, dtype=index_dtype(count)) if rows is None else rows
    codes = groups.codes[pool]
    places = np.ones(len(pool), np.int64)
    for name, weight in weights.items():
        members = np.flatnonzero(codes == names.index(name))
        places[members] = _deal(len(members), Fraction(str(weight)), seed, names.index(name), epoch)
    return np.repeat(pool, places), int(np.count_nonzero(places == 0))


def _deal(size: int, weight: Fraction, seed: int, group: int, epoch: int) -> np.ndarray:
    first, stop = int(epoch * weight * size), int((epoch + 1) * weight * size)
    places = np.zeros(size, np.int64)
    if not size:
        return places
    full, rest = divmod(stop - first, size)
    places += full
    order = random_order(stream(seed, group, Purpose.WEIGHTS), size)
    places[order[(first + np.arange(rest)) % size]] += 1
    return places
