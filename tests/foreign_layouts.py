"""Small checkpoints as other trainers write them, made from a drafter's float32 masters and AdamW's moments.

The order in which their optimizers name tensors by place is written out here, as their networks register them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from paceline.drafter.spec import DrafterSpec
from paceline.export.config_keys import qwen3_section
from paceline.export.speculators import speculators_config
from paceline.types import TargetFacts

State = Mapping[str, Tensor]
Moments = Mapping[str, Mapping[str, Tensor]]


def registered(spec: DrafterSpec, first: Sequence[str], last: Sequence[str]) -> list[str]:
    """Names of all tensors: those before the layers, the layers', those after them."""
    attention = ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"]
    parts = [f"self_attn.{name}" for name in attention] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    parts += ["input_layernorm", "post_attention_layernorm"]
    layers = [f"layers.{layer}.{part}.weight" for layer in range(spec.num_layers) for part in parts]
    return [*first, *layers, *last]


def rounded(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}


def by_place(state: Mapping[str, Tensor], moments: Moments, order: Sequence[str]) -> dict[str, Any]:
    """An optimizer that keeps float32 masters of bfloat16 weights, all by place."""
    entries = {place: dict(moments[name]) for place, name in enumerate(order) if name in moments}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(range(len(order)))}]
    return {
        "optimizer_state_dict": {"state": entries, "param_groups": groups},
        "scheduler_state_dict": {"last_epoch": 3},
        "fp32_params": [state[name].clone() for name in order],
    }


def of_rank(optimizer: dict[str, Any], rank: int, count: int) -> dict[str, Any]:
    """What one of several ranks holds of it, as FSDP shares tensors out: flat parts in turn; some ranks get none."""

    def share(tensor: Tensor) -> Tensor:
        ends = [tensor.numel() * (part + part % 2) // (count + count % 2) for part in range(count + 1)]
        return tensor.flatten()[ends[rank] : ends[rank + 1]].clone()

    state = {
        place: {key: value if key == "step" else share(value) for key, value in entry.items()}
        for place, entry in optimizer["optimizer_state_dict"]["state"].items()
    }
    return {
        **optimizer,
        "optimizer_state_dict": {**optimizer["optimizer_state_dict"], "state": state},
        "fp32_params": [share(master) for master in optimizer["fp32_params"]],
    }


def save_distributed(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def random_states() -> dict[str, Any]:
    return {
        "torch_rng": torch.get_rng_state(),
        "numpy_rng": np.random.RandomState(1).get_state(),
        "python_rng": (3, (1, 2)),
    }


def specforge(
    root: Path, spec: DrafterSpec, state: State, moments: Moments, step: int, epoch: int, ranks: int = 1
) -> Path:
    folder = root / f"mine-step{step}"
    folder.mkdir(parents=True)
    order = registered(spec, [], ["norm.weight", "fc.weight", "hidden_norm.weight"])
    shared = {
        "draft_state_dict": rounded({name: state[name] for name in order}),
        "global_step": step,
        "epoch": epoch,
        "strategy": "dflash",
        "run_id": "mine",
        "world_size": ranks,
    }
    torch.save(shared, folder / "training_state.pt")
    optimizer = by_place(state, moments, order)
    for rank in range(ranks):
        mine = optimizer if ranks == 1 else of_rank(optimizer, rank, ranks)
        torch.save({"optimizer": mine, "rng": random_states()}, folder / f"training_state_rank{rank}.pt")
    return folder


def deepspec(
    root: Path, spec: DrafterSpec, state: State, moments: Moments, step: int, epoch: int, ranks: int = 2
) -> Path:
    folder = root / f"step_{step}"
    folder.mkdir(parents=True)
    config = {
        **qwen3_section(spec, "bfloat16"),
        "architectures": ["Qwen3DSparkModel"],
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.taps),
        "num_target_layers": spec.num_target_layers,
        "num_anchors": 512,
        "markov_rank": 0,
        "enable_confidence_head": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    frozen = {name: torch.zeros(3, 2) for name in ("embed_tokens.weight", "lm_head.weight")}
    save_file({**rounded(state), **frozen}, folder / "model.safetensors")
    order = registered(spec, [], ["norm.weight", "fc.weight", "hidden_norm.weight"])
    for rank in range(ranks):
        mine = of_rank(by_place(state, moments, order), rank, ranks)
        said = {"next_micro_step": 4 * step, "optimizer": mine, "world_size": ranks, **random_states()}
        torch.save(said, folder / f"training_state.rank{rank}.pt")
    return folder


def torchspec(root: Path, spec: DrafterSpec, state: State, moments: Moments, step: int, epoch: int) -> Path:
    folder = root / f"iter_{step:07d}"
    renamed = {"fc": "context_proj", "hidden_norm": "context_norm", "norm": "final_norm"}
    weights = {
        f"draft_model.{renamed.get(name.split('.')[0], name.split('.')[0])}.{name.partition('.')[2]}": tensor
        for name, tensor in rounded(state).items()
    }
    weights["draft_model.embed_tokens.weight"] = torch.zeros(3, 2)
    save_distributed({"model_state": {"model": weights}}, folder / "model")
    order = registered(spec, ["fc.weight", "hidden_norm.weight"], ["norm.weight"])
    optimizer = by_place(state, moments, order)
    masters = {str(place): tensor for place, tensor in enumerate(optimizer["fp32_params"])}
    saved = {"optim_state": {"optim": optimizer["optimizer_state_dict"], "fp32_params": masters}}
    save_distributed(saved, folder / "optimizer")
    (folder / "meta.json").write_text(json.dumps({"iteration": step, "global_step": step}))
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


def nemo(root: Path, spec: DrafterSpec, state: State, moments: Moments, step: int, epoch: int) -> Path:
    folder = root / f"epoch_{epoch}_step_{step}"
    (folder / "model" / ".hf_metadata").mkdir(parents=True)
    inner = {"block_size": spec.block_size, "mask_token_id": spec.mask_token_id, "target_layer_ids": list(spec.taps)}
    config = {
        **qwen3_section(spec, "bfloat16"),
        "architectures": ["Qwen3DFlashDraftModel"],
        "is_causal": False,
        "block_size": spec.block_size,
        "num_target_layers": spec.num_target_layers,
        "dflash_config": inner,
    }
    (folder / "model" / ".hf_metadata" / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model" / "shard-00001-model-00001-of-00001.safetensors")
    flat = {f"state.{name}.{key}": value for name, entry in moments.items() for key, value in entry.items()}
    flat |= {f"param_groups.{name}.lr": torch.tensor(1e-3) for name in moments}
    save_distributed({"optim": flat, "sched": {"last_epoch": step}}, folder / "optim")
    meta = {"global_step": step, "epoch": epoch, **inner}
    torch.save(meta, folder / "dflash_meta.pt")
    return folder


def speculators(
    root: Path, spec: DrafterSpec, state: State, moments: Moments, step: int, epoch: int, facts: TargetFacts
) -> Path:
    folder = root / str(epoch - 1)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(speculators_config(spec, facts, "bfloat16")))
    frozen = {name: torch.zeros(3, 2) for name in ("embed_tokens.weight", "verifier_norm.weight")}
    save_file({**rounded(state), **frozen}, folder / "model.safetensors")
    names = [*frozen, *registered(spec, [], ["norm.weight", "fc.weight", "hidden_norm.weight"])]
    group = {"lr": 1e-3, "params": list(range(len(names))), "param_names": names}
    entries = {
        place: {key: value.to(torch.bfloat16) for key, value in moments[name].items()}
        for place, name in enumerate(names)
        if name in moments
    }
    torch.save({"state": entries, "param_groups": [group]}, folder / "optimizer_state_dict.pt")
    return folder


WRITERS: dict[str, Callable[..., Path]] = {
    "SpecForge": specforge,
    "DeepSpec": deepspec,
    "TorchSpec": torchspec,
    "NeMo AutoModel": nemo,
    "speculators": speculators,
}
