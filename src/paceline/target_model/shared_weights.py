"""What a drafter takes over from its target: embedding, head, and for some objectives the target's own logits.

The loaded target hands these over once (`shared_weights`), so no other process opens its files.

Shape letters: V vocabulary, H hidden size, M probe tokens.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.pipeline.feature_pool import check_room
from paceline.target_model.facts import read_config
from paceline.target_model.introspect import hooked, main_output, run_plain
from paceline.target_model.load import load_model
from paceline.target_model.model import TargetModel
from paceline.target_model.quantize import stored_quantization
from paceline.types import SharedWeights, TeacherParts


def shared_weights(target: TargetModel, *, with_teacher: bool = False) -> SharedWeights:
    """What the drafters of a target take over from it, where it is loaded; no copies are made where none are needed.

    Args:
        target: loaded.
        with_teacher: whether an objective needs the target's logits.

    Raises:
        TargetError: an embedding or head that no drafter can share; one line.
    """
    embedding, head = target.embedding, target.head
    if head.data_ptr() == embedding.data_ptr():
        head = embedding
    return SharedWeights(embedding, head, _teacher_parts(target) if with_teacher else None, target.embedding_scale)


@torch.no_grad()
def _teacher_parts(target: TargetModel) -> TeacherParts:
    """Everything that runs behind the last decoder layer, found by running a few tokens."""
    model, structure = target.model, target.structure
    rows = structure.embedding.weight.shape[0]
    ids = torch.tensor([[1 % rows], [3 % rows], [2 % rows]], device=target.device)
    states: list[Any] = []
    called: list[nn.Module] = []
    handles = [structure.layers[-1].register_forward_hook(lambda module, args, output: states.append(output))]
    inside = {id(module) for layer in structure.layers for module in layer.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    handles += [module.register_forward_hook(lambda module, args, output: called.append(module)) for module in outside]
    with hooked(handles):
        logits = run_plain(model, ids).logits
    last = main_output(states[0])
    assert last is not None, "the structure was found by what its layers put out"
    ran = {id(module) for module in called}
    tensors = {
        f"{prefix}.{name}" if prefix else name: tensor.detach()
        for prefix, module in model.named_modules()
        if id(module) in ran and module is not structure.embedding
        for name, tensor in _own_tensors(module)
    }
    head = next(name for name, module in model.named_modules() if module is structure.head)
    tensors[f"{head}.weight"] = target.head
    return TeacherParts(
        pickle.dumps((type(model), model.config)),
        structure.layers_name,
        isinstance(states[0], tuple),
        tensors,
        last.reshape(len(ids), -1),
        logits.reshape(len(ids), -1),
    )


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def on_host(weights: SharedWeights) -> SharedWeights:
    """The same in memory that other processes of this machine can map: sent to them, no tensor is copied.

    Raises:
        StageError: the machine's shared memory is too small.
    """
    done: dict[int, Tensor] = {}
    sizes: dict[int, int] = {}

    def sized(tensor: Tensor) -> Tensor:
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    _each(weights, sized)
    check_room(
        sum(sizes.values()),
        "embedding and head, which drafters take over from the target, need",
        "lower flow.pool_buffers, or give the container more (docker: --shm-size)",
    )

    def shared(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in done:
            done[tensor.data_ptr()] = tensor.detach().cpu().contiguous().share_memory_()
        return done[tensor.data_ptr()]

    return _each(weights, shared)


def _each(weights: SharedWeights, change: Callable[[Tensor], Tensor]) -> SharedWeights:
    teacher = weights.teacher
    if teacher is not None:
        tensors = {name: change(tensor) for name, tensor in teacher.tensors.items()}
        teacher = replace(teacher, tensors=tensors, states=change(teacher.states), logits=change(teacher.logits))
    return replace(weights, embedding=change(weights.embedding), head=change(weights.head), teacher=teacher)


def load_shared_weights(
    settings: TargetConfig, dtype: str | torch.dtype = torch.float32, *, with_teacher: bool = False
) -> SharedWeights:
    """The same of a target that is not loaded, on the CPU: read with a single decoder layer where possible.

    Args:
        settings: the target's; quantized weights are widened.
        dtype: of the result.
        with_teacher: see `shared_weights`; needs all layers.

    Raises:
        TargetError: no such target, or ends that no drafter can share; one line.
    """
    config = read_config(settings.path, settings.trust_remote_code)
    widened = "none" if stored_quantization(config) is not None else "stored"
    settings = settings.model_copy(update={"quantization": widened, "device_map": None})
    shallow = None
    if not with_teacher and settings.adapter is None and widened == "stored" and not settings.path.endswith(".gguf"):
        shallow = _with_one_layer(config)
    try:
        model, structure, facts = load_model(settings, "cpu", dtype, config=shallow)
    except TargetError:
        if shallow is None:
            raise
        model, structure, facts = load_model(settings, "cpu", dtype)
    return shared_weights(TargetModel(model, structure, facts, [0]), with_teacher=with_teacher)


def _with_one_layer(config: Any) -> Any:
    """A configuration with the first decoder layer alone; some families refuse that, or another shape follows."""
    shallow = copy.deepcopy(config)
    text = shallow.get_text_config(decoder=True)
    count = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[:1])
    text.num_hidden_layers = 1
    return shallow
