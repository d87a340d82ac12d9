"""Where a loaded model keeps its decoder layers, embedding, head and final norm: found by watching it run.

No list of architectures: a stack of decoder layers is whatever container of modules is called child after child on
hidden states while a few tokens pass through.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import TargetError
from paceline.text import first_line


@dataclass(frozen=True, slots=True)
class Structure:
    """The parts of a causal language model.

    Attributes:
        layers: decoder layers in order of execution.
        layers_name: dotted name of their container.
        embedding: the module that embeds token ids.
        head: the module that makes logits.
        embed_scale: layer 0 sees this times the embedding module's output; None where it sees something else.
        embed_note: what it sees in that case, in words.
        explicit_positions: whether the model, told positions 0, 1, ..., does as it does by itself. Some count from
            their pad id; those are left to themselves.
    """

    layers: list[nn.Module]
    layers_name: str
    embedding: Any
    head: Any
    embed_scale: float | None
    embed_note: str
    explicit_positions: bool = True


class ForwardStopped(Exception):
    """Raised by a hook once everything that is wanted has been seen; never leaves this room."""


def main_output(output: Any) -> Tensor | None:
    """Hidden states among what a layer returns: the tensor itself or the first entry of a tuple."""
    if isinstance(output, (tuple, list)):
        output = output[0] if output else None
    elif hasattr(output, "to_tuple"):
        output = output.to_tuple()[0]
    return output if isinstance(output, Tensor) else None


def main_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Hidden states among what a layer is called with: the first floating tensor of rank 3."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3:
            return value
    return None


def forward_names(model: nn.Module) -> set[str]:
    """Names of the arguments that the model's forward takes."""
    return set(inspect.signature(model.forward).parameters)


def cache_name(model: nn.Module) -> str | None:
    """How this model calls its key/value cache: the name has changed over transformers' versions."""
    names = forward_names(model)
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in names), None)


@contextmanager
def hooked(handles: list[Any]) -> Generator[None]:
    """Removes hooks at the end, whatever happens."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def find_structure(model: Any, num_layers: int) -> Structure:
    """Finds the parts of a model by running a few tokens through it.

    Args:
        model: causal language model, or a wrapper around one, in evaluation mode, weights loaded.
        num_layers: decoder layers that its configuration promises.

    Raises:
        TargetError: no stack of as many layers was called; one line.
    """
    embedding = model.get_input_embeddings()
    weight = embedding.weight
    rows = weight.shape[0]
    ids = torch.tensor([[1 % rows, 3 % rows, 2 % rows, 3 % rows]], device=weight.device)
    try:
        stacks = _called_stacks(model, ids)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # kernels that are missing, shapes that quantized weights do not allow
        raise TargetError(
            f"{type(model).__name__}: it loads, but cannot run on {weight.device} ({first_line(error)})"
        ) from error
    fitting = [(name, called) for name, called in stacks.items() if len(called) == num_layers]
    if not fitting:
        seen = ", ".join(f"{name} ({len(called)})" for name, called in stacks.items()) or "none"
        raise TargetError(
            f"{type(model).__name__}: no stack of {num_layers} decoder layers found that passes hidden states on "
            f"(seen: {seen}); such an architecture cannot be a target"
        )
    name, layers = min(fitting, key=lambda entry: entry[0].count("."))
    scale, note = embed_scale(model, embedding, layers[0], ids)
    explicit = _takes_plain_positions(model, layers[0], ids)
    return Structure(layers, name, embedding, head_of(model), scale, note, explicit)


def head_of(model: Any) -> Any:
    """The module that makes logits: the model's own, else that of a language model inside it; None without one."""
    for module in model.modules():
        head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
        if head is not None:
            return head
    return None


def _takes_plain_positions(model: nn.Module, first: nn.Module, ids: Tensor) -> bool:
    """Whether layer 0 puts out the same with positions 0, 1, ... as without any."""
    if "position_ids" not in forward_names(model):
        return False
    seen = []
    for explicit in (True, False):
        caught: list[Tensor] = []

        def stop(module: nn.Module, args: Any, output: Any, caught: list[Tensor] = caught) -> None:
            states = main_output(output)
            if states is not None:
                caught.append(states)
            raise ForwardStopped

        with hooked([first.register_forward_hook(stop)]), torch.no_grad(), suppress(ForwardStopped):
            model(**row_arguments(model, ids, explicit_positions=explicit))
        seen.append(caught)
    return len(seen[0]) == len(seen[1]) == 1 and torch.allclose(seen[0][0], seen[1][0], rtol=1e-3, atol=1e-5)


def _called_stacks(model: nn.Module, ids: Tensor) -> dict[str, list[nn.Module]]:
    """Containers whose children were each called once, in order, on [1, T, D] and returned [1, T, D]."""
    calls: list[tuple[nn.Module, bool]] = []

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        hidden, seen = main_output(output), main_input(args, kwargs)
        fits = hidden is not None and seen is not None and hidden.shape == seen.shape and hidden.dim() == 3
        calls.append((module, fits and hidden is not None and hidden.shape[:2] == ids.shape))

    containers = {
        name: list(module.children())
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
    }
    watched = {id(child): child for children in containers.values() for child in children}
    handles = [child.register_forward_hook(note, with_kwargs=True) for child in watched.values()]
    with hooked(handles), torch.no_grad():
        run_plain(model, ids)
    order: dict[int, int] = {}
    counts: dict[int, int] = {}
    for place, (module, fits) in enumerate(calls):
        counts[id(module)] = counts.get(id(module), 0) + (1 if fits else 1000)
        order[id(module)] = place
    found = {}
    for name, children in containers.items():
        called = [child for child in children if counts.get(id(child)) == 1]
        places = [order[id(child)] for child in called]
        if called and places == sorted(places):
            found[name] = called
    return found


def run_plain(model: Any, ids: Tensor) -> Any:
    """One forward without a cache over unpadded rows [B, T], positions left to the model."""
    return model(**row_arguments(model, ids, explicit_positions=False))


def row_arguments(model: nn.Module, ids: Tensor, *, explicit_positions: bool = True) -> dict[str, Any]:
    """Arguments of a forward over whole rows that start at position 0: ids, positions where they help, no cache.

    Rows may be right-padded; the caller adds the attention mask.
    """
    names = forward_names(model)
    arguments: dict[str, Any] = {"input_ids": ids}
    if explicit_positions and "position_ids" in names:
        arguments["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
    if "use_cache" in names:
        arguments["use_cache"] = False
    return arguments


def embed_scale(model: Any, embedding: Any, first: nn.Module, ids: Tensor) -> tuple[float | None, str]:
    """How the input of layer 0 relates to what the embedding module gives for a token.

    Args:
        model: the language model; everything before its first layer must hold real weights.
        embedding: its embedding module, own scale included.
        first: its first decoder layer.
        ids: probe tokens, int64 [1, T], with a repeated one.

    Returns:
        (scale, "") where layer 0 sees scale · embedding(id); (None, reason) otherwise.
    """
    caught: list[Tensor] = []

    def catch(module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = main_input(args, kwargs)
        if hidden is not None:
            caught.append(hidden.detach())
        raise ForwardStopped

    with hooked([first.register_forward_pre_hook(catch, with_kwargs=True)]), torch.no_grad():
        with suppress(ForwardStopped):
            run_plain(model, ids)
        own = embedding(ids)[0]
    if not caught:
        return None, "its first layer takes no hidden states of rank 3"
    seen, own = caught[0][0].double(), own.to(caught[0].device).double()
    if seen.shape != own.shape:
        return None, f"its embedding has width {own.shape[-1]} and its layers {seen.shape[-1]}"
    step = torch.finfo(caught[0].dtype).eps
    scale = float((seen * own).sum() / own.pow(2).sum().clamp_min(1e-300))
    if not torch.allclose(seen, scale * own, rtol=0, atol=max(8 * step * float(seen.abs().max()), 1e-12)):
        return None, "its first layer sees more than the token's embedding (positions or a norm come in between)"
    return _written_value(scale, 8 * step, model.config.get_text_config(decoder=True)), ""


def _written_value(scale: float, tolerance: float, config: Any) -> float:
    """A measured scale, replaced by 1 or by the configured number that it equals up to rounding."""
    written = [value for value in vars(config).values() if isinstance(value, float) and value > 0]
    for exact in (1.0, *written):
        if abs(scale - exact) <= tolerance * exact:
            return exact
    return scale
