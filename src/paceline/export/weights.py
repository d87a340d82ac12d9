"""Tensors of a drafter folder: which there must be, writing them (sharded when large), reading them back, hashing them.

Names carry no prefix; embedding, head and rotary tables are the target's and are never part of a drafter folder
(3 + 11 · layers tensors). Shape letters: D hidden size, N taps, H query heads, G key/value heads, E head dim, F width
of the MLP.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.errors import ExportError
from paceline.text import parsed_json

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.drafter.spec import DrafterSpec

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""Types in which a folder can be written."""
EMBEDDING = "embed_tokens.weight"
"""A folder's own embedding, where the target's stored one is not what the drafter was trained with."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
"""Above this many bytes the tensors are spread over several files, as transformers has long done."""
MAX_LISTED = 8
"""At most this many tensors are named in one error."""


def expected_shapes(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor of a drafter, in the order in which they are written."""
    hidden, width = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(spec.taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(spec.num_layers):
        layer = f"layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.self_attn.q_norm.weight": (spec.head_dim,),
            f"{layer}.self_attn.k_norm.weight": (spec.head_dim,),
            f"{layer}.mlp.gate_proj.weight": (width, hidden),
            f"{layer}.mlp.up_proj.weight": (width, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, width),
        }
    return shapes


def check_shapes(where: str, spec: DrafterSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors that are missing, left over or misshaped; one line for each kind of error.

    Engines take random weights for missing tensors and ignore unknown ones without a word; here both are errors.

    Raises:
        ExportError: names the tensors, the shapes found and the shapes wanted.
    """
    wanted = expected_shapes(spec)
    errors = []
    if missing := [name for name in wanted if name not in shapes]:
        errors.append(f"{where}: tensors missing: {listed(missing)}; write the folder again from its checkpoint")
    if extra := sorted(name for name in shapes if name not in wanted):
        errors.append(
            f"{where}: tensors that no drafter of this configuration has: {listed(extra)}; "
            "embedding and head belong to the target, other names to another kind of drafter"
        )
    for name, shape in wanted.items():
        if name in shapes and tuple(shapes[name]) != shape:
            found = list(shapes[name])
            errors.append(f"{where}: {name} has shape {found}, the configuration asks for {list(shape)}")
    if errors:
        raise ExportError(*errors)


def listed(names: Sequence[str]) -> str:
    """Names of tensors for a message: the first ones, and how many more."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def in_dtype(state: Mapping[str, Tensor], spec: DrafterSpec, dtype: str) -> dict[str, Tensor]:
    """The tensors as they are stored: on the CPU, contiguous, in `dtype` (rounded to nearest even), in the standard
    order.

    Raises:
        ExportError: an unknown type, tensors that do not fit the spec, or values that are not finite.
    """
    if dtype not in DTYPES:
        raise ExportError(f"dtype {dtype}: a drafter folder is written in {' or '.join(DTYPES)}")
    check_shapes("drafter state", spec, {name: tuple(tensor.shape) for name, tensor in state.items()})
    stored = {name: state[name].detach().to("cpu", DTYPES[dtype]).contiguous() for name in expected_shapes(spec)}
    if broken := [name for name, tensor in stored.items() if not bool(torch.isfinite(tensor).all())]:
        raise ExportError(f"drafter state: not finite in {dtype}: {listed(broken)}; export an earlier checkpoint")
    return stored


def write_weights(folder: Path, stored: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write the tensors: one file, or shards with an index when they take more than `shard_bytes`.

    Returns:
        The files written, the index last.
    """
    shards = _shards(stored, shard_bytes)
    if len(shards) == 1:
        path = folder / SINGLE_FILE
        save_file(shards[0], path, metadata={"format": "pt"})
        return [path]
    written, places = [], {}
    for number, shard in enumerate(shards, start=1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, path.name)
        written.append(path)
    index = {"metadata": {"total_size": sum(map(_bytes, stored.values()))}, "weight_map": places}
    path = folder / INDEX_FILE
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*written, path]


def _shards(stored: Mapping[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in stored.items():
        if shards[-1] and filled + _bytes(tensor) > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += _bytes(tensor)
    return shards


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder, from one file or from shards.

    Raises:
        ExportError: no weights, an index that names absent or unreadable files, or a shard that lacks its tensors.
    """
    if (folder / INDEX_FILE).is_file():
        try:
            places = parsed_json((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
            files = sorted({str(Path(file)) for file in dict(places).values()})
        except (ValueError, KeyError, TypeError) as error:
            raise ExportError(f"{folder / INDEX_FILE}: no index of safetensors shards ({error})") from error
        if outside := [file for file in files if Path(file).name != file]:
            raise ExportError(f"{folder / INDEX_FILE}: names a file outside the folder ({outside[0]})")
    elif (folder / SINGLE_FILE).is_file():
        places, files = None, [SINGLE_FILE]
    else:
        raise ExportError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; give a drafter folder")
    state: dict[str, Tensor] = {}
    for name in files:
        state |= dict(_tensors(folder / name))
    if places is not None and (lost := sorted(set(places) - set(state))):
        raise ExportError(f"{folder / INDEX_FILE}: its shards lack {listed(lost)}")
    return state


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as reader:
            for name in reader.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, reader.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ExportError(f"{path}: cannot be read as safetensors ({error})") from error


def content_hash(stored: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of all tensors, independent of files and order: 16 hex digits.

    Two folders of one name with different weights differ in it; evaluation and the model card print it.
    """
    digest = hashlib.sha256()
    for name in sorted(stored):
        tensor = stored[name].detach().to("cpu").contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.ndim else tensor.numpy().tobytes())
    return digest.hexdigest()[:16]
