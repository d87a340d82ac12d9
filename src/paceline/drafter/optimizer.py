"""The update of the float32 masters: AdamW or Muon, learning rate schedule, clipping, guard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config.optimizer import OptimizerConfig
from paceline.drafter.schedule import Schedule


def learning_rates(config: OptimizerConfig, total_steps: int) -> Schedule:
    """Learning rate by 0-based optimizer step: a linear rise from zero over the warm-up, then the chosen shape."""
    warmup = round(config.warmup * total_steps)
    return Schedule(config.schedule, config.lr, config.lr * config.final_lr, 0, total_steps, warmup)


class MasterOptimizer:
    """Steps the parameters of a network from gradients that are sums over a window.

    Matrices decay by `weight_decay`, norms do not. With `muon`, matrices are stepped by Muon (scaled so that AdamW's
    learning rate fits) and norms by AdamW.

    Args:
        network: float32 parameters.
        config: settings.
        total_steps: optimizer steps of the run, for the schedule.
    """

    def __init__(self, network: nn.Module, config: OptimizerConfig, total_steps: int) -> None:
        self.config = config
        self.rates = learning_rates(config, total_steps)
        self.parameters = list(network.parameters())
        matrices = [p for p in self.parameters if p.ndim >= 2]
        vectors = [p for p in self.parameters if p.ndim < 2]
        adam_groups: list[dict[str, Any]] = [{"params": vectors, "weight_decay": 0.0}]
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        if config.name == "muon":
            self._optimizers["muon"] = torch.optim.Muon(
                matrices,
                lr=config.lr,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        else:
            adam_groups.insert(0, {"params": matrices, "weight_decay": config.weight_decay})
        self._optimizers["adamw"] = torch.optim.AdamW(
            adam_groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )

    def gradients(self) -> list[Tensor]:
        """Gradients of all parameters; zeros where nothing reached one."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def norm(self) -> Tensor:
        """Norm of all gradients together, a scalar on their device."""
        return torch.nn.utils.get_total_norm(self.gradients())

    def step(self, scale: float, step: int) -> None:
        """Multiplies the gradients by `scale` and takes the 0-based step."""
        torch._foreach_mul_(self.gradients(), scale)
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = self.rates.at(step)
            optimizer.step()

    def clear(self) -> None:
        """Drops all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """State of each optimizer by name."""
        return {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes on what `state_dict` gave.

        Raises:
            KeyError: the state is of another optimizer.
        """
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(state[name])
