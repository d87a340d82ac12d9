"""Whether a written folder is the drafter that was trained: reloaded, compared, refused on any difference."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import ExportError
from paceline.export.config_keys import read_config
from paceline.export.formats import folder_format, read_drafter
from paceline.export.golden import draft_logits, golden_difference, stand_ins
from paceline.export.speculators import speculators_config
from paceline.export.weights import DTYPES, EMBEDDING, content_hash, in_dtype, read_weights
from paceline.export.zlab import zlab_config

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.drafter.spec import DrafterSpec
    from paceline.types import TargetFacts

GOLDEN_TOLERANCE = 1e-4
"""Largest difference of golden hidden states (of unit scale) that another thread count or machine may cause."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared.

    Attributes:
        format: of the folder.
        dtype: of its tensors.
        num_tensors: compared bit for bit.
        parameters: numbers in them.
        content_hash: of the tensors as stored.
        logit_difference: largest between the folder's drafter and the trainer's, its weights rounded to `dtype`; 0.
        rounding_difference: the same against the unrounded float32 masters: what storing in `dtype` costs.
        golden_difference: largest between golden hidden states and the folder's; None without golden tensors.
    """

    format: str
    dtype: str
    num_tensors: int
    parameters: int
    content_hash: str
    logit_difference: float
    rounding_difference: float
    golden_difference: float | None


def verify(
    folder: str | Path,
    spec: DrafterSpec,
    state: Mapping[str, Tensor],
    facts: TargetFacts | None = None,
    embedding_scale: float | None = 1.0,
    embedding: Tensor | None = None,
) -> Verification:
    """Reload a folder and compare everything with the trainer's drafter.

    Compared: every number of the spec (windows, causality, rotary base, taps, mask id, label convention, vocabulary,
    ...), every other key of the configuration, every tensor bit for bit after rounding to the folder's type, the logits
    on fixed inputs, and the golden tensors.

    Args:
        folder: of either format.
        spec, state: the trainer's drafter.
        facts: the target. A speculators folder names it, so without it the keys of such a one are compared only as far
            as they are the drafter's.
        embedding_scale: see `zlab_config`.
        embedding: see `write_speculators`.

    Raises:
        ExportError: one line for each difference.
    """
    read_spec, read_state = read_drafter(folder)
    errors = list(_spec_differences(folder, read_spec, spec))
    dtype = _dtype(folder, read_state)
    stored = in_dtype(state, spec, dtype)
    errors = errors or list(_key_differences(folder, spec, dtype, facts, embedding_scale))
    if not errors:
        errors = list(_tensor_differences(folder, read_state, stored))
        errors += _embedding_difference(folder, embedding)
    if errors:
        raise ExportError(*errors)
    inputs = stand_ins(spec)
    ours = draft_logits(spec, stored, inputs)[1]
    theirs = draft_logits(read_spec, read_state, inputs)[1]
    difference = float((theirs - ours).abs().max())
    if not torch.equal(theirs, ours):
        errors.append(f"{folder}: logits differ from the trainer's drafter by {difference:.3g}; export again")
    golden = golden_difference(Path(folder), read_spec, read_state)
    if golden is not None and not golden <= GOLDEN_TOLERANCE:
        errors.append(f"{folder}: golden hidden states differ from the drafter's by {golden:.3g}; export again")
    if errors:
        raise ExportError(*errors)
    return Verification(
        format=folder_format(folder),
        dtype=dtype,
        num_tensors=len(read_state),
        parameters=sum(tensor.numel() for tensor in read_state.values()),
        content_hash=content_hash(read_state),
        logit_difference=difference,
        rounding_difference=float((draft_logits(spec, state, inputs)[1] - theirs).abs().max()),
        golden_difference=golden,
    )


def _spec_differences(folder: str | Path, found: DrafterSpec, wanted: DrafterSpec) -> Iterator[str]:
    before, after = asdict(wanted), asdict(found)
    for name, value in before.items():
        if after[name] != value:
            yield f"{folder}: its configuration says {name} {_plain(after[name])}, the drafter has {_plain(value)}"


def _key_differences(
    folder: str | Path, spec: DrafterSpec, dtype: str, facts: TargetFacts | None, embedding_scale: float | None
) -> Iterator[str]:
    """Keys that are not as written: what reads as the same drafter here may read as another one elsewhere."""
    where, found = read_config(folder)
    if folder_format(folder) == "zlab":
        wanted = zlab_config(spec, dtype, embedding_scale)
    elif facts is not None:
        wanted = speculators_config(spec, facts, dtype)
    else:
        return
    before, after = _leaves(wanted), _leaves(found)
    for key in before | after:
        if before.get(key) != after.get(key):
            yield f"{where}: {key} is {after.get(key, 'absent')}, written was {before.get(key, 'nothing')}"


def _leaves(config: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Values that are no objects, as JSON, by their place."""
    leaves: dict[str, str] = {}
    for key, value in config.items():
        leaves |= _leaves(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": json.dumps(value)}
    return leaves


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _tensor_differences(folder: str | Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in wanted.items():
        if not torch.equal(found[name], tensor):
            count = int((found[name] != tensor).sum())
            yield f"{folder}: {name} differs from the drafter's in {count} of {tensor.numel()} numbers"


def _embedding_difference(folder: str | Path, wanted: Tensor | None) -> Iterator[str]:
    """A folder's own embedding, which must be there exactly where the target's stored one would be wrong."""
    if folder_format(folder) == "zlab":
        return
    found = read_weights(Path(folder)).get(EMBEDDING)
    if (found is None) != (wanted is None):
        yield f"{folder}: {EMBEDDING} is {'missing' if found is None else 'not needed'}; export again"
    elif found is not None and wanted is not None and not torch.equal(found, wanted.to(found.dtype)):
        yield f"{folder}: {EMBEDDING} differs from what the target's first layer gets; export again"


def _dtype(folder: str | Path, state: Mapping[str, Tensor]) -> str:
    names = {kind: name for name, kind in DTYPES.items()}
    kinds = {tensor.dtype for tensor in state.values()}
    if len(kinds) != 1 or not kinds <= set(names):
        raise ExportError(
            f"{folder}: tensors are of type {sorted(map(str, kinds))}; one of {', '.join(DTYPES)} is needed"
        )
    dtype = names[kinds.pop()]
    where, config = read_config(folder)
    for key in ("dtype", "torch_dtype"):
        if config.get(key) != dtype:
            raise ExportError(f"{where}: {key} is {config.get(key)!r}, but the tensors are {dtype}")
    return dtype
