"""Windows: one gradient whatever the partition, one division, guards, exact resume."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
import torch
from drafter_cases import close_window, frozen, gradient_of, make_batch, make_learner, pick, small_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafter.learner import Learner
from paceline.errors import DrafterError
from paceline.types import FeatureBatch

LENGTHS = [10, 20, 7, 60, 3, 33]


def window_gradient(learner, batches):
    for batch in batches:
        learner.accumulate(batch)
    gradient = gradient_of(learner)
    report = close_window(learner)
    return {name: value / report.loss.denominator for name, value in gradient.items()}, report


@settings(max_examples=12, deadline=None)
@given(
    st.permutations(range(len(LENGTHS))),
    st.sets(st.integers(1, len(LENGTHS) - 1)),
    st.sampled_from(["token", "anchor", "sample"]),
    st.sampled_from(["decay", "dpace"]),
    st.sampled_from([None, 1, 40]),
)
def test_any_partition_of_the_window_gives_the_same_gradient(order, cuts, weighting, name, limit):
    """The mean of means would differ: lengths and anchors are very uneven."""
    spec = small_spec()
    whole = make_batch(spec, LENGTHS, num_anchors=12)
    edges = [0, *sorted(cuts), len(LENGTHS)]
    parts = [pick(whole, list(order[a:b])) for a, b in itertools.pairwise(edges)]
    objective = {"weighting": weighting, "name": name}
    expected, one = window_gradient(make_learner(spec, objective=objective), [whole])
    drafter = {"positions_per_pass": limit}
    found, many = window_gradient(make_learner(spec, objective=objective, drafter=drafter), parts)
    for parameter, value in expected.items():
        torch.testing.assert_close(found[parameter], value, rtol=1e-4, atol=1e-6)
    assert many.loss.value == pytest.approx(one.loss.value, rel=1e-5)
    assert many.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-4)
    assert many.ratios["acceptance/streak"] == one.ratios["acceptance/streak"]


def test_the_step_divides_once_and_clips():
    """SGD-like check through AdamW's first step is blind to scale, so the gradient itself is caught before it."""
    spec = small_spec()
    learner = make_learner(spec, optimizer={"clip_norm": 0.5})
    expected, _ = window_gradient(make_learner(spec), [make_batch(spec, LENGTHS)])
    seen = {}
    for optimizer in learner.optimizer._optimizers.values():
        optimizer.register_step_pre_hook(lambda *_: seen.update(gradient_of(learner)))
    learner.accumulate(make_batch(spec, LENGTHS))
    report = close_window(learner)
    norm = torch.sqrt(sum(value.square().sum() for value in expected.values()))
    assert report.gradient_norm == pytest.approx(float(norm), rel=1e-4) and norm > 0.5 and report.clipped
    for name, value in expected.items():
        torch.testing.assert_close(seen[name], value * (0.5 / norm), rtol=1e-3, atol=1e-6)
    assert torch.sqrt(sum(value.square().sum() for value in seen.values())) == pytest.approx(0.5, rel=1e-4)


def test_resume_is_bit_exact(tmp_path):
    for options in ({}, {"optimizer": {"name": "muon"}}, {"objective": {"name": "dpace", "weighting": "sample"}}):
        spec = small_spec()
        batches = [make_batch(spec, [20, 9], seed=s) for s in range(6)]
        straight = make_learner(spec, **options)
        resumed = make_learner(spec, **options)
        reports = []
        for step, batch in enumerate(batches, 1):
            straight.accumulate(batch)
            reports.append(close_window(straight, step))
        for step, batch in enumerate(batches[:3], 1):
            resumed.accumulate(batch)
            close_window(resumed, step)
        file = io.BytesIO()
        torch.save(resumed.state_dict(), file)
        file.seek(0)
        again = make_learner(spec, seed=99, **options)
        again.load_state_dict(torch.load(file, weights_only=True))
        for step, batch in enumerate(batches[3:], 4):
            again.accumulate(batch)
            assert close_window(again, step) == reports[step - 1]
        for name, value in straight.network.state_dict().items():
            assert torch.equal(value, again.network.state_dict()[name])
        first, second = straight.state_dict()["optimizer"], again.state_dict()["optimizer"]
        moments = [
            (a[key], second[kind]["state"][index][key])
            for kind in first
            for index, a in first[kind]["state"].items()
            for key in a
        ]
        assert moments and all(torch.equal(one, two) and one.abs().sum() > 0 for one, two in moments)


def test_state_is_a_copy():
    spec = small_spec()
    learner = make_learner(spec)
    learner.accumulate(make_batch(spec, LENGTHS))
    close_window(learner)
    state = learner.state_dict()
    kept = state["network"]["fc.weight"].clone()
    learner.accumulate(make_batch(spec, LENGTHS))
    close_window(learner, 2)
    assert torch.equal(kept, state["network"]["fc.weight"])
    assert not torch.equal(kept, learner.network.state_dict()["fc.weight"])


def test_masters_are_float32_and_norms_move():
    """A bfloat16 weight at 1.0 does not move in 100 steps at 6e-4; the master reaches 0.940."""
    spec = small_spec()
    learner = make_learner(
        spec, dtype="bfloat16", total_steps=1000, optimizer={"lr": 6e-4, "schedule": "constant", "warmup": 0.0}
    )
    assert all(p.dtype == torch.float32 for p in learner.network.parameters())
    weight = learner.network.norm.weight
    for _ in range(100):
        for parameter in learner.network.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        learner.optimizer.step(1.0, learner.steps_done)
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 0.940), rtol=0, atol=1e-4)


def test_the_share_of_unmoved_norm_weights_is_reported():
    spec = small_spec()
    learner = make_learner(spec, dtype="bfloat16", optimizer={"warmup": 0.0})
    learner.accumulate(make_batch(spec, LENGTHS))
    assert close_window(learner).ratios["norms/unmoved"].value == 1.0
    learner.accumulate(make_batch(spec, LENGTHS))
    assert close_window(learner, 2).ratios["norms/unmoved"].value < 0.01


def test_frozen_tensors_get_no_gradient_and_are_no_state():
    spec = small_spec()
    embedding, head = frozen(spec)
    embedding.requires_grad_()
    head.requires_grad_()
    small = make_learner(spec)
    learner = Learner(
        spec, embedding=embedding, head=head, drafter=small.settings, objective=small.objective,
        optimizer=small.optimizer.config, total_steps=5, seed=0,
    )  # fmt: skip
    before = head.detach().clone()
    learner.accumulate(make_batch(spec, LENGTHS))
    assert embedding.grad is None and head.grad is None
    assert learner._head.grad is None and learner._embedding.grad is None
    close_window(learner)
    assert torch.equal(head.detach(), before)
    trained = {
        id(p) for group in learner.optimizer._optimizers.values() for g in group.param_groups for p in g["params"]
    }
    assert trained == {id(p) for p in learner.network.parameters()}
    assert set(learner.state_dict()["network"]) == set(learner.network.state_dict())


def test_a_batch_without_anchors_takes_part_and_changes_nothing():
    spec = small_spec()
    batch = make_batch(spec, LENGTHS)
    empty = make_batch(spec, [5, 4], masks=[np.zeros(5, bool), np.zeros(4, bool)], index=7, bucket=3)
    expected, _ = window_gradient(make_learner(spec), [batch])
    found, report = window_gradient(make_learner(spec), [empty, batch])
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert report.batches == [7, 0] and report.buckets[3].loss.denominator == 0 and report.buckets[3].samples == 2


def test_a_window_without_any_anchor_moves_nothing_and_has_no_nan():
    spec = small_spec()
    learner = make_learner(spec)
    learner.accumulate(make_batch(spec, LENGTHS))
    close_window(learner)
    before = learner.state_dict()["network"]
    learner.accumulate(make_batch(spec, [5], masks=[np.zeros(5, bool)]))
    report = close_window(learner, 2)
    assert (report.gradient_norm, report.skipped, report.loss.denominator) == (0.0, False, 0.0)
    assert all(torch.equal(before[name], value) for name, value in learner.state_dict()["network"].items())


def test_steps_that_are_not_finite_are_skipped_and_then_stop_the_run():
    spec = small_spec()
    learner = make_learner(spec, optimizer={"max_skipped_steps": 2})
    good = make_batch(spec, LENGTHS)
    bad = make_batch(spec, [9, 9], index=5, rows=[41, 42])
    bad = FeatureBatch(bad.host, torch.full_like(bad.features, float("nan")))
    before = learner.state_dict()["network"]
    for batch in (bad, good):
        learner.accumulate(batch)
    report = close_window(learner)
    assert report.skipped and not report.clipped
    assert all(torch.equal(before[name], value) for name, value in learner.state_dict()["network"].items())
    learner.accumulate(good)
    assert not close_window(learner, 2).skipped
    learner.accumulate(bad)
    assert close_window(learner, 3).skipped
    learner.accumulate(bad)
    with pytest.raises(DrafterError, match=r"step 4: .* 2 steps in a row; last in batches \[5\], samples \[41, 42\]"):
        close_window(learner, 4)


def test_report_counts_what_the_window_held():
    spec = small_spec()
    learner = make_learner(spec)
    first = make_batch(spec, LENGTHS, bucket=2, index=4)
    second = make_batch(spec, [5, 50], bucket=0, index=9, seed=3)
    for batch in (first, second):
        learner.accumulate(batch)
    report = close_window(learner)
    anchors = len(first.host.anchors) + len(second.host.anchors)
    assert report.batches == [4, 9] and list(report.buckets) == [0, 2]
    assert (report.samples, report.anchors, report.draft_positions) == (8, anchors, 4 * anchors)
    assert (report.real_tokens, report.padded_tokens, report.max_length) == (sum(LENGTHS) + 55, 6 * 60 + 100, 60)
    losses = [report.buckets[number].loss for number in (0, 2)]
    assert sum(loss.numerator for loss in losses) == pytest.approx(report.loss.numerator)
    assert sum(loss.denominator for loss in losses) == pytest.approx(report.loss.denominator)
    assert report.learning_rate == learner.optimizer.rates.at(0)


def test_accumulating_never_waits_for_the_device(monkeypatch):
    """No value is fetched to the host before the window is closed."""
    spec = small_spec()
    learner = make_learner(spec)
    batch = make_batch(spec, LENGTHS)

    def refuse(self, *_args, **_kwargs):
        raise AssertionError("fetched to the host")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero"):
            patch.setattr(torch.Tensor, name, refuse)
        learner.accumulate(batch)
    assert close_window(learner).loss.denominator > 0


def test_frozen_tensors_of_another_shape_are_refused():
    spec = small_spec()
    embedding, head = frozen(small_spec(vocab_size=60))
    small = make_learner(spec)
    with pytest.raises(DrafterError, match=r"embedding is \[60, 16\]"):
        Learner(
            spec, embedding=embedding, head=head, drafter=small.settings, objective=small.objective,
            optimizer=small.optimizer.config, total_steps=5, seed=0,
        )  # fmt: skip
