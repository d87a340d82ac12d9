"""The flex backend: its mask, its values and gradients, and how many graphs it needs; all on the CPU."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._inductor.exc import LoweringException
from torch.nn.attention import flex_attention

from drafter_cases import SHAPES, attention_inputs, layout_of, make_batch, make_learner, small_spec
from paceline.config import load_settings
from paceline.drafter.anchors import sample_anchors
from paceline.drafter.attention import BACKENDS, flex
from paceline.drafter.attention.dense import visible
from paceline.drafter.attention.layout import Layout
from paceline.errors import DrafterError
from paceline.plan.epoch import plan_epoch

LENGTHS = Path(__file__).parents[2] / "benchmarks" / "data" / "lengths-902087.npz"


@pytest.fixture
def compile_with(monkeypatch):
    """Lets the CUDA path run on the CPU: the kernel is compiled by another backend, with a backward pass."""

    def use(backend):
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
        monkeypatch.setattr(flex, "_attend", flex.compiled)

    torch._dynamo.reset()
    flex._kernel.cache_clear()
    yield use
    torch._dynamo.reset()
    flex._kernel.cache_clear()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_values_equal_dense(shape, window, causal):
    layout = layout_of(shape)
    with torch.no_grad():
        tensors = [tensor.detach().float() for tensor in attention_inputs(layout, seed=3)]
        reference = BACKENDS["dense"](*tensors, layout, window, causal)
        torch.testing.assert_close(BACKENDS["flex"](*tensors, layout, window, causal), reference)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch looks at it while compiling
def test_values_and_gradients_equal_dense_when_compiled(compile_with):
    compile_with("aot_eager")
    for shape, (window, causal) in zip(SHAPES, [(None, False), (6, True), (3, False), (None, True)], strict=True):
        layout, results = layout_of(shape), []
        for name in ("dense", "flex"):
            tensors = attention_inputs(layout, seed=3)
            output = BACKENDS[name](*tensors, layout, window, causal)
            weight = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view(output.shape)
            (output * weight).sum().backward()
            results.append([output.detach(), *(tensor.grad for tensor in tensors)])
        for reference, found in zip(*results, strict=True):
            torch.testing.assert_close(found, reference, rtol=1e-8, atol=1e-8)


def test_masks_are_the_rule_at_padded_sizes():
    for shape, window, causal in itertools.product(SHAPES, [None, 1, 4], [False, True]):
        layout = layout_of(shape)
        mask = flex.block_mask(layout, window, causal, 256, 256)
        assert mask is flex.block_mask(layout, window, causal, 256, 256)
        rows, columns = torch.arange(256)[:, None], torch.arange(512)[None, :]
        dense = mask.mask_mod(torch.tensor(0), torch.tensor(0), rows, columns)
        slots, real = len(layout.anchors) * layout.block_size, layout.num_context
        seen = torch.cat([dense[:slots, :real], dense[:slots, 256 : 256 + slots]], dim=1)
        assert torch.equal(seen, visible(layout, window, causal))
        # Nothing real sees padding, and each padded slot sees itself.
        assert dense[:slots].sum() == seen.sum() and dense.any(dim=1).all()


@pytest.mark.parametrize("window", [None, 40, 450])
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_are_empty_partial_or_full_as_the_rule_says(window, causal):
    random = np.random.default_rng(0)
    lengths = np.array([700, 3, 520])
    # Late anchors of the first document, so that some tiles are seen whole.
    anchors = [np.arange(520, 700, 3), np.array([0, 2]), np.sort(random.choice(520, 30, replace=False))]
    layout = layout_of((lengths, np.concatenate(anchors), [60, 2, 30], 5))
    mask = flex.block_mask(layout, window, causal, 1280, 512)
    dense = mask.mask_mod(torch.tensor(0), torch.tensor(0), torch.arange(512)[:, None], torch.arange(1792)[None, :])
    tiles = dense.view(4, 128, 14, 128).transpose(1, 2).flatten(2)
    whole, some = tiles.all(2), tiles.any(2)
    assert whole.any() == (window != 40), "the case holds full tiles"
    for counts, listed, expected in (
        (mask.kv_num_blocks, mask.kv_indices, some & ~whole),
        (mask.full_kv_num_blocks, mask.full_kv_indices, whole),
    ):
        for row in range(4):
            assert listed[0, 0, row, : counts[0, 0, row]].tolist() == expected[row].nonzero()[:, 0].tolist()


def test_padded_sizes_are_few():
    sizes = {flex.padded_size(count) for count in range(1, 50_000)}
    assert len(sizes) < 60 and min(sizes) == 256
    assert all(count <= flex.padded_size(count) <= max(256, 1.13 * count + 127) for count in range(1, 50_000))


@pytest.mark.parametrize("example", ["one_gpu", "eight_gpus"])
def test_200_real_batches_need_few_graphs(project, compile_with, example):
    graphs = []

    def count(graph, _inputs):
        graphs.append(graph)
        return lambda *inputs: (next(torch.zeros_like(x) for x in inputs if torch.is_tensor(x) and x.ndim == 4),)

    compile_with(count)
    settings = load_settings(project / "examples" / f"{example}.yaml")
    config = settings.drafter
    lengths = np.minimum(np.load(LENGTHS)["lengths"].astype(np.int64), settings.data.max_length)
    shape = {"num_anchors": config.num_anchors, "block_size": config.block_size}
    plan = plan_epoch(lengths, None, settings.plan, **shape, seed=0, epoch=0)
    kinds = {(config.sliding_window if kind == "sliding" else None, causal) for kind, causal in config.layer_kinds()}
    shapes = set()
    for batch in map(plan.batch, range(200)):
        anchors = [
            sample_anchors(np.ones(lengths[row], bool), seed=0, epoch=0, sample=int(row), limit=config.num_anchors)
            for row in batch.rows
        ]
        counts = np.array([len(found) for found in anchors])
        layout = Layout.of(lengths[batch.rows], np.concatenate(anchors), counts, config.block_size, torch.device("cpu"))
        sizes = flex.padded_size(layout.num_context), flex.padded_size(int(counts.sum()) * config.block_size)
        shapes.add((*sizes, int(counts.sum())))
        query = torch.zeros(1, 4, sizes[1], 16, requires_grad=True)
        keys = torch.zeros(1, 2, sum(sizes), 16, requires_grad=True)
        for window, causal in kinds:
            flex.compiled(query, keys, keys, flex.block_mask(layout, window, causal, *sizes))
    assert len(shapes) > 30 and len(graphs) <= 6


def test_more_graphs_than_the_limit_are_an_error(compile_with):
    compile_with("eager")
    layout = layout_of(SHAPES[0])
    mask = flex.block_mask(layout, None, False, 256, 256)
    message = r"drafter.attention: flex: .*; set drafter.attention to split$"
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1), pytest.raises(DrafterError, match=message):
        for dtype in (torch.float32, torch.float64):
            query, keys = torch.zeros(1, 2, 256, 16, dtype=dtype), torch.zeros(1, 2, 512, 16, dtype=dtype)
            flex.compiled(query, keys, keys, mask)


def test_a_backward_pass_that_does_not_compile_says_the_way_out(monkeypatch):
    """torch compiles it when it runs first."""

    class Uncompiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise LoweringException(RuntimeError("NoValidChoicesError: no kernel fits\nin two lines"), "flex", (), {})

    spec = small_spec()
    learner = make_learner(spec)
    honest = learner._measure
    monkeypatch.setattr(learner, "_measure", lambda *given: Uncompiled.apply(honest(*given)))
    with pytest.raises(DrafterError, match=r"^drafter.attention: flex: .*NoValidChoices.*; set .* to split$"):
        learner.accumulate(make_batch(spec, [20]))
    monkeypatch.setattr(learner, "_measure", lambda *given: honest(*given) + None)
    with pytest.raises(TypeError):
        learner.accumulate(make_batch(spec, [20]))
