"""What a token costs in each decoder layer of a target: counted on its modules without weights, from the configuration.

Shape letters: D hidden, H·E query heads × head size, T tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.target_model.facts import model_class, read_config
from paceline.text import first_line

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
STATE = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One decoder layer.

    Attributes:
        matrices: numbers of the weight matrices that a token goes through; of experts, those that it is sent to.
        across: H·E where the layer attends, 0 where it is recurrent.
        window: tokens that it attends to at most; None: all earlier ones.
        state: numbers of a recurrent layer's state, where the configuration says how many.
    """

    matrices: float
    across: int
    window: int | None
    state: int

    def flops(self, lengths: np.ndarray) -> float:
        """Forward of whole samples; multiply and add count as two.

        2·matrices·T + 4·H·E·Σ(tokens attended to) + 6·state·T: a gated delta rule reads its state twice and adds to it
        once a token.

        Args:
            lengths: T of each sample, int64 [B].
        """
        tokens = lengths.astype(np.float64)
        seen = tokens if self.window is None else np.minimum(tokens, self.window)
        pairs = seen * tokens - seen**2 / 2
        return float(np.sum((2 * self.matrices + 6 * self.state) * tokens + 4 * self.across * pairs))


def layer_costs(settings: TargetConfig) -> list[LayerCost] | None:
    """The decoder layers of a target, in order; None where experts are not counted by its configuration.

    Raises:
        TargetError: its modules cannot be made from the configuration, or hold no stack of its layers; one line.
    """
    config = read_config(settings.path, settings.trust_remote_code)
    try:
        with torch.device("meta"):
            model = model_class(config).from_config(config, trust_remote_code=settings.trust_remote_code)
    except Exception as error:  # code that comes with the target may raise anything
        raise TargetError(
            f"target.path = {settings.path}: its layers cannot be counted ({first_line(error)})"
        ) from error
    return costs_of_model(model, settings.path)


def costs_of_model(model: Any, path: str) -> list[LayerCost] | None:
    """The decoder layers of a model, on whatever device; see `layer_costs`.

    Args:
        model: causal language model, or a wrapper around one.
        path: of the target, for errors.
    """
    text = model.config.get_text_config(decoder=True)
    layers, kinds = _layers(model, text.num_hidden_layers, path), _kinds(text)
    heads = getattr(text, "num_attention_heads", None) or 0
    across = heads * (getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0))
    values = [getattr(text, name, None) for name in STATE]
    state = int(np.prod([value for value in values if value is not None])) if None not in values else 0
    share = _routed_share(text)
    costs = []
    for layer, kind in zip(layers, kinds, strict=True):
        named = [(name, weight.numel()) for name, weight in layer.named_parameters() if weight.ndim >= 2]
        routed = sum(size for name, size in named if ".experts." in f".{name}")
        if routed and share is None:
            return None
        matrices = sum(size for _, size in named) - routed + routed * (share or 0.0)
        attends = kind.endswith("attention") and kind != "linear_attention"
        window = getattr(text, "sliding_window", None) if kind == "sliding_attention" else None
        costs.append(LayerCost(matrices, across if attends else 0, window, 0 if attends else state))
    return costs


def _layers(model: Any, count: int, path: str) -> Sequence[nn.Module]:
    stacks = [module for module in (model.get_decoder() or model).modules() if isinstance(module, nn.ModuleList)]
    found = next((stack for stack in stacks if len(stack) == count), None)
    if found is None:
        raise TargetError(f"target.path = {path}: {type(model).__name__} has no list of {count} layers to count")
    return list(found)


def _kinds(text: Any) -> list[str]:
    """What each layer does, as configurations name it; all attend to everything where nothing is said."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    return list(kinds) if kinds else ["full_attention"] * text.num_hidden_layers


def _routed_share(text: Any) -> float | None:
    """Share of a layer's experts that a token is sent to; None where there are none, or it is not said."""
    experts, routed = (
        next((value for name in names if isinstance(value := getattr(text, name, None), int) and value), None)
        for names in (EXPERTS, ROUTED)
    )
    return routed / experts if experts and routed else None
