"""The plan as a batch sampler: lists of row numbers, for a PyTorch ``DataLoader(batch_sampler=...)`` or plain numpy.

No torch here: a DataLoader asks a batch sampler for nothing but ``__iter__`` and ``__len__``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.config.schema import PlanConfig
from paceline.errors import PlanError
from paceline.plan.entries import Groups
from paceline.plan.epoch import EpochPlan, plan_epoch


class PlanBatchSampler:
    """Batches of one rank, epoch after epoch; every rank gets the same number of them.

    Every rank plans the whole epoch (milliseconds) and takes its own share, so nothing is communicated. Its batches
    come window after window: the first ``accumulate`` of them are its part of the first optimizer step, and so on; only
    the last window of an epoch may be shorter. Where the last batches are fewer than the ranks, they are split, so that
    ranks which synchronize after every batch do not wait for one another forever; where they also hold fewer samples
    than there are ranks, some of these samples are repeated.

    Args:
        lengths: tokens of every row of the data set.
        settings: planning settings; None: the defaults.
        num_replicas, rank: data-parallel processes, and which of them this is.
        seed: key of all randomness.
        eligible: eligible anchors a row, for ``settings.draft_position_budget``; None: estimated.
        num_anchors, block_size: for the same budget; by default it counts samples, which other models have.
        groups: tag or source of every row, for ``settings.weights``.

    Raises:
        PlanError: lengths or settings that allow no plan.
    """

    def __init__(
        self,
        lengths: np.ndarray | Sequence[int],
        settings: PlanConfig | None = None,
        *,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        eligible: np.ndarray | Sequence[int] | None = None,
        num_anchors: int = 1,
        block_size: int = 1,
        groups: Groups | None = None,
    ) -> None:
        if not 0 <= rank < num_replicas:
            raise PlanError(f"rank {rank}: allowed: 0 to {num_replicas - 1}, for num_replicas {num_replicas}")
        self.settings = settings if settings is not None else PlanConfig()
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.epoch = 0
        self._lengths, self._eligible, self._groups = lengths, eligible, groups
        self._num_anchors, self._block_size = num_anchors, block_size
        self._start = 0  # where the next pass begins
        self._origin = 0  # where the last pass began: what `consumed` counts from
        self._position = 0
        self._plan: EpochPlan | None = None

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch, made when first asked for."""
        if self._plan is None or self._plan.epoch != self.epoch:
            self._plan = plan_epoch(
                self._lengths,
                self._eligible,
                self.settings,
                num_anchors=self._num_anchors,
                block_size=self._block_size,
                replicas=self.num_replicas,
                seed=self.seed,
                epoch=self.epoch,
                groups=self._groups,
            )
        return self._plan

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch (0-based). Going to another one forgets a position that was loaded; to the same, keeps it."""
        if epoch < 0:
            raise PlanError(f"epoch {epoch}: allowed: 0 or more")
        if epoch != self.epoch:
            self._start = self._origin = self._position = 0
        self.epoch = epoch

    def __len__(self) -> int:
        """Batches of this rank in the whole current epoch, wherever iteration is."""
        return -(-self.plan.num_batches // self.num_replicas)

    def __iter__(self) -> Iterator[list[int]]:
        """Row numbers of one batch after another, from the position that was loaded, else from the first."""
        plan, start = self.plan, self._start
        self._start, self._origin = 0, start
        for position in range(start, len(self)):
            self._position = position + 1
            first = position * self.num_replicas
            if first + self.num_replicas <= plan.num_batches:
                yield plan.rows(first + self.rank).tolist()
            else:
                batches = [plan.rows(index) for index in range(first, plan.num_batches)]
                yield _split(batches, self.num_replicas)[self.rank].tolist()

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Where iteration is.

        Args:
            consumed: batches trained since this pass over the epoch began, which after `load_state_dict` is in the
                middle: so just what the training loop counted. A DataLoader with workers asks for batches ahead,
                which is why the sampler cannot count them itself; None: batches handed out so far.

        Returns:
            Plain values: epoch, position in the epoch, and the plan's fingerprint.

        Raises:
            PlanError: ``consumed`` is not a number of batches that this pass can have.
        """
        left = len(self) - self._origin
        if consumed is not None and not 0 <= consumed <= left:
            raise PlanError(
                f"consumed {consumed}: allowed in epoch {self.epoch}: 0 to {left}, counted from position "
                f"{self._origin}, where this pass began"
            )
        position = self._position if consumed is None else self._origin + consumed
        return {"epoch": self.epoch, "position": position, "fingerprint": self.plan.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a state was taken; any rank may load any rank's state.

        Raises:
            PlanError: the state belongs to other lengths, settings, seed or replicas, or to no place of the epoch.
        """
        self.epoch = int(state["epoch"])
        if state["fingerprint"] != self.plan.fingerprint:
            raise PlanError(
                f"the state of epoch {self.epoch} belongs to another plan (fingerprint {state['fingerprint']}, here "
                f"{self.plan.fingerprint}); lengths, plan settings, seed and replicas must be those of the first run"
            )
        position = int(state["position"])
        if not 0 <= position <= len(self):
            raise PlanError(f"position {position} is not in epoch {self.epoch} of {len(self)} batches a rank")
        self._start = self._origin = self._position = position


def _split(batches: list[np.ndarray], parts: int) -> list[np.ndarray]:
    """One batch for each rank from fewer batches: the largest is halved until there are enough.

    Halves keep every budget that the whole batch kept. Where only single samples are left, they are repeated.
    """
    while len(batches) < parts:
        largest = max(range(len(batches)), key=lambda number: len(batches[number]))
        if len(batches[largest]) == 1:
            batches = [*batches, *batches[: parts - len(batches)]]
        else:
            batches[largest : largest + 1] = np.array_split(batches[largest], 2)
    return batches
