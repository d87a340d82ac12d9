"""Features cross the pool unchanged, or with the error of a smaller type that is measured."""

from __future__ import annotations

import pytest
import torch

from paceline.pipeline.feature_pool import FeaturePool

TOKENS, TAPS, HIDDEN = 37, 3, 16


def features(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(TOKENS, TAPS, HIDDEN, generator=torch.Generator().manual_seed(0))
    scales = torch.tensor([1e-3, 1.0, 400.0])[:, None] * torch.linspace(0.1, 10, TOKENS)[:, None, None]
    return (values * scales).reshape(TOKENS, -1).to(dtype)


def pool(transport: str, dtype: torch.dtype = torch.float32) -> FeaturePool:
    return FeaturePool(2, 64, TAPS * HIDDEN, dtype, HIDDEN, transport=transport, taps=TAPS)


def test_exact_features_lie_in_the_buffer_itself() -> None:
    shared, made = pool("exact"), features()
    place = shared.place(1, TOKENS)
    assert place is not None
    place.copy_(made)
    shared.write(1, place)
    assert torch.equal(shared.read(1, TOKENS)[0], made)
    assert shared.read(1, TOKENS)[0].data_ptr() == place.data_ptr()
    assert shared.transport_error(made) == 0.0


@pytest.mark.parametrize(("transport", "most", "size"), [("bf16", 2**-8, 2), ("fp8", 2**-4, 1)])
def test_a_smaller_type_loses_only_its_rounding_in_any_tap(transport: str, most: float, size: int) -> None:
    shared, made = pool(transport), features()
    assert shared.place(0, TOKENS) is None
    shared.write(0, made)
    read, _ = shared.read(0, TOKENS)
    assert read.dtype == torch.float32
    lost = (read - made).view(TOKENS, TAPS, HIDDEN).norm(dim=(0, 2)) / made.view(TOKENS, TAPS, HIDDEN).norm(dim=(0, 2))
    assert 0 < float(lost.max()) < most
    assert shared.transport_error(made) == pytest.approx(float((read - made).norm() / made.norm()), rel=1e-3)
    scales = 4 * TAPS if transport == "fp8" else 0
    assert shared.token_bytes == TAPS * HIDDEN * size + HIDDEN * 4 + scales


def test_bf16_features_cross_as_bf16_without_conversion() -> None:
    shared = pool("bf16", torch.bfloat16)
    assert shared.place(0, TOKENS) is not None


def test_zeros_stay_zeros_in_fp8() -> None:
    shared = pool("fp8")
    shared.write(0, torch.zeros(TOKENS, TAPS * HIDDEN))
    assert torch.equal(shared.read(0, TOKENS)[0], torch.zeros(TOKENS, TAPS * HIDDEN))


def test_buffers_and_last_states_do_not_touch_one_another() -> None:
    shared, made = pool("fp8"), features()
    shared.write(0, made)
    before, _ = shared.read(0, TOKENS)
    shared.write(1, 2 * made)
    last = shared.last_view(0, TOKENS)
    assert last is not None
    last.fill_(7.0)
    assert torch.equal(shared.read(0, TOKENS)[0], before)
    other = shared.last_view(1, TOKENS)
    assert other is not None and not other.any()
