"""Noise on features, keyed by (seed, epoch, sample): it does not depend on batch composition or order of arrival."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.config.learning import NoiseConfig
from paceline.drafter.schedule import Schedule, ramp
from paceline.types import HostBatch

_KEY = 0x6E6F6973_65000000
"""Second word of the generator's key: another stream than the anchors'."""


def noise_ratio(config: NoiseConfig, total_steps: int) -> Schedule:
    """Noise RMS over feature RMS by 0-based optimizer step."""
    if config.kind == "none":
        return Schedule("constant", 0.0, 0.0, 0, 1)
    return ramp(config, config.ratio, config.ratio_end, total_steps)


def add_noise(
    features: Tensor, host: HostBatch, num_taps: int, kind: str, ratio: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Features with noise whose RMS is a share of each token's own, tap by tap.

    Args:
        features: [S, N·H]; left as they are.
        host: of these features; its rows and epoch are part of the key.
        num_taps: N.
        kind: "gaussian" or "uniform".
        ratio: noise RMS / feature RMS.
        seed: of the run.

    Returns:
        (noised features [S, N·H], energies [2, N]: Σ signal² and Σ noise² per tap).
    """
    drawn = torch.empty(features.shape, dtype=torch.float32, device=features.device)
    generator = torch.Generator(features.device)
    edge = 0
    for row, length in zip(host.planned.rows[: len(host.lengths)], host.lengths, strict=True):
        counter = np.array([0, 0, host.planned.epoch, row], dtype=np.uint64)
        word = np.random.Philox(counter=counter, key=np.array([seed, _KEY], dtype=np.uint64)).random_raw(1)[0]
        generator.manual_seed(int(word) >> 1)
        part = drawn[edge : edge + int(length)]
        if kind == "gaussian":
            part.normal_(generator=generator)
        else:
            part.uniform_(-(3**0.5), 3**0.5, generator=generator)
        edge += int(length)
    by_tap = features.float().unflatten(1, (num_taps, -1))
    noise = drawn.unflatten(1, (num_taps, -1)).mul_(by_tap.square().mean(-1, keepdim=True).sqrt_().mul_(ratio))
    energies = torch.stack([by_tap.square().sum((0, 2)), noise.square().sum((0, 2))])
    return (by_tap + noise).flatten(1).to(features.dtype), energies
