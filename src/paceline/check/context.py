"""What the checks of a run share; each part is made when the first check needs it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paceline.check.sample_data import SampleData, few_samples, gather, plan_of, user_places
from paceline.config import Settings
from paceline.device import synchronize
from paceline.drafter.learner import Learner
from paceline.drafter.spec import DrafterSpec
from paceline.plan.epoch import EpochPlan
from paceline.run.build import Models, resolve_models
from paceline.run.learner_factory import LearnerFactory
from paceline.target_model.load import load_target
from paceline.target_model.model import TargetModel
from paceline.target_model.shared_weights import shared_weights
from paceline.types import FeatureBatch, PlannedBatch, TargetFacts


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """How much a pre-flight does.

    Attributes:
        rows: about how many rows of the data are tokenized.
        seconds: longest time of the overfit.
        steps: optimizer steps of the overfit at most.
        price: of one device for one hour; None where nobody asked for the cost.
    """

    rows: int = 256
    seconds: float = 120.0
    steps: int = 200
    price: float | None = None


class CheckContext:
    """A run under test.

    Args:
        settings: of the run.
        folder: scratch folder.
        limits: how much is done.
    """

    def __init__(self, settings: Settings, folder: Path, limits: CheckLimits) -> None:
        self.settings, self.folder, self.limits = settings, folder, limits
        self.load_seconds = 0.0
        self.target_s, self.drafter_s = 0.0, 0.0
        """Work of a whole run on one device a role; filled in by the timing."""

    @cached_property
    def models(self) -> Models:
        """Target and drafter, from files alone."""
        return resolve_models(self.settings)

    @property
    def facts(self) -> TargetFacts:
        """Of the target."""
        return self.models.facts

    @property
    def spec(self) -> DrafterSpec:
        """Of the drafter."""
        return self.models.spec

    @cached_property
    def material(self) -> SampleData:
        """The data."""
        return gather(self.settings, self.folder, self.limits.rows)

    def user_places(self, text: str) -> str:
        """A text with the user's files instead of the scratch files."""
        origins = self.material.origins if "material" in self.__dict__ else {}
        return user_places(text, self.folder, origins, self.settings.data.train)

    @cached_property
    def plan(self) -> EpochPlan:
        """First epoch over the material's store."""
        return plan_of(self.settings, self.spec, self.material)

    @cached_property
    def batches(self) -> list[PlannedBatch]:
        """The micro-batches of `plan`."""
        return [self.plan.batch(index) for index in range(self.plan.num_batches)]

    @cached_property
    def target(self) -> TargetModel:
        """The target on the device of its first worker."""
        began = time.perf_counter()
        target = load_target(self.settings.target, self.models.taps, self.settings.flow.target_devices[0])
        self.load_seconds = time.perf_counter() - began
        return target

    @cached_property
    def few(self) -> FeatureBatch:
        """A small real batch with what the target saw."""
        host = few_samples(self.material.store, self.spec, self.facts, self.settings.seed)
        return self.target.features(host, with_last=self.settings.objective.needs_teacher)

    @cached_property
    def learner(self) -> Learner:
        """A new learner of the run's drafter on the device of its first rank, without noise."""
        return self.new_learner(self.limits.steps)

    def new_learner(self, steps: int) -> Learner:
        """As `learner`, with schedules for this many steps."""
        quiet = self.settings.drafter.noise.model_copy(update={"kind": "none"})
        settings = self.settings
        weights = shared_weights(self.target, with_teacher=settings.objective.needs_teacher)
        return LearnerFactory(
            target=settings.target,
            drafter=settings.drafter.model_copy(update={"noise": quiet, "diagnose_every": 0, "init_step": None}),
            objective=settings.objective,
            optimizer=settings.optimizer,
            seed=settings.seed,
            spec=self.spec,
            device=settings.flow.drafter_devices[0],
            total_steps=steps,
            run_dir=self.folder,
            most_tokens=max(batch.real_tokens for batch in self.batches),
        )(weights)

    def wait(self) -> None:
        """Until both devices have done what they were asked."""
        for name in (self.settings.flow.target_devices[0], self.settings.flow.drafter_devices[0]):
            synchronize(name)
