"""Small specs, batches and frozen tensors for the drafter's tests."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from batches import host_batch, planned_batch
from paceline.config import DrafterConfig, ObjectiveConfig, OptimizerConfig
from paceline.drafter.anchors import sample_anchors
from paceline.drafter.attention.layout import Layout
from paceline.drafter.host_copy import HostCopy
from paceline.drafter.learner import Learner
from paceline.drafter.spec import DrafterSpec
from paceline.types import FeatureBatch, HostBatch, PlannedStep, StepReport


def small_spec(**changes) -> DrafterSpec:
    small = DrafterSpec(
        num_layers=2, block_size=4, hidden_size=16, intermediate_size=24, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, layers=("full", "full"), causal=(False, False), sliding_window=None,
        rope_theta=1e4, rms_norm_eps=1e-6, vocab_size=50, mask_token_id=49, taps=(1, 3), num_target_layers=6,
        initializer_range=0.3, bos_token_id=1, eos_token_ids=(2,), pad_token_id=0,
    )  # fmt: skip
    return replace(small, **changes)


KINDS = [
    {"layers": ("full", "full"), "causal": (False, False)},
    {"layers": ("full", "full"), "causal": (True, True)},
    {"layers": ("sliding", "sliding"), "causal": (True, True), "sliding_window": 7},
    {"layers": ("sliding", "sliding"), "causal": (False, False), "sliding_window": 7},
    {"layers": ("sliding", "full"), "causal": (True, False), "sliding_window": 5},
    {"layers": ("sliding", "sliding"), "causal": (True, True), "sliding_window": 3},
]


def frozen(spec: DrafterSpec, seed: int = 0, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    make = lambda: torch.randn(spec.vocab_size, spec.hidden_size, generator=generator).to(dtype)  # noqa: E731
    return make(), make()


def make_host(
    spec: DrafterSpec, lengths, *, seed=0, num_anchors=4, masks=None, bucket=0, index=0, rows=None
) -> HostBatch:
    random = np.random.default_rng(seed)
    rows = np.arange(len(lengths)) if rows is None else np.asarray(rows)
    documents, found_masks, anchors = [], [], []
    for i, length in enumerate(lengths):
        documents.append(random.integers(3, spec.vocab_size - 1, length))
        mask = random.random(length) < 0.8 if masks is None else np.asarray(masks[i], bool)
        found_masks.append(mask)
        anchors.append(sample_anchors(mask, seed=seed, epoch=0, sample=int(rows[i]), limit=num_anchors))
    positions = sum(map(len, anchors)) * spec.block_size
    return host_batch(
        documents, masks=found_masks, anchors=anchors, rows=rows, index=index, bucket=bucket, draft_positions=positions
    )


def make_batch(
    spec: DrafterSpec, lengths, *, seed=0, dtype=torch.float32, last_hidden=False, **options
) -> FeatureBatch:
    host = make_host(spec, lengths, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed + 1)
    total = int(sum(lengths))
    features = torch.randn(total, len(spec.taps) * spec.hidden_size, generator=generator).to(dtype)
    last = torch.randn(total, spec.hidden_size, generator=generator).to(dtype) if last_hidden else None
    return FeatureBatch(host, features, last)


def pick(batch: FeatureBatch, rows, index=0) -> FeatureBatch:
    """The given documents of a batch as a batch of their own."""
    host = batch.host
    starts = np.cumsum(host.lengths) - host.lengths
    firsts = np.cumsum(host.anchor_counts) - host.anchor_counts
    tokens = np.concatenate([np.arange(starts[i], starts[i] + host.lengths[i]) for i in rows])
    anchors = np.concatenate([host.anchors[firsts[i] : firsts[i] + host.anchor_counts[i]] for i in rows])
    width = int(host.lengths[rows].max())
    planned = planned_batch(host.planned.rows[rows], width, len(tokens), index=index, bucket=host.planned.bucket)
    part = HostBatch(
        planned, host.ids[rows, :width], host.loss_mask[rows, :width], host.lengths[rows], anchors,
        host.anchor_counts[rows],
    )  # fmt: skip
    last = batch.last_hidden[tokens] if batch.last_hidden is not None else None
    return FeatureBatch(part, batch.features[tokens], last)


def make_learner(
    spec: DrafterSpec, *, dtype="float32", total_steps=50, seed=0, device="cpu", world=None, shards=None, **sections
) -> Learner:
    """A learner on random frozen tensors; `sections` are keyword dicts: drafter, objective, optimizer."""
    embedding, head = frozen(spec)
    drafter = {"num_layers": spec.num_layers, "block_size": spec.block_size, "dtype": dtype}
    return Learner(
        spec,
        embedding=embedding,
        head=head,
        drafter=DrafterConfig(**{**drafter, **sections.get("drafter", {})}),
        objective=ObjectiveConfig(**sections.get("objective", {})),
        optimizer=OptimizerConfig(**{"lr": 1e-2, **sections.get("optimizer", {})}),
        total_steps=total_steps,
        seed=seed,
        device=device,
        world=world,
        shards=shards,
    )


def close_window(learner: Learner, step: int = 1) -> StepReport:
    return replace(learner.step(PlannedStep(step, 0, step - 1, range(0), save=False)), seconds=0.5)


def state_of(learner: Learner) -> dict:
    """A copy of a learner's state."""
    return HostCopy("cpu").take(learner.state_dict())


def gradient_of(learner: Learner) -> dict[str, torch.Tensor]:
    """Undivided gradients of the open window."""
    return {name: p.grad.clone() for name, p in learner.network.named_parameters() if p.grad is not None}


def slow_dpace(ce, live, alpha) -> list[float]:
    """D-PACE weights of one block, from the formula."""
    q = [(1 - alpha) * math.exp(-c) + alpha if on else 1.0 for c, on in zip(ce, live, strict=True)]
    reach = [math.prod(q[: m + 1]) if live[m] else 0.0 for m in range(len(q))]
    return [sum(reach[j:]) if live[j] else 0.0 for j in range(len(q))]


SHAPES = [
    ([9], [2, 3, 7], [3], 3),
    ([5, 1, 12], [0, 4, 1, 5, 6, 11], [2, 0, 4], 4),
    ([30, 4, 30], [*range(0, 30, 2), 0, 1, 29], [15, 2, 1], 2),
    ([3], [3], [1], 5),
]


def layout_of(shape) -> Layout:
    lengths, anchors, counts, slots = shape
    return Layout.of(np.array(lengths), np.array(anchors), np.array(counts), slots, torch.device("cpu"))


def attention_inputs(layout: Layout, seed: int) -> list[torch.Tensor]:
    """Queries, context keys and values, block keys and values, with 2 key heads of 3 query heads each, float64."""
    generator = torch.Generator().manual_seed(seed)
    groups, repeats, size = 2, 3, 4
    count, slots = len(layout.anchors), layout.block_size

    def make(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    return [
        make(groups, count, slots, repeats, size),
        make(groups, layout.num_context, size),
        make(groups, layout.num_context, size),
        make(groups, count, slots, size),
        make(groups, count, slots, size),
    ]
