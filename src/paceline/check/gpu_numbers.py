"""Stage A of the acceptance of a device: its numbers against those of the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.check.gpu_bench import Bench, Check, skipped, verdict
from paceline.check.results import CheckResult
from paceline.device import Mark, description, hold_back, main_device, no_waiting, synchronize
from paceline.drafter.attention import BACKENDS
from paceline.drafter.attention.layout import Layout
from paceline.drafter.host_copy import HostCopy
from paceline.drafter.loss.tiled_ce import head_cross_entropy
from paceline.types import FeatureBatch, PlannedStep

TYPES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Allowed relative error of values; gradients may have ten times as much."""


def seconds_of(device: str, work: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a piece of work on a device, after one unmeasured time."""
    work()
    synchronize(device)
    found = []
    for _ in range(repeats):
        began = Mark(device, timed=True)
        work()
        ended = Mark(device, timed=True)
        ended.wait()
        found.append(ended.seconds_since(began))
    return float(np.median(found))


def relative(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖, in float64 on the CPU; infinity where something is not finite."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    error = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
    return error if np.isfinite(error) else float("inf")


def ceilings(bench: Bench) -> CheckResult:
    """How fast the device multiplies and copies: recorded, not judged."""
    size, dtype = (256, torch.float32) if bench.tiny else (8192, torch.bfloat16)
    a, b = (torch.randn(size, size, device=bench.device).to(dtype) for _ in range(2))
    bench.peak_flops = 2 * size**3 / seconds_of(bench.device, lambda: a @ b, 5)
    count = 2**20 if bench.tiny else 2**28
    there = torch.empty(count, dtype=torch.uint8, device=bench.device)
    here = torch.empty(count, dtype=torch.uint8, pin_memory=bench.is_cuda)
    figures = {
        "matmul_tflops": bench.peak_flops / 1e12,
        "to_host_gb_per_s": count / seconds_of(bench.device, lambda: here.copy_(there, non_blocking=True), 5) / 1e9,
        "to_device_gb_per_s": count / seconds_of(bench.device, lambda: there.copy_(here, non_blocking=True), 5) / 1e9,
    }
    detail = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
    return verdict("ceilings", True, f"{description(bench.device)}; {detail}", figures=figures)


def attention(bench: Bench) -> CheckResult:
    """The backend that training uses on this device against the reference in float64, values and gradients."""
    name = "flex" if bench.is_cuda else "split"
    worst = dict.fromkeys(("float32", "bfloat16"), 0.0)
    errors = []
    size = 64 if bench.is_cuda else 16
    shape = np.array([150, 9, 61]), np.array([3, 40, 149, 0, 30, 60]), np.array([3, 1, 2])
    for window, causal in ((None, False), (None, True), (37, True), (37, False)):
        layout = Layout.of(*shape, 8, torch.device("cpu"))
        reference = _attend("dense", layout, window, causal, torch.device("cpu"), torch.float64, size)
        moved = Layout.of(*shape, 8, torch.device(bench.device))
        for dtype, allowed in TYPES.items():
            found = _attend(name, moved, window, causal, torch.device(bench.device), dtype, size)
            for place, (one, other) in enumerate(zip(found, reference, strict=True)):
                error = relative(one, other)
                worst[str(dtype).removeprefix("torch.")] = max(worst[str(dtype).removeprefix("torch.")], error)
                if not error <= allowed * (1 if place == 0 else 10):
                    errors.append(f"{dtype}, window {window}, causal {causal}, part {place}: {error:.2g}")
    detail = f"{name} against float64: worst relative error " + ", ".join(f"{k} {v:.1e}" for k, v in worst.items())
    return verdict("attention", not errors, "; ".join([detail, *errors[:3]]), "use drafter.attention: split", worst)


def _attend(
    name: str, layout: Layout, window: int | None, causal: bool, device: torch.device, dtype: torch.dtype, size: int
) -> list[Tensor]:
    """Output and gradients; the same random values for every backend."""
    source = torch.Generator().manual_seed(3)
    groups, repeats, count, slots = 2, 4, len(layout.anchors), layout.block_size
    shapes = (
        (groups, count, slots, repeats, size),
        *[(groups, layout.num_context, size)] * 2,
        *[(groups, count, slots, size)] * 2,
    )
    values = [torch.randn(*shape, generator=source, dtype=torch.float64) for shape in shapes]
    tensors = [value.to(device, dtype).requires_grad_() for value in values]
    query, keys, values_, block_keys, block_values = tensors
    output = BACKENDS[name](query, keys, values_, block_keys, block_values, layout, window, causal)
    weight = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view(output.shape).to(device, dtype)
    (output * weight).sum().backward()
    return [output, *(tensor.grad for tensor in tensors if tensor.grad is not None)]


def graphs(bench: Bench) -> CheckResult:
    """Compiled graphs over many micro-batches of the plan: few, and never the unfused fallback."""
    if not bench.is_cuda:
        return skipped("graphs", "flex attention is compiled on CUDA only")
    from torch._dynamo.utils import counters

    context = bench.context(bench.device)
    learner = context.new_learner(10)
    counters.clear()
    began = time.perf_counter()
    number = min(200, len(context.batches) * 4)
    for index in range(number):
        learner.accumulate(_features(bench, index))
    learner.step(PlannedStep(1, 0, 0, range(0), save=False))
    synchronize(bench.device)
    made = counters["stats"]["unique_graphs"]
    seconds = time.perf_counter() - began
    detail = f"{made} graphs over {number} micro-batches in {seconds:.0f} s"
    return verdict("graphs", made <= 6, detail, "a shape changes too often", {"graphs": made, "seconds": seconds})


def head(bench: Bench) -> CheckResult:
    """Cross entropy in tiles against whole logits in float64: loss and gradient."""
    source = torch.Generator().manual_seed(1)
    rows, vocab, hidden = 300, 1000, 64
    states = torch.randn(rows, hidden, generator=source, dtype=torch.float64)
    weight = torch.randn(vocab, hidden, generator=source, dtype=torch.float64)
    labels = torch.randint(0, vocab, (rows,), generator=source)
    reference = states.clone().requires_grad_()
    expected = F.cross_entropy(reference @ weight.T, labels, reduction="none")
    expected.sum().backward()
    worst = {}
    for dtype, allowed in TYPES.items():
        ours = states.to(bench.device, dtype).requires_grad_()
        found, _ = head_cross_entropy(ours, weight.to(bench.device, dtype), labels.numpy(), 128)
        found.sum().backward()
        assert ours.grad is not None and reference.grad is not None
        error = max(relative(found, expected), relative(ours.grad, reference.grad) / 10)
        worst[str(dtype).removeprefix("torch.")] = error
        if not error <= allowed:
            return verdict("head", False, f"{dtype}: relative error {error:.2g}", "report it", worst)
    return verdict("head", True, ", ".join(f"{k} {v:.1e}" for k, v in worst.items()), figures=worst)


def learner(bench: Bench) -> CheckResult:
    """One window and thirty steps of the demo's drafter, on the CPU and on the device, in float32."""
    losses: dict[str, list[float]] = {}
    gradients: dict[str, Tensor] = {}
    steps = 10 if bench.tiny else 30
    for device in ("cpu", bench.device):
        made = bench.context(device).new_learner(steps)
        for step in range(1, steps + 1):
            made.accumulate(_features(bench, step))
            if step == 1:
                found = [p.grad.flatten() for p in made.network.parameters() if p.grad is not None]
                gradients[device] = torch.cat(found).double().cpu()
            report = made.step(PlannedStep(step, 0, step - 1, range(0), save=False))
            losses.setdefault(device, []).append(report.loss.value)
    ours, theirs = np.array(losses[bench.device]), np.array(losses["cpu"])
    first, last = abs(ours[0] / theirs[0] - 1), float(np.abs(ours / theirs - 1).max())
    cosine = float(F.cosine_similarity(gradients[bench.device], gradients["cpu"], dim=0))
    passed = first <= 1e-5 and last <= 1e-2 and cosine > 0.9999
    detail = f"loss differs by {first:.1e} at first, {last:.1e} in {steps} steps; gradient cosine {cosine:.6f}"
    return verdict(
        "learner", passed, detail, "attach the JSON to a report", {"first": first, "last": last, "cosine": cosine}
    )


def taps(bench: Bench) -> CheckResult:
    """The demo target's features on the device against those on the CPU."""
    errors = {}
    for index in range(3):
        host = _host(bench, index)
        expected = bench.context("cpu").target.features(host).features
        errors[index] = relative(bench.context(bench.device).target.features(host).features, expected)
    worst = max(errors.values())
    detail = f"relative error of features {worst:.1e}"
    return verdict("taps", worst <= 1e-4, detail, "try another target.attention", {"worst": worst})


def waits(bench: Bench) -> CheckResult:
    """The host never waits for the card inside a micro-batch."""
    if not bench.is_cuda:
        return skipped("waits", "only a card works beside the host")
    made, batch = bench.context(bench.device).new_learner(3), _features(bench, 0)
    moved = FeatureBatch(batch.host, batch.features.to(bench.device))
    made.accumulate(moved)
    synchronize(bench.device)
    with no_waiting(bench.device):
        made.accumulate(moved)
    return verdict("waits", True, "no wait inside a micro-batch")


def snapshot(bench: Bench) -> CheckResult:
    """A checkpoint's copy holds the weights of its step although the card is late."""
    values = torch.arange(1_000_000, dtype=torch.float32, device=bench.device)
    copy = HostCopy(main_device(bench.device))
    wrong = 0
    for number in range(5 if bench.tiny else 20):
        hold_back(bench.device)
        values.add_(1.0)
        taken = copy.take({"w": values})["w"]
        first = float(taken[0])
        wrong += first != number + 1
    return verdict(
        "snapshot", wrong == 0, f"{wrong} copies of another step", "checkpoints may be torn", {"wrong": wrong}
    )


def _host(bench: Bench, index: int) -> Any:
    from paceline.check.sample_data import collated

    context = bench.context("cpu")
    settings = context.settings
    planned, anchors = context.batches[index % len(context.batches)], settings.drafter.num_anchors
    return collated(planned, context.material.store, context.facts, settings.seed, anchors)


def _features(bench: Bench, index: int) -> FeatureBatch:
    return bench.context("cpu").target.features(_host(bench, index))


NUMBERS: dict[str, Check] = {
    "ceilings": ceilings,
    "attention": attention,
    "graphs": graphs,
    "head": head,
    "learner": learner,
    "taps": taps,
    "waits": waits,
    "snapshot": snapshot,
}
"""Stage A."""
