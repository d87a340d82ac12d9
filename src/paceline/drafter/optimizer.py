"""How the float32 masters move: AdamW or Muon, and the learning rate of each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.config.learning import OptimizerConfig
from paceline.drafter.schedule import Schedule


def learning_rates(config: OptimizerConfig, total_steps: int) -> Schedule:
    """Learning rate by 0-based optimizer step: a linear rise from zero over the warm-up, then the chosen shape."""
    warmup = round(config.warmup * total_steps)
    return Schedule(config.schedule, config.lr, config.lr * config.final_lr, 0, total_steps, warmup)


def make_optimizers(network: nn.Module, config: OptimizerConfig) -> dict[str, torch.optim.Optimizer]:
    """The optimizers of a network's float32 parameters, by name.

    Matrices decay by `weight_decay`, norms do not. With `muon`, matrices are moved by Muon (scaled so that AdamW's
    learning rate fits) and norms by AdamW.
    """
    matrices = [parameter for parameter in network.parameters() if parameter.ndim >= 2]
    norms = [parameter for parameter in network.parameters() if parameter.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": norms, "weight_decay": 0.0}]
    found: dict[str, torch.optim.Optimizer] = {}
    if config.name == "muon":
        found["muon"] = torch.optim.Muon(
            matrices,
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
    else:
        groups.insert(0, {"params": matrices, "weight_decay": config.weight_decay})
    betas = (config.beta1, config.beta2)
    found["adamw"] = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
    return found
