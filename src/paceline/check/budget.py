"""What a run needs, reckoned: bytes by cause and device, time, and the split of the devices. No model is loaded.

Weights, gradients, optimizer state, features and pool are counted exactly. Activations are estimates (marked so): one
layer of the target at a time; every layer of the drafter, whose activations live until the backward pass.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.config import Settings
from paceline.contracts import TargetFacts
from paceline.drafter.spec import DrafterSpec

FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Load:
    """The largest micro-batch: real and padded tokens, draft positions."""

    tokens: int
    padded: int
    positions: int


def drafter_parameters(spec: DrafterSpec) -> int:
    """Trained parameters of a drafter."""
    hidden, across = spec.hidden_size, spec.num_attention_heads * spec.head_dim
    keys = spec.num_key_value_heads * spec.head_dim
    layer = 2 * hidden * across + 2 * hidden * keys + 3 * hidden * spec.intermediate_size
    norms = 2 * hidden + 2 * spec.head_dim
    return spec.num_layers * (layer + norms) + len(spec.taps) * hidden * hidden + 2 * hidden


def target_bytes(weights: int, facts: TargetFacts, spec: DrafterSpec, settings: Settings, load: Load) -> dict[str, int]:
    """Bytes of one target worker's device, by cause."""
    width = settings_bytes(settings.target.dtype)
    inner = facts.intermediate_size or 4 * facts.hidden_size
    return {
        "weights": weights,
        "features of the largest batch": load.tokens * len(spec.taps) * facts.hidden_size * width,
        "activations of one layer (estimate)": load.padded * (6 * facts.hidden_size + 3 * inner) * width,
    }


def drafter_bytes(facts: TargetFacts, spec: DrafterSpec, settings: Settings, load: Load) -> dict[str, int]:
    """Bytes of one drafter rank's device, by cause."""
    width = settings_bytes(settings.drafter.dtype)
    parameters, states = drafter_parameters(spec), 1 if settings.optimizer.name == "muon" else 2
    across = (spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim
    positions = min(load.positions, settings.drafter.positions_per_pass or load.positions)
    shared = spec.vocab_size * spec.hidden_size * width * (1 if facts.tied_head else 2)
    layer = positions * (8 * spec.hidden_size + 2 * across + 4 * spec.intermediate_size)
    context = load.tokens * 4 * spec.num_key_value_heads * spec.head_dim
    return {
        "master weights": parameters * FLOAT32,
        "gradients": parameters * FLOAT32,
        "optimizer state": parameters * FLOAT32 * states,
        "embedding and head": shared,
        "features of the largest batch": load.tokens * len(spec.taps) * spec.hidden_size * width,
        "activations (estimate)": spec.num_layers * (layer + context) * width,
        "logits of a chunk": 3 * min(settings.drafter.head_chunk, positions) * spec.vocab_size * FLOAT32,
    }


def pool_bytes(facts: TargetFacts, spec: DrafterSpec, settings: Settings, load: Load) -> int:
    """Bytes of the feature buffers, in shared memory."""
    columns = len(spec.taps) * facts.hidden_size + (facts.hidden_size if settings.objective.needs_teacher else 0)
    return settings.flow.num_buffers * load.tokens * columns * settings_bytes(settings.target.dtype)


def settings_bytes(dtype: str) -> int:
    """Bytes of one number of a type named in the settings."""
    return getattr(torch, dtype).itemsize


def device_memory(device: str) -> int:
    """Bytes of a device: a GPU's memory, or the machine's."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(torch.device(device)).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def shared_memory() -> int | None:
    """Free bytes where shared memory lies; None where the system has no such place."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return None
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def by_device(settings: Settings, target: Mapping[str, int], drafter: Mapping[str, int]) -> dict[str, int]:
    """Bytes on every device of the run; roles that share one are added."""
    totals: dict[str, int] = {}
    for devices, needed in ((settings.flow.target_devices, target), (settings.flow.drafter_devices, drafter)):
        for device in devices:
            totals[device] = totals.get(device, 0) + sum(needed.values())
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


def best_split(devices: int, target_s: float, drafter_s: float) -> Split:
    """The split of some devices into target workers and drafter ranks that ends first.

    One device does both in turn.
    """
    if devices < 2:
        return Split(1, 1, target_s + drafter_s)
    splits = [
        Split(count, devices - count, wall_seconds(count, devices - count, target_s, drafter_s))
        for count in range(1, devices)
    ]
    return min(splits, key=lambda split: split.seconds)


def overlapping(target_devices: Sequence[str], drafter_devices: Sequence[str], threads: int) -> bool:
    """Whether the roles get in one another's way: they share a GPU, or the processors are fewer than the threads."""
    if {name for name in target_devices if name.startswith("cuda")} & set(drafter_devices):
        return True
    on_cpu = sum(not name.startswith("cuda") for name in (*target_devices, *drafter_devices))
    return on_cpu > 1 and on_cpu * threads > (os.cpu_count() or 1)
