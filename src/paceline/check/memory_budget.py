"""What a run needs, estimated: bytes by cause and device, time, and the split of the devices. No model is loaded.

Weights, gradients, optimizer state, features and pool are counted exactly. Activations are estimates (marked so): one
layer of the target at a time; every layer of the drafter, whose activations live until the backward pass.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.config import Settings, devices_of
from paceline.drafter import memory
from paceline.drafter.spec import DrafterSpec
from paceline.types import TargetFacts

FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Load:
    """The largest micro-batch: real and padded tokens, draft positions."""

    tokens: int
    padded: int
    positions: int


def target_bytes(weights: int, facts: TargetFacts, spec: DrafterSpec, settings: Settings, load: Load) -> dict[str, int]:
    """Bytes of one target worker's device, by cause."""
    width = settings_bytes(settings.target.dtype)
    inner = facts.intermediate_size or 4 * facts.hidden_size
    return {
        "weights": weights,
        "features of the largest batch": load.tokens * len(spec.taps) * facts.hidden_size * width,
        "activations of one layer (estimate)": load.padded * (6 * facts.hidden_size + 3 * inner) * width,
    }


def drafter_bytes(
    facts: TargetFacts, spec: DrafterSpec, settings: Settings, load: Load, per_pass: int | None = None
) -> dict[str, int]:
    """Bytes of one drafter rank's device, by cause.

    Args:
        facts, spec, settings, load: of the run.
        per_pass: draft positions that are computed at once at most; None: all of a micro-batch's.
    """
    ranks, device = len(settings.flow.drafter_devices), settings.flow.drafter_devices[0]
    shape = memory.training_shape(settings, spec, facts.tied_head, ranks, device)
    return memory.drafter_bytes(shape, load.tokens, min(load.positions, per_pass or load.positions))


def evaluator_bytes(weights: int, spec: DrafterSpec, settings: Settings) -> dict[str, int]:
    """Bytes of the device that decodes while training continues, without caches; empty without one."""
    if settings.evaluate.device is None:
        return {}
    width = settings_bytes(settings.decode_dtype)
    return {
        "weights of the target": weights * width // settings_bytes(settings.target.dtype),
        "weights of the drafter": memory.num_parameters(spec) * FLOAT32,
    }


def pool_bytes(facts: TargetFacts, spec: DrafterSpec, settings: Settings, load: Load) -> int:
    """Bytes of the feature buffers, in shared memory."""
    flow, width = settings.flow, settings_bytes(settings.target.dtype)
    crossing = {"exact": width, "bf16": 2, "fp8": 1}[flow.transport]
    token = len(spec.taps) * (facts.hidden_size * crossing + (FLOAT32 if flow.transport == "fp8" else 0))
    token += facts.hidden_size * width if settings.objective.needs_teacher else 0
    allowed = flow.num_buffers if flow.pool_bytes is None else flow.pool_bytes // (load.tokens * token)
    return min(flow.num_buffers, allowed) * load.tokens * token


def handed_over_bytes(facts: TargetFacts, settings: Settings) -> int:
    """Bytes of embedding and head, which the target hands to the drafter ranks in shared memory before training."""
    size = facts.vocab_size * facts.hidden_size * settings_bytes(settings.target.dtype)
    return size if facts.tied_head else 2 * size


def settings_bytes(dtype: str) -> int:
    """Bytes of one number of a type named in the settings."""
    return getattr(torch, dtype).itemsize


def shared_memory() -> int | None:
    """Free bytes of shared memory; None where the system has none."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return None
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def by_device(
    settings: Settings, target: Mapping[str, int], drafter: Mapping[str, int], evaluator: Mapping[str, int]
) -> dict[str, int]:
    """Bytes on every device of the run; roles that share one are added, a worker on several is shared out evenly.

    Inline, the target computes while the drafter keeps no activations, and the other way round.
    """
    flow, totals = settings.flow, dict[str, int]()
    evaluators = [] if settings.evaluate.device is None else [settings.evaluate.device]
    for workers, needed in ((flow.target_devices, target), (flow.drafter_devices, drafter), (evaluators, evaluator)):
        for worker in workers:
            devices = devices_of(worker)
            for device in devices:
                totals[device] = totals.get(device, 0) + sum(needed.values()) // len(devices)
    if flow.mode == "inline" and flow.target_devices == flow.drafter_devices:
        of_pass = sum(target.values()) - target.get("weights", 0)
        totals[flow.drafter_devices[0]] -= min(of_pass, drafter.get("activations", 0))
    return totals


@dataclass(frozen=True, slots=True)
class Split:
    """Devices by role, and the wall time of the run with them."""

    targets: int
    drafters: int
    seconds: float


def wall_seconds(targets: int, drafters: int, target_s: float, drafter_s: float) -> float:
    """Time of a pipeline whose stages overlap: that of the slower stage.

    Args:
        targets, drafters: workers of each role.
        target_s, drafter_s: work of each role on one device, in seconds.
    """
    return max(target_s / targets, drafter_s / drafters)


def best_split(devices: int, target_s: float, drafter_s: float, per_target: int = 1) -> Split:
    """The split of some devices into target workers and drafter ranks that ends first.

    One device does both in turn.

    Args:
        devices: in all.
        target_s, drafter_s: see `wall_seconds`.
        per_target: devices over which one target worker is spread.
    """
    counts = range(1, (devices - 1) // per_target + 1)
    if not counts:
        return Split(1, 1, target_s + drafter_s)
    splits = []
    for count in counts:
        rest = devices - count * per_target
        splits.append(Split(count, rest, wall_seconds(count, rest, target_s, drafter_s)))
    return min(splits, key=lambda split: split.seconds)


def overlapping(target_devices: Sequence[str], drafter_devices: Sequence[str], threads: int) -> bool:
    """Whether the roles get in one another's way: they share a GPU, or the processors are fewer than the threads."""
    on_gpus = {name for worker in target_devices for name in devices_of(worker) if name.startswith("cuda")}
    if on_gpus & set(drafter_devices):
        return True
    on_cpu = sum(not name.startswith("cuda") for name in (*target_devices, *drafter_devices))
    return on_cpu > 1 and on_cpu * threads > (os.cpu_count() or 1)
