"""Noise on the features: its key, its size, its ramp."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from drafter_cases import make_batch, small_spec
from paceline.config.learning import NoiseConfig
from paceline.drafter.noise import add_noise, noise_ratio


@pytest.mark.parametrize("kind", ["gaussian", "uniform"])
def test_noise_is_keyed_by_sample_and_sized_by_tap(kind):
    spec = small_spec()
    batch = make_batch(spec, [200, 30], rows=[7, 8])
    features = batch.features.clone()
    features[:, :16] *= 50
    noised, energies = add_noise(features, batch.host, 2, kind, 0.1, seed=3)
    assert torch.equal(features[:, 16:], batch.features[:, 16:])
    ratio = (noised - features).unflatten(1, (2, -1)).square().mean((0, 2)) / features.unflatten(
        1, (2, -1)
    ).square().mean((0, 2))
    np.testing.assert_allclose(ratio.sqrt(), 0.1, rtol=0.1)
    torch.testing.assert_close((energies[1] / energies[0]).sqrt(), ratio.sqrt(), rtol=0.02, atol=0)
    alone = make_batch(spec, [30], rows=[8])
    again, _ = add_noise(features[200:], alone.host, 2, kind, 0.1, seed=3)
    assert torch.equal(again, noised[200:])
    other, _ = add_noise(features[200:], make_batch(spec, [30], rows=[9]).host, 2, kind, 0.1, seed=3)
    assert not torch.equal(other, again)


def test_noise_ramps_and_refusals():
    ramp = noise_ratio(NoiseConfig(kind="uniform", ratio=0.0, ratio_end=0.2, first_step=10, last_step=20), 100)
    assert [ramp.at(step) for step in (0, 10, 15, 20, 99)] == pytest.approx([0, 0, 0.1, 0.2, 0.2])
    down = noise_ratio(NoiseConfig(kind="gaussian", ratio=0.4, ratio_end=0.0, ramp="cosine"), 101)
    assert [down.at(step) for step in (0, 50, 100)] == pytest.approx([0.4, 0.2, 0.0])
    assert noise_ratio(NoiseConfig(), 100).at(50) == 0.0
    with pytest.raises(ValidationError, match="must come after"):
        NoiseConfig(first_step=5, last_step=5)
