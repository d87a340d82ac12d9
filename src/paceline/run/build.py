"""What a run is, before any model loads: settings become facts, plans and steps, and every error is found here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from paceline.checkpoint import checkpoints, run_directory
from paceline.checkpoint.changes import PlanBefore, SettingsChange, change_asked, plans_before, read_changes
from paceline.config import PlanConfig, Settings, devices_of, named_values
from paceline.data.coverage import check_mask_token
from paceline.data.mask_token import MaskToken, choose_mask_token
from paceline.data.store import TokenStore, open_store
from paceline.data.tokenizer import load_tokenizer
from paceline.drafter.spec import DrafterSpec, derive_spec
from paceline.errors import ConfigError, DrafterError, PacelineError, TargetError
from paceline.pipeline.feature_pool import FeaturePool
from paceline.pipeline.multinode import ALONE, Nodes
from paceline.run.checkpoint_policy import check_saving
from paceline.run.eval_worker import check_background_evaluation
from paceline.run.run import Run
from paceline.run.training_plan import Begin, TrainingPlan
from paceline.run.warm_start import check_init
from paceline.target_model.facts import describe_target
from paceline.target_model.preconditions import check_loadable, check_repeatable
from paceline.target_model.taps import check_taps, default_taps
from paceline.target_model.vllm_environment import engine_name, find_vllm
from paceline.types import HostBatch, PlannedStep, TargetFacts

Made = TypeVar("Made")


@dataclass(frozen=True)
class Models:
    """Target and drafter of a run, from configurations and the tokenizer alone.

    Attributes:
        facts: of the target.
        taps: tapped layers.
        mask: the token of the draft slots.
        spec: of the drafter.
    """

    facts: TargetFacts
    taps: list[int]
    mask: MaskToken
    spec: DrafterSpec


def resolve_models(settings: Settings) -> Models:
    """Facts of the target, taps and drafter of a run; reads configurations and tokenizer only.

    Raises:
        PacelineError: one line per error, those of taps, mask token and sizes together.
    """
    if settings.target.engine == "vllm":
        find_vllm(settings.target)
    check_loadable(settings.target, devices_of(settings.flow.target_devices[0])[0])
    if settings.train.deterministic:
        check_repeatable(settings.target, settings.flow.target_devices[0])
    facts = describe_target(settings.target)
    named = facts.named_tokens
    errors: list[PacelineError] = []

    def attempt(make: Callable[[], Made]) -> Made | None:
        try:
            return make()
        except (ConfigError, DrafterError, TargetError) as error:
            errors.append(error)
            return None

    tokenizer = load_tokenizer(settings.target.path, settings.target.trust_remote_code)
    taps = attempt(lambda: _taps(settings, facts))
    mask = attempt(lambda: choose_mask_token(tokenizer, settings.drafter.mask_token_id, facts.vocab_size, named))
    # Where taps or mask token cannot be used, the sizes are looked at with others.
    mask_id = mask.id if mask is not None else next(token for token in range(facts.vocab_size) if token not in named)
    drafter = settings.drafter.model_copy(update={"mask_token_id": mask_id})
    spec = attempt(lambda: derive_spec(drafter, facts, taps or [0], mask_id))
    if taps is None or mask is None or spec is None:
        raise type(errors[0])(*(line for error in errors for line in error.errors))
    return Models(facts, taps, mask, spec)


def _taps(settings: Settings, facts: TargetFacts) -> list[int]:
    taps = settings.target.taps
    if taps is None:
        taps = default_taps(facts.num_layers, settings.target.num_taps)
    check_taps(taps, facts.num_layers)
    return list(taps)


def build_run(settings: Settings, models: Models, nodes: Nodes = ALONE) -> Run:
    """Everything about a run that can be known, and refused, before a model loads.

    Args:
        settings: of the run; `check_support` has accepted them.
        models: from `resolve_models`.
        nodes: the machines that train it together; the first of them owns the run directory.

    Raises:
        PacelineError: one line per error.
    """
    facts, spec = models.facts, models.spec
    source = open_store(settings.store_path, verify=settings.data.verify)
    check_mask_token(source, spec.mask_token_id, facts.vocab_size)
    run_dir, heldout = Path(settings.run_dir), None
    first, damaged = _resume_point(run_dir) if nodes.first else (0, ())
    change = change_of(settings, first) if nodes.first else None
    begin = _begin(settings)
    replicas, earlier, begin = nodes.agree(
        {}, [_replicas(settings, nodes), _plans_before(run_dir, change), [begin.step, begin.epoch]]
    )
    before = [PlanBefore(last, PlanConfig.model_validate(plan), anchors) for last, plan, anchors in earlier]
    _check_carry(settings, before)
    plan = TrainingPlan(settings, spec, facts, source, replicas, before, Begin(*begin))
    if nodes.first:
        first = max(first, plan.begin.step)
        if first > plan.total_steps:
            raise ConfigError(
                f"train: {first} steps are taken already, and these settings ask for {plan.total_steps}; raise "
                "train.max_steps or train.epochs"
            )
        if settings.evaluate.validation_samples and settings.heldout_store_path.is_dir():
            heldout = open_store(settings.heldout_store_path, verify=settings.data.verify)
        check_saving(settings, spec, facts, heldout is not None)
        check_background_evaluation(settings)
        of_run = {**_facts_of_run(settings, models, source, plan), **_init(settings, spec)}
        run_directory.open_run(settings, of_run, first)
    first = nodes.agree(_facts_of_machine(settings, models, source, plan), first)
    return Run(settings, run_dir, facts, models.taps, spec, source, heldout, plan, first, nodes, damaged, change)


def step_after(settings: Settings, step: int) -> PlannedStep | None:
    """The step that a run would take after this one, as it was planned at its last start; None where its epochs end.

    The run's store must be there.
    """
    models, before = resolve_models(settings), plans_before(read_changes(Path(settings.run_dir)))
    train = settings.train.model_copy(update={"max_steps": step + 1})
    settings, source = settings.model_copy(update={"train": train}), open_store(settings.store_path)
    replicas = _replicas(settings, ALONE)
    plan = TrainingPlan(settings, models.spec, models.facts, source, replicas, before, _begin(settings))
    return plan.steps[-1] if plan.total_steps > step else None


def change_of(settings: Settings, step: int | None = None) -> SettingsChange | None:
    """What settings of a run would change from now on; None where none does, or nothing is trained yet.

    Args:
        settings: of this start.
        step: optimizer steps that have been taken; None: they are looked up.
    """
    run_dir = Path(settings.run_dir)
    step = _resume_point(run_dir)[0] if step is None else step
    if not step:
        return None
    found = change_asked(run_dir / run_directory.SETTINGS, settings, step)
    return found if found.changed else None


def _resume_point(run_dir: Path) -> tuple[int, tuple[str, ...]]:
    return checkpoints.resume_point(run_dir) if run_directory.is_run_directory(run_dir) else (0, ())


def _plans_before(run_dir: Path, change: SettingsChange | None) -> list[tuple[int, dict[str, Any], int]]:
    """How steps were planned before these settings, as plain values that can be sent to other machines."""
    known = plans_before([*read_changes(run_dir), *([] if change is None else [change])])
    return [(before.last_step, before.plan.model_dump(mode="json"), before.num_anchors) for before in known]


def _check_carry(settings: Settings, before: Sequence[PlanBefore]) -> None:
    if before and "carry" in {settings.plan.leftover, *(earlier.plan.leftover for earlier in before)}:
        raise ConfigError(
            "plan: with plan.leftover: carry an epoch hands samples on to the next, so this plan cannot change in a "
            "run; put it back, or give another run_dir"
        )


def _init(settings: Settings, spec: DrafterSpec) -> dict[str, Any]:
    """What the run notes of the drafter folder that it begins with; the folder is checked before the first step."""
    run_dir = Path(settings.run_dir)
    if settings.drafter.init is None:
        return {}
    if run_directory.is_run_directory(run_dir) and checkpoints.steps(run_dir):
        return {"init": run_directory.read_run_facts(run_dir).get("init")}
    return {"init": check_init(settings, spec)}


def _begin(settings: Settings) -> Begin:
    """Where the run begins to count: as it was started or forked; a new one as its settings say."""
    run_dir = Path(settings.run_dir)
    if run_directory.is_run_directory(run_dir):
        return Begin(**run_directory.read_run_facts(run_dir).get("begins", {}))
    return Begin(settings.drafter.init_step or 0, settings.drafter.init_epoch)


def _replicas(settings: Settings, nodes: Nodes) -> int:
    """Ranks that the plan is made for. They stay those of the run's first start, so that its windows stay the same."""
    if run_directory.is_run_directory(Path(settings.run_dir)) and nodes.first:
        known = run_directory.read_run_facts(Path(settings.run_dir)).get("replicas")
        if known is not None:
            return int(known)
    return nodes.here.count * len(settings.flow.drafter_devices)


def _facts_of_run(settings: Settings, models: Models, source: TokenStore, plan: TrainingPlan) -> dict[str, Any]:
    """What makes the run what it is, beside its settings."""
    return {
        "drafter": models.spec.to_dict(),
        "target": dict(models.facts.identity),
        "target_fingerprint": models.facts.fingerprint,
        "engine": engine_name(settings.target),
        "data_fingerprint": source.fingerprint,
        "total_steps": plan.total_steps,
        "replicas": plan.replicas,
        **({"begins": asdict(plan.begin)} if plan.begin != Begin() else {}),
    }


def _facts_of_machine(settings: Settings, models: Models, source: TokenStore, plan: TrainingPlan) -> dict[str, Any]:
    """What must be the same on all machines of a run."""
    sections = {"seed", "plan", "drafter", "objective", "optimizer", "train"}
    versions = {
        f"version of {name}": version for name, version in run_directory.versions().items() if name != "platform"
    }
    return {
        **named_values(settings.model_dump(mode="json", include=sections)),
        "flow.drafter_devices (number)": len(settings.flow.drafter_devices),
        "target": models.facts.fingerprint,
        "drafter shape": models.spec.to_dict(),
        "data": source.fingerprint,
        "steps": plan.total_steps,
        "steps with a checkpoint": [planned.step for planned in plan.steps if planned.save],
        **versions,
    }


def feature_pool(run: Run, validation: Sequence[HostBatch]) -> FeaturePool:
    """Buffers of the largest micro-batch's size, as many as asked for and allowed.

    Raises:
        ConfigError: not even two fit `flow.pool_bytes`.
        StageError: shared memory is too small.
    """
    settings, flow = run.settings, run.settings.flow
    most_tokens = max([run.plan.largest.real_tokens, *(host.planned.real_tokens for host in validation)])
    of_one = functools.partial(
        FeaturePool,
        max_tokens=most_tokens,
        columns=len(run.taps) * run.facts.hidden_size,
        dtype=getattr(torch, settings.target.dtype),
        last_columns=run.facts.hidden_size if settings.objective.needs_teacher else 0,
        transport=flow.transport,
        taps=len(run.taps),
    )
    if flow.pool_bytes is None:
        return of_one(flow.num_buffers)
    size = of_one(1).num_bytes
    if flow.pool_bytes < 2 * size:
        raise ConfigError(
            f"flow.pool_bytes: {flow.pool_bytes} hold no 2 buffers of {size} bytes, the features of the plan's largest "
            f"micro-batch ({most_tokens} tokens); raise it, lower plan.token_budget, or set flow.transport"
        )
    return of_one(min(flow.num_buffers, flow.pool_bytes // size))
