"""Tiny random targets for the tests of every room that needs one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from batches import host_batch
from paceline.config import TargetConfig
from paceline.target_model.shared_weights import load_shared_weights
from paceline.types import HostBatch

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
"""Sizes that a server runs: heads of 32, and weights large enough that answers vary."""

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    # experts, by the names that the families use
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
PAD = 0


def tiny_model(model_type: str, seed: int = 0, **more: Any) -> Any:
    """A random causal language model of a type, in float32; its norms scale each column in another way."""
    config = AutoConfig.for_model(model_type, **{**TINY, **more})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and "norm" in name and name.endswith("weight"):
                weight += torch.rand_like(weight) - 0.5
    return model


def save_tiny(folder: Path, model_type: str, seed: int = 0, **more: Any) -> Path:
    """Saves `tiny_model`; returns the folder."""
    tiny_model(model_type, seed, **more).save_pretrained(str(folder))
    return folder


def target_batch(documents: Sequence[Sequence[int]], *, width: int | None = None, index: int = 3) -> HostBatch:
    """A right-padded batch of documents without anchors; its samples are 100, 101 ..."""
    return host_batch(documents, rows=range(100, 100 + len(documents)), width=width, pad=PAD, index=index)


def embedding_and_head(
    folder: Path | str, dtype: torch.dtype = torch.float32, adapter: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What drafters of a target take over, without a loaded target."""
    weights = load_shared_weights(TargetConfig(path=str(folder), adapter=adapter), dtype)
    return weights.embedding, weights.head
