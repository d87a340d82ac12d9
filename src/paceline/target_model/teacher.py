"""The target's own distributions from its last hidden states: final norm, head and what is between them, nothing else.

The target's own code runs, its decoder layers replaced by ones that put out the given states. So a norm that scales by
1 + w, capped or scaled logits and other habits of a family are the family's own.

Shape letters: M states, H hidden, V vocabulary.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import TargetError
from paceline.target_model.introspect import head_of, run_plain
from paceline.types import TeacherParts


class Teacher:
    """Makes the target's logits from outputs of its last decoder layer.

    Args:
        parts: what the loaded target handed over.
        device: where it runs.

    Raises:
        TargetError: the logits do not follow from the last layer's output alone; one line.
    """

    def __init__(self, parts: TeacherParts, device: str | torch.device = "cpu") -> None:
        self._model, self._states = _built_on_meta(parts.built_from), torch.empty(0)
        for name, tensor in parts.tensors.items():
            prefix, _, own = name.rpartition(".")
            module = self._model.get_submodule(prefix)
            moved = tensor.to(device)
            if own in module._buffers:
                module._buffers[own] = moved
            else:
                setattr(module, own, nn.Parameter(moved, requires_grad=False))
        for layer in self._model.get_submodule(parts.layers).children():
            layer.forward = self._standing_in(as_tuple=parts.layers_give_tuples)
        self._model.get_input_embeddings().forward = self._embedded
        self._head = next(head_of(self._model).parameters())
        found = self(parts.states.to(device)).cpu()
        if not torch.allclose(found, parts.logits.cpu(), atol=1e-4, rtol=1e-3):
            raise TargetError(
                f"{type(self._model).__name__}: its logits do not follow from the output of its last decoder layer "
                "alone, so it cannot teach distributions; leave kl, tv and lk out of objective.terms"
            )

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [M, V] of outputs of the last decoder layer [M, H]."""
        self._states = hidden.to(self._head.device, self._head.dtype)[:, None]
        ids = torch.zeros((len(hidden), 1), dtype=torch.long, device=self._head.device)
        return run_plain(self._model, ids).logits.reshape(len(hidden), -1)

    def _embedded(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros_like(self._states)

    def _standing_in(self, *, as_tuple: bool) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return (self._states,) if as_tuple else self._states

        return forward


def _built_on_meta(built_from: bytes) -> Any:
    """The target's model without memory for its weights."""
    from transformers.dynamic_module_utils import init_hf_modules

    init_hf_modules()  # from then on code that came with the target can be imported
    model_class, config = pickle.loads(built_from)
    with torch.device("meta"):
        return model_class(config).eval()
