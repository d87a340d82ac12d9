"""A block of one sequence drafted in few operations, as the decode loop asks for it pass after pass.

The context that came since the last block and the block itself stand under each other as rows and go through each
layer's projections together; keys and values are written into the cache, where attention reads them. Weights are copied
once: in the compute type, transposed (few rows times such a matrix take a CPU about half the time), those that read
the same rows side by side. The slow reference is `Drafter.draft_blocks`.

Shape letters: T context rows, K slots, D hidden size, N taps, H query heads, G key heads, E head size, I inner size.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.decode.kv_cache import ContextStore
from paceline.drafter.layers import accumulation_dtype, rotary_table

if TYPE_CHECKING:
    from paceline.drafter.network import Drafter, DraftLayer
    from paceline.drafter.spec import DrafterSpec

POSITIONS = 1024
"""Positions of the rotary table at first."""
_newest: weakref.WeakKeyDictionary[nn.Module, FusedWeights] = weakref.WeakKeyDictionary()
"""The last copies, by network."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Copied weights: maps [in, out] in the compute type, norms in the wide one."""

    into: Tensor
    """Queries, keys, values: [D, (H + 2G)·E]."""
    heads: Tensor
    """Norms of queries and keys, [H + G, E]."""
    out: Tensor
    gate_up: Tensor
    down: Tensor
    before: Tensor
    between: Tensor


class FusedWeights:
    """Copied weights of a network, as they are when this is made.

    Args:
        network: the drafter.
        dtype: compute type.
    """

    def __init__(self, network: Drafter, dtype: torch.dtype) -> None:
        self.key = weights_key(network, dtype)
        self.dtype, self.wide, self.spec = dtype, accumulation_dtype(dtype), network.spec
        with torch.no_grad():
            self._fc = self._map(network.fc.weight)
            self._hidden_norm = self._norm(network.hidden_norm.weight)
            self._norm_out = self._norm(network.norm.weight)
            self._layers = [self._copied(layer) for layer in network.draft_layers()]
        self._table = self._rotary(POSITIONS)

    def extend(self, store: ContextStore, features: Tensor) -> None:
        """Keys and values of the next tokens at once, from features [T, N·H]."""
        start, spec = store.stored, self.spec
        cos, sin = self._angles(start, features.shape[0])
        context = self._context(features)
        first = spec.num_attention_heads * spec.head_dim
        store.make_room(features.shape[0], context)
        for index, layer in enumerate(self._layers):
            rows = (context @ layer.into[:, first:]).view(context.shape[0], -1, spec.head_dim)
            keys = self._heads(rows[:, : spec.num_key_value_heads], layer.heads[spec.num_attention_heads :], cos, sin)
            store.write(index, start, keys, rows[:, spec.num_key_value_heads :])
        store.stored += features.shape[0]

    def draft(self, store: ContextStore, waiting: Tensor | None, block: Tensor) -> Tensor:
        """Final hidden states [K, D] of a block.

        Args:
            store: keys and values of the context; those of the waiting tokens are added to it.
            waiting: features [T, N·H] of the tokens after the stored ones; None: there are none.
            block: embedded slots [K, D].
        """
        context = block[:0] if waiting is None else self._context(waiting)
        spec, start, new = self.spec, store.stored, context.shape[0]
        cos, sin = self._angles(start, new + block.shape[0])
        store.make_room(new + block.shape[0], block)
        attend = _Attention(spec, start + new, block.shape[0], block.device)
        x, keyed = block, spec.num_attention_heads + spec.num_key_value_heads
        for index, layer in enumerate(self._layers):
            slots = self._normed(x, layer.before)
            rows = torch.cat([context, slots]) if new else slots
            heads = (rows @ layer.into).view(rows.shape[0], -1, spec.head_dim)
            turned = self._heads(heads[:, :keyed], layer.heads, cos, sin)
            keys, values = store.write(index, start, turned[:, spec.num_attention_heads :], heads[:, keyed:])
            seen = attend(index, turned[new:, : spec.num_attention_heads], keys, values)
            x = torch.addmm(x, seen, layer.out)
            inner = self._normed(x, layer.between) @ layer.gate_up
            gate, up = inner.chunk(2, dim=-1)
            x = torch.addmm(x, F.silu(gate).mul_(up), layer.down)
        store.stored += new  # the block itself was written behind; it means nothing now
        return self._normed(x, self._norm_out)

    def _context(self, features: Tensor) -> Tensor:
        return self._normed(features @ self._fc, self._hidden_norm)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.wide), weight.shape, weight, self.spec.rms_norm_eps).to(self.dtype)

    def _heads(self, rows: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Normalised and rotated heads [T, ..., E]."""
        size = rows.shape[-1]
        normed = F.rms_norm(rows.to(self.wide), (size,), None, self.spec.rms_norm_eps).mul_(weight)
        normed = normed.to(self.dtype).to(self.wide)  # rounded as the reference rounds
        return (normed * cos).addcmul_(normed.roll(size // 2, -1), sin).to(self.dtype)

    def _angles(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        cos, sin = self._table
        if start + count > cos.shape[0]:
            cos, sin = self._table = self._rotary(max(start + count, 2 * cos.shape[0]))
        return cos[start : start + count], sin[start : start + count]

    def _rotary(self, count: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin [positions, 1, E]: turned = x · cos + halves of x exchanged · sin."""
        positions = torch.arange(count, device=self._fc.device)
        cos, sin = rotary_table(positions, self.spec.head_dim, self.spec.rope_theta, self.dtype)
        return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]

    def _map(self, *weights: Tensor) -> Tensor:
        return torch.cat([weight.to(self.dtype) for weight in weights]).t().contiguous()

    def _norm(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.wide, copy=True)

    def _copied(self, layer: DraftLayer) -> _Layer:
        attention, mlp, spec = layer.self_attn, layer.mlp, self.spec
        heads = [(attention.q_norm, spec.num_attention_heads), (attention.k_norm, spec.num_key_value_heads)]
        return _Layer(
            into=self._map(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
            heads=torch.cat([self._norm(norm.weight).expand(count, -1) for norm, count in heads]),
            out=self._map(attention.o_proj.weight),
            gate_up=self._map(mlp.gate_proj.weight, mlp.up_proj.weight),
            down=self._map(mlp.down_proj.weight),
            before=self._norm(layer.input_layernorm.weight),
            between=self._norm(layer.post_attention_layernorm.weight),
        )


class _Attention:
    """Attention of one block at a position: masks are made once for layers of a kind."""

    def __init__(self, spec: DrafterSpec, position: int, slots: int, device: torch.device) -> None:
        self._spec, self._position, self._slots, self._device = spec, position, slots, device
        self._masks: dict[tuple[int | None, bool], Tensor | None] = {}

    def __call__(self, index: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Queries [K, H, E], keys and values [G, C, E] up to the block's end → [K, H·E]."""
        spec, slots = self._spec, self._slots
        window, causal = spec.window(index), spec.causal[index]
        first = 0 if window is None else max(0, self._position - window + 1)
        if (window, causal) not in self._masks:
            self._masks[window, causal] = self._mask(first, window, causal)
        groups = spec.num_key_value_heads
        repeats = spec.num_attention_heads // groups
        output = F.scaled_dot_product_attention(
            query.view(slots, groups, repeats, -1).permute(1, 0, 2, 3).reshape(1, groups, slots * repeats, -1),
            keys[None, :, first:],
            values[None, :, first:],
            attn_mask=self._masks[window, causal],
        )
        return output.view(groups, slots, repeats, -1).permute(1, 0, 2, 3).reshape(slots, -1)

    def _mask(self, first: int, window: int | None, causal: bool) -> Tensor | None:
        """True where a slot sees a column from `first` on, [K·repeats, C]; None where all see all."""
        end = self._position + self._slots
        if not causal and (window is None or end - first <= window):
            return None
        columns = torch.arange(first, end, device=self._device)
        slots = columns[self._position - first :, None]
        seen = columns <= slots if causal else torch.ones_like(columns <= slots)
        if window is not None:
            seen &= slots - columns < window
        return seen.repeat_interleave(self._spec.num_attention_heads // self._spec.num_key_value_heads, dim=0)


def fused_weights(network: Drafter, dtype: torch.dtype) -> FusedWeights:
    """Copied weights of a network; those of the last call where no weight was written since."""
    known = _newest.get(network)
    if known is None or known.key != weights_key(network, dtype):
        _newest.pop(network, None)  # the old copies go before there are new ones
        del known
        _newest[network] = FusedWeights(network, dtype)
    return _newest[network]


def weights_key(network: nn.Module, dtype: torch.dtype) -> tuple[object, ...]:
    """What changes when weights are written, moved, or another compute type is asked for."""
    versions = ((p.data_ptr(), None if p.is_inference() else p._version) for p in network.parameters())
    return dtype, *versions
