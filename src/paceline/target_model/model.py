"""The loaded target: tapped forward over padded rows, stopped after the last tap; embedding and head for the drafter.

Shape letters: B documents, W padded width, S real tokens of the batch, H hidden size, N taps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.device import on_stream, to_device
from paceline.errors import TargetError
from paceline.target_model.introspect import (
    ForwardStopped,
    Structure,
    forward_names,
    hooked,
    main_output,
    row_arguments,
)
from paceline.types import FeatureBatch, HostBatch, TargetFacts

EMBEDDED_AT_ONCE = 8192
"""Vocabulary rows."""


class TargetModel:
    """A frozen causal language model with taps.

    Attributes:
        model: the transformers model, evaluation mode, no gradients.
        structure: its layers, embedding and head.
        facts: what its folder says.
        taps: tapped layer ids, in feature order.
        packed: whether the documents of a batch share one row, positions restarting, instead of a padded row each.
        masked: whether padded rows get an attention mask; without it only where `row_check.needs_mask` says so.
        device, dtype: where ids go in and of what type features come out.
    """

    def __init__(
        self,
        model: Any,
        structure: Structure,
        facts: TargetFacts,
        taps: Sequence[int],
        *,
        packed: bool = False,
        masked: bool = True,
    ) -> None:
        self.model = model
        self.structure = structure
        self.facts = facts
        self.taps = list(taps)
        self.packed, self.masked = packed, masked
        weight = structure.embedding.weight
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = model.dtype
        self._embedding: Tensor | None = None
        self._head: Tensor | None = None

    @property
    def width(self) -> int:
        """Features of one token: N · H."""
        return len(self.taps) * self.facts.hidden_size

    @property
    def embedding(self) -> Tensor:
        """What layer 0 sees for every token, [V, H], scale included; TargetError where more than the token counts."""
        if self._embedding is None:
            self._embedding = _embedding_table(self.structure, self.facts.path)
        return self._embedding

    @property
    def embedding_scale(self) -> float | None:
        """What the stored embedding must be multiplied with to give `embedding`; None where no number does."""
        table, stored = self.embedding, self.structure.embedding.weight.detach()
        if table.data_ptr() == stored.data_ptr():
            return 1.0
        few, rows = table[:EMBEDDED_AT_ONCE].double(), stored[:EMBEDDED_AT_ONCE].double()
        scale = float((few * rows).sum() / rows.square().sum().clamp_min(1e-300))
        step = torch.finfo(table.dtype).eps
        return scale if torch.allclose(few, scale * rows, rtol=4 * step, atol=1e-12) else None

    @property
    def head(self) -> Tensor:
        """Weight of the language model head, [V, H]; TargetError where it has a bias or is no linear map."""
        if self._head is None:
            self._head = _head_weight(self.structure, self.facts.path).to(self.device)
        return self._head

    def with_layout(self, *, masked: bool, packed: bool, taps: Sequence[int] | None = None) -> TargetModel:
        """The same loaded model, whose rows are computed in another way, or with other taps."""
        taps = self.taps if taps is None else taps
        return TargetModel(self.model, self.structure, self.facts, taps, packed=packed, masked=masked)

    @torch.no_grad()
    def features(
        self,
        host: HostBatch,
        out: Tensor | None = None,
        *,
        with_last: bool = False,
        copies: torch.cuda.Stream | None = None,
    ) -> FeatureBatch:
        """Tap outputs of the real tokens of a batch.

        Args:
            host: the batch, right-padded.
            out: contiguous buffer of at least S · N · H numbers of the target's type to write into, on any device;
                the result is then a view of it.
            with_last: also hand over the output of the last layer (teacher distributions need it).
            copies: queue of the device in which states of taps on other cards arrive; where None, the device waits for
                them itself.

        Returns:
            Features [S, N·H]; documents follow one another in row order.

        Raises:
            TargetError: ids outside the vocabulary, a buffer that is too small or of another type.
        """
        ids = np.asarray(host.ids)
        if ids.size and (ids.min() < 0 or ids.max() >= self.facts.vocab_size):
            raise TargetError(
                f"batch {host.planned.index}: token id {int(ids.max())} is outside the target's vocabulary of "
                f"{self.facts.vocab_size}; was the store made with another tokenizer?"
            )
        features, last = self.tap_rows(
            to_device(ids, self.device), host.lengths, out=out, with_last=with_last, copies=copies
        )
        return FeatureBatch(host=host, features=features, last_hidden=last)

    @torch.no_grad()
    def tap_rows(
        self,
        ids: Tensor,
        lengths: np.ndarray | Sequence[int],
        *,
        out: Tensor | None = None,
        with_last: bool = False,
        copies: torch.cuda.Stream | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Tap outputs of right-padded rows. On a GPU the host waits for nothing that is computed, but masks are made.

        Args:
            ids: int64 [B, W].
            lengths: real tokens of each row.
            out, with_last, copies: see `features`.

        Returns:
            Features [S, N·H] and, when asked for, the last layer's output [S, H].
        """
        keep = to_device(real_positions(lengths, ids.shape[1]), self.device)
        if self.packed:
            arguments = packed_arguments(self.model, ids, lengths, keep)
            ids, keep = arguments["input_ids"], torch.arange(len(keep), device=self.device)
        else:
            arguments = self._row_arguments(ids, lengths)
        features = self._buffer(out, keep.numel())
        hidden = self.facts.hidden_size
        last: list[Tensor] = []

        def tap(place: int, final: bool) -> Any:
            """A hook that keeps the real tokens' states in the columns of one tap, and ends the forward if final."""

            def hook(module: nn.Module, args: Any, output: Any) -> None:
                """Called by torch with the layer's output."""
                states = self._states(output, ids, place)
                here = keep.to(states.device)
                with on_stream(None if states.device == features.device else copies):
                    kept = states.reshape(-1, hidden).index_select(0, here)
                    features[:, place * hidden : (place + 1) * hidden] = kept
                if final:
                    raise ForwardStopped

            return hook

        def take_last(module: nn.Module, args: Any, output: Any) -> None:
            """Keeps the real tokens' states of the last layer, and ends the forward."""
            states = self._states(output, ids, -1)
            last.append(states.reshape(-1, hidden).index_select(0, keep.to(states.device)).to(self.device))
            raise ForwardStopped

        final = -1 if with_last else max(self.taps)
        layers = self.structure.layers
        handles = [layers[at].register_forward_hook(tap(place, at == final)) for place, at in enumerate(self.taps)]
        if with_last:
            handles.append(layers[-1].register_forward_hook(take_last))
        with hooked(handles), suppress(ForwardStopped), nullcontext() if self.packed else _values_not_read():
            self.model(**arguments)
        return features, last[0] if last else None

    def _row_arguments(self, ids: Tensor, lengths: np.ndarray | Sequence[int]) -> dict[str, Any]:
        arguments = row_arguments(self.model, ids, explicit_positions=self.structure.explicit_positions)
        if self.masked and "attention_mask" in forward_names(self.model) and int(np.min(lengths)) < ids.shape[1]:
            real = np.arange(ids.shape[1])[None] < np.asarray(lengths)[:, None]
            arguments["attention_mask"] = to_device(real.astype(np.int64), ids.device)
        return arguments

    def _states(self, output: Any, ids: Tensor, place: int) -> Tensor:
        states = main_output(output)
        if states is None or states.shape != (*ids.shape, self.facts.hidden_size):
            name = "the last layer" if place < 0 else f"tapped layer {self.taps[place]}"
            shown = None if states is None else list(states.shape)
            raise TargetError(
                f"{self.facts.path}: {name} put out {shown} instead of {[*ids.shape, self.facts.hidden_size]}; "
                "its states are no hidden states of the tokens, so it cannot be tapped"
            )
        return states

    def _buffer(self, out: Tensor | None, num_tokens: int) -> Tensor:
        if out is None:
            return torch.empty(num_tokens, self.width, dtype=self.dtype, device=self.device)
        needed = num_tokens * self.width
        if out.dtype != self.dtype or out.numel() < needed or not out.is_contiguous():
            raise TargetError(
                f"feature buffer {list(out.shape)} of {out.dtype}: {num_tokens} x {self.width} contiguous numbers of "
                f"{self.dtype} are needed; size buffers by the plan's largest batch and the target's dtype"
            )
        return out.view(-1)[:needed].view(num_tokens, self.width)


def packed_arguments(model: Any, ids: Tensor, lengths: np.ndarray | Sequence[int], keep: Tensor) -> dict[str, Any]:
    """Arguments of a forward over all real tokens in one row [1, S], positions starting at 0 in every document.

    No mask is given: transformers tells documents apart by the positions, which is proved at the start
    (`row_check.prove_packed`).

    Args:
        model: the target.
        ids: right-padded rows, int64 [B, W].
        lengths: real tokens of each row.
        keep: places of the real tokens in the flattened rows, int64 [S].
    """
    arguments = row_arguments(model, ids.reshape(1, -1).index_select(1, keep))
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
    arguments["position_ids"] = to_device(positions[None], ids.device)
    return arguments


@contextmanager
def _values_not_read() -> Generator[None]:
    """transformers does not look into ids and positions meanwhile, for padding and for several documents in a row.

    The rows are right-padded, with one document each; the host would wait for the GPU to learn that.
    """
    from transformers import PreTrainedModel, masking_utils

    looks = (
        (masking_utils, "find_packed_sequence_indices"),
        (PreTrainedModel, "warn_if_padding_and_no_attention_mask"),
    )
    before = [(owner, name, getattr(owner, name)) for owner, name in looks if hasattr(owner, name)]
    for owner, name, _ in before:
        setattr(owner, name, lambda *_: None)
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def real_positions(lengths: np.ndarray | Sequence[int], width: int) -> np.ndarray:
    """Places of the real tokens in a flattened [B · W] batch, row after row, int64 [S]."""
    lengths = np.asarray(lengths, dtype=np.int64)
    return np.concatenate([row * width + np.arange(length) for row, length in enumerate(lengths)])


@torch.no_grad()
def _embedding_table(structure: Structure, path: str) -> Tensor:
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
    parts = [structure.embedding(part).detach() for part in ids.split(EMBEDDED_AT_ONCE)]
    table = torch.cat(parts)
    return table if structure.embed_scale == 1.0 else table * structure.embed_scale


def _head_weight(structure: Structure, path: str) -> Tensor:
    """Weight of the head, [V, H]; refused where the head is missing, biased or not linear."""
    head = structure.head
    weight = getattr(head, "weight", None)
    if head is None or not isinstance(weight, Tensor) or weight.dim() != 2:
        raise TargetError(f"target.path = {path}: it has no linear language model head that a drafter could share")
    if weight.is_meta:
        raise TargetError(f"target.path = {path}: its head is on the disk; give it a device in target.device_map")
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
