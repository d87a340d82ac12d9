"""Tiny random targets of several architectures, for the tests of this room and of the rooms after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
}


def save_tiny(folder: Path, model_type: str, seed: int = 0, **more: Any) -> Path:
    """Saves a random model of a type; returns its folder."""
    config = AutoConfig.for_model(model_type, **{**TINY, **more})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(str(folder))
    return folder
