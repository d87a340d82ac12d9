"""The DFlash network: one forward for training over packed documents and for decoding after a stored context.

The features of a token (target layer outputs, concatenated) become one context vector that every draft layer reads
as keys and values; queries come from the blocks only. Parameter names are those of published checkpoints
[arXiv 2602.06036; z-lab/dflash].

Shape letters: A anchors, K slots, S context tokens, N taps, H hidden size of the target = D of the drafter,
G key heads, R query heads per key head, E head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.drafter.attention import BACKENDS, Attention, decode_attention
from paceline.drafter.attention.layout import Layout
from paceline.drafter.layers import GatedMLP, Linear, RMSNorm, rotary_table, rotate
from paceline.drafter.spec import DrafterSpec
from paceline.errors import DrafterError

Table = tuple[Tensor, Tensor]


class SelfAttention(nn.Module):
    """Attention of a draft layer: queries from blocks, keys and values from context and blocks."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
        self.q_proj = Linear(spec.hidden_size, self.heads * self.size)
        self.k_proj = Linear(spec.hidden_size, self.key_heads * self.size)
        self.v_proj = Linear(spec.hidden_size, self.key_heads * self.size)
        self.o_proj = Linear(self.heads * self.size, spec.hidden_size)
        self.q_norm = RMSNorm(self.size, spec.rms_norm_eps)
        self.k_norm = RMSNorm(self.size, spec.rms_norm_eps)

    def keys_values(self, x: Tensor, table: Table) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, of context vectors [S, D] or slots [A, K, D]: each [G, S, E] or [G, A, K, E]."""
        shape = (*x.shape[:-1], self.key_heads, self.size)
        cos, sin = table
        key = rotate(self.k_norm(self.k_proj(x).view(shape)), (cos.unsqueeze(-2), sin.unsqueeze(-2)))
        return key.movedim(-2, 0), self.v_proj(x).view(shape).movedim(-2, 0)

    def forward(
        self,
        x: Tensor,
        context: tuple[Tensor, Tensor],
        table: Table,
        layout: Layout,
        window: int | None,
        causal: bool,
        attend: Attention,
    ) -> Tensor:
        """Blocks [A, K, D] with the context's keys and values → [A, K, D]."""
        anchors, slots, _ = x.shape
        cos, sin = table
        query = self.q_norm(self.q_proj(x).view(anchors, slots, self.heads, self.size))
        query = rotate(query, (cos.unsqueeze(-2), sin.unsqueeze(-2)))
        query = query.view(anchors, slots, self.key_heads, self.heads // self.key_heads, self.size).permute(
            2, 0, 1, 3, 4
        )
        key, value = self.keys_values(x, table)
        output = attend(query, *context, key, value, layout, window, causal)
        return self.o_proj(output.permute(1, 2, 0, 3, 4).reshape(anchors, slots, self.heads * self.size))


class DraftLayer(nn.Module):
    """A Qwen3 layer with pre-norms whose context is not normalized again."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.self_attn = SelfAttention(spec)
        self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        context: tuple[Tensor, Tensor],
        table: Table,
        layout: Layout,
        window: int | None,
        causal: bool,
        attend: Attention,
    ) -> Tensor:
        """Blocks [A, K, D] → [A, K, D]."""
        x = x + self.self_attn(self.input_layernorm(x), context, table, layout, window, causal, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The network of a spec. Holds neither embedding nor head: those are the target's.

    Args:
        spec: the architecture.
        attention: backend name; "auto" is flex on CUDA and split elsewhere, and in decoding the one made for it.
        recompute: whether each draft layer is computed again backwards, so that only its input is kept.
        seed: of the new weights (normal with the spec's deviation; norms are 1).
    """

    def __init__(self, spec: DrafterSpec, *, attention: str = "auto", recompute: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.spec = spec
        self.attention, self.recompute = attention, recompute
        self.fc = Linear(len(spec.taps) * spec.hidden_size, spec.hidden_size)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, Linear):
                    module.weight.normal_(0.0, spec.initializer_range, generator=generator)

    def training_forward(
        self,
        features: Tensor,
        doc_lengths: np.ndarray | Sequence[int],
        anchors: np.ndarray | Sequence[int],
        anchor_counts: np.ndarray | Sequence[int],
        block_embeddings: Tensor,
    ) -> Tensor:
        """Hidden states of all blocks over packed documents.

        Args:
            features: tap outputs of the real tokens, document after document, [S, N·H]; their type is the compute type.
            doc_lengths: tokens per document; sums to S.
            anchors: positions within their documents, ascending per document, [A].
            anchor_counts: anchors per document; sums to A.
            block_embeddings: embedded slots [A, K, D]: the anchor's token, then mask tokens.

        Returns:
            Final normalized hidden states [A, K, D], ready for the target's head.

        Raises:
            DrafterError: the parts do not fit each other.
        """
        lengths = np.asarray(doc_lengths, np.int64)
        if lengths.sum() != features.shape[0]:
            raise DrafterError(f"{features.shape[0]} feature rows for documents of {lengths.sum()} tokens")
        anchor_array = np.asarray(anchors, np.int64)
        if len(anchor_array) != block_embeddings.shape[0]:
            raise DrafterError(f"{block_embeddings.shape[0]} blocks for {len(anchor_array)} anchors")
        layout = Layout.of(
            lengths, anchor_array, np.asarray(anchor_counts, np.int64), block_embeddings.shape[1], features.device
        )
        context, x = self.context(features), block_embeddings
        context_table = self._table(layout.tensor(layout.context_positions), features.dtype)
        table, attend = self._table(layout.slot_positions, x.dtype), self._backend(x)
        for index, layer in enumerate(self.draft_layers()):

            def compute(x: Tensor, context: Tensor, layer: DraftLayer = layer, index: int = index) -> Tensor:
                keys_values = layer.self_attn.keys_values(context, context_table)
                return layer(x, keys_values, table, layout, self.spec.window(index), self.spec.causal[index], attend)

            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(compute, x, context, use_reentrant=False, preserve_rng_state=False)
            else:
                x = compute(x, context)
        return self.norm(x)

    @torch.no_grad()
    def context_parts(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [G, T, E] of context tokens, one pair a draft layer.

        Args:
            features: tap outputs, [T, N·H].
            positions: of the tokens in their sequences, int64 [T].
        """
        table = self._table(positions, features.dtype)
        context = self.context(features)
        return [layer.self_attn.keys_values(context, table) for layer in self.draft_layers()]

    @torch.no_grad()
    def draft_blocks(
        self, contexts: Iterable[tuple[Tensor, Tensor]], room: int, positions: Sequence[int], block_embeddings: Tensor
    ) -> Tensor:
        """Hidden states of one block each of several sequences.

        Args:
            contexts: keys and values of every draft layer, [G, A·room, E]: sequence after sequence.
            room: columns of a sequence, of which those before its block's position are seen.
            positions: of the anchors in their sequences.
            block_embeddings: embedded slots [A, K, D].

        Returns:
            Final normalized hidden states [A, K, D].
        """
        layout = Layout.of(
            np.full(len(positions), room),
            np.asarray(positions, np.int64),
            np.ones(len(positions), np.int64),
            block_embeddings.shape[1],
            block_embeddings.device,
        )
        attend = decode_attention if self.attention == "auto" else self._backend(block_embeddings)
        x, table = block_embeddings, self._table(layout.slot_positions, block_embeddings.dtype)
        for index, (layer, context) in enumerate(zip(self.draft_layers(), contexts, strict=True)):
            x = layer(x, context, table, layout, self.spec.window(index), self.spec.causal[index], attend)
        return self.norm(x)

    def context(self, features: Tensor) -> Tensor:
        """Context vectors [S, D] of features [S, N·H]."""
        return self.hidden_norm(self.fc(features))

    def draft_layers(self) -> list[DraftLayer]:
        """The draft layers, typed."""
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def _table(self, positions: Tensor, dtype: torch.dtype) -> Table:
        return rotary_table(positions, self.spec.head_dim, self.spec.rope_theta, dtype)

    def _backend(self, x: Tensor) -> Attention:
        name = self.attention
        if name == "auto":
            # Kernels of flex_attention need more shared memory in float64 than cards have.
            name = "flex" if x.device.type == "cuda" and x.dtype != torch.float64 else "split"
        return BACKENDS[name]
