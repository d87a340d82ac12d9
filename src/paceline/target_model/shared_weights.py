"""The two ends that a drafter shares with its target: what layer 0 sees of a token, and the weights of the head.

`load_embedding_and_head` reads these tensors alone from safetensors, so a drafter process never holds the target.

Shape letters: V vocabulary, H hidden size.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import TargetError
from paceline.target_model.adapter import adapted_names
from paceline.target_model.facts import describe, read_config
from paceline.target_model.files import read_header, resolve_folder, weight_files
from paceline.target_model.introspect import Structure, embed_scale, head_of
from paceline.target_model.quantize import stored_quantization

CHUNK = 8192
"""Vocabulary rows that are embedded at once."""


@torch.no_grad()
def drafter_embedding(structure: Structure, path: str) -> Tensor:
    """What the target's layer 0 sees for every token.

    Returns:
        [V, H], type and device of the target's embedding; the weight itself where nothing is scaled.

    Raises:
        TargetError: layer 0 sees something that is no function of the token alone.
    """
    if structure.embed_scale is None:
        raise TargetError(
            f"target.path = {path}: no drafter can share its embedding: {structure.embed_note}; choose another target"
        )
    weight: Tensor = structure.embedding.weight.detach()
    if type(structure.embedding) is nn.Embedding and structure.embed_scale == 1.0:
        return weight
    ids = torch.arange(weight.shape[0], device=weight.device)
    parts = [structure.embedding(part).detach() for part in ids.split(CHUNK)]
    table = torch.cat(parts)
    return table if structure.embed_scale == 1.0 else table * structure.embed_scale


def drafter_head(structure: Structure, path: str) -> Tensor:
    """Weight of the head, [V, H]; refused where the head is missing, biased or not linear."""
    head = structure.head
    weight = getattr(head, "weight", None)
    if head is None or not isinstance(weight, Tensor) or weight.dim() != 2:
        raise TargetError(f"target.path = {path}: it has no linear language model head that a drafter could share")
    if weight.is_meta:
        raise TargetError(f"target.path = {path}: its head lies on the disk; give it a device in target.device_map")
    bias = getattr(head, "bias", None)
    if isinstance(bias, Tensor) and (bias.is_meta or bool((bias != 0).any())):
        raise TargetError(
            f"target.path = {path}: its head has a bias, which a drafter's head lacks; choose another target"
        )
    if weight.shape != structure.embedding.weight.shape:
        raise TargetError(
            f"target.path = {path}: embedding {list(structure.embedding.weight.shape)} and head {list(weight.shape)} "
            "differ in shape, so no drafter can share both; choose another target"
        )
    return weight.detach()


def load_embedding_and_head(
    path: str, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False, adapter: str | None = None
) -> tuple[Tensor, Tensor]:
    """Embedding (as layer 0 sees it) and head of a target, without its other weights where possible.

    Args:
        path: folder or hub name of the target.
        dtype: type of the result.
        trust_remote_code: whether code that comes with the target may run.
        adapter: folder of an adapter that is merged.

    Returns:
        embedding [V, H] and head [V, H] on the CPU; one and the same tensor where they are tied and unscaled.

    Raises:
        TargetError: tensors missing from the files, or ends that no drafter can share; one line.
    """
    folder = resolve_folder(path)
    config = read_config(path, trust_remote_code)
    files = {} if path.endswith(".gguf") or getattr(config, "quantization_config", None) else _tensor_places(folder)
    whole = functools.partial(_load_whole, path, dtype, trust_remote_code, adapter)
    model = build_on_meta(config, trust_remote_code)
    layers = _resting_layers(model, describe(path, trust_remote_code).num_layers)
    embedding, head = model.get_input_embeddings(), head_of(model)
    names = {id(module): name for name, module in model.named_modules()}
    wanted = [
        f"{names[id(module)]}.weight" for module in (embedding, head) if getattr(module, "weight", None) is not None
    ]
    stored = [_stored_name(files, name) for name in wanted]
    tied = head is not None and head.weight is embedding.weight
    more = [name for name, _ in embedding.named_parameters() if name != "weight"]  # e.g. a norm of its own
    if layers is None or more or not stored or stored[0] is None or (stored[-1] is None and not tied):
        return whole()
    if adapter is not None and not _stays_in(model, layers, adapted_names(adapter)):
        return whole()
    rows = _read(files, stored[0])
    other = _read(files, stored[-1]) if stored[-1] is not None and stored[-1] != stored[0] else rows
    if tied and not torch.equal(rows, other):
        return whole()  # the files contradict the configuration
    _fill(model, embedding, head, layers, rows.to(dtype))
    if head is not None:
        head.weight = embedding.weight if tied else nn.Parameter(other.to(dtype), requires_grad=False)
    ids = torch.tensor([[1, 3, 2, 3]]) % embedding.weight.shape[0]
    try:
        scale, note = embed_scale(model, embedding, layers[0], ids)
    except RuntimeError:  # something before the first layer needs weights that are not there
        return whole()
    structure = Structure(layers, "", embedding, head, scale, note)
    bias = getattr(head, "bias", None)
    if isinstance(bias, Tensor) and head is not None:
        name = _stored_name(files, f"{names[id(head)]}.bias")
        head.bias = nn.Parameter(torch.zeros(bias.shape) if name is None else _read(files, name), requires_grad=False)
    return drafter_embedding(structure, path).to(dtype), drafter_head(structure, path).to(dtype)


def build_on_meta(config: Any, trust_remote_code: bool = False) -> Any:
    """The target's model without memory for its weights; tied weights are one parameter."""
    with torch.device("meta"):
        model = model_class(config).from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    return model.eval()


def model_class(config: Any) -> Any:
    """The auto class that builds this configuration's language model, wrapper included where it is one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM
    from transformers.models.auto import modeling_auto as auto

    named = (config.architectures or [None])[0]
    tables = (
        (AutoModelForCausalLM, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (AutoModelForImageTextToText, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        (AutoModelForMultimodalLM, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES),
    )
    exact = [kind for kind, table in tables if named is not None and table.get(config.model_type) == named]
    possible = [kind for kind, table in tables if config.model_type in table]
    return (exact or possible or [AutoModelForCausalLM])[0]


def _tensor_places(folder: Path) -> dict[str, Path]:
    return {name: file for file in weight_files(folder) for name in read_header(file)}


def _stored_name(files: dict[str, Path], name: str | None) -> str | None:
    """The name under which a parameter is stored: its own, or one that differs only in leading module names."""
    if name is None:
        return None
    if name in files:
        return name
    parts = name.split(".")
    for start in range(len(parts) - 1):
        tail = ".".join(parts[start:])
        found = [stored for stored in files if stored == tail or stored.endswith("." + tail)]
        if len(found) == 1:
            return found[0]
    return None


def _read(files: dict[str, Path], name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(str(files[name]), framework="pt") as reader:
        return reader.get_tensor(name)


def _resting_layers(model: Any, num_layers: int) -> list[nn.Module] | None:
    """Decoder layers of a model that cannot run: the outermost list of as many modules beside the embedding."""
    embedding = model.get_input_embeddings()
    home = next(name for name, module in model.named_modules() if module is embedding).rpartition(".")[0]
    found = {
        name: list(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and name.startswith(home)
    }
    return found[min(found, key=lambda name: name.count("."))] if found else None


def _fill(model: Any, embedding: Any, head: Any, layers: list[nn.Module], weight: Tensor) -> None:
    """Gives real memory to what runs before the first layer: the embedding's weight and small modules beside it."""
    spared = {id(module) for layer in layers for module in layer.modules()}
    spared |= {id(module) for module in (head.modules() if head is not None else ())}
    embedding.weight = nn.Parameter(weight, requires_grad=False)
    home = next(name for name, module in model.named_modules() if module is embedding).rpartition(".")[0]
    for name, module in model.named_modules():
        if id(module) in spared or not name.startswith(home):
            continue
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                filled = nn.Parameter(torch.randn(parameter.shape, dtype=weight.dtype), requires_grad=False)
                setattr(module, key, filled)
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, key, torch.zeros(buffer.shape, dtype=buffer.dtype))
        if module is not embedding or type(embedding) is not nn.Embedding:
            if module is embedding:
                module.weight = nn.Parameter(weight.clone(), requires_grad=False)  # initialising writes in place
            with torch.random.fork_rng(devices=[]):
                model._init_weights(module)
            if module is embedding:
                module.weight = nn.Parameter(weight, requires_grad=False)


def _stays_in(model: Any, layers: list[nn.Module], names: list[str] | None) -> bool:
    """Whether an adapter's tensors, by name, all change decoder layers, and neither embedding nor head."""
    home = next(name for name, module in model.named_modules() if module is layers[0]).rpartition(".")[0]
    return names is not None and all(f".{home}." in name for name in names)


def _load_whole(path: str, dtype: torch.dtype, trust_remote_code: bool, adapter: str | None) -> tuple[Tensor, Tensor]:
    from paceline.config.schema import TargetConfig
    from paceline.target_model.load import load_model

    quantization = "none" if stored_quantization(read_config(path, trust_remote_code)) is not None else "stored"
    settings = TargetConfig(path=path, trust_remote_code=trust_remote_code, adapter=adapter, quantization=quantization)
    model, structure, _ = load_model(settings, "cpu", dtype)
    del model
    embedding, head = drafter_embedding(structure, path), drafter_head(structure, path)
    return embedding.to(dtype), head.to(dtype)
