"""Training checkpoints of other trainers of DFlash drafters, read under our names.

Weights, AdamW's moments where they are stored, step and epoch where they are said. Facts about the layouts were read at
the commits that docs/comparison.md names:

| trainer | a checkpoint | weights | moments |
|---|---|---|---|
| SpecForge | ``RUN-stepN/`` | ``training_state.pt`` | there or in ``training_state_rankR.pt``, by place |
| DeepSpec | ``step_N/`` | ``model.safetensors`` | ``training_state.rankR.pt``, by place |
| TorchSpec | ``iter_N/`` | ``model/`` (DCP) | ``optimizer/`` (DCP), by place |
| NeMo AutoModel | ``epoch_E_step_N/`` | ``model/`` (safetensors) | ``optim/`` (DCP), by name |
| speculators | ``E/`` | ``model.safetensors`` | ``optimizer_state_dict.pt``, by name |
| paceline | ``checkpoints/step-N/`` | ``drafter.safetensors`` | ``state.pt``, by place |

DCP is torch.distributed.checkpoint. Moments by place are in the order in which the trainer's network registers its
parameters. The float32 masters beside them show whether that order is right: rounded, they are the stored weights.
Nothing here runs code from a file: pickles are read with what tensors and plain values need, and nothing else.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from paceline.checkpoint import checkpoints
from paceline.drafter.network import Drafter
from paceline.drafter.spec import DrafterSpec
from paceline.errors import ExportError
from paceline.export.compatibility import build_spec
from paceline.export.config_keys import integer, layer_ids, read_config, shape_fields
from paceline.export.speculators import spec_from_speculators
from paceline.export.weights import read_weights
from paceline.export.zlab import ARCHITECTURE, spec_from_zlab
from paceline.text import first_line, parsed_json

if TYPE_CHECKING:
    from torch import Tensor


Moments = dict[str, dict[str, "Tensor"]]
"""Tensor name → ``exp_avg``, ``exp_avg_sq`` (of its shape) and ``step`` (0 dimensions), as torch's AdamW keeps them."""
ADAMW = ("exp_avg", "exp_avg_sq", "step")
LAYER = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm"),
    *("self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm"),
    "post_attention_layernorm",
)
"""A draft layer's parts in the order in which all these trainers register them."""
TORCHSPEC_NAMES = {"context_proj": "fc", "context_norm": "hidden_norm", "final_norm": "norm"}
PICKLED = {
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
    "torch": {"Size", "float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.serialization": {"_get_layout"},
}
"""Module → names that the ``.metadata`` of a DCP folder may hold."""


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint of another trainer.

    Attributes:
        trainer: its name.
        folder: of the checkpoint, where a folder of several was given.
        state: tensors of the drafter by our names; float32 masters where they are stored.
        moments: of those tensors that have them.
        step, epoch: optimizer steps and whole epochs behind it; None where it does not say.
        spec: the drafter, where the layout has its configuration.
        left_over: tensors there that are no drafter's.
    """

    trainer: str
    folder: Path
    state: dict[str, Tensor]
    moments: Moments = field(default_factory=dict)
    step: int | None = None
    epoch: int | None = None
    spec: DrafterSpec | None = None
    left_over: tuple[str, ...] = ()


def find_foreign(folder: str | Path) -> tuple[str, Path] | None:
    """Trainer and folder of the checkpoint here, or of the newest one in a folder of several; None where there is none.

    Raises:
        ExportError: checkpoints of several runs.
    """
    root = Path(folder)
    for trainer, layout in LAYOUTS.items():
        if (root / layout.mark).exists():
            return trainer, root
        inside = [
            (int(match["number"]), match["run"] or "", path)
            for path in (root.iterdir() if root.is_dir() else ())
            if (match := re.fullmatch(layout.named, path.name)) and not path.is_symlink()
            if (path / layout.mark).exists()
        ]
        if len(runs := {run for _, run, _ in inside}) > 1:
            raise ExportError(
                f"{root}: checkpoints of several runs ({', '.join(sorted(runs))}); give one of their folders"
            )
        if inside:
            return trainer, max(inside)[2]
    return None


def read_foreign(folder: str | Path) -> ForeignCheckpoint | None:
    """The checkpoint of another trainer in a folder; None where there is none.

    Raises:
        ExportError: a file that cannot be read, or moments that do not belong to the weights.
    """
    found = find_foreign(folder)
    if found is None:
        return None
    trainer, place = found
    try:
        return LAYOUTS[trainer].read(place)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ExportError):
            raise
        raise ExportError(
            f"{place}: looks like a checkpoint of {trainer} and cannot be read ({type(error).__name__}: "
            f"{first_line(error)}); it must be whole, with the files of all ranks"
        ) from error


def _specforge(folder: Path) -> ForeignCheckpoint:
    shared = _loaded(folder / "training_state.pt")
    stored, left_over = _split(shared["draft_state_dict"])
    replicated = shared.get("replicated_optimizer_state")
    parts = [replicated] if replicated is not None else []
    if not parts:
        count = int(shared.get("world_size", 1))
        parts = [_loaded(folder / f"training_state_rank{rank}.pt")["optimizer"] for rank in range(count)]
    state, moments = _by_place(folder, stored, _order(stored), [part for part in parts if part])
    return ForeignCheckpoint(
        "SpecForge", folder, state, moments, shared.get("global_step"), shared.get("epoch"), None, left_over
    )


def _deepspec(folder: Path) -> ForeignCheckpoint:
    where, config = read_config(folder)
    if config.get("markov_rank") or config.get("enable_confidence_head"):
        raise ExportError(f"{where}: has a Markov or a confidence head; that is another kind of drafter (DSpark)")
    stored, left_over = _split(read_weights(folder))
    ranks = [_loaded(folder / "training_state.rank0.pt")]
    ranks += [_loaded(folder / f"training_state.rank{rank}.pt") for rank in range(1, int(ranks[0]["world_size"]))]
    state, moments = _by_place(folder, stored, _order(stored), [rank["optimizer"] for rank in ranks])
    fields = shape_fields(where, config) | {
        "causal": (False,) * integer(where, config, "num_hidden_layers"),
        "block_size": integer(where, config, "block_size", at_least=2),
        "mask_token_id": integer(where, config, "mask_token_id", at_least=0),
        "taps": layer_ids(where, config, "target_layer_ids"),
        "num_target_layers": integer(where, config, "num_target_layers"),
        "sample_from_anchor": True,  # its slot k is trained on the token after it
    }
    match = re.fullmatch(r"step_(\d+)", folder.name)
    step = int(match[1]) if match else None
    return ForeignCheckpoint("DeepSpec", folder, state, moments, step, None, build_spec(where, fields), left_over)


def _torchspec(folder: Path) -> ForeignCheckpoint:
    found = {name.partition("draft_model.")[2] or name: tensor for name, tensor in _dcp(folder / "model").items()}
    renamed = {
        TORCHSPEC_NAMES.get(head, head) + dot + rest: tensor
        for (head, dot, rest), tensor in ((name.partition("."), tensor) for name, tensor in found.items())
    }
    stored, left_over = _split(renamed)
    order = ["fc.weight", "hidden_norm.weight", *(name for name in _order(stored) if name.startswith("layers."))]
    parts = []
    if (folder / "optimizer").is_dir():
        parts = [_nested(_dcp(folder / "optimizer"))]
    state, moments = _by_place(folder, stored, [*order, "norm.weight"], parts)
    said = parsed_json((folder / "meta.json").read_text(encoding="utf-8")) if (folder / "meta.json").is_file() else {}
    return ForeignCheckpoint("TorchSpec", folder, state, moments, said.get("global_step"), None, None, left_over)


def _nested(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    """TorchSpec's optimizer from the flat names of its DCP folder, as SpecForge and DeepSpec have it."""
    state: dict[int, dict[str, Tensor]] = {}
    masters: dict[int, Tensor] = {}
    for name, tensor in flat.items():
        if match := re.fullmatch(r"optim_state\.optim\.state\.(\d+)\.(\w+)", name):
            state.setdefault(int(match[1]), {})[match[2]] = tensor
        elif match := re.fullmatch(r"optim_state\.fp32_params\.(\d+)", name):
            masters[int(match[1])] = tensor
    return {"optimizer_state_dict": {"state": state}, "fp32_params": [masters[place] for place in sorted(masters)]}


def _nemo(folder: Path) -> ForeignCheckpoint:
    meta = _loaded(folder / "dflash_meta.pt")
    model = folder / "model"
    configs = [
        path for path in (model / "consolidated", model / ".hf_metadata", model) if (path / "config.json").is_file()
    ]
    if not configs:
        raise ExportError(
            f"{model}: no config.json there, nor in consolidated or .hf_metadata; it says what the drafter is"
        )
    where, config = read_config(configs[0])
    spec = spec_from_zlab(where, {**config, "architectures": [ARCHITECTURE]})
    sharded = any(model.glob("*.safetensors"))
    stored, left_over = _split(_sharded(model) if sharded else read_weights(configs[0]))
    moments: Moments = {}
    if (folder / "optim").is_dir():
        for name, tensor in _dcp(folder / "optim").items():
            if match := re.fullmatch(r"optim\.state\.(.+)\.(exp_avg|exp_avg_sq|step)", name):
                moments.setdefault(match[1], {})[match[2]] = tensor
    state = {name: tensor.float() for name, tensor in stored.items()}
    step, epoch = meta.get("global_step"), meta.get("epoch")
    return ForeignCheckpoint("NeMo AutoModel", folder, state, _fitting(moments, state), step, epoch, spec, left_over)


def _speculators(folder: Path) -> ForeignCheckpoint:
    where, config = read_config(folder)
    stored, left_over = _split(read_weights(folder))
    payload = _loaded(folder / "optimizer_state_dict.pt")
    moments: Moments = {}
    for optimizer in payload if isinstance(payload, list) else [payload]:
        names = [name for group in optimizer["param_groups"] for name in group.get("param_names", ())]
        for place, entry in optimizer["state"].items():
            name = place if isinstance(place, str) else names[place] if place < len(names) else str(place)
            moments[name.removeprefix("module.")] = entry
    state = {name: tensor.float() for name, tensor in stored.items()}
    taken = _fitting(moments, state)
    steps = {int(entry["step"]) for entry in taken.values()}
    epoch = int(folder.name) + 1 if folder.name.isdigit() else None
    spec = spec_from_speculators(where, config)
    return ForeignCheckpoint("speculators", folder, state, taken, max(steps, default=None), epoch, spec, left_over)


def _ours(folder: Path) -> ForeignCheckpoint:
    step = int(folder.name.removeprefix(checkpoints.PREFIX))
    run = folder.parent.parent
    note, found = checkpoints.read_note(run, step), checkpoints.read_checkpoint(run, step)
    spec, state = DrafterSpec.from_dict(note["run"]["drafter"]), found["network"]
    with torch.device("meta"):
        order = [(name, parameter.ndim) for name, parameter in Drafter(spec).named_parameters()]
    # Matrices come first in AdamW, then norms, each as the network registers them; Muon leaves it the norms.
    matrices = [] if "muon" in found["optimizer"] else [name for name, ndim in order if ndim > 1]
    places = enumerate([*matrices, *(name for name, ndim in order if ndim == 1)])
    entries = found["optimizer"]["adamw"]["state"]
    moments = _fitting({name: entries[place] for place, name in places if place in entries}, state)
    return ForeignCheckpoint("paceline", folder, state, moments, step, note.get("epoch"), spec)


@dataclass(frozen=True)
class _Layout:
    """How a trainer's checkpoints are known, and read."""

    mark: str
    named: str
    read: Callable[[Path], ForeignCheckpoint]


LAYOUTS = {
    "SpecForge": _Layout("training_state.pt", r"(?P<run>.+)-step(?P<number>\d+)", _specforge),
    "DeepSpec": _Layout("training_state.rank0.pt", r"(?P<run>)step_(?P<number>\d+)", _deepspec),
    "TorchSpec": _Layout("model/.metadata", r"(?P<run>)iter_(?P<number>\d+)", _torchspec),
    "NeMo AutoModel": _Layout("dflash_meta.pt", r"(?P<run>)epoch_\d+_step_(?P<number>\d+)", _nemo),
    "speculators": _Layout("optimizer_state_dict.pt", r"(?P<run>)(?P<number>\d+)", _speculators),
    "paceline": _Layout(checkpoints.NOTE, r"(?P<run>)step-(?P<number>\d+)", _ours),
}
"""Trainer → its layout: a file that only its checkpoints have, the names of their folders, the reader."""


def _loaded(path: Path) -> Any:
    """What torch saved: tensors, plain values and the arrays of numpy's random states."""
    try:
        from numpy._core.multiarray import _reconstruct
    except ImportError as error:
        raise ExportError(f"{path}: needs numpy 2 to be read") from error
    arrays: list[Any] = [_reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    with torch.serialization.safe_globals(arrays):
        return torch.load(path, map_location="cpu", weights_only=True)


class _PlainUnpickler(pickle.Unpickler):
    """Takes what the metadata of a DCP folder holds, and no other name."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """The class of a name that checkpoints need; an error for all other names."""
        if global_name not in PICKLED.get(module_name, ()):
            raise pickle.UnpicklingError(f"holds {module_name}.{global_name}, which no checkpoint needs")
        return super().find_class(module_name, global_name)


class _PlainReader(FileSystemReader):
    """A DCP folder on the disk, whose metadata runs no code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The folder's metadata, read by `_PlainUnpickler`."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _PlainUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _dcp(folder: Path) -> dict[str, Tensor]:
    return _read_whole(_PlainReader(folder))


def _sharded(folder: Path) -> dict[str, Tensor]:
    return _read_whole(HuggingFaceStorageReader(str(folder)))


def _read_whole(reader: Any) -> dict[str, Tensor]:
    """All tensors of a distributed checkpoint, put together from what each rank wrote."""
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def _split(found: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Tensors that a drafter may have, and the names of the others."""
    plain = {
        re.sub(r"^(module\.|_orig_mod\.|model\.|draft_model\.)+", "", name): tensor for name, tensor in found.items()
    }
    parts = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    ours = {name for name in plain if name in parts or re.fullmatch(rf"layers\.\d+\.({'|'.join(LAYER)})\.weight", name)}
    return {name: plain[name] for name in plain if name in ours}, tuple(sorted(set(plain) - ours))


def _order(state: Mapping[str, Tensor]) -> list[str]:
    """Names in the order in which a network of layers, norm, fc and hidden_norm registers them."""
    layers = sorted({int(name.split(".")[1]) for name in state if name.startswith("layers.")})
    inner = [f"layers.{layer}.{part}.weight" for layer in layers for part in LAYER]
    return [*inner, "norm.weight", "fc.weight", "hidden_norm.weight"]


def _by_place(
    where: Path, stored: Mapping[str, Tensor], order: Sequence[str], parts: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Tensor], Moments]:
    """Masters and moments of an optimizer that names its tensors by place.

    Args:
        where: for messages.
        stored: the weights by our names.
        order: our names by place.
        parts: the optimizer's state; one, or those of all ranks in turn, which hold consecutive parts of each tensor.

    Raises:
        ExportError: the masters are not the stored weights: another order, another network or lost ranks.
    """
    state = {name: tensor.float() for name, tensor in stored.items()}
    if not parts:
        return state, {}
    masters = [part.get("fp32_params") or [] for part in parts]
    if len(masters[0]) != len(order) or set(order) != set(stored):
        raise ExportError(
            f"{where}: its optimizer has {len(masters[0])} masters, the drafter there has {len(stored)} tensors; the "
            "order of one is not known from the other"
        )
    moments: Moments = {}
    for place, name in enumerate(order):
        shape = stored[name].shape
        master = _whole([rank[place] for rank in masters], shape)
        if master is None or not torch.equal(master.to(stored[name].dtype), stored[name]):
            raise ExportError(
                f"{where}: master {place} of its optimizer is not {name}, rounded; files of another step or other ranks"
            )
        state[name] = master.float()
        entries = [part["optimizer_state_dict"]["state"].get(place, {}) for part in parts]
        averages = {key: _whole([entry[key] for entry in entries if key in entry], shape) for key in ADAMW[:2]}
        steps = [entry["step"] for entry in entries if "step" in entry]
        if steps and all(average is not None for average in averages.values()):
            moments[name] = {
                **{key: average for key, average in averages.items() if average is not None},
                "step": steps[0],
            }
    return state, _fitting(moments, state)


def _whole(parts: Sequence[Tensor], shape: torch.Size) -> Tensor | None:
    """A tensor from one whole copy, or from the flat parts of all ranks; None where they are not that."""
    if parts and parts[0].shape == shape:
        return parts[0]
    flat = torch.cat([part.flatten() for part in parts]) if parts else torch.empty(0)
    return flat.reshape(shape) if flat.numel() == shape.numel() and flat.numel() else None


def _fitting(moments: Mapping[str, Mapping[str, Any]], state: Mapping[str, Tensor]) -> Moments:
    """The moments of the drafter's tensors that AdamW can take: all three there, in their shapes; in float32."""
    return {
        name: {key: torch.as_tensor(entry[key]).float() for key in ADAMW}
        for name, entry in moments.items()
        if name in state and all(key in entry for key in ADAMW)
        if all(entry[key].shape == state[name].shape for key in ADAMW[:2])
    }
