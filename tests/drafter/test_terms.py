"""Terms against a teacher: values by their definitions, gradients by autograd; schedules, noise, validation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from drafter_cases import close_window, frozen, make_batch, make_learner, small_spec
from pydantic import ValidationError
from torch.nn import functional as F

from paceline.config import ObjectiveConfig
from paceline.config.drafter import NoiseConfig
from paceline.drafter.block_inputs import build_blocks
from paceline.drafter.learner import Learner, _share_schedules
from paceline.drafter.loss.distillation import distillation_loss
from paceline.drafter.noise import add_noise, noise_ratio
from paceline.drafter.tree import tree_streaks
from paceline.errors import DrafterError
from paceline.types import FeatureBatch


def plain(name: str, logits: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    p, q = torch.softmax(teacher, 1), torch.softmax(logits, 1)
    kl, tv = (p * (p.log() - q.log())).sum(1), 1 - torch.minimum(p, q).sum(1)
    if name == "lk":
        share = torch.exp(-3 * torch.minimum(p, q).sum(1)).detach()
        return share * kl + (1 - share) * tv
    return {"ce": F.cross_entropy(logits, labels, reduction="none"), "kl": kl, "tv": tv}[name]


@pytest.mark.parametrize(
    "shares", [{"ce": 1.0}, {"kl": 1.0}, {"tv": 1.0}, {"lk": 1.0}, {"ce": 0.1, "tv": 0.9, "kl": 2.0}]
)
@pytest.mark.parametrize("chunk", [3, 100])
def test_mixtures_equal_plain_logits(shares, chunk):
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    hidden, head, own, last = make(11, 6).requires_grad_(), make(40, 6), make(40, 5), make(11, 5)
    labels = np.random.default_rng(0).integers(0, 40, 11)
    logits = hidden @ head.T
    tokens = torch.from_numpy(labels)
    reference = sum(s * plain(n, logits, last @ own.T, tokens) for n, s in shares.items())
    weights = torch.linspace(0.1, 3, 11, dtype=torch.float64)
    (expected,) = torch.autograd.grad((reference * weights).sum(), hidden)
    found = distillation_loss(hidden, head, labels, shares, lambda rows: rows @ own.T, last, chunk)
    (gradient,) = torch.autograd.grad((found.loss * weights).sum(), hidden)
    torch.testing.assert_close(found.loss, reference)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(found.cross_entropy, F.cross_entropy(logits, tokens, reduction="none").detach())
    assert torch.equal(found.correct, logits.argmax(1) == tokens)
    for name, values in found.terms.items():
        torch.testing.assert_close(values, plain(name, logits, last @ own.T, tokens).detach())


def teacher_learner(spec, teacher=None, **objective) -> Learner:
    embedding, head = frozen(spec)
    small = make_learner(spec)
    return Learner(
        spec, embedding=embedding, head=head, drafter=small.settings, objective=ObjectiveConfig(**objective),
        optimizer=small.optimizer.config, total_steps=11, seed=0, teacher=teacher,
    )  # fmt: skip


@pytest.mark.parametrize("sample_from_anchor", [False, True])
def test_the_teacher_of_a_draft_is_the_token_before_its_label(sample_from_anchor):
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


def test_a_missing_teacher_is_refused_in_words():
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


LENGTHS = [20, 8, 31]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"terms": {}}, "one above 0"),
        ({"terms": {"ce": -1.0, "kl": 2.0}}, "no negative share"),
        ({"terms_end": {"ce": 0.0}}, "terms_end must have"),
        ({"name": "dpace", "gamma": 3.0}, "no part in dpace"),
        ({"terms": {"mse": 1.0}}, "'ce', 'kl', 'tv' or 'lk'"),
    ],
)
def test_objectives_that_are_refused(values, text):
    with pytest.raises(ValidationError, match=text):
        ObjectiveConfig(**values)


@pytest.mark.parametrize("kind", ["gaussian", "uniform"])
def test_noise_is_keyed_by_sample_and_relative_to_each_tap(kind):
    spec = small_spec()
    batch = make_batch(spec, [200, 30], rows=[7, 8])
    features = batch.features.clone()
    features[:, :16] *= 50
    noised, energies = add_noise(features, batch.host, 2, kind, 0.1, seed=3)
    assert torch.equal(features[:, 16:], batch.features[:, 16:])
    ratio = (noised - features).unflatten(1, (2, -1)).square().mean((0, 2)) / features.unflatten(
        1, (2, -1)
    ).square().mean((0, 2))
    np.testing.assert_allclose(ratio.sqrt(), 0.1, rtol=0.1)
    torch.testing.assert_close((energies[1] / energies[0]).sqrt(), ratio.sqrt(), rtol=0.02, atol=0)
    alone = make_batch(spec, [30], rows=[8])
    again, _ = add_noise(features[200:], alone.host, 2, kind, 0.1, seed=3)
    assert torch.equal(again, noised[200:])
    other, _ = add_noise(features[200:], make_batch(spec, [30], rows=[9]).host, 2, kind, 0.1, seed=3)
    assert not torch.equal(other, again)


def test_noise_ramps_and_refusals():
    ramp = noise_ratio(NoiseConfig(kind="uniform", ratio=0.0, ratio_end=0.2, first_step=10, last_step=20), 100)
    assert [ramp.at(step) for step in (0, 10, 15, 20, 99)] == pytest.approx([0, 0, 0.1, 0.2, 0.2])
    down = noise_ratio(NoiseConfig(kind="gaussian", ratio=0.4, ratio_end=0.0, ramp="cosine"), 101)
    assert [down.at(step) for step in (0, 50, 100)] == pytest.approx([0.4, 0.2, 0.0])
    assert noise_ratio(NoiseConfig(), 100).at(50) == 0.0
    with pytest.raises(ValidationError, match="must come after"):
        NoiseConfig(first_step=5, last_step=5)


def test_validation_has_no_noise_leaves_the_window_alone_and_repeats():
    spec = small_spec()
    drafter = {"noise": NoiseConfig(kind="gaussian", ratio=0.5), "diagnose_share": 1.0}
    learner = make_learner(spec, drafter=drafter)
    clean = make_learner(spec, drafter={"diagnose_share": 1.0})
    batch = make_batch(spec, LENGTHS, num_anchors=9)
    learner.accumulate(batch)
    before = [p.grad.clone() for p in learner.network.parameters()]
    found = learner.validate([batch])
    assert found == learner.validate([batch]) == clean.validate([batch])
    assert all(torch.equal(a, p.grad) for a, p in zip(before, learner.network.parameters(), strict=True))
    clean.accumulate(batch)
    report, noised = close_window(clean), close_window(learner)
    assert found["loss"].value == pytest.approx(report.loss.value, rel=1e-6) and noised.loss != report.loss
    assert {name for name in found if name != "loss"} <= set(report.ratios)
    assert noised.ratios["schedule/noise_ratio"].value == 0.5
    # A noise of half the RMS has a quarter of the energy.
    assert [noised.ratios[f"noise/snr_tap_{tap}"].value for tap in (0, 1)] == pytest.approx([4.0, 4.0], rel=0.2)


def test_diagnosis_agrees_with_plain_logits():
    spec = small_spec()
    learner = make_learner(spec, drafter={"diagnose_share": 1.0, "head_chunk": 7, "diagnose_every": 2})
    batch = make_batch(spec, LENGTHS, num_anchors=9)
    host, table = batch.host, build_blocks(batch.host, spec)
    blocks = F.embedding(torch.from_numpy(table.tokens), learner._embedding)
    with torch.no_grad():
        hidden = learner.network.training_forward(
            batch.features, host.lengths, host.anchors, host.anchor_counts, blocks
        )
        logits = hidden[:, 1:] @ learner._head.T
    learner.accumulate(batch)
    ratios = close_window(learner).ratios
    for k in (2, 4, 8, 16):
        top = logits.topk(k, dim=2).indices
        hit = (top == torch.from_numpy(table.labels)[..., None]).any(2).numpy() & table.live
        for j in range(3):
            ratio = ratios[f"coverage/top_{k}_slot_{j + 1}"]
            assert (ratio.numerator, ratio.denominator) == (hit[:, j].sum(), table.live[:, j].sum())
    assert ratios["tree/streak_256"].value >= ratios["tree/streak_16"].value >= ratios["acceptance/streak"].value
    assert ratios["tree/streak_16"].denominator == len(host.anchors)
    chances = logits.log_softmax(2)
    labels, live = torch.from_numpy(table.labels).clamp(min=0), torch.from_numpy(table.live)
    own = chances.gather(2, labels[..., None])[..., 0]
    found = tree_streaks(chances.topk(min(256, chances.shape[2]), dim=2).values, own, live, (64,))
    whole = live.all(1)
    assert 0 < int(whole.sum()) < len(whole), "blocks cut short and whole ones are both needed"
    expected = float(found.streaks[0][whole].sum() / found.surrogates[0][whole].sum())
    assert ratios["tree/surrogate_ratio_64"].value == pytest.approx(expected, rel=1e-4)
    learner.accumulate(batch)
    assert not any(name.startswith(("tree", "coverage")) for name in close_window(learner, 2).ratios)


def test_batches_carry_what_the_teacher_reads():
    spec = small_spec()
    batch = make_batch(spec, LENGTHS, last_hidden=True)
    learner = teacher_learner(spec, lambda rows: rows @ frozen(spec)[1].T, terms={"lk": 1.0}, name="dpace")
    learner.accumulate(batch)
    assert isinstance(batch, FeatureBatch) and close_window(learner).loss.denominator > 0
