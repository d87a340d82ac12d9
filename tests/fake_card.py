"""A card without memory: tensors that know their device and shape, on a machine that has no GPU.

Inside `fake_card` a model's weights are torch's fake tensors on a card. Whatever mixes devices, or needs a value on the
host, raises. Without gradients only: torch aborts the process where one is asked for on a device that it lacks.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
TYPES = {"float": torch.float32, "long": torch.int64, "bool": torch.bool, "int": torch.int32, "double": torch.float64}


class WithoutGuards(TorchFunctionMode):
    """Methods whose Python bindings switch to the tensor's card first, which is not there, as plain operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not args or not isinstance(args[0], Tensor) or args[0].device.type != "cuda":
            return func(*args, **kwargs)
        if name == "__getitem__":
            return indexed(args[0], args[1])
        if name == "__setitem__":
            aten.copy_(indexed(args[0], args[1]), args[2])
            return None
        if name == "contiguous":
            return args[0] if args[0].is_contiguous() else aten.clone(args[0], memory_format=torch.contiguous_format)
        if name in TYPES and func is getattr(Tensor, name, None):
            return aten._to_copy(args[0], dtype=TYPES[name])
        if name == "to":
            return moved(args[0], *args[1:], **kwargs)
        return func(*args, **kwargs)


def indexed(tensor: Tensor, index: Any) -> Tensor:
    """Indexing by numbers, slices, None, an ellipsis and tensors."""
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        missing = tensor.dim() - sum(part is not None and part is not Ellipsis for part in index)
        index = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
    place, picked = 0, {}
    for part in index:
        if part is None:
            tensor = aten.unsqueeze(tensor, place)
        elif isinstance(part, int):
            tensor = aten.select(tensor, place, part)
            continue
        elif isinstance(part, slice):
            tensor = aten.slice(tensor, place, part.start, part.stop, part.step or 1)
        else:
            picked[place] = part
        place += 1
    return aten.index(tensor, [picked.get(at) for at in range(max(picked) + 1)]) if picked else tensor


def moved(tensor: Tensor, *where: Any, **more: Any) -> Tensor:
    """`Tensor.to`."""
    for value in where:
        if isinstance(value, torch.dtype):
            more["dtype"] = value
        elif isinstance(value, Tensor):
            more |= {"device": value.device, "dtype": value.dtype}
        elif isinstance(value, (str, torch.device)):
            more["device"] = torch.device(value)
    more = {key: value for key, value in more.items() if key in ("device", "dtype") and value is not None}
    same = all(getattr(tensor, key) == value for key, value in more.items())
    return tensor if same else aten._to_copy(tensor, **more)


@contextmanager
def fake_card(model: nn.Module, device: str) -> Generator[None]:
    """Inside, the model's weights are on a card that is not there; it cannot be used afterwards."""
    with FakeTensorMode(), WithoutGuards(), torch.no_grad():
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    there = torch.empty(weight.shape, dtype=weight.dtype, device=device)
                    module._parameters[name] = nn.Parameter(there, requires_grad=False)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
        yield
