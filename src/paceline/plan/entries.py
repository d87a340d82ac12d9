"""What enters an epoch: over-length and anchorless samples are left out, weights become repeats.

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


@dataclass(frozen=True, slots=True)
class PlanInput:
    """What a plan is made from, beside the epoch.

    Attributes:
        lengths: tokens of every row, integers ≥ 1 [N].
        eligible: eligible anchors of every row [N]; None: estimated by ``settings.eligible_share``.
        settings: planning settings.
        num_anchors: anchors of a sample at most.
        block_size: slots of a block.
        replicas: drafter replicas that share every window.
        seed: key of all randomness, ≥ 0.
        groups: tag or source of every row, for ``settings.weights``.
    """

    lengths: np.ndarray
    eligible: np.ndarray | None
    settings: PlanConfig
    num_anchors: int
    block_size: int
    replicas: int
    seed: int
    groups: Groups | None = None

    def eligible_of(self, rows: np.ndarray, lengths: np.ndarray | None = None) -> np.ndarray:
        """Eligible anchors of some rows: as given, or the estimated share of the tokens (rounded up), integers.

        ``lengths`` of these rows save a look-up where they are known.
        """
        if self.eligible is not None:
            return self.eligible.take(rows)
        lengths = self.lengths.take(rows) if lengths is None else lengths
        if self.settings.eligible_share == 1:
            return lengths
        share = Fraction(str(self.settings.eligible_share)).limit_denominator(1_000_000)
        return -(-lengths.astype(np.int64) * share.numerator // share.denominator)

    def anchors_of(self, rows: np.ndarray, lengths: np.ndarray | None = None) -> np.ndarray:
        """Anchors of some rows that train in one epoch: those eligible, ``num_anchors`` at most, int64."""
        counts = self.eligible_of(rows, lengths)
        return np.minimum(counts, min(self.num_anchors, np.iinfo(counts.dtype).max)).astype(np.int64)


@dataclass(frozen=True)
class Entries:
    """The samples of one epoch.

    Attributes:
        given: what the epoch is planned from.
        lengths: tokens of each entry, integers ≥ 1 [E].
        rows: row number of each entry [E]; None when entry i is row i.
        left_out: reason → rows that the epoch does not hold, for those reasons that occur.
        kept_over_length: rows over ``max_length`` that are planned all the same.
    """

    given: PlanInput
    lengths: np.ndarray
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
        return width_histogram(self.lengths, self.given.settings.width_multiple)

    def know_histogram(self, counts: np.ndarray) -> None:
        """Takes over a histogram that fell out of other work, instead of counting again."""
        self.__dict__["histogram"] = counts

    def rows_of(self, entries: np.ndarray) -> np.ndarray:
        """Row numbers of some entries."""
        return entries if self.rows is None else self.rows[entries]

    def drafts(self, order: np.ndarray, lengths: np.ndarray | None = None) -> np.ndarray | None:
        """Draft positions of some entries, int64; None when no budget asks for them.

        Args:
            order: the entries.
            lengths: theirs, where they are known.
        """
        if self.given.settings.draft_position_budget is None:
            return None
        return self.given.anchors_of(self.rows_of(order), lengths) * self.given.block_size


def width_histogram(lengths: np.ndarray, width_multiple: int) -> np.ndarray:
    """Samples per padded width: place c counts width (c + 1) · ``width_multiple``, int64."""
    counts = np.zeros(-(-int(lengths.max()) // width_multiple), np.int64)
    for start in range(0, len(lengths), CHUNK):
        found = np.bincount((lengths[start : start + CHUNK].astype(np.int64) - 1) // width_multiple)
        counts[: len(found)] += found
    return counts


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


def checked_counts(values: np.ndarray | Sequence[int], name: str, lowest: int) -> np.ndarray:
    """One whole number a sample as an integer array [N], not copied when it already is one.

    Raises:
        PlanError: empty, of another shape or type, or a number below ``lowest`` or over 2³¹ − 1; one line.
    """
    array = np.asarray(values)
    if array.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            whole = array.astype(np.int64)
        array = whole if (whole == array).all() else array
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise PlanError(
            f"{name}: {array.dtype} numbers of shape {array.shape}; give one whole number a sample, {lowest} or more"
        )
    if not array.size:
        raise PlanError(f"{name}: empty; give one whole number a sample")
    for row in (int(array.argmin()), int(array.argmax())):
        if not lowest <= array[row] <= MAX_COUNT:
            raise PlanError(f"{name}[{row}] is {array[row]}; allowed: {lowest} to {MAX_COUNT}")
    return array


def checked_eligible(eligible: np.ndarray | Sequence[int], lengths: np.ndarray) -> np.ndarray:
    """Eligible anchors of every row as an integer array [N].

    Raises:
        PlanError: as `checked_counts`, not one a row, or more than a sample has tokens.
    """
    array = checked_counts(eligible, "eligible", 0)
    if len(array) != len(lengths):
        raise PlanError(f"eligible has {len(array)} entries for {len(lengths)} lengths; give one count a sample")
    if (array > lengths).any():
        row = int(np.flatnonzero(array > lengths)[0])
        raise PlanError(
            f"eligible[{row}] is {array[row]}, but the sample has {lengths[row]} tokens; an anchor is one of them"
        )
    return array


def fitting(
    lengths: np.ndarray, eligible: np.ndarray, settings: PlanConfig, *, num_anchors: int, block_size: int
) -> np.ndarray:
    """Whether each sample alone is within every budget and ``max_length``, bool [N]; arguments as for `plan_epoch`."""
    limits = BatchBudget.of(settings)
    roomy = np.array([limits.capacity(limits.width(int(length))) > 0 for length in lengths])
    fits = roomy & (np.minimum(eligible, num_anchors) * block_size <= limits.draft_limit)
    return fits if settings.max_length is None else fits & (lengths <= settings.max_length)


def enter(given: PlanInput, epoch: int, carried: np.ndarray | None = None) -> Entries:
    """The entries of one epoch.

    Args:
        given: lengths, settings and seed.
        epoch: with the seed, key of the choice among fractional weights.
        carried: rows that the last epoch handed on; they are entries beside this epoch's own.

    Raises:
        PlanError: nothing remains, a sample exceeds a budget alone, or a weight names no group.
    """
    settings, lengths = given.settings, given.lengths
    rows, left_out, kept_over_length = _kept(given)
    if settings.weights:
        rows, unplanned = _weighted(rows, given, epoch)
        if unplanned:
            left_out["weight"] = unplanned
    if carried is not None and carried.size:
        own = np.arange(len(lengths), dtype=index_dtype(len(lengths))) if rows is None else rows
        rows = np.concatenate([own, carried.astype(own.dtype)])
    if rows is not None and not rows.size:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise PlanError(f"all {len(lengths)} samples are left out ({reasons}); there is nothing to plan")
    entries = Entries(given, lengths if rows is None else lengths[rows], rows, left_out, kept_over_length)
    _check_budgets(entries, given)
    return entries


def _kept(given: PlanInput) -> tuple[np.ndarray | None, dict[str, int], int]:
    """Rows that are neither too long nor without anchors (None: all), why others are left out, long ones kept."""
    settings, lengths, eligible = given.settings, given.lengths, given.eligible
    keep, left_out, kept_over_length = None, dict[str, int](), 0
    if settings.max_length is not None and int(lengths.max()) > settings.max_length:
        fits = lengths <= settings.max_length
        over = len(lengths) - int(np.count_nonzero(fits))
        if settings.on_over_length == "keep":
            kept_over_length = over
        else:
            left_out["over_length"], keep = over, fits
    if eligible is not None and settings.without_anchors == "drop" and int(eligible.min()) == 0:
        before = len(lengths) if keep is None else int(np.count_nonzero(keep))
        keep = eligible > 0 if keep is None else keep & (eligible > 0)
        left_out["without_anchors"] = before - int(np.count_nonzero(keep))
    rows = None if keep is None else np.flatnonzero(keep).astype(index_dtype(len(lengths)))
    return rows, left_out, kept_over_length


def _check_budgets(entries: Entries, given: PlanInput) -> None:
    limits = BatchBudget.of(given.settings)
    longest = entries.longest
    width = limits.width(longest)
    if limits.capacity(width) < 1:
        row = entries.rows_of(np.array([entries.lengths.argmax()]))[0]
        padded = f", {width} at width_multiple {limits.width_multiple}" if width != longest else ""
        cost = f", costing {limits.cost(width)} with attention" if limits.attention_length is not None else ""
        raise PlanError(
            f"token_budget {limits.token_budget} is smaller than the longest sample (row {row}: {longest} tokens"
            f"{padded}{cost}); raise plan.token_budget to {limits.cost(width)}, or leave such samples out with "
            "plan.max_length"
        )
    if limits.draft_position_budget is None:
        return
    eligible = given.eligible if given.eligible is None or entries.rows is None else given.eligible[entries.rows]
    counts = entries.lengths if eligible is None else eligible  # an estimate ascends with the length
    most = np.array([counts.argmax()])
    drafts = int(given.anchors_of(entries.rows_of(most))[0]) * given.block_size
    if drafts > limits.draft_position_budget:
        raise PlanError(
            f"draft_position_budget {limits.draft_position_budget} is smaller than the {drafts} draft positions of "
            f"row {entries.rows_of(most)[0]} (at most {given.num_anchors} anchors × block {given.block_size}); raise "
            "plan.draft_position_budget or lower drafter.num_anchors"
        )


def _weighted(rows: np.ndarray | None, given: PlanInput, epoch: int) -> tuple[np.ndarray, int]:
    """Rows with repeats, ascending, and how many rows do not occur.

    A group of n rows with weight w fills ⌊(epoch + 1)·w·n⌋ − ⌊epoch·w·n⌋ places an epoch, dealt cyclically over a
    fixed random order of its rows: after any number of epochs no row was planned more than once oftener than another of
    its group, and within one epoch every row occurs ⌊w⌋ or ⌈w⌉ times.
    """
    weights, groups, count = given.settings.weights, given.groups, len(given.lengths)
    if groups is None:
        named = ", ".join(weights)
        raise PlanError(f"plan.weights names {named}, but the samples carry no tags or sources; drop plan.weights")
    names = list(groups.names)
    for name in weights:
        if name not in names:
            shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
            raise PlanError(f"plan.weights: {name} is not a tag or source of the samples; allowed: {shown}")
    if len(groups.codes) != count:
        raise PlanError(f"groups has {len(groups.codes)} entries for {count} lengths; give one group a sample")
    pool = np.arange(count, dtype=index_dtype(count)) if rows is None else rows
    codes = groups.codes[pool]
    places = np.ones(len(pool), np.int64)
    for name, weight in weights.items():
        members = np.flatnonzero(codes == names.index(name))
        places[members] = _deal(len(members), Fraction(str(weight)), given.seed, names.index(name), epoch)
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
