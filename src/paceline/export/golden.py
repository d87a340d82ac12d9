"""Golden tensors: fixed inputs and what the drafter makes of them, for any engine to check itself against.

They lie in a sub-folder, because servers load every ``*.safetensors`` beside ``config.json``. All are computed in
float32 from the tensors as stored. Shape letters: S context tokens, K slots, N taps, D hidden size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from safetensors.torch import load_file, save_file

from paceline.decode.draft_session import DraftSession
from paceline.drafter.network import Drafter
from paceline.errors import ExportError

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.drafter.spec import DrafterSpec

FOLDER, TENSORS, NOTE = "golden", "golden.safetensors", "golden.json"
MAX_CONTEXT = 128
"""Context tokens are enough to pass a window of this size; wider windows are compared as numbers only."""
STAND_IN_ROWS = 64
"""Rows of the random head that is used where the target's is not at hand."""


@dataclass(frozen=True, slots=True)
class GoldenInputs:
    """What a drafter is given.

    Attributes:
        features: tap outputs of the context, float32 [S, N·D]; token t is at position t, the anchor at S.
        block_embeddings: embedded slots, float32 [K, D].
        head: rows of the output head, float32 [V, D] or fewer.
        ids: context ids, then the anchor's, int64 [S + 1]; None for stand-ins.
        origin: ``target`` when the features are the target's own on these ids, else ``random``.
    """

    features: Tensor
    block_embeddings: Tensor
    head: Tensor
    ids: Tensor | None = None
    origin: Literal["random", "target"] = "random"


def context_tokens(spec: DrafterSpec) -> int:
    """Context length of golden inputs: past the window where that is short enough, and never less than two blocks."""
    return min(MAX_CONTEXT, (spec.sliding_window or 0) + 2 * spec.block_size)


def golden_ids(spec: DrafterSpec, seed: int = 0) -> Tensor:
    """Context ids and the anchor's, drawn from the whole vocabulary, int64 [S + 1]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, spec.vocab_size, (context_tokens(spec) + 1,), generator=generator)


def golden_features(spec: DrafterSpec, seed: int = 0) -> Tensor:
    """Features drawn from a normal distribution, float32 [S, N·D]."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(context_tokens(spec), len(spec.taps) * spec.hidden_size, generator=generator)


def stand_ins(spec: DrafterSpec, seed: int = 0) -> GoldenInputs:
    """Inputs that need no target: features, embeddings and a small head drawn from a normal distribution."""
    generator = torch.Generator().manual_seed(seed + 2)
    embeddings = torch.randn(spec.block_size, spec.hidden_size, generator=generator)
    head = torch.randn(STAND_IN_ROWS, spec.hidden_size, generator=generator)
    return GoldenInputs(golden_features(spec, seed), embeddings, head)


def target_inputs(
    spec: DrafterSpec, embedding: Tensor, head: Tensor, features: Tensor | None = None, seed: int = 0
) -> GoldenInputs:
    """Inputs with the target's embedding and head.

    Args:
        spec: the drafter.
        embedding, head: of the target, [V, D].
        features: of `golden_ids` (without the anchor), [S, N·D]; None draws them.
        seed: of what is drawn.
    """
    ids = golden_ids(spec, seed)
    block = torch.full((spec.block_size,), spec.mask_token_id)
    block[0] = ids[-1]
    given = golden_features(spec, seed) if features is None else features.float()
    return GoldenInputs(given, embedding[block].float(), head.float(), ids, "random" if features is None else "target")


@torch.no_grad()
def draft_logits(spec: DrafterSpec, state: Mapping[str, Tensor], inputs: GoldenInputs) -> tuple[Tensor, Tensor]:
    """Hidden states [K, D] and logits [K, V] of one block behind the context, float32, by the decoding forward.

    Args:
        spec: the drafter.
        state: its tensors; taken as float32.
        inputs: what it is given.
    """
    with torch.device("meta"):
        network = Drafter(spec)
    network.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    session = DraftSession(network)
    session.extend(inputs.features)
    hidden = session.draft(inputs.block_embeddings, inputs.features.shape[0])
    return hidden, hidden @ inputs.head.T


def write_golden(folder: Path, spec: DrafterSpec, stored: Mapping[str, Tensor], inputs: GoldenInputs) -> None:
    """Write ``golden/golden.safetensors`` and ``golden/golden.json`` into a drafter folder.

    Tensors: ``ids`` [S + 1], ``features`` [S, N·D], ``block_ids`` [K], ``block_embeddings`` [K, D], ``hidden`` [K, D],
    ``logits`` [K, V].

    Raises:
        ExportError: inputs without ids.
    """
    if inputs.ids is None:
        raise ExportError("golden tensors: ids, embedding and head of the target are needed")
    hidden, logits = draft_logits(spec, stored, inputs)
    block = torch.full((spec.block_size,), spec.mask_token_id)
    block[0] = inputs.ids[-1]
    place = folder / FOLDER
    place.mkdir(exist_ok=True)
    tensors = {
        "ids": inputs.ids,
        "features": inputs.features,
        "block_ids": block,
        "block_embeddings": inputs.block_embeddings,
        "hidden": hidden,
        "logits": logits,
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, place / TENSORS)
    note = {
        "features": inputs.origin,
        "dtype": "float32",
        "anchor_position": inputs.features.shape[0],
        "taps": list(spec.taps),
        "first_draft_slot": spec.first_draft_slot,
        "how": "context token t at position t with features[t]; slot k of the block at position anchor_position + k",
    }
    (place / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def golden_difference(folder: Path, spec: DrafterSpec, state: Mapping[str, Tensor]) -> float | None:
    """Largest absolute difference between the golden hidden states and this drafter's; None without golden tensors.

    The logits are the head's product of the hidden states, so they need not be computed again.
    """
    path = folder / FOLDER / TENSORS
    if not path.is_file():
        return None
    golden = load_file(path)
    inputs = GoldenInputs(golden["features"], golden["block_embeddings"], golden["block_embeddings"][:1])
    hidden, _ = draft_logits(spec, state, inputs)
    return float((hidden - golden["hidden"]).abs().max())
