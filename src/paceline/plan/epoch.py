"""The epoch plan: a pure function of (lengths, planning settings, seed, epoch), as compact arrays.

Enter → compose → schedule. Nothing is stored but what any process can compute again; resume is an index.

Shape letters: N rows of the store, E entries of the epoch, M micro-batches, W windows, G batches a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from paceline.config.schema import MAX_COUNT, PlanConfig, Schedule
from paceline.errors import PlanError
from paceline.plan.batches import Batches, rows_of
from paceline.plan.buckets import bucket_edges, bucket_of
from paceline.plan.budget import BatchBudget
from paceline.plan.entries import (
    Entries,
    Groups,
    check_whole,
    checked_eligible,
    checked_lengths,
    draft_positions,
    eligible_counts,
    enter,
)
from paceline.plan.even_window import even_out, splittable
from paceline.plan.fingerprint import fingerprint
from paceline.plan.rng import Purpose, stream
from paceline.plan.schedule_input import Pool, batch_lengths, rank_batches, split_leftover
from paceline.plan.schedules import SCHEDULES
from paceline.plan.strategies import STRATEGIES
from paceline.types import PlannedBatch

MOST_REPLICAS = 65_535
"""Replicas are numbered in 16 bits."""


@dataclass(frozen=True)
class EpochPlan:
    """Which rows go together, in which optimizer window, replica and slot.

    Attributes:
        settings, num_anchors, block_size, replicas, seed, epoch: what the plan was made from, beside the lengths.
        lengths, eligible: of the rows, as given; eligible is None where unknown.
        composition: the micro-batches as composed; its entries are row numbers.
        sequence: composed batch of each place in training order, int32 [M]; whole windows first, the left-over last.
        edges: upper ends of the buckets in tokens, int64.
        bucket: bucket of each composed batch, uint16 [M].
        left_out: reason → rows that this epoch does not hold.
        kept_over_length: rows over ``max_length`` that are planned all the same.
        carried_in, carried_out: rows taken over from the last epoch, and handed on to the next one.
    """

    settings: PlanConfig
    num_anchors: int
    block_size: int
    replicas: int
    seed: int
    epoch: int
    lengths: np.ndarray
    eligible: np.ndarray | None
    composition: Batches
    sequence: np.ndarray
    edges: np.ndarray
    bucket: np.ndarray
    left_out: dict[str, int] = field(default_factory=dict)
    kept_over_length: int = 0
    carried_in: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    carried_out: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def num_batches(self) -> int:
        """Micro-batches of the epoch."""
        return len(self.sequence)

    @property
    def num_samples(self) -> int:
        """Entries that are trained in this epoch, repeats counted."""
        return int(self.counts.sum())

    @property
    def window_size(self) -> int:
        """Micro-batches of a whole window: accumulate × replicas."""
        return self.settings.accumulate * self.replicas

    @property
    def num_windows(self) -> int:
        """Optimizer steps of the epoch, the same for every replica; the last may be short."""
        return -(-self.num_batches // self.window_size)

    @cached_property
    def counts(self) -> np.ndarray:
        """Samples of each place in training order, int64 [M]."""
        return np.diff(self.composition.offsets)[self.sequence].astype(np.int64)

    @cached_property
    def widths(self) -> np.ndarray:
        """Padded width of each place in training order, int32 [M]."""
        return self.composition.width[self.sequence]

    @cached_property
    def buckets(self) -> np.ndarray:
        """Bucket of each place in training order, uint16 [M]."""
        return self.bucket[self.sequence]

    @cached_property
    def windows(self) -> np.ndarray:
        """Window of each place in training order, int32 [M]."""
        return (np.arange(self.num_batches, dtype=np.int64) // self.window_size).astype(np.int32)

    @cached_property
    def replica_of(self) -> np.ndarray:
        """Replica of each place in training order, uint16 [M]."""
        return (np.arange(self.num_batches, dtype=np.int64) % self.replicas).astype(np.uint16)

    @cached_property
    def slots(self) -> np.ndarray:
        """Slot inside window and replica of each place in training order, uint16 [M]."""
        place = np.arange(self.num_batches, dtype=np.int64) % self.window_size
        return (place // self.replicas).astype(np.uint16)

    def rows(self, index: int) -> np.ndarray:
        """Row numbers of the batch at a place in training order, int64 [B]."""
        composed = self.sequence[index]
        offsets = self.composition.offsets
        return self.composition.order[offsets[composed] : offsets[composed + 1]].astype(np.int64)

    def batch(self, index: int) -> PlannedBatch:
        """The micro-batch at a place in training order, in O(1).

        Raises:
            PlanError: no such place.
        """
        if not 0 <= index < self.num_batches:
            raise PlanError(f"batch {index} is not in the plan; it has batches 0 to {self.num_batches - 1}")
        composed = self.sequence[index]
        rows = self.rows(index)
        lengths = self.lengths[rows]
        width = int(self.composition.width[composed])
        eligible = eligible_counts(lengths, None if self.eligible is None else self.eligible[rows], self.settings)
        place = index % self.window_size
        return PlannedBatch(
            index=index,
            epoch=self.epoch,
            window=index // self.window_size,
            replica=place % self.replicas,
            slot=place // self.replicas,
            bucket=int(self.bucket[composed]),
            rows=rows,
            width=width,
            real_tokens=int(lengths.sum(dtype=np.int64)),
            padded_tokens=self.settings.token_budget if self.composition.packed else len(rows) * width,
            draft_positions=int(draft_positions(eligible, self.num_anchors, self.block_size).sum()),
        )

    def window(self, index: int) -> range:
        """Places of one window's batches in training order.

        Raises:
            PlanError: no such window.
        """
        if not 0 <= index < self.num_windows:
            raise PlanError(f"window {index} is not in the plan; it has windows 0 to {self.num_windows - 1}")
        start = index * self.window_size
        return range(start, min(start + self.window_size, self.num_batches))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all that the plan was made from and decides; the same on every platform."""
        shape, composition = [self.seed, self.epoch, self.replicas, self.num_anchors, self.block_size], self.composition
        decided = (composition.offsets, composition.width, self.bucket, self.sequence, composition.order)
        return fingerprint(self.settings, shape, (self.lengths, self.eligible), decided)


def plan_epoch(
    lengths: np.ndarray | Sequence[int],
    eligible: np.ndarray | Sequence[int] | None,
    settings: PlanConfig,
    *,
    num_anchors: int,
    block_size: int,
    replicas: int = 1,
    seed: int,
    epoch: int,
    groups: Groups | None = None,
) -> EpochPlan:
    """Plans one epoch.

    Args:
        lengths: tokens of every row, integers ≥ 1 [N].
        eligible: eligible anchors of every row [N]; None: estimated by ``settings.eligible_share``.
        settings: planning settings.
        num_anchors: anchors a sample at most.
        block_size: slots of a block.
        replicas: drafter replicas that share every window.
        seed: key of all randomness, ≥ 0.
        epoch: 0-based epoch.
        groups: tag or source of every row, for ``settings.weights``.

    Returns:
        The plan; with ``leftover: carry`` the earlier epochs are planned on the way, so epoch e costs e + 1 plans.

    Raises:
        PlanError: lengths, budgets, edges or weights that allow no plan; one line.
    """
    request = _Request.of(lengths, eligible, settings, num_anchors, block_size, replicas, seed, groups)
    return _plan(request, epoch, [settings.schedule])[0]


def plan_schedules(
    lengths: np.ndarray | Sequence[int],
    eligible: np.ndarray | Sequence[int] | None,
    settings: PlanConfig,
    schedules: Sequence[Schedule],
    *,
    num_anchors: int,
    block_size: int,
    replicas: int = 1,
    seed: int,
    epoch: int,
    groups: Groups | None = None,
) -> list[EpochPlan]:
    """As `plan_epoch` for several schedules of one composition, which is made once; one plan for each schedule."""
    request = _Request.of(lengths, eligible, settings, num_anchors, block_size, replicas, seed, groups)
    return _plan(request, epoch, schedules)


def _plan(request: _Request, epoch: int, schedules: Sequence[Schedule]) -> list[EpochPlan]:
    check_whole("epoch", epoch)
    if epoch < 0:
        raise PlanError(f"epoch {epoch} must be at least 0")
    carried: np.ndarray | None = None
    if request.settings.leftover == "carry":
        for number in range(epoch):
            composed = _compose_one(request, number, carried)
            carried = rows_of(composed.composition, _carried(request, composed, number))
    composed = _compose_one(request, epoch, carried)
    return [_schedule_one(request, composed, epoch, carried, schedule) for schedule in schedules]


@dataclass(frozen=True, slots=True)
class _Request:
    lengths: np.ndarray
    eligible: np.ndarray | None
    settings: PlanConfig
    num_anchors: int
    block_size: int
    replicas: int
    seed: int
    groups: Groups | None

    @classmethod
    def of(
        cls,
        lengths: np.ndarray | Sequence[int],
        eligible: np.ndarray | Sequence[int] | None,
        settings: PlanConfig,
        num_anchors: int,
        block_size: int,
        replicas: int,
        seed: int,
        groups: Groups | None,
    ) -> _Request:
        """A checked request."""
        for name, value in (
            ("num_anchors", num_anchors), ("block_size", block_size), ("replicas", replicas), ("seed", seed)
        ):  # fmt: skip
            check_whole(name, value)
        if min(num_anchors, block_size, replicas) < 1 or seed < 0:
            raise PlanError(
                f"num_anchors {num_anchors}, block_size {block_size} and replicas {replicas} must be at least 1, "
                f"seed {seed} at least 0"
            )
        if replicas > MOST_REPLICAS or max(num_anchors, block_size) > MAX_COUNT:
            raise PlanError(
                f"replicas {replicas} must be at most {MOST_REPLICAS}, num_anchors {num_anchors} and block_size "
                f"{block_size} at most {MAX_COUNT}"
            )
        checked = checked_lengths(lengths)
        counts = None if eligible is None else checked_eligible(eligible, checked)
        return cls(checked, counts, settings, num_anchors, block_size, replicas, seed, groups)


@dataclass(frozen=True, slots=True)
class _Composed:
    """Batches of an epoch: ``batches`` over the entries, ``composition`` the same over the rows."""

    entries: Entries
    edges: np.ndarray
    batches: Batches
    pool: Pool
    leftover: np.ndarray

    @property
    def composition(self) -> Batches:
        if self.entries.rows is None:
            return self.batches
        return replace(self.batches, order=self.entries.rows[self.batches.order])


def _compose_one(request: _Request, epoch: int, carried: np.ndarray | None) -> _Composed:
    settings = request.settings
    entries = enter(
        request.lengths,
        request.eligible,
        settings,
        num_anchors=request.num_anchors,
        block_size=request.block_size,
        seed=request.seed,
        epoch=epoch,
        groups=request.groups,
        carried=carried,
    )
    bits = stream(request.seed, epoch, Purpose.COMPOSE)
    batches = STRATEGIES[settings.strategy](entries, BatchBudget.of(settings), settings, bits)
    edges = bucket_edges(entries, settings)
    batches, pool, leftover = _pooled(request, entries, batches, edges, epoch)
    return _Composed(entries, edges, batches, pool, leftover)


def _schedule_one(
    request: _Request, composed: _Composed, epoch: int, carried: np.ndarray | None, schedule: Schedule
) -> EpochPlan:
    settings = request.settings
    if schedule != settings.schedule:
        settings = settings.model_copy(update={"schedule": schedule})
    sequence = SCHEDULES[schedule](composed.pool, settings, stream(request.seed, epoch, Purpose.SCHEDULE))
    composition, carried_out = composed.composition, np.empty(0, np.int64)
    if settings.leftover == "short":
        sequence = np.concatenate([sequence, composed.leftover])
    else:
        carried_out = rows_of(composition, _carried(request, composed, epoch))
    return EpochPlan(
        settings=settings,
        num_anchors=request.num_anchors,
        block_size=request.block_size,
        replicas=request.replicas,
        seed=request.seed,
        epoch=epoch,
        lengths=request.lengths,
        eligible=request.eligible,
        composition=composition,
        sequence=sequence,
        edges=composed.edges,
        bucket=composed.pool.bucket,
        left_out=composed.entries.left_out,
        kept_over_length=composed.entries.kept_over_length,
        carried_in=np.empty(0, np.int64) if carried is None else carried,
        carried_out=carried_out,
    )


def _carried(request: _Request, composed: _Composed, epoch: int) -> np.ndarray:
    """The left-over batches, which the next epoch takes over."""
    if not composed.pool.num_windows:
        raise PlanError(
            f"the {composed.batches.num_batches} micro-batches of epoch {epoch} fill no window of "
            f"{composed.pool.window_size} (accumulate × replicas); set plan.leftover: short, or lower plan.accumulate"
        )
    return composed.leftover


def _pooled(
    request: _Request, entries: Entries, composition: Batches, edges: np.ndarray, epoch: int
) -> tuple[Batches, Pool, np.ndarray]:
    """What the schedule arranges, and the left-over batches; a short window is evened out between the replicas."""
    settings, replicas = request.settings, request.replicas
    limits = BatchBudget.of(settings)

    def buckets(of: Batches) -> np.ndarray:
        return of.bucket if of.bucket is not None else bucket_of(of.width, edges, limits)

    bucket, length = buckets(composition), batch_lengths(composition, entries.lengths)
    ranked = rank_batches(composition, bucket, length)
    ranking, leftover = split_leftover(
        ranked, settings.accumulate * replicas, stream(request.seed, epoch, Purpose.LEFTOVER)
    )
    evened = None
    if settings.leftover == "short" and replicas > 1 and len(leftover) % replicas:
        leftover = splittable(leftover, ranked, np.diff(composition.offsets), replicas, settings.accumulate * replicas)
        ranking = ranked[~np.isin(ranked, leftover)]
        evened = even_out(composition, leftover, replicas, entries.lengths, limits)
    if evened is not None:
        composition, leftover = evened.composition, evened.leftover(leftover)
        ranking = evened.first[ranking].astype(ranking.dtype)
        bucket, length = buckets(composition), np.repeat(length, evened.pieces)
        if len(leftover) >= settings.accumulate * replicas:  # split into whole windows: schedule them like any other
            ranking, leftover = split_leftover(
                rank_batches(composition, bucket, length),
                settings.accumulate * replicas,
                stream(request.seed, epoch, Purpose.LEFTOVER),
            )
    pool = Pool(ranking, bucket, length, len(edges), settings.accumulate, replicas, epoch)
    return composition, pool, leftover
