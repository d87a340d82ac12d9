"""Windows: one gradient whatever the partition, one division, guards, exact resume."""

from __future__ import annotations

import collections
import gc
import io
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from drafter_cases import (
    close_window,
    frozen,
    gradient_of,
    make_batch,
    make_learner,
    pick,
    slow_dpace,
    small_spec,
    state_of,
)
from paceline.config import ObjectiveConfig
from paceline.config.learning import NoiseConfig
from paceline.drafter.block_inputs import build_blocks
from paceline.drafter.learner import Learner, _share_schedules
from paceline.errors import DrafterError
from paceline.types import FeatureBatch, PlannedStep

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
def test_any_partition_of_a_window_gives_the_same_gradient(order, cuts, weighting, name, limit):
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
    for optimizer in learner.optimizers.values():
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
        learner.optimizers["adamw"].step()
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 0.940), rtol=0, atol=1e-4)


def test_share_of_unmoved_norm_weights_is_reported():
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
        optimizer=small.optimizer_settings, total_steps=5, seed=0,
    )  # fmt: skip
    before = head.detach().clone()
    learner.accumulate(make_batch(spec, LENGTHS))
    assert embedding.grad is None and head.grad is None
    assert learner._head.grad is None and learner._embedding.grad is None
    close_window(learner)
    assert torch.equal(head.detach(), before)
    trained = {id(p) for group in learner.optimizers.values() for g in group.param_groups for p in g["params"]}
    assert trained == {id(p) for p in learner.network.parameters()}
    assert set(learner.state_dict()["network"]) == set(learner.network.state_dict())


def test_a_batch_without_anchors_changes_nothing():
    spec = small_spec()
    batch = make_batch(spec, LENGTHS)
    empty = make_batch(spec, [5, 4], masks=[np.zeros(5, bool), np.zeros(4, bool)], index=7, bucket=3)
    expected, _ = window_gradient(make_learner(spec), [batch])
    found, report = window_gradient(make_learner(spec), [empty, batch])
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert report.batches == [7, 0] and report.buckets[3].loss.denominator == 0 and report.buckets[3].samples == 2


def test_a_window_without_anchors_moves_nothing():
    spec = small_spec()
    learner = make_learner(spec)
    learner.accumulate(make_batch(spec, LENGTHS))
    close_window(learner)
    before = state_of(learner)["network"]
    learner.accumulate(make_batch(spec, [5], masks=[np.zeros(5, bool)]))
    report = close_window(learner, 2)
    assert (report.gradient_norm, report.skipped, report.loss.denominator) == (0.0, False, 0.0)
    assert all(torch.equal(before[name], value) for name, value in learner.state_dict()["network"].items())


def test_steps_not_finite_are_skipped_then_stop_the_run():
    spec = small_spec()
    learner = make_learner(spec, optimizer={"max_skipped_steps": 2})
    good = make_batch(spec, LENGTHS)
    bad = make_batch(spec, [9, 9], index=5, rows=[41, 42])
    bad = FeatureBatch(bad.host, torch.full_like(bad.features, float("nan")))
    before = state_of(learner)["network"]
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
    assert report.learning_rate == learner.rates.at(0)


class Operations(TorchDispatchMode):
    """Counts operations by name, and refuses some."""

    def __init__(self, refused=lambda func, args: False) -> None:
        super().__init__()
        self.refused, self.counts = refused, collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert not self.refused(name, args), f"{name} may not be called here"
        self.counts[name] += 1
        return func(*args, **(kwargs or {}))


WAITING = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique_dim", "_unique2"}
"""Operations after which the host waits for a card; indexing with a mask is `nonzero`."""
VIEWS = {
    "view",
    "_unsafe_view",
    "slice",
    "select",
    "expand",
    "transpose",
    "t",
    "permute",
    "detach",
    "alias",
    "unsqueeze",
}
"""Operations that compute nothing."""
OBJECTIVES = [{}, {"name": "dpace", "weighting": "sample"}, {"terms": {"kl": 1.0, "lk": 0.5, "ce": 1.0}}]


def train_a_window(learner: Learner, **options) -> None:
    for number in range(2):
        learner.accumulate(make_batch(learner.spec, LENGTHS, last_hidden=True, index=number, **options))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("limit", [None, 40])
def test_accumulating_never_waits_for_the_device(monkeypatch, objective, limit):
    """No value comes to the host before the window is closed."""
    spec = small_spec(layers=("sliding", "full"), causal=(True, False), sliding_window=5)
    options = {"positions_per_pass": limit, "diagnose_every": 1, "noise": {"kind": "gaussian"}}
    learner = teacher_learner(spec, lambda rows: rows @ frozen(spec)[1].T, drafter=options, **objective)

    def refuse(self, *_args, **_kwargs):
        raise AssertionError("fetched to the host")

    with monkeypatch.context() as patch, Operations(lambda name, args: name in WAITING):
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero"):
            patch.setattr(torch.Tensor, name, refuse)
        train_a_window(learner)
    with Operations() as operations:
        assert close_window(learner).loss.denominator > 0
    assert operations.counts["_local_scalar_dense"] == 0, "the window's sums come in one transfer"


def test_a_micro_batch_keeps_to_its_budget_of_operations():
    """Each is a kernel on a card, where attention is one as well; 530 of them in two layers."""
    learner = make_learner(small_spec(), drafter={"diagnose_every": 0, "attention": "dense"})
    with Operations() as operations:
        learner.accumulate(make_batch(learner.spec, LENGTHS, num_anchors=4))
    assert sum(count for name, count in operations.counts.items() if name not in VIEWS) < 600


def test_a_probe_leaves_room_for_the_optimizer():
    """What fits without the optimizer's state must fit with it, which is made in the first step."""
    learner, batch = make_learner(small_spec()), make_batch(small_spec(), LENGTHS)
    whole, held = sum(p.numel() for p in learner.parameters), []
    others = {id(t) for t in gc.get_objects() if type(t) is torch.Tensor}

    def noted(batch):
        ours = [t for t in gc.get_objects() if type(t) is torch.Tensor and id(t) not in others]
        held.append(max(t.numel() for t in ours if t.dtype == torch.uint8))

    honest, learner.accumulate = learner.accumulate, noted
    learner.probe(batch)
    assert held == [pytest.approx(8 * whole, rel=0.01)]
    learner.accumulate = honest
    learner.accumulate(batch)
    close_window(learner)
    learner.accumulate = lambda batch: held.append(
        sum(t.numel() == held[0] for t in gc.get_objects() if type(t) is torch.Tensor)
    )
    learner.probe(batch)
    assert held[1] == 0, "the state is there by now"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_operation_has_a_deterministic_form(objective):
    """What torch.use_deterministic_algorithms refuses on CUDA, and sums by atomic additions to the same place."""
    spec = small_spec()
    learner = teacher_learner(
        spec, lambda rows: rows @ frozen(spec)[1].T, drafter={"diagnose_every": 1, "diagnose_share": 1.0}, **objective
    )

    def refused(name, args):
        if name in ("index_add", "index_add_"):
            return len(args[2].unique()) < len(args[2])
        return name in ("put_", "histc", "median", "bincount", "scatter_reduce") or (
            name in ("cumsum", "cumsum_") and args[0].is_floating_point()
        )

    learner.hold_for_validation(make_batch(spec, LENGTHS, last_hidden=True))
    with Operations(refused) as operations:
        train_a_window(learner)
        report = learner.step(PlannedStep(1, 0, 0, range(2), save=False, validate=True))
    assert "validation/loss" in report.ratios
    assert {"mm", "_foreach_mul_"} <= operations.counts.keys(), "forward, backward and step were watched"


def test_frozen_tensors_of_another_shape_are_refused():
    spec = small_spec()
    embedding, head = frozen(small_spec(vocab_size=60))
    small = make_learner(spec)
    with pytest.raises(DrafterError, match=r"embedding is \[60, 16\]"):
        Learner(
            spec, embedding=embedding, head=head, drafter=small.settings, objective=small.objective,
            optimizer=small.optimizer_settings, total_steps=5, seed=0,
        )  # fmt: skip


def brute_loss(learner, batches):
    """(Σ weighted loss, Σ weight) over windows with plain logits, slot by slot."""
    spec, settings = learner.spec, learner.objective
    numerator = denominator = 0.0
    for batch in batches:
        host = batch.host
        table = build_blocks(host, spec)
        blocks = F.embedding(torch.from_numpy(table.tokens), learner._embedding)
        hidden = learner.network.training_forward(
            batch.features, host.lengths, host.anchors, host.anchor_counts, blocks
        )
        logits = hidden @ learner._head.T
        per_sample = {}
        for a in range(len(host.anchors)):
            slots = [j + spec.first_draft_slot for j in range(spec.num_drafts)]
            ce = [
                float(F.cross_entropy(logits[a, slot], torch.tensor(table.labels[a, j])))
                for j, slot in enumerate(slots)
            ]
            live = table.live[a]
            if settings.name == "dpace":
                w = slow_dpace(ce, live, settings.alpha)
            else:
                w = [math.exp(-j / learner.gammas.at(0)) * on for j, on in enumerate(live)]
            pair = (sum(x * c for x, c in zip(w, ce, strict=True)), sum(w))
            if settings.weighting == "token":
                numerator, denominator = numerator + pair[0], denominator + pair[1]
            elif settings.weighting == "anchor":
                numerator, denominator = numerator + pair[0] / pair[1], denominator + 1
            else:
                per_sample.setdefault(table.documents[a], []).append(pair)
        for pairs in per_sample.values():
            numerator += sum(p[0] for p in pairs) / sum(p[1] for p in pairs)
            denominator += 1
    return numerator, denominator


@pytest.mark.parametrize("weighting", ["token", "anchor", "sample"])
@pytest.mark.parametrize("name", ["decay", "dpace"])
@pytest.mark.parametrize("sample_from_anchor", [False, True])
def test_window_loss_is_its_definition(weighting, name, sample_from_anchor):
    spec = small_spec(sample_from_anchor=sample_from_anchor)
    learner = make_learner(spec, objective={"weighting": weighting, "name": name})
    batches = [make_batch(spec, [20, 5, 9], seed=1), make_batch(spec, [40], seed=2, num_anchors=9)]
    with torch.no_grad():
        numerator, denominator = brute_loss(learner, batches)
    for batch in batches:
        learner.accumulate(batch)
    report = close_window(learner)
    assert report.loss.numerator == pytest.approx(numerator, rel=1e-5)
    assert report.loss.denominator == pytest.approx(denominator, rel=1e-5)


@pytest.mark.parametrize("limit", [None, 40])
def test_each_sample_has_the_loss_that_it_has_alone(limit: int | None) -> None:
    spec = small_spec()
    whole = make_batch(spec, LENGTHS, num_anchors=12)
    learner = make_learner(spec, drafter={"positions_per_pass": limit})
    learner.accumulate(whole)
    report = close_window(learner)
    (found,) = report.sample_losses.values()
    assert list(report.sample_losses) == list(report.batches) and found.shape == (6, 2)
    for place in range(len(LENGTHS)):
        alone = make_learner(spec)
        alone.accumulate(pick(whole, [place]))
        loss = close_window(alone).loss
        assert found[place] == pytest.approx([loss.numerator, loss.denominator], rel=1e-5)
    assert found.sum(0) == pytest.approx([report.loss.numerator, report.loss.denominator], rel=1e-6)


def teacher_learner(spec, teacher=None, drafter=None, **objective) -> Learner:
    embedding, head = frozen(spec)
    small = make_learner(spec, drafter=drafter or {})
    return Learner(
        spec, embedding=embedding, head=head, drafter=small.settings, objective=ObjectiveConfig(**objective),
        optimizer=small.optimizer_settings, total_steps=11, seed=0, teacher=teacher,
    )  # fmt: skip


@pytest.mark.parametrize("sample_from_anchor", [False, True])
def test_teacher_of_a_draft_is_the_token_before_its_label(sample_from_anchor):
    spec = small_spec(sample_from_anchor=sample_from_anchor)
    batch = make_batch(spec, [20, 9, 15], last_hidden=True)
    seen = []
    learner = teacher_learner(spec, lambda rows: seen.append(rows) or rows @ frozen(spec)[1].T, terms={"kl": 1.0})
    learner.accumulate(batch)
    table = build_blocks(batch.host, spec)
    starts = np.cumsum(batch.host.lengths) - batch.host.lengths
    expected = []
    for a, document in enumerate(table.documents):
        for j in range(spec.num_drafts):
            if table.live[a, j]:
                label = batch.host.anchors[a] + 1 + j
                assert table.labels[a, j] == batch.host.ids[document, label]
                expected.append(int(starts[document] + label - 1))
    assert torch.equal(torch.cat(seen), batch.last_hidden[expected])
    report = close_window(learner)
    assert report.ratios["objective/kl"].denominator == len(expected)


def test_a_missing_teacher_is_refused():
    spec = small_spec()
    with pytest.raises(DrafterError, match="no teacher was given"):
        teacher_learner(spec, terms={"ce": 1.0, "tv": 0.5})
    learner = teacher_learner(spec, lambda rows: rows, terms={"tv": 1.0})
    with pytest.raises(DrafterError, match="did not send them"):
        learner.accumulate(make_batch(spec, [20]))


def test_shares_and_gamma_move_in_a_straight_line():
    spec = small_spec()
    learner = teacher_learner(
        spec, lambda rows: rows @ frozen(spec)[1].T, terms={"ce": 1.0}, terms_end={"kl": 1.0}, gamma=2.0, gamma_end=4.0
    )
    assert {name: schedule.at(5) for name, schedule in learner.shares.items()} == {"ce": 0.5, "kl": 0.5}
    learner.steps_done = 5
    batch = make_batch(spec, LENGTHS, last_hidden=True)
    learner.accumulate(batch)
    report = close_window(learner, 6)
    assert report.ratios["schedule/gamma"].value == 3.0


@pytest.mark.parametrize(("shape", "midway"), [("linear", 0.25), ("cosine", (1 - math.cos(math.pi / 4)) / 2)])
def test_shares_gamma_and_noise_follow_one_ramp(shape, midway):
    spec = small_spec()
    way = {"ramp": shape, "first_step": 4, "last_step": 8}
    learner = make_learner(
        spec,
        drafter={"noise": {"kind": "gaussian", "ratio": 0.0, "ratio_end": 1.0, **way}},
        objective={"gamma": 2.0, "gamma_end": 4.0, **way},
    )
    shares = _share_schedules(ObjectiveConfig(terms={"ce": 1.0}, terms_end={"kl": 1.0}, **way), 50)
    for step, share in ((0, 0.0), (4, 0.0), (5, midway), (8, 1.0), (30, 1.0)):
        assert shares["kl"].at(step) == pytest.approx(share) and shares["ce"].at(step) == pytest.approx(1 - share)
        assert learner.gammas.at(step) == pytest.approx(2 + 2 * share)
        assert learner.noise_ratios.at(step) == pytest.approx(share)
    with pytest.raises(ValidationError, match="must come after first_step"):
        ObjectiveConfig(first_step=8, last_step=8)


def test_validation_repeats_and_leaves_the_window_alone():
    spec = small_spec()
    drafter = {"noise": NoiseConfig(kind="gaussian", ratio=0.5), "diagnose_share": 1.0}
    learner = make_learner(spec, drafter=drafter)
    clean = make_learner(spec, drafter={"diagnose_share": 1.0})
    batch = make_batch(spec, LENGTHS, num_anchors=9)
    learner.hold_for_validation(batch)
    clean.hold_for_validation(batch)
    learner.accumulate(batch)
    before = [p.grad.clone() for p in learner.network.parameters()]
    found = learner.validate()
    assert found == learner.validate() == clean.validate()
    assert all(torch.equal(a, p.grad) for a, p in zip(before, learner.network.parameters(), strict=True))
    clean.accumulate(batch)
    report, noised = close_window(clean), close_window(learner)
    assert found["loss"].value == pytest.approx(report.loss.value, rel=1e-6) and noised.loss != report.loss
    assert {name for name in found if name != "loss"} <= set(report.ratios)
    assert noised.ratios["schedule/noise_ratio"].value == 0.5
    # A noise of half the RMS has a quarter of the energy.
    assert [noised.ratios[f"noise/snr_tap_{tap}"].value for tap in (0, 1)] == pytest.approx([4.0, 4.0], rel=0.2)


def test_batches_carry_what_the_teacher_reads():
    spec = small_spec()
    batch = make_batch(spec, LENGTHS, last_hidden=True)
    learner = teacher_learner(spec, lambda rows: rows @ frozen(spec)[1].T, terms={"lk": 1.0}, name="dpace")
    learner.accumulate(batch)
    assert isinstance(batch, FeatureBatch) and close_window(learner).loss.denominator > 0


@pytest.mark.parametrize("weighting", ["token", "anchor", "sample"])
def test_dpace_gradient_equals_plain_autograd(weighting):
    """Weights are the drafter's own chances, and must be held fixed: with their gradient the loss is another one."""
    spec = small_spec()
    objective = {"name": "dpace", "weighting": weighting}
    learner, plain = make_learner(spec, objective=objective), make_learner(spec, objective=objective)
    batch = make_batch(spec, [20, 31], num_anchors=6)
    learner.accumulate(batch)
    host, table = batch.host, build_blocks(batch.host, spec)
    blocks = F.embedding(torch.from_numpy(table.tokens), plain._embedding)
    hidden = plain.network.training_forward(batch.features, host.lengths, host.anchors, host.anchor_counts, blocks)
    logits = hidden[:, spec.first_draft_slot :] @ plain._head.T
    labels = torch.from_numpy(table.labels)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    weights = torch.tensor([slow_dpace(*row, 0.5) for row in zip(losses.tolist(), table.live, strict=True)])
    documents = torch.from_numpy(table.documents)
    if weighting == "anchor":
        weights = weights / weights.sum(1, keepdim=True)
    elif weighting == "sample":
        weights = weights / torch.stack([weights[documents == n].sum() for n in documents])[:, None]
    (weights * losses).sum().backward()
    for name, gradient in gradient_of(plain).items():
        torch.testing.assert_close(gradient_of(learner)[name], gradient, rtol=1e-4, atol=1e-5)


def test_each_step_takes_the_values_of_its_schedules():
    """γ, the shares of terms, noise and learning rate: none a step late or early."""
    spec, steps = small_spec(), 6
    way = {"first_step": 1, "last_step": 4}
    learner = teacher_learner(
        spec,
        lambda rows: rows @ frozen(spec)[1].T,
        drafter={"noise": {"kind": "gaussian", "ratio": 0.1, "ratio_end": 0.9, **way}},
        gamma=1.0,
        gamma_end=8.0,
        terms={"ce": 1.0, "kl": 0.5},
        terms_end={"ce": 0.1, "kl": 2.0},
        **way,
    )
    for step in range(steps):
        share = min(1.0, max(0.0, (step - 1) / 3))
        batch = make_batch(spec, LENGTHS, last_hidden=True, seed=step)
        learner.accumulate(batch)
        report = close_window(learner, step + 1)
        weights = np.exp(-np.arange(spec.num_drafts) / (1.0 + 7.0 * share)) * build_blocks(batch.host, spec).live
        assert report.loss.denominator == pytest.approx(weights.sum(), rel=1e-5)
        assert report.ratios["schedule/gamma"].value == pytest.approx(1.0 + 7.0 * share)
        noise = [report.ratios[f"noise/snr_tap_{tap}"].value ** -0.5 for tap in (0, 1)]
        assert noise == pytest.approx([0.1 + 0.8 * share] * 2, rel=0.2)
        assert report.ratios["schedule/noise_ratio"].value == pytest.approx(0.1 + 0.8 * share)
        assert report.learning_rate == learner.rates.at(step)
    shares = {}
    for share, terms in ((1.0, {"ce": 0.1, "kl": 2.0}), (0.0, {"ce": 1.0, "kl": 0.5})):
        fixed = teacher_learner(spec, lambda rows: rows @ frozen(spec)[1].T, terms=terms)
        fixed.accumulate(make_batch(spec, LENGTHS, last_hidden=True))
        shares[share] = close_window(fixed).loss.numerator
    moving = teacher_learner(
        spec, lambda rows: rows @ frozen(spec)[1].T, terms={"ce": 1.0, "kl": 0.5}, terms_end={"ce": 0.1, "kl": 2.0}
    )
    moving.accumulate(make_batch(spec, LENGTHS, last_hidden=True))
    assert close_window(moving).loss.numerator == pytest.approx(shares[0.0], rel=1e-6)


def test_losses_and_sums_are_float32_in_bfloat16():
    """The window's loss is that of the very logits of bfloat16, summed without their rounding."""
    spec = small_spec(vocab_size=50)
    learner = make_learner(spec, dtype="bfloat16")
    batch = make_batch(spec, [60, 70, 80], num_anchors=40, dtype=torch.bfloat16)
    host, table = batch.host, build_blocks(batch.host, spec)
    blocks = F.embedding(torch.from_numpy(table.tokens), learner._embedding)
    with torch.no_grad():
        hidden = learner.network.training_forward(
            batch.features, host.lengths, host.anchors, host.anchor_counts, blocks
        )
        logits = (hidden[:, 1:] @ learner._head.T).double()
    labels = torch.from_numpy(table.labels)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).numpy()
    weights = np.exp(-np.arange(spec.num_drafts) / learner.gammas.at(0)) * table.live
    learner.accumulate(batch)
    loss = close_window(learner).loss
    assert loss.numerator == pytest.approx(float((weights * losses).sum()), rel=1e-6)
    assert loss.denominator == pytest.approx(float(weights.sum()), rel=1e-6)
