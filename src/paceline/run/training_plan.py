"""All optimizer steps of a run and their micro-batches: the plans of its epochs, one after another.

Nothing here is stored but what changed on the way (`checkpoint.changes`): a plan is a pure function of lengths,
settings, replicas, seed and epoch. Where it changes inside an epoch, the samples that are not trained yet are planned
anew.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.checkpoint.changes import PlanBefore
from paceline.checkpoint.retention import VALIDATION
from paceline.config import Settings
from paceline.data.collate import collate
from paceline.data.store import TokenStore
from paceline.drafter.anchors import sample_anchors
from paceline.drafter.spec import DrafterSpec
from paceline.errors import ConfigError, DataError
from paceline.plan.entries import fitting, groups_of_tags
from paceline.plan.epoch import EpochPlan, plan_epoch
from paceline.plan.pieces import PiecedEpoch, PlanPiece, cut
from paceline.types import HostBatch, PlannedBatch, PlannedStep, TargetFacts

Place = tuple[int, int]
"""(epoch, index): where in the plans a micro-batch is."""


def epoch_plan(
    settings: Settings,
    spec: DrafterSpec,
    source: TokenStore,
    epoch: int,
    replicas: int | None = None,
    rows: np.ndarray | None = None,
) -> EpochPlan:
    """The plan of one epoch.

    Args:
        settings, spec, source: of the run.
        epoch: 0-based.
        replicas: drafter ranks to plan for; None: those of one machine.
        rows: of the store, which alone are planned; None: all. Row i of the plan is row ``rows[i]``.
    """
    weights, every = settings.plan.weights, slice(None) if rows is None else rows
    groups = groups_of_tags(source.names(), weights) if weights else None
    return plan_epoch(
        np.asarray(source.lengths)[every],
        np.asarray(source.eligible)[every],
        settings.plan,
        num_anchors=settings.drafter.num_anchors,
        block_size=spec.block_size,
        replicas=len(settings.flow.drafter_devices) if replicas is None else replicas,
        seed=settings.seed,
        epoch=epoch,
        groups=groups if groups is None else replace(groups, codes=groups.codes[every]),
    )


@dataclass(frozen=True)
class Largest:
    """The largest micro-batches of a run.

    Attributes:
        real_tokens: most real tokens of one.
        padded_tokens: most padded tokens of one, the target's work, and its place.
        positions: most draft positions of one, the drafter's work, and its place.
    """

    real_tokens: int = 0
    padded_tokens: tuple[int, Place] = (0, (0, 0))
    positions: tuple[int, Place] = (0, (0, 0))

    def over(self, plan: EpochPlan, first_batch: int = 0) -> Largest:
        """This, or more where a plan has larger micro-batches; of equal ones the first.

        Args:
            plan: of an epoch or a piece of it.
            first_batch: place in the epoch of the plan's first micro-batch.
        """
        if not plan.num_batches:
            return self
        batches = plan.batches
        starts = batches.offsets[:-1]
        real = np.add.reduceat(plan.lengths[batches.order], starts)[plan.sequence]
        padded = plan.counts * plan.widths if not batches.packed else real
        positions = plan.given.anchors_of(batches.order) * plan.given.block_size
        drafted = np.add.reduceat(positions, starts)[plan.sequence]

        def larger(known: tuple[int, Place], sizes: np.ndarray) -> tuple[int, Place]:
            at = int(sizes.argmax())
            return (int(sizes[at]), (plan.epoch, first_batch + at)) if sizes[at] > known[0] else known

        return Largest(
            max(self.real_tokens, int(real.max())), larger(self.padded_tokens, padded), larger(self.positions, drafted)
        )


@dataclass(frozen=True, slots=True)
class Begin:
    """Where a run begins to count: what was done before it, by another trainer or on other data.

    Attributes:
        step: optimizer steps.
        epoch: whole epochs of this data.
    """

    step: int = 0
    epoch: int = 0


class TrainingPlan:
    """The steps of a run.

    Args:
        settings, spec, facts, source: of the run.
        replicas: drafter ranks that it is planned for: those that the run was started with.
        before: how steps were planned before the settings of this start, oldest first.
        begin: what was done before the run.

    Attributes:
        steps: every optimizer step of the run.
        total_steps: number of the last one.
        largest: its largest micro-batches.

    Raises:
        DataError: no step can be planned.
    """

    def __init__(
        self,
        settings: Settings,
        spec: DrafterSpec,
        facts: TargetFacts,
        source: TokenStore,
        replicas: int,
        before: Sequence[PlanBefore] = (),
        begin: Begin = Begin(),
    ) -> None:
        self.replicas = replicas
        self._settings, self._spec, self._source = settings, spec, source
        self._before, self.begin = before, begin
        self._pad_id = facts.pad_token_id if facts.pad_token_id is not None else 0
        self._steps_before: dict[int, int] = {}
        """Number of the last step before each epoch."""
        self.epoch = functools.lru_cache(maxsize=2)(self._epoch)
        """The plan of an epoch, by its 0-based number."""
        self.largest = Largest()
        self.steps = self._planned_steps()
        if not self.steps:
            raise DataError(f"{source.path}: no optimizer step can be planned from its {len(source.lengths)} rows")
        self.total_steps = self.steps[-1].step

    def whole_epoch(self, epoch: int) -> EpochPlan:
        """The plan of an epoch under the settings of this start, as if nothing had changed in it."""
        return epoch_plan(self._settings, self._spec, self._source, epoch, self.replicas)

    def _epoch(self, epoch: int) -> EpochPlan | PiecedEpoch:
        at = self._steps_before[epoch]
        earlier = [before for before in self._before if before.last_step > at]
        if not earlier:
            return self.whole_epoch(epoch)
        pieces: list[PlanPiece] = []
        for before in earlier:
            windows = before.last_step - at - sum(piece.plan.num_windows for piece in pieces)
            pieces += self._piece(epoch, pieces, self._settings_of(before), windows)
        pieces += self._piece(epoch, pieces, self._settings)
        return PiecedEpoch(pieces, self.whole_epoch(epoch).edges)

    def _settings_of(self, before: PlanBefore) -> Settings:
        drafter = self._settings.drafter.model_copy(update={"num_anchors": before.num_anchors})
        return self._settings.model_copy(update={"plan": before.plan, "drafter": drafter})

    def _piece(
        self, epoch: int, earlier: Sequence[PlanPiece], settings: Settings, windows: int | None = None
    ) -> list[PlanPiece]:
        """The first windows (None: all) of a plan of what earlier pieces left; empty where they left nothing."""
        whole = epoch_plan(settings, self._spec, self._source, epoch, self.replicas)
        if not earlier:
            return [PlanPiece(cut(whole, windows), None, 0, 0)]
        trained = np.zeros(len(self._source.lengths), bool)
        for piece in earlier:
            trained[piece.trained_rows()] = True
        # What a plan of the whole epoch would hold, repeats by weight included, without what is trained already.
        rows = np.sort(whole.batches.order).astype(np.int64)
        rows = rows[~trained[rows]]
        if not len(rows):
            return []
        limits = settings.plan.model_copy(update={"weights": {}, "edges": whole.edges.tolist()})
        of_rest = settings.model_copy(update={"plan": limits})
        plan = epoch_plan(of_rest, self._spec, self._source, epoch, self.replicas, rows)
        first_batch = sum(piece.plan.num_batches for piece in earlier)
        return [PlanPiece(cut(plan, windows), rows, first_batch, sum(piece.plan.num_windows for piece in earlier))]

    def _planned_steps(self) -> list[PlannedStep]:
        train, begin = self._settings.train, self.begin
        if train.epochs <= begin.epoch or (train.max_steps or begin.step + 1) <= begin.step:
            raise ConfigError(
                f"train: {begin.step} steps and {begin.epoch} epochs are behind this run already; raise train.epochs "
                "or train.max_steps, which count them"
            )
        limit = None if train.max_steps is None else train.max_steps - begin.step
        windows: list[tuple[int, int, range]] = []
        for epoch in range(begin.epoch, train.epochs):
            if limit is not None and len(windows) >= limit:
                break
            self._steps_before[epoch] = begin.step + len(windows)
            plan = self.epoch(epoch)
            for piece in plan.pieces if isinstance(plan, PiecedEpoch) else [PlanPiece(plan, None, 0, 0)]:
                self.largest = self.largest.over(piece.plan, piece.first_batch)
            windows += [(epoch, window, plan.window(window)) for window in range(plan.num_windows)]
        save, validate = self._settings.checkpoint.every_steps, self._settings.evaluate.every_steps
        by_validation = (self._settings.checkpoint.keep_best or "").startswith(VALIDATION)
        windows, steps = windows[:limit], []
        for step, window in enumerate(windows, begin.step + 1):
            last = step == begin.step + len(windows)
            saved = step % save == 0 or last
            measured = step % validate == 0 or last or (saved and by_validation)
            steps.append(PlannedStep(step, *window, save=saved, validate=measured))
        return steps

    def host_batches(self, steps: Sequence[PlannedStep], ranks: range, num_ranks: int) -> Iterator[HostBatch]:
        """Host batches of these steps in plan order: those that some of the drafter ranks train.

        Args:
            steps: of this plan.
            ranks: whose batches are made.
            num_ranks: of all machines.
        """
        for planned in steps:
            for index in planned.batches:
                if planned.rank_of(index, num_ranks) in ranks:
                    yield self._collated(self.epoch(planned.epoch).batch(index))

    def largest_batches(self) -> list[HostBatch]:
        """The host batches with most padded tokens and with most draft positions; one where they are the same."""
        places = dict.fromkeys((self.largest.padded_tokens[1], self.largest.positions[1]))
        return [self._collated(self.epoch(epoch).batch(index)) for epoch, index in places]

    def _collated(self, planned: PlannedBatch) -> HostBatch:
        settings = self._settings
        return collate(
            planned,
            self._source,
            sample_anchors,
            seed=settings.seed,
            num_anchors=settings.drafter.num_anchors,
            pad_id=self._pad_id,
        )

    def validation_batches(self, heldout: TokenStore | None) -> list[HostBatch]:
        """Host batches of the first held-out samples, with the same anchors in every run and at every step.

        They are composed as the training batches are, within the same budgets; samples that exceed a budget alone are
        left out.

        Args:
            heldout: the tokenized held-out samples; None where there are none.
        """
        if heldout is None:
            return []
        settings, num_anchors = self._settings, self._settings.drafter.num_anchors
        limits = settings.plan.model_copy(update={"accumulate": 1, "leftover": "short", "weights": {}, "edges": None})
        rows = np.arange(min(settings.evaluate.validation_samples, len(heldout.lengths)))
        lengths, eligible = heldout.lengths[rows], heldout.eligible[rows]
        fits = fitting(lengths, eligible, limits, num_anchors=num_anchors, block_size=self._spec.block_size)
        rows, lengths, eligible = rows[fits], lengths[fits], eligible[fits]
        if not len(rows) or not eligible.any():
            return []
        plan = plan_epoch(
            lengths, eligible, limits, num_anchors=num_anchors, block_size=self._spec.block_size, seed=0, epoch=0
        )
        batches = [plan.batch(index) for index in range(plan.num_batches)]
        return [
            collate(
                replace(planned, rows=rows[planned.rows]),
                heldout,
                sample_anchors,
                seed=0,
                num_anchors=num_anchors,
                pad_id=self._pad_id,
            )
            for planned in batches
        ]
