"""The examples for GPUs fit the cards that they name, by the forecast of `paceline check`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paceline.check import memory_budget
from paceline.config import load_settings
from paceline.drafter import memory
from paceline.drafter.spec import derive_spec
from paceline.target_model.taps import default_taps
from paceline.types import TargetFacts

GIB = 2**30
ROOM = 0.9
"""Share of a card that a run may take: the rest is for kernels' work space and fragments."""


def facts(layers, hidden, inner, heads, key_heads, vocab, *, tied=False) -> TargetFacts:
    return TargetFacts(
        path="target", architecture="Qwen3ForCausalLM", model_type="qwen3", num_layers=layers, hidden_size=hidden,
        vocab_size=vocab, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=key_heads,
        head_dim=128, rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=40_960, initializer_range=0.02,
        tied_head=tied, bos_token_id=None, eos_token_ids=(151_645,), pad_token_id=151_643, fingerprint="",
    )  # fmt: skip


# Example, facts of its target, bytes of the target's weights, memory of the card in GiB.
CASES = {
    "one_gpu": (facts(36, 4096, 12_288, 32, 8, 151_936), 2 * 8.2e9, 79.0),
    "eight_gpus": (facts(64, 5120, 17_408, 40, 8, 248_320), 2 * 27.8e9, 95.6),
    "small_gpu": (facts(36, 2560, 9728, 32, 8, 151_936, tied=True), 1.1 * 4.0e9, 23.6),
}


def needed(project: Path, name: str, *, own_passes: bool = False, **flags: str) -> dict[str, int]:
    """Bytes on each card of an example; with `own_passes` as many positions at once as the card's rank would choose."""
    target, weights, card = CASES[name]
    settings = load_settings(project / "examples" / f"{name}.yaml", flags)
    taps = default_taps(target.num_layers, settings.target.num_taps)
    spec = derive_spec(settings.drafter, target, taps, None)
    budget = settings.plan.token_budget
    load = memory_budget.Load(budget, budget, settings.plan.draft_position_budget or 0)
    per_pass = settings.drafter.positions_per_pass
    if own_passes:
        load = dataclasses.replace(load, positions=10**9)
        devices = settings.flow.drafter_devices
        shape = memory.training_shape(settings, spec, target.tied_head, len(devices), devices[0])
        held = int(weights) if settings.flow.mode == "inline" else 0
        per_pass = memory.fitting_positions(shape, budget, int(ROOM * card * GIB) - held)
    drafter = memory_budget.drafter_bytes(target, spec, settings, load, per_pass)
    of_target = memory_budget.target_bytes(int(weights), target, spec, settings, load)
    return memory_budget.by_device(settings, of_target, drafter, {})


@pytest.mark.parametrize("name", CASES)
def test_an_example_fits_its_cards(project: Path, name: str) -> None:
    for device, size in needed(project, name).items():
        assert size <= ROOM * CASES[name][2] * GIB, f"{device}: {size / GIB:.1f} GiB"


@pytest.mark.parametrize("name", CASES)
def test_what_a_rank_chooses_by_itself_fits(project: Path, name: str) -> None:
    """Up to the card's share, and not far below it where there is work enough."""
    sizes = needed(project, name, own_passes=True, **{"drafter.positions_per_pass": "null"})
    assert 0.75 * ROOM < max(sizes.values()) / (CASES[name][2] * GIB) <= ROOM


@pytest.mark.parametrize("name", ["one_gpu", "eight_gpus"])
def test_without_passes_an_example_does_not_fit(project: Path, name: str) -> None:
    sizes = needed(project, name, **{"drafter.positions_per_pass": "null"})
    assert max(sizes.values()) > ROOM * CASES[name][2] * GIB
