"""A tiny target, drafters of every kind for it, and how they learn its answers; shared by the oracle tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from batches import host_batch
from paceline.config.schema import TargetConfig
from paceline.drafter.network import Drafter
from paceline.drafter.spec import DrafterSpec
from paceline.target_model.load import load_target
from paceline.target_model.model import TargetModel

VOCABULARY, HIDDEN, LAYERS, MASK = 96, 32, 6, 95
TAPS = (1, 4)
PROMPTS = [[5, 17, 3, 60, 8, 44, 21], [70, 2, 9, 9, 31]]
ANSWER_TOKENS = 48
FIT_STEPS = 16

KINDS: dict[str, dict[str, Any]] = {
    "full": {"layers": ("full", "full"), "causal": (False, False)},
    "full causal": {"layers": ("full", "full"), "causal": (True, True)},
    "sliding causal and full": {"layers": ("sliding", "full"), "causal": (True, False), "sliding_window": 10},
    "sliding causal": {"layers": ("sliding",) * 2, "causal": (True, True), "sliding_window": 10},
    "sliding bidirectional": {"layers": ("sliding",) * 2, "causal": (False, False), "sliding_window": 10},
}


def load(folder: Path, dtype: str) -> TargetModel:
    """The tiny target in a type, with our taps."""
    return load_target(TargetConfig(path=str(folder), taps=list(TAPS)), TAPS, dtype=dtype)


def make_spec(kind: str, **changes: Any) -> DrafterSpec:
    """A drafter of a kind for the tiny target; its numbers are no library defaults, so that a lost key shows."""
    values: dict[str, Any] = {
        "num_layers": 2,
        "block_size": 6,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": None,
        "rope_theta": 3_000.0,
        "rms_norm_eps": 1e-3,
        "vocab_size": VOCABULARY,
        "mask_token_id": MASK,
        "taps": TAPS,
        "num_target_layers": LAYERS,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "pad_token_id": 0,
    }
    return DrafterSpec(**{**values, **KINDS[kind], **changes})


def embed_blocks(spec: DrafterSpec, target: TargetModel, anchor_ids: torch.Tensor) -> torch.Tensor:
    """Embedded blocks [A, K, D]: each anchor's token, then mask tokens."""
    ids = torch.full((len(anchor_ids), spec.block_size), spec.mask_token_id)
    ids[:, 0] = anchor_ids
    return target.embedding[ids].detach()


def fit(spec: DrafterSpec, target: TargetModel, rows: list[list[int]], steps: int) -> Drafter:
    """A drafter that learned these rows by heart: cross entropy on every block that fits, plain Adam."""
    features = target.features(host_batch(rows)).features
    network = Drafter(spec, seed=5)
    first = spec.first_draft_slot
    spans = [range(2, len(row) - spec.block_size) for row in rows]
    anchors = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    counts = np.array([len(span) for span in spans])
    shift = 1 - first
    slots = range(first, spec.block_size)
    places = [(row, anchor) for row, span in zip(rows, spans, strict=True) for anchor in span]
    labels = torch.tensor([[row[anchor + slot + shift] for slot in slots] for row, anchor in places])
    blocks = embed_blocks(spec, target, torch.tensor([row[anchor] for row, anchor in places]))
    optimizer = torch.optim.Adam(network.parameters(), lr=4e-3)
    for _ in range(steps):
        hidden = network.training_forward(features, [len(row) for row in rows], anchors, counts, blocks)
        logits = hidden[:, first:] @ target.head.T
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network
