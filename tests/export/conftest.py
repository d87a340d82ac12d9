"""Small drafters of every kind that the export tests write and read."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.drafter.network import Drafter
from paceline.drafter.spec import DrafterSpec
from paceline.types import TargetFacts

BASE: dict[str, Any] = {
    "num_layers": 3,
    "block_size": 6,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layers": ("full", "full", "full"),
    "causal": (False, False, False),
    "sliding_window": None,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "vocab_size": 97,
    "mask_token_id": 95,
    "taps": (1, 4),
    "num_target_layers": 6,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_ids": (2, 3),
    "pad_token_id": 0,
}
MIXED = {"layers": ("sliding", "sliding", "full"), "sliding_window": 8}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding causal and full": {**MIXED, "causal": (True, True, False)},
    "sliding causal": {"layers": ("sliding",) * 3, "sliding_window": 8, "causal": (True,) * 3},
    "sliding bidirectional": {"layers": ("sliding",) * 3, "sliding_window": 8, "causal": (False,) * 3},
    "sliding bidirectional and full": {**MIXED, "causal": (False, False, False)},
    "full causal": {"causal": (True,) * 3},
}


@pytest.fixture
def make_spec() -> Callable[..., DrafterSpec]:
    return lambda kind="full", **changes: DrafterSpec(**{**BASE, **KINDS[kind], **changes})


@pytest.fixture
def make_state() -> Callable[[DrafterSpec], dict[str, torch.Tensor]]:
    def state(spec: DrafterSpec, seed: int = 7) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        network = Drafter(spec, seed=seed)
        tensors = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
        for name, tensor in tensors.items():
            if name.endswith("norm.weight") or "layernorm" in name:
                tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
        return tensors

    return state


@pytest.fixture
def make_facts() -> Callable[..., TargetFacts]:
    def facts(spec: DrafterSpec, **changes: Any) -> TargetFacts:
        values: dict[str, Any] = {
            "path": "some/target",
            "architecture": "Qwen3ForCausalLM",
            "model_type": "qwen3",
            "num_layers": spec.num_target_layers,
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": 512,
            "initializer_range": 0.02,
            "tied_head": True,
            "bos_token_id": None,
            "eos_token_ids": (2, 3),
            "pad_token_id": 0,
            "fingerprint": "f" * 64,
        }
        return TargetFacts(**{**values, **changes})

    return facts


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder with a sub-folder for each owner/name, in place of the Hugging Face hub."""
    import huggingface_hub

    root = tmp_path / "hub"

    class LocalApi:
        def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
            (root / repo_id).mkdir(parents=True, exist_ok=exist_ok)

        def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> str:
            shutil.copytree(folder_path, root / repo_id, dirs_exist_ok=True)
            return f"commit of {repo_id}"

    for name in ("create_repo", "upload_folder"):
        ours = set(inspect.signature(getattr(LocalApi, name)).parameters)
        assert ours <= set(inspect.signature(getattr(huggingface_hub.HfApi, name)).parameters)
    monkeypatch.setattr(huggingface_hub, "HfApi", LocalApi)
    return root
