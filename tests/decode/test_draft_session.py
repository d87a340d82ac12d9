"""Drafting in few operations: equal to the slow path, in every layer kind and type, with weights as they are."""

from __future__ import annotations

import pytest
import torch

from drafter_cases import KINDS, small_spec
from paceline.decode import fast_draft
from paceline.decode.draft_session import DraftSession
from paceline.drafter.network import Drafter


def values(*shape: int, seed: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def slowly(network: Drafter, features: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """The reference: keys and values of the context apart from the block, one sequence of a batch."""
    count = features.shape[0]
    parts = network.context_parts(features, torch.arange(count))
    return network.draft_blocks(parts, count, [count], block[None])[0]


def lively(**kind) -> Drafter:
    """A network whose weights and norms matter."""
    network = Drafter(small_spec(**kind), seed=1)
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            parameter.add_(values(*parameter.shape, seed=number), alpha=0.2)
    return network


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.06)], ids=str
)
def test_drafts_equal_the_slow_path(kind, dtype, tolerance, monkeypatch):
    """A context that comes in pieces, long ones among them; storage and rotary table grow on the way."""
    monkeypatch.setattr(fast_draft, "POSITIONS", 8)
    network = lively(**kind)
    spec = network.spec
    features = values(400, len(spec.taps) * spec.hidden_size, dtype=dtype)
    session = DraftSession(network)
    for place, end in enumerate((1, 2, 7, 7, 90, 93, 260, 262, 263, 399)):
        session.extend(features[session.length : end])
        block = values(spec.block_size, spec.hidden_size, seed=place, dtype=dtype)
        found = session.draft(block, end)
        assert found.dtype == dtype and session.length == session.store.stored == end
        expected = slowly(network, features[:end], block)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_block_leaves_nothing_behind_for_the_next():
    network = lively()
    spec = network.spec
    features = values(30, len(spec.taps) * spec.hidden_size)
    blocks = values(3, spec.block_size, spec.hidden_size)
    session = DraftSession(network)
    session.extend(features[:20])
    session.draft(9 * blocks[0], 20)
    torch.testing.assert_close(session.draft(blocks[1], 20), slowly(network, features[:20], blocks[1]))
    # At an earlier place of what is stored, too, and after tokens that were taken back.
    torch.testing.assert_close(session.draft(blocks[1], 12), slowly(network, features[:12], blocks[1]))
    for piece in (features[20:23], features[23:27]):
        session.extend(piece)
    session.crop(24)
    assert (session.length, session.store.stored) == (24, 20)
    torch.testing.assert_close(session.draft(blocks[2], 24), slowly(network, features[:24], blocks[2]))
    session.crop(11)
    assert (session.length, session.store.stored) == (11, 11)
    torch.testing.assert_close(session.draft(blocks[2], 11), slowly(network, features[:11], blocks[2]))


def test_waiting_features_are_cropped_by_tokens():
    network = lively()
    session = DraftSession(network)
    features = values(100, len(network.spec.taps) * network.spec.hidden_size)
    session.extend(features[:70])
    session.extend(features[:2])
    session.extend(features[:3])
    session.crop(99)
    assert (session.length, session.store.stored) == (75, 70)
    for length, stored in ((73, 70), (71, 70), (2, 2)):
        session.crop(length)
        assert (session.length, session.store.stored) == (length, stored)


@pytest.mark.parametrize("inference", [False, True], ids=["", "first in inference mode"])
def test_weights_are_copied_once_and_anew_when_written(inference):
    network = lively()
    spec = network.spec
    features, block = values(5, len(spec.taps) * spec.hidden_size), values(spec.block_size, spec.hidden_size)

    def draft() -> torch.Tensor:
        session = DraftSession(network)
        session.extend(features)
        return session.draft(block, 5)

    with torch.inference_mode(inference):
        before = draft().clone()
    copies = fast_draft.fused_weights(network, torch.float32)
    assert torch.equal(draft(), before) and fast_draft.fused_weights(network, torch.float32) is copies
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    hidden = network.training_forward(features, [5], [5], [1], block[None])
    hidden.square().sum().backward()
    optimizer.step()
    after = draft()
    assert fast_draft.fused_weights(network, torch.float32) is not copies and not torch.allclose(
        after, before, atol=1e-3
    )
    torch.testing.assert_close(after, slowly(network, features, block))
    network.load_state_dict(lively().state_dict())
    torch.testing.assert_close(draft(), before)
    network.double()
    features, block = features.double(), block.double()
    assert draft().dtype == torch.float64 and fast_draft.fused_weights(network, torch.float64).key != copies.key


def test_copies_are_no_part_of_the_network():
    network = lively()
    names, spec = list(network.state_dict()), network.spec
    DraftSession(network).draft(values(spec.block_size, spec.hidden_size), 0)
    assert list(network.state_dict()) == names
    assert all(parameter.requires_grad for parameter in network.parameters())
