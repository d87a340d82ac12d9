"""The network: training equals decoding, blocks see what they may, published names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafter_cases import KINDS, make_batch, small_spec
from paceline.decode.draft_session import DraftSession
from paceline.drafter.layers import GatedMLP, Linear, RMSNorm, rotary_table, rotate
from paceline.drafter.network import Drafter
from paceline.errors import DrafterError


def embeddings(count: int, spec, seed=5) -> torch.Tensor:
    return torch.randn(count, spec.block_size, spec.hidden_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["auto", "split", "dense"])
def test_training_equals_decoding(kind, attention):
    """Past the window (documents of 40 tokens, windows up to 7), with the context arriving in pieces and cropped."""
    spec = small_spec(**kind)
    network = Drafter(spec, attention=attention, seed=1)
    batch = make_batch(spec, [40, 3, 25], num_anchors=9)
    host = batch.host
    blocks = embeddings(len(host.anchors), spec)
    trained = network.training_forward(batch.features, host.lengths, host.anchors, host.anchor_counts, blocks)
    row, start = 0, 0
    for length, count in zip(host.lengths, host.anchor_counts, strict=True):
        session = DraftSession(network)
        for anchor in host.anchors[row : row + count]:
            # As a decode loop does: some tokens too many, then cropped to what was verified.
            ahead = min(int(anchor) + 2, int(length))
            session.extend(batch.features[start + session.length : start + ahead])
            session.crop(int(anchor))
            torch.testing.assert_close(session.draft(blocks[row], int(anchor)), trained[row], rtol=0, atol=1e-5)
            row += 1
        start += int(length)
    assert row == len(host.anchors) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_see_only_their_own_past(kind):
    """The derivative of a block by features at or after its anchor, of other documents or blocks, is exactly zero."""
    spec = small_spec(**{**kind, "block_size": 8} if not kind.get("sliding_window") else kind)
    network = Drafter(spec, seed=1)
    batch = make_batch(spec, [14, 9], masks=[np.ones(14, bool), np.ones(9, bool)], num_anchors=3)
    anchors, counts = np.array([4, 5, 10, 6]), np.array([3, 1])
    features = batch.features.clone().requires_grad_()
    blocks = embeddings(4, spec).requires_grad_()
    output = network.training_forward(features, batch.host.lengths, anchors, counts, blocks)
    starts = np.array([0, 0, 0, 14])
    for block in range(4):
        to_features, to_blocks = torch.autograd.grad(
            output[block].square().sum(), (features, blocks), retain_graph=True
        )
        seen = to_features.abs().sum(-1) > 0
        end = starts[block] + anchors[block]
        # Strictly before the anchor: the anchor's own target state is unknown while decoding.
        assert not seen[end:].any()
        assert not seen[: starts[block]].any()
        low = end - max((w for w in map(spec.window, range(2)) if w), default=99) + 1
        if "full" in spec.layers:
            assert seen[starts[block] : end].all()
        else:
            assert seen[max(starts[block], low) : end].all() and not seen[: max(starts[block], low)].any()
        assert (to_blocks.abs().sum((1, 2)) > 0).tolist() == [other == block for other in range(4)]
    if all(spec.causal):
        first = torch.autograd.grad(output[0, 1].sum(), blocks)[0][0].abs().sum(-1) > 0
        assert first.tolist()[:3] == [True, True, False]


def test_names_are_those_of_published_checkpoints():
    network = Drafter(small_spec())
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for i in range(2):
        names |= {f"layers.{i}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")}
        names |= {f"layers.{i}.self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj")}
        names |= {f"layers.{i}.self_attn.{n}.weight" for n in ("q_norm", "k_norm")}
        names |= {f"layers.{i}.mlp.{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")}
    state = network.state_dict()
    assert set(state) == names and len(names) == 3 + 11 * 2
    assert all(value.dtype == torch.float32 for value in state.values())


def test_new_weights_are_keyed_by_the_seed_alone():
    torch.manual_seed(1)
    first = Drafter(small_spec(), seed=3).state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = Drafter(small_spec(), seed=3).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["fc.weight"], Drafter(small_spec(), seed=4).state_dict()["fc.weight"])


def test_rotary_tables_are_float32_in_bfloat16():
    """In bfloat16 the positions 1000 and 1001 have one and the same angle."""
    cos, _ = rotary_table(torch.tensor([1000, 1001]), 8, 1e4, torch.bfloat16)
    assert cos.dtype == torch.float32 and not torch.equal(cos[0], cos[1])
    reference = np.cos(np.array([1000.0, 1001.0])[:, None] * 1e4 ** -(np.arange(0, 8, 2) / 8))
    np.testing.assert_allclose(cos.numpy(), reference, atol=1e-4)


def test_bfloat16_features_compute_in_bfloat16_near_float32():
    spec = small_spec(block_size=5)
    network = Drafter(spec, seed=1)
    batch = make_batch(spec, [300], num_anchors=6)
    host = batch.host
    blocks = embeddings(len(host.anchors), spec)
    arguments = (host.lengths, host.anchors, host.anchor_counts)
    exact = network.training_forward(batch.features, *arguments, blocks)
    rough = network.training_forward(batch.features.bfloat16(), *arguments, blocks.bfloat16())
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).abs().mean() < 0.03 * exact.abs().mean()


def test_rms_norm_and_its_gradient():
    norm = RMSNorm(5, 1e-6).double()
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    reference = torch.nn.functional.rms_norm(x, (5,), norm.weight, 1e-6)
    torch.testing.assert_close(norm(x), reference)
    assert torch.autograd.gradcheck(norm, (x,))


def test_no_context_and_no_blocks_work():
    spec = small_spec()
    network = Drafter(spec)
    blocks = embeddings(1, spec)
    alone = DraftSession(network).draft(blocks[0], 0)
    features = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(network.training_forward(features, [3], [0], [1], blocks)[0], alone)
    assert network.training_forward(features, [3], [], [0], embeddings(0, spec)).shape == (0, 4, 16)


def test_misfits_are_refused():
    spec = small_spec()
    network = Drafter(spec)
    with pytest.raises(DrafterError, match="a block at 3 needs 3"):
        DraftSession(network).draft(embeddings(1, spec)[0], 3)
    with pytest.raises(DrafterError, match="feature rows"):
        network.training_forward(torch.zeros(4, 32), [3], [1], [1], embeddings(1, spec))
    with pytest.raises(DrafterError, match="2 blocks for 1 anchors"):
        network.training_forward(torch.zeros(3, 32), [3], [1], [1], embeddings(2, spec))


def test_gated_mlp_and_its_gradient():
    mlp = GatedMLP(3, 5).double()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    torch.testing.assert_close(mlp(x), (torch.nn.functional.silu(gate) * up) @ mlp.down_proj.weight.T)
    assert torch.autograd.gradcheck(mlp, (x,))


def test_rotation_and_its_gradient():
    x = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    table = rotary_table(torch.arange(5, 8)[:, None], 6, 100.0, torch.float64)
    pairs = torch.complex(x[..., :3], x[..., 3:]) * torch.complex(*table)
    torch.testing.assert_close(rotate(x, table), torch.cat([pairs.real, pairs.imag], dim=-1))
    assert torch.autograd.gradcheck(lambda y: rotate(y, table), (x,))


@pytest.mark.parametrize("kind", KINDS[:2] + KINDS[4:5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recomputed_layers_give_the_same_bits_and_keep_less(kind, dtype):
    spec = small_spec(**kind, num_layers=2)
    batch = make_batch(spec, [40, 25], num_anchors=9, dtype=dtype)
    host, found = batch.host, []
    blocks = embeddings(len(host.anchors), spec).to(dtype)
    for recompute in (False, True):
        network, kept = Drafter(spec, recompute=recompute, seed=1), {}

        def note(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            hidden = network.training_forward(batch.features, host.lengths, host.anchors, host.anchor_counts, blocks)
        before = sum(kept.values())
        hidden.float().square().sum().backward()
        found.append((hidden, [parameter.grad for parameter in network.parameters()], before))
    (hidden, gradients, whole), (again, others, least) = found
    assert torch.equal(hidden, again) and all(map(torch.equal, gradients, others)) and least < 0.5 * whole


def test_no_copy_of_a_weight_is_kept_for_the_backward_pass():
    """In bfloat16 such copies would take half of the masters' memory."""
    linear, saved = Linear(40, 50), []
    torch.nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 7, 40, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = linear(x)
    assert {tensor.data_ptr() for tensor in saved} == {x.data_ptr(), linear.weight.data_ptr()}
    output.float().square().sum().backward()
    expected = torch.nn.functional.linear(x, linear.weight.bfloat16())
    found = torch.autograd.grad(expected.float().square().sum(), (x, linear.weight))
    assert torch.equal(output, expected) and torch.equal(found[0], x.grad) and torch.equal(found[1], linear.weight.grad)


@pytest.mark.parametrize("gradient", [False, True])
def test_rms_norm_is_float32_in_bfloat16(gradient):
    """Each value is the exact one, rounded once; in bfloat16 most would be off by several last places."""
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(300, 1e-6)
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.3, generator=generator)
    x = torch.randn(50, 300, generator=generator).bfloat16().requires_grad_()
    with torch.set_grad_enabled(gradient):
        found = norm(x)
    wide = x.detach().double().requires_grad_()
    exact = torch.nn.functional.rms_norm(wide, (300,), norm.weight.detach().double(), 1e-6)
    assert (found == exact.bfloat16()).float().mean() > 0.999
    if gradient:
        slope = torch.randn(50, 300, generator=generator).bfloat16()
        found.backward(slope)
        exact.backward(slope.double())
        assert (x.grad == wide.grad.bfloat16()).float().mean() > 0.99


def test_a_forward_that_must_never_change():
    """Made when the published packages gave the same: rotary pairs, head mapping, gate and up, norms and windows.

    Weights and inputs are sines, so they do not depend on a random generator.
    """
    spec = small_spec(layers=("sliding", "full"), causal=(True, False), sliding_window=5)
    network = Drafter(spec)

    def sines(*shape, phase):
        return torch.sin(torch.arange(1, 1 + int(np.prod(shape))).double().square() * 0.7 + phase).view(shape)

    network.double()
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            parameter.copy_(sines(*parameter.shape, phase=number) * 0.4 + (parameter.ndim == 1))
    features, blocks = sines(12, 32, phase=0.1), sines(2, 4, 16, phase=0.2)
    with torch.no_grad():
        hidden = network.training_forward(features, [12], [4, 9], [2], blocks)
    found = hidden[:, :, ::5].flatten().tolist()
    assert found == pytest.approx(GOLDEN, abs=1e-6)


GOLDEN = [
    -0.981919, -0.369965, -0.739958, -0.526135, -1.175118, -0.838433, 0.006591, -1.532730,
    -0.601722, -0.518597, -0.104792, -0.575894, 0.086775, 0.258053, -0.652712, 0.287944,
    0.303206, -0.176578, -1.469863, -0.229983, 0.821646, -0.671661, -0.857128, -1.134946,
    -0.241135, -0.067806, -0.908128, -1.435580, -0.492672, -0.203120, 0.218408, -2.129870,
]  # fmt: skip
