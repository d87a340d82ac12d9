"""How the float32 masters move: AdamW or Muon, the learning rate of each step, and what of the state is saved."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.config import OptimizerConfig
from paceline.drafter.distributed import broadcast_state, owners
from paceline.drafter.schedule import Schedule
from paceline.errors import DrafterError


def learning_rates(config: OptimizerConfig, total_steps: int) -> Schedule:
    """Learning rate by 0-based optimizer step: a linear rise from zero over the warm-up, then the chosen shape."""
    warmup = round(config.warmup * total_steps)
    return Schedule(config.schedule, config.lr, config.lr * config.final_lr, 0, total_steps, warmup)


def make_optimizers(
    network: nn.Module, config: OptimizerConfig, shards: dist.ProcessGroup | None = None
) -> dict[str, Optimizer]:
    """The optimizers of a network's float32 parameters, by name.

    Matrices decay by `weight_decay`, norms do not. With `muon`, matrices are moved by Muon (scaled so that AdamW's
    learning rate fits) and norms by AdamW.

    Args:
        network: float32 parameters.
        config: settings.
        shards: ranks among which each optimizer's state is shared out; None: every rank holds all of it.

    Raises:
        DrafterError: the package that the settings need is missing.
    """
    matrices = [parameter for parameter in network.parameters() if parameter.ndim >= 2]
    norms = [parameter for parameter in network.parameters() if parameter.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": norms, "weight_decay": 0.0}]
    found: dict[str, Optimizer] = {}
    if config.name == "muon":
        found["muon"] = _made(
            torch.optim.Muon,
            [{"params": matrices}],
            shards,
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
    else:
        groups.insert(0, {"params": matrices, "weight_decay": config.weight_decay})
    shared = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.state == "8bit":
        found["adamw"] = _made(_adamw_8bit(), groups, shards, **shared)
    else:
        found["adamw"] = _made(torch.optim.AdamW, groups, shards, **shared, fused=True)
    return found


def optimizer_state(optimizer: Any, shards: dist.ProcessGroup | None, device: torch.device) -> dict[str, Any]:
    """What `load_optimizer_state` takes, whole.

    Where the state is shared out, all ranks must ask: it is gathered, on the first of them alone.
    """
    if shards is None:
        return optimizer.state_dict()
    mine: dict[Tensor, Any] = optimizer.optim.state  # of this rank's parameters
    parameters, place = _places(optimizer)
    state = {}
    for index, owner in enumerate(owners([parameter in mine for parameter in parameters], shards, device)):
        if owner is None:
            continue
        part = broadcast_state(mine.get(parameters[index]), shards, device, owner)
        if dist.get_rank(shards) == 0:
            state[index] = part
    groups = [
        {**group, "params": [place[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def load_optimizer_state(optimizer: Any, state: Mapping[str, Any], shards: dist.ProcessGroup | None) -> None:
    """Takes on a whole state; where it is shared out, this rank's part of it.

    A rank's part goes to the optimizer that ZeRO holds inside: ZeRO's own loading keeps a second copy on the device,
    and moves the step counts to the CPU, where a fused AdamW on a card cannot use them (torch 2.13).
    """
    if shards is None:
        optimizer.load_state_dict(copy.deepcopy(dict(state)))
        return
    _, place = _places(optimizer)
    inside = optimizer.optim
    mine = [place[parameter] for group in inside.param_groups for parameter in group["params"]]
    part = {number: copy.deepcopy(state["state"][at]) for number, at in enumerate(mine) if at in state["state"]}
    inside.load_state_dict({"state": part, "param_groups": inside.state_dict()["param_groups"]})


def with_moments(
    optimizer: Any, names: Mapping[Tensor, str], moments: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Any]:
    """A whole state for `load_optimizer_state`, with these moments and none for all other parameters.

    Args:
        optimizer: AdamW, without state.
        names: of the network's parameters.
        moments: name → ``exp_avg``, ``exp_avg_sq`` and ``step``.
    """
    parameters, place = _places(optimizer)
    groups = [
        {**group, "params": [place[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    state = {
        place[parameter]: dict(moments[names[parameter]]) for parameter in parameters if names[parameter] in moments
    }
    return {"state": state, "param_groups": groups}


def _places(optimizer: Any) -> tuple[list[Tensor], dict[Tensor, int]]:
    """Parameters of an optimizer in the order of its state, and the place of each."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return parameters, {parameter: index for index, parameter in enumerate(parameters)}


def _made(kind: type[Optimizer], groups: list[dict[str, Any]], shards: Any, **settings: Any) -> Optimizer:
    if shards is None:
        make: Callable[..., Optimizer] = kind
        return make(groups, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.distributed.optim's own use of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(groups, optimizer_class=kind, process_group=shards, **settings)


def _adamw_8bit() -> type[Optimizer]:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise DrafterError(
            "optimizer.state: 8bit needs bitsandbytes, which is not installed; pip install 'paceline[quantize]', or "
            "set optimizer.state to float32"
        ) from error
    return AdamW8bit
