"""Stage C of the acceptance of a device, the target's side: the tapped forward at real sizes with random weights, and
the way of its features to the host."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import torch

from paceline.check.gpu_bench import Bench, Check, verdict
from paceline.check.gpu_numbers import ceilings, seconds_of
from paceline.check.gpu_speed import GOAL, host_of
from paceline.check.results import CheckResult
from paceline.pipeline.feature_pool import FeaturePool
from paceline.target_model.hand_over import HandOver, SentBatch
from paceline.target_model.introspect import find_structure
from paceline.target_model.layer_costs import costs_of_model
from paceline.target_model.model import TargetModel
from paceline.target_model.row_check import needs_mask
from paceline.types import HostBatch

EXPOSED = 0.02
"""Share of the forward's time that the features' way to the host may add."""
BATCHES = 8
"""Batches of one measurement of that."""


def target_of(bench: Bench) -> TargetModel:
    """A target with twelve layers of Qwen3-8B, random weights, tapped five times; a small one with ``tiny``."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    layers, hidden, heads, vocab = (4, 64, 4, 512) if bench.tiny else (12, 4096, 32, 151936)
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        head_dim=hidden // heads,
        vocab_size=vocab,
    )
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if bench.is_cuda else torch.float32)
    model.requires_grad_(False).eval()
    known = bench.context("cpu").facts
    facts = replace(known, num_layers=layers, hidden_size=hidden, vocab_size=vocab, path="random")
    taps = np.linspace(1, layers - 2, 5 if layers > 6 else 2).round().astype(int).tolist()
    target = TargetModel(model, find_structure(model, layers), facts, taps)
    target.masked = needs_mask(target)
    return target


def target_forward(bench: Bench) -> CheckResult:
    """The tapped forward over rows of several lengths: share of the measured peak."""
    if not bench.peak_flops > 0:
        ceilings(bench)
    target, figures = target_of(bench), {}
    costs = (costs_of_model(target.model, "random") or [])[: max(target.taps) + 1]
    for rows, width in ((4, 64),) if bench.tiny else ((64, 768), (17, 2880), (6, 8192)):
        host = host_of(target.facts.vocab_size, np.full(rows, width), 4, 16)
        room = torch.empty(rows * width * target.width, dtype=target.dtype, device=bench.device)
        spent = seconds_of(bench.device, lambda host=host, room=room: target.features(host, out=room), 3)
        figures[f"share_{rows}x{width}"] = sum(cost.flops(host.lengths) for cost in costs) / spent / bench.peak_flops
    masked = "with an attention mask" if target.masked else "without a mask"
    detail = masked + ", " + ", ".join(f"{name.removeprefix('share_')} {share:.1%}" for name, share in figures.items())
    passed = max(figures.values()) >= (0 if bench.tiny else GOAL)
    advice = f"below {GOAL:.0%} of the measured matrix product; attach the JSON to a report"
    return verdict("target forward", passed, detail, advice, figures)


def hand_over(bench: Bench) -> CheckResult:
    """What the way of the features to the host adds to the forwards, two batches in flight; and that they arrive."""
    target = target_of(bench)
    host = host_of(target.facts.vocab_size, np.full(4 if bench.tiny else 17, 64 if bench.tiny else 2880), 4, 16)
    tokens = int(host.lengths.sum())
    pool = FeaturePool(2, tokens, target.width, target.dtype)
    way = HandOver(pool, bench.device)
    bench.kept.append(pool)
    room = torch.empty(tokens * target.width, dtype=target.dtype, device=bench.device)

    def alone() -> None:
        for _ in range(BATCHES):
            target.features(host, out=room)

    plain = seconds_of(bench.device, alone, 2)
    handed = seconds_of(bench.device, lambda: _hand_over(target, host, way), 2)
    same = torch.equal(pool.read(0, tokens)[0], room.view(tokens, -1).cpu())
    exposed = handed / plain - 1
    detail = (
        f"adds {exposed:.1%} to {BATCHES} forwards of {plain / BATCHES:.3f} s; features {'equal' if same else 'DIFFER'}"
    )
    passed = same and (bench.tiny or exposed <= EXPOSED)
    return verdict(
        "hand-over", passed, detail, "attach the JSON to a report", {"exposed": exposed, "forwards_s": plain}
    )


def _hand_over(target: TargetModel, host: HostBatch, way: HandOver) -> None:
    tokens, sent = int(host.lengths.sum()), deque[SentBatch]()
    for number in range(BATCHES):
        if len(sent) == 2:
            sent.popleft().check()
        out = way.place(number % 2, tokens)
        sent.append(way.send(number % 2, target.features(host, out=out, copies=way.copies)))
    while sent:
        sent.popleft().check()


TARGET_SPEED: dict[str, Check] = {"target forward": target_forward, "hand-over": hand_over}
"""The first part of stage C."""
