"""What a run is, before any model loads: settings become facts, plans and steps, and every error is found here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.checkpoint import checkpoints, run_directory
from paceline.config import Settings, devices_of
from paceline.data.collate import collate
from paceline.data.coverage import check_mask_token
from paceline.data.store import TokenStore, open_store
from paceline.data.tokenizer import load_tokenizer, mask_token_id
from paceline.device import why_missing
from paceline.drafter.anchors import sample_anchors
from paceline.drafter.spec import DrafterSpec, derive_spec
from paceline.errors import ConfigError, DataError
from paceline.pipeline.feature_pool import FeaturePool
from paceline.pipeline.multinode import ALONE, NodeInfo, Nodes
from paceline.plan.entries import fitting, groups_of_tags
from paceline.plan.epoch import EpochPlan, plan_epoch
from paceline.run.checkpoint_policy import VALIDATION, check_saving
from paceline.run.eval_worker import check_background_evaluation
from paceline.run.warm_start import check_init
from paceline.target_model.facts import describe_target
from paceline.target_model.preconditions import check_loadable, target_errors
from paceline.target_model.taps import check_taps, default_taps
from paceline.types import HostBatch, PlannedBatch, PlannedStep, TargetFacts


@dataclass(frozen=True)
class LargestBatch:
    """How large the micro-batches of a run get.

    Attributes:
        real_tokens: most real tokens of one.
        padded_tokens: most padded tokens of one, the target's work.
        epoch, index: where in the plans that one is.
    """

    real_tokens: int = 0
    padded_tokens: int = 0
    epoch: int = 0
    index: int = 0

    def over(self, plan: EpochPlan) -> LargestBatch:
        """This, or more where a plan has larger micro-batches."""
        batches = plan.batches
        real = np.add.reduceat(plan.lengths[batches.order], batches.offsets[:-1])[plan.sequence]
        padded = plan.counts * plan.widths if not batches.packed else real
        at, most = int(padded.argmax()), max(self.real_tokens, int(real.max()))
        if padded[at] <= self.padded_tokens:
            return replace(self, real_tokens=most)
        return LargestBatch(most, int(padded[at]), plan.epoch, at)


@dataclass(frozen=True)
class Run:
    """A run as it is known before any model loads.

    Attributes:
        settings: resolved.
        run_dir: where it lives.
        facts, taps, spec: of target and drafter.
        source: the tokenized data.
        heldout: the tokenized held-out samples, where there are any to validate on.
        orders: every optimizer step of the run.
        first_step: steps that a checkpoint already holds.
        replicas: drafter ranks that the plan was made for: those that the run was started with.
        machines: that train it together, seen from this one.
        extent: the largest micro-batches of its plans.
        damaged: a sentence for each newer checkpoint that is not as it was written.
    """

    settings: Settings
    run_dir: Path
    facts: TargetFacts
    taps: list[int]
    spec: DrafterSpec
    source: TokenStore
    heldout: TokenStore | None
    orders: list[PlannedStep]
    first_step: int
    replicas: int
    extent: LargestBatch
    machines: Nodes = ALONE
    damaged: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Drafter ranks of all machines."""
        return self.machines.place.count * len(self.settings.flow.drafter_devices)

    def plan_of(self, epoch: int) -> EpochPlan:
        """The plan of one epoch."""
        return epoch_plan(self.settings, self.spec, self.source, epoch, self.replicas)

    @property
    def remaining(self) -> list[PlannedStep]:
        """Steps still to take."""
        return self.orders[self.first_step :]


def resolve_spec(settings: Settings) -> tuple[TargetFacts, list[int], DrafterSpec]:
    """Facts of the target, taps and drafter of a run; reads configurations and tokenizer only."""
    check_loadable(settings.target, devices_of(settings.flow.target_devices[0])[0])
    facts = describe_target(settings.target)
    taps = settings.target.taps
    if taps is None:
        taps = default_taps(facts.num_layers, settings.target.num_taps)
    check_taps(taps, facts.num_layers)
    mask_id = settings.drafter.mask_token_id
    if mask_id is None:
        mask_id = mask_token_id(load_tokenizer(settings.target.path, settings.target.trust_remote_code))
    if mask_id is None:
        raise ConfigError(
            f"drafter.mask_token_id: unset, and the tokenizer of {settings.target.path} names no mask token; "
            "give the id of a token that never occurs in text"
        )
    return facts, list(taps), derive_spec(settings.drafter, facts, taps, mask_id)


def build_run(settings: Settings, machines: Nodes = ALONE) -> Run:
    """Everything about a run that can be known, and refused, before a model loads.

    Args:
        settings: of the run.
        machines: that train it together; the first of them owns the run directory.

    Raises:
        PacelineError: one line per error.
    """
    check_support(settings, machines.place)
    facts, taps, spec = resolve_spec(settings)
    source = open_store(settings.store_path, verify=settings.data.verify)
    check_mask_token(source, spec.mask_token_id, facts.vocab_size)
    replicas = machines.agree({}, _replicas(settings, machines))
    extent = LargestBatch()

    def plan_of(epoch: int) -> EpochPlan:
        nonlocal extent
        plan = epoch_plan(settings, spec, source, epoch, replicas)
        extent = extent.over(plan) if plan.num_batches else extent
        return plan

    orders = step_orders(settings, plan_of)
    if not orders:
        raise DataError(f"{settings.store_path}: no optimizer step can be planned from its {len(source.lengths)} rows")
    run_dir, first, heldout, damaged = Path(settings.run_dir), 0, None, ()
    if machines.first:
        if settings.evaluate.validation_samples and settings.heldout_store_path.is_dir():
            heldout = open_store(settings.heldout_store_path, verify=settings.data.verify)
        check_saving(settings, spec, facts, heldout is not None)
        check_background_evaluation(settings)
        of_run = {**_facts_of_run(facts, spec, source, orders, replicas), **_init(settings, spec)}
        run_dir = run_directory.open_run(settings, of_run)
        first, damaged = checkpoints.resume_point(run_dir)
        first = min(first, len(orders))
    first = machines.agree(_facts_of_machine(settings, facts, spec, source, orders), first)
    return Run(
        settings, run_dir, facts, taps, spec, source, heldout, orders, first, replicas, extent, machines, damaged
    )


def _init(settings: Settings, spec: DrafterSpec) -> dict[str, Any]:
    """What the run notes of the drafter folder that it begins with; the folder is looked at before the first step."""
    run_dir = Path(settings.run_dir)
    if settings.drafter.init is None:
        return {}
    if run_directory.is_run_directory(run_dir) and checkpoints.steps(run_dir):
        return {"init": run_directory.read_run_facts(run_dir).get("init")}
    return {"init": check_init(settings.drafter.init, spec, settings.target.path)}


def _replicas(settings: Settings, machines: Nodes) -> int:
    """Ranks that the plan is made for. They stay those of the run's first start, so that its windows stay the same."""
    if run_directory.is_run_directory(Path(settings.run_dir)) and machines.first:
        known = run_directory.read_run_facts(Path(settings.run_dir)).get("replicas")
        if known is not None:
            return int(known)
    return machines.place.count * len(settings.flow.drafter_devices)


def _facts_of_run(
    facts: TargetFacts, spec: DrafterSpec, source: TokenStore, orders: Sequence[PlannedStep], replicas: int
) -> dict[str, Any]:
    """What makes the run what it is, beside its settings."""
    return {
        "drafter": spec.to_dict(),
        "target": dict(facts.identity),
        "target_fingerprint": facts.fingerprint,
        "data_fingerprint": source.fingerprint,
        "total_steps": len(orders),
        "replicas": replicas,
    }


def _facts_of_machine(
    settings: Settings, facts: TargetFacts, spec: DrafterSpec, source: TokenStore, orders: Sequence[PlannedStep]
) -> dict[str, Any]:
    """What must be the same on all machines of a run."""
    sections = ("seed", "plan", "drafter", "objective", "optimizer", "train")
    versions = {
        f"version of {name}": version for name, version in run_directory.versions().items() if name != "platform"
    }
    return {
        **{name: getattr(settings, name) for name in sections},
        "flow.drafter_devices (number)": len(settings.flow.drafter_devices),
        "target": facts.fingerprint,
        "drafter shape": spec.to_dict(),
        "data": source.fingerprint,
        "steps": len(orders),
        "steps with a checkpoint": [order.step for order in orders if order.save],
        **versions,
    }


def epoch_plan(
    settings: Settings, spec: DrafterSpec, source: TokenStore, epoch: int, replicas: int | None = None
) -> EpochPlan:
    """The plan of one epoch: a pure function of lengths, settings, replicas, seed and epoch.

    Args:
        settings, spec, source: of the run.
        epoch: 0-based.
        replicas: drafter ranks to plan for; None: those of one machine.
    """
    weights = settings.plan.weights
    return plan_epoch(
        source.lengths,
        source.eligible,
        settings.plan,
        num_anchors=settings.drafter.num_anchors,
        block_size=spec.block_size,
        replicas=len(settings.flow.drafter_devices) if replicas is None else replicas,
        seed=settings.seed,
        epoch=epoch,
        groups=groups_of_tags(source.names(), weights) if weights else None,
    )


def step_orders(settings: Settings, plan_of: Callable[[int], EpochPlan]) -> list[PlannedStep]:
    """All optimizer steps of a run, from the plans of all its epochs."""
    limit = settings.train.max_steps
    places: list[tuple[int, int, range]] = []
    for epoch in range(settings.train.epochs):
        plan = plan_of(epoch)
        places += [(epoch, window, plan.window(window)) for window in range(plan.num_windows)]
        if limit is not None and len(places) >= limit:
            places = places[:limit]
            break
    save, validate, last = settings.checkpoint.every_steps, settings.evaluate.every_steps, len(places)
    best = settings.checkpoint.keep_best or ""
    orders = []
    for step, place in enumerate(places, 1):
        saved = step % save == 0 or step == last
        measured = step % validate == 0 or step == last or (saved and best.startswith(VALIDATION))
        orders.append(PlannedStep(step, *place, save=saved, validate=measured))
    return orders


def host_batches(run: Run, orders: Sequence[PlannedStep]) -> Iterator[HostBatch]:
    """Host batches of these steps in plan order: those that this machine's drafter ranks train."""
    plan_of = functools.lru_cache(maxsize=2)(run.plan_of)
    here = len(run.settings.flow.drafter_devices)
    ranks = range(run.machines.place.number * here, (run.machines.place.number + 1) * here)
    for order in orders:
        for index in order.batches:
            if order.rank_of(index, run.num_ranks) in ranks:
                yield _collated(run, plan_of(order.epoch).batch(index))


def largest_batch(run: Run) -> HostBatch:
    """The host batch with the most padded tokens of all plans of the run."""
    return _collated(run, run.plan_of(run.extent.epoch).batch(run.extent.index))


def _collated(run: Run, planned: PlannedBatch) -> HostBatch:
    return collate(
        planned,
        run.source,
        sample_anchors,
        seed=run.settings.seed,
        num_anchors=run.settings.drafter.num_anchors,
        pad_id=run.facts.pad_token_id if run.facts.pad_token_id is not None else 0,
    )


def validation_batches(run: Run) -> list[HostBatch]:
    """Host batches of the first held-out samples, the same with the same anchors in every run and at every step.

    They are composed as the training batches are, within the same budgets; samples that exceed a budget alone are left
    out.
    """
    if run.heldout is None:
        return []
    settings, block_size, num_anchors = run.settings, run.spec.block_size, run.settings.drafter.num_anchors
    limits = settings.plan.model_copy(update={"accumulate": 1, "leftover": "short", "weights": {}, "edges": None})
    rows = np.arange(min(settings.evaluate.validation_samples, len(run.heldout.lengths)))
    lengths, eligible = run.heldout.lengths[rows], run.heldout.eligible[rows]
    fits = fitting(lengths, eligible, limits, num_anchors=num_anchors, block_size=block_size)
    rows, lengths, eligible = rows[fits], lengths[fits], eligible[fits]
    if not len(rows) or not eligible.any():
        return []
    plan = plan_epoch(lengths, eligible, limits, num_anchors=num_anchors, block_size=block_size, seed=0, epoch=0)
    pad_id = run.facts.pad_token_id if run.facts.pad_token_id is not None else 0
    found = []
    for index in range(plan.num_batches):
        planned = plan.batch(index)
        planned = replace(planned, rows=rows[planned.rows])
        host = collate(planned, run.heldout, sample_anchors, seed=0, num_anchors=num_anchors, pad_id=pad_id)
        found.append(replace(host, planned=replace(planned, epoch=-1, window=-1)))
    return found


def feature_pool(run: Run, validation: Sequence[HostBatch]) -> FeaturePool:
    """Buffers of the largest micro-batch's size, as many as asked for and allowed.

    Raises:
        ConfigError: not even two fit `flow.pool_bytes`.
        StageError: shared memory is too small.
    """
    settings, flow = run.settings, run.settings.flow
    most_tokens = max([run.extent.real_tokens, *(host.planned.real_tokens for host in validation)])
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


def check_support(settings: Settings, place: NodeInfo = ALONE.place) -> None:
    """Refuse what this machine or this version cannot do; needs the settings and the place among machines alone.

    Raises:
        ConfigError: one line per error.
    """
    errors = target_errors(settings.target, len(settings.flow.target_devices))
    if settings.target.device_map is not None and any("+" in name for name in settings.flow.target_devices):
        errors.append(
            "target.device_map: a group in flow.target_devices spreads the target already; drop one of the two"
        )
    if settings.flow.mode == "inline" and any("+" in name for name in settings.flow.target_devices):
        errors.append("flow.target_devices: groups need flow.mode: pipeline; inline knows target.device_map")
    for key, names in (
        ("flow.target_devices", settings.flow.target_devices),
        ("flow.drafter_devices", settings.flow.drafter_devices),
        ("evaluate.device", [settings.evaluate.device or "cpu"]),
    ):
        if not names:
            errors.append(f"{key}: empty; list at least one device, for example cpu or cuda:0")
        for name in [device for entry in names for device in devices_of(entry)]:
            if reason := why_missing(name):
                errors.append(f"{key}: {reason}")
    if settings.flow.mode == "inline" and len(settings.flow.target_devices) + len(settings.flow.drafter_devices) > 2:
        errors.append("flow.mode: inline runs one target and one drafter; list one device each or use pipeline")
    if settings.flow.mode == "inline" and place.count > 1:
        errors.append(f"flow.mode: inline runs on one machine, WORLD_SIZE is {place.count}; use pipeline")
    on_gpu = [name for name in (*settings.flow.target_devices, *settings.flow.drafter_devices) if name != "cpu"]
    if place.on_this_host > 1 and on_gpu:
        errors.append(
            f"flow: {place.on_this_host} pipelines on this host would share {', '.join(dict.fromkeys(on_gpu))}; start "
            "one a machine (torchrun --nproc-per-node 1) and list all of its devices under flow"
        )
    on_cpu = [name for name in settings.flow.drafter_devices if not name.startswith("cuda")]
    for key, value in (("attention", "flex"), ("head", "liger")):
        if on_cpu and getattr(settings.drafter, key) == value:
            other = "split" if key == "attention" else "tiled"
            errors.append(f"drafter.{key}: {value} trains on CUDA only, and a drafter rank is on cpu; use {other}")
    if settings.drafter.head != "tiled" and settings.objective.needs_teacher:
        errors.append(
            f"drafter.head: {settings.drafter.head} knows cross entropy alone, and objective.terms has terms that need "
            "the target's distributions; use tiled"
        )
    if (settings.plan.strategy == "packed") != (settings.target.rows == "packed"):
        errors.append(
            f"plan.strategy: {settings.plan.strategy} does not go with target.rows: {settings.target.rows}: documents "
            "of a packed plan share one row of the target, those of other plans have padded rows of their own; "
            "set both to packed, or plan.strategy to grid and target.rows to padded"
        )
    if errors:
        raise ConfigError(*errors)
