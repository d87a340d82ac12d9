"""The parts of a draft layer that hold no masks: linear maps, RMS norms, the gated MLP, rotary embeddings.

Weights are float32 masters; every map casts them to the type of its input. Norms and rotary embeddings compute in
float32 (float64 for float64 inputs), whatever the compute type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WHOLE_ROWS = 2**27
"""Elements of a chunk of whole logit rows at most: 512 MiB in float32, whatever the vocabulary."""


def rows_at_once(chunk: int, vocabulary: int) -> int:
    """Slots whose whole logit rows may exist at once: at most `chunk`, fewer for large vocabularies, at least one."""
    return max(1, min(chunk, WHOLE_ROWS // vocabulary))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: the type in which norms, tables and losses compute."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Linear(nn.Module):
    """A linear map without bias whose weight is cast to the type of the input; weight [out, in]."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        if not torch.is_grad_enabled():
            return F.linear(x, self.weight.to(x.dtype))
        output = _Linear.apply(x, self.weight)
        assert isinstance(output, Tensor)
        return output


class _Linear(torch.autograd.Function):
    """Keeps the input and the master weight, which is cast again backwards: a cast weight kept until then would take
    half of the masters' memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """x · weightᵀ, [..., in] → [..., out]."""
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of x and of the master weight; None where nobody asks."""
        x, weight = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = (gradient @ weight.to(gradient.dtype)).view(x.shape)
        d_weight = (x.flatten(0, -2).t() @ gradient).t().to(weight.dtype) if ctx.needs_input_grad[1] else None
        return d_x, d_weight


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] → [..., size], same type."""
        if not torch.is_grad_enabled():
            kind = accumulation_dtype(x.dtype)
            return F.rms_norm(x.to(kind), x.shape[-1:], self.weight.to(kind), self.epsilon).to(x.dtype)
        output = _RMSNorm.apply(x, self.weight, self.epsilon)
        assert isinstance(output, Tensor)
        return output


class _RMSNorm(torch.autograd.Function):
    """Keeps only the input and one number a row for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """[..., size] → [..., size]."""
        x_wide = x.to(accumulation_dtype(x.dtype))
        square = torch.linalg.vector_norm(x_wide, dim=-1, keepdim=True).square_()
        scale = square.div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x_wide * scale).mul_(weight.to(x_wide.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Gradients of input and weight."""
        x, weight, scale = ctx.saved_tensors
        gradient = gradients[0].to(scale.dtype)
        wide_weight = weight.to(scale.dtype)
        normal = x.to(scale.dtype) * scale
        product = gradient * normal
        d_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        d_x = None
        if ctx.needs_input_grad[0]:
            # Large buffers are reused: on a CPU, fresh memory costs more than the arithmetic.
            mean = (product @ wide_weight).div_(x.shape[-1]).unsqueeze(-1)
            scaled = torch.mul(gradient, wide_weight, out=product)
            d_x = scaled.sub_(normal.mul_(mean)).mul_(scale).to(x.dtype)
        return d_x, d_weight, None


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(size, inner)
        self.up_proj = Linear(size, inner)
        self.down_proj = Linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] → [..., size]."""
        if not torch.is_grad_enabled():
            return self.down_proj(F.silu(self.gate_proj(x)).mul_(self.up_proj(x)))
        inner = _SwiGLU.apply(self.gate_proj(x), self.up_proj(x))
        assert isinstance(inner, Tensor)
        return self.down_proj(inner)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) · up; keeps its two inputs only."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) · up."""
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        gate, up = ctx.saved_tensors
        d_up = F.silu(gate).mul_(gradients[0])
        return torch.ops.aten.silu_backward(gradients[0] * up, gate), d_up


def rotary_table(positions: Tensor, size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a rotary embedding over the whole head.

    Args:
        positions: integer positions, any shape [...].
        size: head size E.
        theta: base.
        dtype: compute type; tables are float32 for float32 and narrower types.

    Returns:
        cos and sin, each [..., E / 2].
    """
    kind = accumulation_dtype(dtype)
    steps = torch.arange(0, size, 2, device=positions.device, dtype=kind) / size
    angles = positions.to(kind)[..., None] * (theta**-steps)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the pairs (x[i], x[i + E/2]) of the last dimension by the table's angles; computes in the table's type.

    Args:
        x: [..., E].
        table: cos and sin, broadcastable to [..., E / 2].
    """
    if not torch.is_grad_enabled():
        return _rotated(x, *table, 1.0)
    output = _Rotation.apply(x, *table)
    assert isinstance(output, Tensor)
    return output


class _Rotation(torch.autograd.Function):
    """Its gradient is the rotation back, so only the table is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x, rotated by its positions."""
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient, rotated back."""
        cos, sin = ctx.saved_tensors
        return _rotated(gradients[0], cos, sin, -1.0), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    output = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    left, right = output.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=right).addcmul_(first, sin, value=direction)
    return output.to(x.dtype)
