"""Stage C of the acceptance of a device: speed and memory of the parts at real sizes, with random weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from paceline.check import memory_budget
from paceline.check.gpu_bench import Bench, Check, skipped, verdict
from paceline.check.gpu_numbers import ceilings, seconds_of
from paceline.check.results import CheckResult
from paceline.config import DrafterConfig, ObjectiveConfig, OptimizerConfig
from paceline.device import forget_peak, peak_allocated_bytes
from paceline.drafter.anchors import sample_anchors
from paceline.drafter.learner import Learner
from paceline.drafter.spec import DrafterSpec
from paceline.run.flops import drafter_flops
from paceline.text import size
from paceline.types import FeatureBatch, HostBatch, PlannedBatch, PlannedStep

GOAL = 0.45
"""Share of the measured peak that the drafter's step should reach."""
MEMORY_ERROR = 0.05
"""Allowed difference between measured and forecast peak memory."""


def spec_of(bench: Bench) -> DrafterSpec:
    """A drafter for a target of Qwen3-8B's sizes; a small one with ``tiny``."""
    whole = DrafterSpec(
        num_layers=5, block_size=16, hidden_size=4096, intermediate_size=12288, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, layers=("full",) * 5, causal=(False,) * 5, sliding_window=None,
        rope_theta=1e6, rms_norm_eps=1e-6, vocab_size=151936, mask_token_id=151669, taps=(1, 9, 17, 25, 33),
        num_target_layers=36, initializer_range=0.02, bos_token_id=None, eos_token_ids=(151645,), pad_token_id=151643,
    )  # fmt: skip
    if not bench.tiny:
        return whole
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return replace(whole, **small, head_dim=16, vocab_size=512, mask_token_id=500, eos_token_ids=(1,), pad_token_id=0)


def learner_of(bench: Bench, spec: DrafterSpec, positions: int) -> Learner:
    """A learner with random frozen tensors."""
    dtype = torch.bfloat16 if bench.is_cuda else torch.float32
    embedding = torch.randn(spec.vocab_size, spec.hidden_size, device=bench.device).mul_(0.02).to(dtype)
    settings = DrafterConfig(
        num_layers=spec.num_layers,
        dtype="bfloat16" if bench.is_cuda else "float32",
        positions_per_pass=positions,
        diagnose_every=0,
    )
    return Learner(
        spec,
        embedding=embedding,
        head=embedding,
        drafter=settings,
        objective=ObjectiveConfig(),
        optimizer=OptimizerConfig(),
        total_steps=100,
        seed=0,
        device=bench.device,
    )


def host_of(vocabulary: int, lengths: np.ndarray, anchors: int, block_size: int) -> HostBatch:
    """Random tokens, all supervised, so many anchors a sample."""
    random, width = np.random.default_rng(0), int(lengths.max())
    ids = random.integers(3, vocabulary - 1, (len(lengths), width))
    mask = np.arange(width) < lengths[:, None]
    rows = [
        sample_anchors(mask[row, :length], seed=0, epoch=0, sample=row, limit=anchors)
        for row, length in enumerate(lengths)
    ]
    counts = np.array([len(row) for row in rows])
    positions, padded = int(counts.sum()) * block_size, width * len(lengths)
    planned = PlannedBatch(
        index=0, epoch=0, window=0, replica=0, slot=0, bucket=0, rows=np.arange(len(lengths)), width=width,
        real_tokens=int(lengths.sum()), padded_tokens=padded, draft_positions=positions,
    )  # fmt: skip
    return HostBatch(planned, np.where(mask, ids, 0), mask, lengths, np.concatenate(rows), counts)


def batch_of(bench: Bench, spec: DrafterSpec, lengths: np.ndarray, anchors: int) -> FeatureBatch:
    """As `host_of`, with random features."""
    host = host_of(spec.vocab_size, lengths, anchors, spec.block_size)
    dtype = torch.bfloat16 if bench.is_cuda else torch.float32
    features = torch.randn(int(lengths.sum()), len(spec.taps) * spec.hidden_size, device=bench.device).to(dtype)
    return FeatureBatch(host, features)


def drafter_step(bench: Bench) -> CheckResult:
    """The drafter's work on one micro-batch: share of the measured peak."""
    if not bench.peak_flops > 0:
        ceilings(bench)
    spec, figures = spec_of(bench), {}
    lengths = np.full(4, 64) if bench.tiny else np.full(16, 2048)
    for anchors in (4,) if bench.tiny else (32, 128, 256):
        batch = batch_of(bench, spec, lengths, anchors)
        positions = batch.host.planned.draft_positions
        made = learner_of(bench, spec, min(positions, 16384))
        spent = seconds_of(bench.device, lambda made=made, batch=batch: made.accumulate(batch), 3 if bench.tiny else 5)
        flops = drafter_flops(spec, batch.host.lengths, batch.host.anchor_counts)
        figures[f"share_{positions}"] = flops / spent / bench.peak_flops
        made.step(PlannedStep(1, 0, 0, range(0), save=False))
        del made
    detail = ", ".join(f"{name.removeprefix('share_')} positions {share:.1%}" for name, share in figures.items())
    if bench.tiny:
        return verdict("drafter step", all(share > 0 for share in figures.values()), detail, figures=figures)
    advice = f"below {GOAL:.0%} of the measured matrix product; attach the JSON to a report"
    return verdict("drafter step", max(figures.values()) >= GOAL, detail, advice, figures)


def memory(bench: Bench) -> CheckResult:
    """Peak memory of the drafter's step against the forecast of ``paceline check``."""
    if not bench.is_cuda:
        return skipped("memory", "only a card counts what its allocator holds")
    spec, lengths = spec_of(bench), np.full(16, 2048)
    batch = batch_of(bench, spec, lengths, 64)
    made = learner_of(bench, spec, 16384)
    forget_peak(bench.device)
    for step in (1, 2):
        made.accumulate(batch)
        made.step(PlannedStep(step, 0, step - 1, range(0), save=False))
    measured = peak_allocated_bytes(bench.device)
    settings = bench.settings(bench.device, **{"drafter.dtype": "bfloat16"})
    load = memory_budget.Load(int(lengths.sum()), int(lengths.sum()), batch.host.planned.draft_positions)
    facts = replace(bench.context("cpu").facts, hidden_size=spec.hidden_size, tied_head=True)
    forecast = sum(memory_budget.drafter_bytes(facts, spec, settings, load, 16384).values())
    error = measured / forecast - 1
    detail = f"measured {size(measured)}, forecast {size(forecast)} ({error:+.1%})"
    advice = "the forecast of `paceline check` is off on this card; attach the JSON to a report"
    return verdict("memory", abs(error) <= MEMORY_ERROR, detail, advice, {"measured": measured, "forecast": forecast})


DRAFTER_SPEED: dict[str, Check] = {"drafter step": drafter_step, "memory": memory}
"""The second part of stage C."""
