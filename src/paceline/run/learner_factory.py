"""How a drafter rank is built, in whichever process: the learner with the state that the run starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.checkpoint import checkpoints
from paceline.config import DrafterConfig, ObjectiveConfig, OptimizerConfig, TargetConfig
from paceline.drafter.spec import DrafterSpec
from paceline.pipeline.multinode import RankInfo
from paceline.run.run import Run
from paceline.run.warm_start import initial_weights
from paceline.types import SharedWeights

if TYPE_CHECKING:
    from paceline.drafter.learner import Learner


@dataclass(frozen=True)
class LearnerFactory:
    """Builds the learner of a drafter rank; pickles.

    Attributes:
        target, drafter, objective, optimizer, seed, spec: of the run.
        device: of the rank.
        total_steps: optimizer steps of the run.
        run_dir, first_step: where the checkpoint is that the run continues from; step 0: it begins.
        group: where it finds the other ranks; None for a rank that is alone.
    """

    target: TargetConfig
    drafter: DrafterConfig
    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    seed: int
    spec: DrafterSpec
    device: str
    total_steps: int
    run_dir: Path
    first_step: int = 0
    group: RankInfo | None = None

    def __call__(self, weights: SharedWeights | None = None) -> Learner:
        """The learner, with the state of the checkpoint that the run continues from.

        Args:
            weights: what the loaded target hands over; read from its files where None.
        """
        from paceline.drafter.learner import Learner
        from paceline.target_model.shared_weights import load_shared_weights
        from paceline.target_model.teacher import Teacher

        if weights is None:
            # In the type of the loaded target, so that all modes train on the same numbers.
            weights = load_shared_weights(self.target, self.target.dtype, with_teacher=self.objective.needs_teacher)
        learner = Learner(
            self.spec,
            embedding=weights.embedding,
            head=weights.head,
            drafter=self.drafter,
            objective=self.objective,
            optimizer=self.optimizer,
            total_steps=self.total_steps,
            seed=self.seed,
            device=self.device,
            world=self.group.join(self.device) if self.group else None,
            teacher=Teacher(weights.teacher, self.device) if weights.teacher is not None else None,
        )
        if self.group is not None and self.group.across_machines:
            self._start_as_the_first(learner, self.group)
        else:
            self._begin(learner)
        return learner

    def _begin(self, learner: Learner) -> None:
        """Take on the checkpoint that the run continues from, or the drafter folder that it begins with."""
        if self.first_step:
            learner.load_state_dict(checkpoints.read_checkpoint(self.run_dir, self.first_step))
        elif self.drafter.init is not None:
            learner.network.load_state_dict(initial_weights(self.drafter.init))

    def _start_as_the_first(self, learner: Learner, group: RankInfo) -> None:
        """All ranks take on the state of rank 0, which alone reads the checkpoint: the disk need not be shared."""
        from paceline.drafter.distributed import broadcast_state

        assert learner.world is not None, "the rank has joined its group"
        state = None
        if group.rank == 0:
            self._begin(learner)
            state = learner.state_dict()
        learner.load_state_dict(broadcast_state(state, learner.world, learner.device))


def learner_factory(run: Run, rank: int = 0, group: RankInfo | None = None) -> LearnerFactory:
    """How a drafter rank of this run is built.

    Args:
        run: from `build_run`.
        rank: which of this machine's.
        group: where it finds the other ranks, where there are any.
    """
    settings = run.settings
    return LearnerFactory(
        target=settings.target,
        drafter=settings.drafter,
        objective=settings.objective,
        optimizer=settings.optimizer,
        seed=settings.seed,
        spec=run.spec,
        device=settings.flow.drafter_devices[rank],
        total_steps=len(run.steps),
        run_dir=run.run_dir,
        first_step=run.first_step,
        group=group,
    )
