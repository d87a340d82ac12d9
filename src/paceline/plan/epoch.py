"""The epoch plan: a pure function of (lengths, planning settings, seed, epoch), as compact arrays.

Enter → compose → schedule. Nothing is stored but what any process can compute again; resume is an index.

Shape letters: N rows of the store, E entries of the epoch, M micro-batches, W windows, G batches a window.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from paceline.config.schema import MAX_COUNT, PlanConfig, Schedule
from paceline.errors import PlanError
from paceline.plan.batches import Batches, rows_of
from paceline.plan.buckets import bucket_edges, bucket_of
from paceline.plan.budget import BatchBudget
from paceline.plan.entries import Groups, PlanInput, checked_counts, checked_eligible, enter
from paceline.plan.rng import Purpose, stream
from paceline.plan.schedule_input import Pool, rank_batches, split_leftover
from paceline.plan.schedules import SCHEDULES
from paceline.plan.strategies import STRATEGIES
from paceline.types import PlannedBatch


@dataclass(frozen=True)
class EpochPlan:
    """Which rows go together, in which optimizer window, replica and slot.

    Attributes:
        given: what the plan was made from, beside the epoch.
        epoch: 0-based.
        batches: the micro-batches as composed; their entries are row numbers.
        sequence: composed batch of each place in training order, int32 [M]; whole windows first, the left-over last.
        edges: upper ends of the buckets in tokens, int64.
        bucket: bucket of each composed batch, uint16.
        left_out: reason → rows that this epoch does not hold.
        kept_over_length: rows over ``max_length`` that are planned all the same.
        carried_in, carried_out: rows taken over from the last epoch, and handed on to the next one.
    """

    given: PlanInput
    epoch: int
    batches: Batches
    sequence: np.ndarray
    edges: np.ndarray
    bucket: np.ndarray
    left_out: dict[str, int] = field(default_factory=dict)
    kept_over_length: int = 0
    carried_in: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    carried_out: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def settings(self) -> PlanConfig:
        """Planning settings."""
        return self.given.settings

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every row of the store, [N]."""
        return self.given.lengths

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
        return self.settings.accumulate * self.given.replicas

    @property
    def num_windows(self) -> int:
        """Optimizer steps of the epoch, the same for every replica; the last may be short."""
        return -(-self.num_batches // self.window_size)

    @cached_property
    def counts(self) -> np.ndarray:
        """Samples of each place in training order, int64 [M]."""
        return np.diff(self.batches.offsets)[self.sequence].astype(np.int64)

    @cached_property
    def widths(self) -> np.ndarray:
        """Padded width of each place in training order, int32 [M]."""
        return self.batches.width[self.sequence]

    @cached_property
    def buckets(self) -> np.ndarray:
        """Bucket of each place in training order, uint16 [M]."""
        return self.bucket[self.sequence]

    def rows(self, index: int) -> np.ndarray:
        """Row numbers of the batch at a place in training order, int64 [B]."""
        composed, offsets = self.sequence[index], self.batches.offsets
        return self.batches.order[offsets[composed] : offsets[composed + 1]].astype(np.int64)

    def batch(self, index: int) -> PlannedBatch:
        """The micro-batch at a place in training order, in O(1).

        Raises:
            PlanError: no such place.
        """
        if not 0 <= index < self.num_batches:
            raise PlanError(f"batch {index} is not in the plan; it has batches 0 to {self.num_batches - 1}")
        composed = self.sequence[index]
        rows = self.rows(index)
        width = int(self.batches.width[composed])
        place = index % self.window_size
        return PlannedBatch(
            index=index,
            epoch=self.epoch,
            window=index // self.window_size,
            replica=place % self.given.replicas,
            slot=place // self.given.replicas,
            bucket=int(self.bucket[composed]),
            rows=rows,
            width=width,
            real_tokens=int(self.lengths[rows].sum(dtype=np.int64)),
            padded_tokens=self.settings.token_budget if self.batches.packed else len(rows) * width,
            draft_positions=int(self.given.anchors_of(rows).sum()) * self.given.block_size,
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

    def rescheduled(self, schedule: Schedule) -> EpochPlan:
        """The same batches in the order of another schedule."""
        given = replace(self.given, settings=self.settings.model_copy(update={"schedule": schedule}))
        sequence, _ = _arranged(given, self.epoch, self.batches, self.bucket, len(self.edges))
        return replace(self, given=given, sequence=sequence)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all that the plan was made from and decides, 32 hexadecimal digits; the same on every platform."""
        given = self.given
        sources = [values for values in (given.lengths, given.eligible) if values is not None]
        head = {
            "settings": given.settings.model_dump(),
            "shape": [given.seed, self.epoch, given.replicas, given.num_anchors, given.block_size],
            "sizes": [len(given.lengths), None if given.eligible is None else len(given.eligible)],
        }
        digest = hashlib.blake2b(json.dumps(head, sort_keys=True).encode(), digest_size=16)
        for values in sources:
            digest.update(np.ascontiguousarray(values, "<i4").data)
        batches = self.batches
        for part in (batches.offsets, batches.width, self.bucket, self.sequence, batches.order):
            digest.update(np.ascontiguousarray(part, "<i8" if part.itemsize == 8 else "<i4").data)
        return digest.hexdigest()


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
        num_anchors: anchors of a sample at most.
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
    if min(num_anchors, block_size, replicas) < 1 or min(seed, epoch) < 0 or max(num_anchors, block_size) > MAX_COUNT:
        raise PlanError(
            f"num_anchors {num_anchors}, block_size {block_size}, replicas {replicas}: allowed: 1 to {MAX_COUNT}; "
            f"seed {seed}, epoch {epoch}: allowed: 0 or more"
        )
    checked = checked_counts(lengths, "lengths", 1)
    counts = None if eligible is None else checked_eligible(eligible, checked)
    given = PlanInput(checked, counts, settings, num_anchors, block_size, replicas, seed, groups)
    carried = np.empty(0, np.int64)
    if settings.leftover == "carry":
        for number in range(epoch):
            carried = _plan(given, number, carried).carried_out
    return _plan(given, epoch, carried)


def _plan(given: PlanInput, epoch: int, carried: np.ndarray) -> EpochPlan:
    settings, limits = given.settings, BatchBudget.of(given.settings)
    entries = enter(given, epoch, carried)
    batches = STRATEGIES[settings.strategy](entries, limits, settings, stream(given.seed, epoch, Purpose.COMPOSE))
    edges = bucket_edges(entries, settings)
    bucket = bucket_of(batches.width, edges, limits) if batches.bucket is None else batches.bucket
    if entries.rows is not None:
        batches = replace(batches, order=entries.rows[batches.order])
    sequence, carried_out = _arranged(given, epoch, batches, bucket, len(edges))
    return EpochPlan(
        given, epoch, batches, sequence, edges, bucket, entries.left_out, entries.kept_over_length, carried, carried_out
    )


def _arranged(
    given: PlanInput, epoch: int, batches: Batches, bucket: np.ndarray, num_buckets: int
) -> tuple[np.ndarray, np.ndarray]:
    """The composed batches in training order, and the rows that the next epoch takes over."""
    settings = given.settings
    window_size = settings.accumulate * given.replicas
    ranking, leftover = split_leftover(
        rank_batches(bucket, batches.length), window_size, stream(given.seed, epoch, Purpose.LEFTOVER)
    )
    if settings.leftover == "carry" and not len(ranking):
        raise PlanError(
            f"the {batches.num_batches} micro-batches of epoch {epoch} fill no window of {window_size} "
            "(accumulate × replicas); set plan.leftover: short, or lower plan.accumulate"
        )
    pool = Pool(ranking, bucket, batches.length, num_buckets, settings.accumulate, given.replicas, epoch)
    sequence = SCHEDULES[settings.schedule](pool, settings, stream(given.seed, epoch, Purpose.SCHEDULE))
    if settings.leftover == "carry":
        return sequence, rows_of(batches, leftover)
    return np.concatenate([sequence, leftover]), np.empty(0, np.int64)
