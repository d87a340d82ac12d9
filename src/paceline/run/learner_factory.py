"""How a drafter rank is built, in whichever process: the learner with the state that the run starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint import checkpoints
from paceline.config import DrafterConfig, ObjectiveConfig, OptimizerConfig, TargetConfig, devices_of
from paceline.device import allocated_bytes, main_device, total_bytes
from paceline.drafter.memory import CARD_SHARE, TrainingShape, fitting_positions
from paceline.drafter.spec import DrafterSpec
from paceline.pipeline.multinode import RankInfo
from paceline.run.run import Run
from paceline.run.warm_start import initial_state
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
        run_dir, first_step: where the checkpoint is that the run continues from; there is none where it begins.
        group: where it finds the other ranks; None for a rank that is alone.
        most_tokens: real tokens of the run's largest micro-batch.
        beside: other processes that hold models on the device.
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
    most_tokens: int = 0
    beside: int = 0

    def __call__(self, weights: SharedWeights) -> Learner:
        """The learner, with the state of the checkpoint that the run continues from.

        Args:
            weights: what the loaded target hands over.
        """
        from paceline.drafter.distributed import broadcast_state
        from paceline.drafter.learner import Learner
        from paceline.target_model.teacher import Teacher

        world = self.group.join(self.device) if self.group else None
        shards = self.group.machine_group() if self.group and self.optimizer.shard else None
        learner = Learner(
            self.spec,
            embedding=weights.embedding,
            head=weights.head,
            drafter=self._in_passes(tied=weights.head.data_ptr() == weights.embedding.data_ptr()),
            objective=self.objective,
            optimizer=self.optimizer,
            total_steps=self.total_steps,
            seed=self.seed,
            device=self.device,
            world=world,
            shards=shards,
            teacher=Teacher(weights.teacher, self.device) if weights.teacher is not None else None,
        )
        if self.group is not None and self.group.across_machines:  # rank 0 alone reads: the disk need not be shared
            assert learner.world is not None, "the rank has joined its group"
            mine = self._start(learner) if self.group.rank == 0 else None
            state = broadcast_state(mine, learner.world, learner.device)
        else:
            state = self._start(learner)
        if "optimizer" in state:
            learner.load_state_dict(state)
        else:
            learner.begin(state)
        return learner

    def _in_passes(self, *, tied: bool) -> DrafterConfig:
        """The drafter's settings with `positions_per_pass` as the card's memory allows, where it is unset.

        It follows from the card's size and from what this process holds there already (inline: the target), never from
        what is free at the moment, so a run that is resumed adds up the same passes.
        """
        if self.drafter.positions_per_pass is not None or not self.device.startswith("cuda"):
            return self.drafter
        shape = TrainingShape(
            self.spec,
            self.drafter,
            self.objective,
            self.optimizer,
            features=self.target.dtype,
            tied=tied,
            ranks=self.group.on_this_machine if self.group else 1,
        )
        room = int(CARD_SHARE * total_bytes(self.device)) // (1 + self.beside) - allocated_bytes(self.device)
        return self.drafter.model_copy(update={"positions_per_pass": fitting_positions(shape, self.most_tokens, room)})

    def _start(self, learner: Learner) -> Mapping[str, Any]:
        """The checkpoint that the run continues from; where it begins, the weights alone."""
        if self.first_step in checkpoints.steps(self.run_dir):
            return checkpoints.read_checkpoint(self.run_dir, self.first_step)
        if self.drafter.init is not None:
            begun = initial_state(self.drafter, self.optimizer, self.spec)
            return {**begun, "network": {**learner.network.state_dict(), **begun["network"]}}
        return {"network": learner.network.state_dict()}


def learner_factory(run: Run, rank: int = 0, group: RankInfo | None = None) -> LearnerFactory:
    """How a drafter rank of this run is built.

    Args:
        run: from `build_run`.
        rank: which of this machine's.
        group: where it finds the other ranks, where there are any.
    """
    settings, flow = run.settings, run.settings.flow
    device = flow.drafter_devices[rank]
    others = [settings.evaluate.device, *(flow.target_devices if flow.mode == "pipeline" else [])]
    beside = [name for entry in others if entry is not None for name in devices_of(entry)]
    return LearnerFactory(
        target=settings.target,
        drafter=settings.drafter,
        objective=settings.objective,
        optimizer=settings.optimizer,
        seed=settings.seed,
        spec=run.spec,
        device=device,
        total_steps=run.plan.total_steps,
        run_dir=run.run_dir,
        first_step=run.first_step,
        group=group,
        most_tokens=run.plan.largest.real_tokens,
        beside=sum(main_device(name) == main_device(device) for name in beside),
    )
