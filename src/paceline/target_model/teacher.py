"""The target's own distributions from its last hidden states: final norm, head and whatever lies between, nothing else.

The target's own forward runs, its decoder layers replaced by one that puts out the given states. So a norm that scales
by 1 + w, capped or scaled logits and other habits of a family are the family's own code. Layer weights are let go.

Shape letters: M states, H hidden, V vocabulary, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.config.schema import TargetConfig
from paceline.errors import TargetError
from paceline.target_model.facts import read_config
from paceline.target_model.introspect import Structure, head_of, hooked, main_output, run_plain
from paceline.target_model.load import load_model
from paceline.target_model.quantize import quantised


class Teacher:
    """Makes the target's logits from outputs of its last decoder layer.

    Args:
        model: a loaded target; it is changed and can do nothing else afterwards.
        structure: its parts.
        path: for errors.

    Raises:
        TargetError: the logits do not follow from the last layer's output alone.
    """

    def __init__(self, model: Any, structure: Structure, path: str) -> None:
        self._model, self._states = model, torch.empty(0)
        rows = structure.embedding.weight.shape[0]
        ids = torch.tensor([[1 % rows], [3 % rows], [2 % rows]], device=structure.embedding.weight.device)
        seen: list[Any] = []
        handle = structure.layers[-1].register_forward_hook(lambda module, args, output: seen.append(output))
        with hooked([handle]), torch.no_grad():
            expected = run_plain(model, ids).logits
        for layer in structure.layers:
            layer.forward = self._standing_in(as_tuple=isinstance(seen[0], tuple))
            for parameter in layer.parameters():
                parameter.data = parameter.data.new_empty(0)
        states = main_output(seen[0])
        if states is None or not torch.allclose(
            self(states.reshape(-1, states.shape[-1])), expected.reshape(-1, expected.shape[-1]), atol=1e-4, rtol=1e-3
        ):
            raise TargetError(
                f"target.path = {path}: its logits do not follow from the output of its last decoder layer alone, so "
                "it cannot teach distributions; leave kl, tv and lk out of objective.terms"
            )

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [M, V] of outputs of the last decoder layer [M, H]."""
        head = next(head_of(self._model).parameters())
        self._states = hidden.to(head.device, head.dtype)[:, None]
        ids = torch.zeros((len(hidden), 1), dtype=torch.long, device=head.device)
        return run_plain(self._model, ids).logits.reshape(len(hidden), -1)

    def _standing_in(self, *, as_tuple: bool) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return (self._states,) if as_tuple else self._states

        return forward


def load_teacher(settings: TargetConfig, device: str | torch.device = "cpu") -> Teacher:
    """The teacher of a target; its layers are loaded for a moment, on the CPU, and let go.

    Quantised weights are placed by their quantizer, so such layers pass through `device` itself.

    Raises:
        TargetError: no such target, or one that cannot teach; one line.
    """
    config = read_config(settings.path, settings.trust_remote_code)
    whole = settings.model_copy(update={"device_map": None})
    if quantised(config, settings.quantization):
        model, structure, _ = load_model(whole, device)
        return Teacher(model, structure, settings.path)
    model, structure, _ = load_model(whole, "cpu")
    teacher = Teacher(model, structure, settings.path)
    model.to(device)
    return teacher
