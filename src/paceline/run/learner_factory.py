"""How a drafter rank is built, in whichever process: the learner with the state that the run starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.checkpoint import checkpoints
from paceline.config import Settings
from paceline.drafter.spec import DrafterSpec
from paceline.pipeline.multinode import RankInfo, meeting_prefix
from paceline.run.build import Run
from paceline.run.warm_start import initial_weights
from paceline.types import SharedWeights

if TYPE_CHECKING:
    from paceline.drafter.learner import Learner


@dataclass(frozen=True)
class LearnerFactory:
    """Builds the learner of a drafter rank, in whichever process; pickles.

    Attributes:
        settings, spec, run_dir, total_steps, first_step: of the run.
        rank: which of `flow.drafter_devices`.
        group: where it finds the other ranks; None for a rank that is alone.
    """

    settings: Settings
    spec: DrafterSpec
    run_dir: Path
    total_steps: int
    first_step: int
    rank: int = 0
    group: RankInfo | None = None

    @property
    def device(self) -> str:
        """Where the rank runs."""
        return self.settings.flow.drafter_devices[self.rank]

    def __call__(self, weights: SharedWeights | None = None) -> Learner:
        """The learner, with the state of the checkpoint that the run goes on from.

        Args:
            weights: what the loaded target hands over; read from its files where None.
        """
        from paceline.drafter.learner import Learner
        from paceline.target_model.shared_weights import load_shared_weights
        from paceline.target_model.teacher import Teacher

        settings = self.settings
        if weights is None:
            weights = load_shared_weights(settings.target, with_teacher=settings.objective.needs_teacher)
        teacher = Teacher(weights.teacher, self.device) if weights.teacher is not None else None
        learner = Learner(
            self.spec,
            embedding=weights.embedding,
            head=weights.head,
            drafter=settings.drafter,
            objective=settings.objective,
            optimizer=settings.optimizer,
            total_steps=self.total_steps,
            seed=settings.seed,
            device=self.device,
            world=self.group.join(self.device) if self.group else None,
            teacher=teacher,
        )
        if self.group is not None and self.group.across_machines:
            self._start_as_the_first(learner, self.group)
        else:
            self._begin(learner)
        return learner

    def _begin(self, learner: Learner) -> None:
        """Take on the checkpoint that the run goes on from, or the drafter folder that it begins with."""
        if self.first_step:
            learner.load_state_dict(checkpoints.read_checkpoint(self.run_dir, self.first_step))
        elif self.settings.drafter.init is not None:
            learner.network.load_state_dict(initial_weights(self.settings.drafter.init))

    def _start_as_the_first(self, learner: Learner, group: RankInfo) -> None:
        """All ranks take on the state of rank 0, which alone reads the checkpoint: the disk need not be shared."""
        from paceline.drafter.distributed import broadcast_state

        assert learner.world is not None, "the rank has joined its group"
        state = None
        if group.rank == 0:
            self._begin(learner)
            state = learner.state_dict()
        learner.load_state_dict(broadcast_state(state, learner.world, learner.device))


def learner_factory(run: Run, rank: int = 0, port: int = 0) -> LearnerFactory:
    """How a drafter rank of this run is built.

    Args:
        run: from `compose`.
        rank: which of this machine's.
        port: of this machine's store, where it is the only one and several ranks must find one another.
    """
    place, group = run.machines.place, None
    if run.num_ranks > 1 and (port or place.count > 1):
        group = RankInfo(
            place.address,
            port or place.port,
            f"{meeting_prefix(place)}/ranks",
            place.number * len(run.settings.flow.drafter_devices) + rank,
            run.num_ranks,
            place.count > 1,
        )
    return LearnerFactory(run.settings, run.spec, run.run_dir, len(run.orders), run.first_step, rank, group)
