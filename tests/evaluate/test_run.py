"""Evaluation reports: measures by hand, lossless checks, the training forward beside the loop, the negative control."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import pytest
import torch

from paceline.config import EvaluateConfig
from paceline.decode import kv_cache
from paceline.decode.answers import Decoded, Pass
from paceline.decode.loop import greedy_decode
from paceline.errors import DataError, TargetError
from paceline.evaluate import evaluate as module
from paceline.evaluate.evaluate import evaluate, lossless
from paceline.evaluate.metrics import by_context, group, histogram, macro_tau, slot_rates

PASSES = [Pass(10, 3, 3, 4), Pass(300, 3, 0, 1), Pass(301, 3, 1, 2), Pass(1100, 2, 2, 2)]


@dataclass(frozen=True)
class Prompt:
    id: str
    ids: list[int]
    tags: tuple[str, ...] = ()


def test_measures_by_hand():
    assert group(PASSES).tau == 9 / 4 and group([]).passes == 0
    assert macro_tau([PASSES[:1], PASSES[1:], []]) == (4 + 5 / 3) / 2
    assert histogram(PASSES, 3) == [1, 1, 1, 1]
    rates = slot_rates(PASSES, 3)
    assert [(rate.reached, rate.accepted) for rate in rates] == [(4, 3), (3, 2), (1, 1)]
    assert [rate.conditional for rate in rates] == [3 / 4, 2 / 3, 1.0]
    assert [rate.cumulative for rate in rates] == [3 / 4, 2 / 4, 1 / 4]
    assert {name: entry.passes for name, entry in by_context(PASSES).items()} == {
        "0-255": 1,
        "256-1023": 2,
        "1024-4095": 1,
    }


def test_tau_is_the_mean_over_blocks_not_a_product_of_slots():
    """Blocks [1111] and [0000]: τ is 3, although every slot accepts half of the blocks."""
    passes = [Pass(0, 4, 4, 5), Pass(5, 4, 0, 1)]
    assert group(passes).tau == 3.0
    assert [rate.conditional for rate in slot_rates(passes, 4)] == [0.5, 1.0, 1.0, 1.0]


@pytest.fixture(scope="module")
def report(make_pair, prompts):
    """A float64 evaluation of a random pair."""
    target, network = make_pair("qwen3")
    asked = [Prompt(f"p{at}", ids, ("even" if at % 2 == 0 else "odd",)) for at, ids in enumerate(prompts)]
    return evaluate(target, network, asked, EvaluateConfig(num_prompts=6, max_new_tokens=24))


def test_a_report_adds_up(report):
    assert report.num_prompts == len(report.rows) == 6
    assert sum(report.histogram) == report.passes == sum(len(row.accepted) for row in report.rows)
    assert report.new_tokens == sum(row.new_tokens for row in report.rows)
    assert 1 <= report.tau_micro < 3
    assert sum(entry.passes for entry in report.by_tag.values()) == report.passes
    assert sum(entry.passes for entry in report.by_context.values()) == report.passes
    assert report.dtype == "float64"
    assert json.loads(json.dumps(report.to_json()))["tau_micro"] == report.tau_micro


def test_float64_is_lossless(report):
    assert (report.lossless.prompts, report.lossless.equal, report.lossless.errors) == (6, 6, 0)


def test_several_prompts_at_once_give_the_same_report(make_pair, prompts, report):
    target, network = make_pair("qwen3")
    asked = [Prompt(f"p{at}", ids, ("even" if at % 2 == 0 else "odd",)) for at, ids in enumerate(prompts)]
    settings = EvaluateConfig(num_prompts=6, max_new_tokens=24, batch_size=4)
    together = evaluate(target, network, asked, settings, check_training=False)
    assert [row.pieces for row in together.rows] == [row.pieces for row in report.rows]
    assert [row.accepted for row in together.rows] == [row.accepted for row in report.rows]
    assert together.lossless == report.lossless and together.plain_seconds_per_token is None


@pytest.mark.parametrize("seeded", [False, True], ids=["free", "chain first"])
def test_trees_stand_beside_the_chain(make_pair, prompts, report, seeded):
    target, network = make_pair("qwen3")
    asked = [Prompt(f"p{at}", ids, ("even" if at % 2 == 0 else "odd",)) for at, ids in enumerate(prompts)]
    settings = EvaluateConfig(num_prompts=6, max_new_tokens=24, tree_budget=40, tree_chain_seed=seeded)
    both = evaluate(target, network, asked, settings, check_training=False)
    tree = both.tree
    assert [row.accepted for row in both.rows] == [row.accepted for row in report.rows], "the chain as without trees"
    assert both.tau_micro == report.tau_micro and both.lossless == report.lossless
    assert (tree.budget, tree.chain_seed, tree.temperature) == (40, seeded, 1.0)
    assert (tree.lossless.prompts, tree.lossless.equal, both.errors) == (6, 6, 0)
    assert both.tree_tau == tree.tau_micro > both.tau_micro and not tree.below_chain
    assert sum(tree.histogram) == tree.passes < both.passes and tree.new_tokens == both.new_tokens
    assert sum(entry.passes for entry in tree.by_tag.values()) == tree.passes
    assert sum(entry.passes for entry in tree.by_context.values()) == tree.passes
    assert json.loads(json.dumps(both.to_json()))["tree"]["tau_micro"] == tree.tau_micro


def knowing(answers):
    """Logits of a drafter that knows every answer, for `draft_logits`."""

    def logits(target, drafts, token, position):
        rows = torch.zeros(5, 97)
        for slot in range(5):
            rows[slot, answers[position + 1 + slot]] = 12.0
        return rows

    return logits


def test_a_tree_that_does_worse_than_the_chain_is_said_to(make_pair, prompts, monkeypatch):
    """One node against five drafts that all stand."""
    target, network = make_pair("qwen3", eos_token_id=96)
    answer = greedy_decode(target, prompts[3], max_new_tokens=40).ids
    for loop in ("chain", "tree"):
        monkeypatch.setattr(f"paceline.decode.{loop}.draft_logits", knowing([*prompts[3], *answer]))
    settings = EvaluateConfig(max_new_tokens=20, tree_budget=1)
    found = evaluate(target, network, [Prompt("x", prompts[3])], settings, check_training=False)
    assert (found.tau_micro, found.tree_tau, found.tree.below_chain) == (19 / 4, 19 / 10, True)
    settings = EvaluateConfig(max_new_tokens=20, tree_budget=6, tree_temperature=0.5)
    found = evaluate(target, network, [Prompt("x", prompts[3])], settings, check_training=False)
    assert (found.tau_micro, found.tree_tau, found.tree.below_chain) == (19 / 4, 19 / 4, False)
    assert found.tree.temperature == 0.5


def test_a_lossy_tree_is_a_error(make_pair, prompts, monkeypatch):
    target, network = make_pair("qwen3")
    original = module.tree_decode

    def lossy(*args, **more):
        found = original(*args, **more)
        return dataclasses.replace(found, ids=[*found.ids[:-1], (found.ids[-1] + 1) % 97])

    monkeypatch.setattr(module, "tree_decode", lossy)
    settings = EvaluateConfig(max_new_tokens=8, tree_budget=4)
    found = evaluate(target, network, [Prompt("x", prompts[3])], settings, check_training=False)
    assert (found.lossless.errors, found.tree.lossless.errors, found.errors) == (0, 1, 1)


def test_trees_are_refused_before_anything_is_decoded(make_pair, prompts, monkeypatch):
    target, network = make_pair("qwen3_5_text")
    begun = []
    monkeypatch.setattr(module, "speculative_decode", lambda *args, **more: begun.append(args))
    monkeypatch.setattr(kv_cache, "_repeated", lambda value, count: value)  # a state that is not copied row by row
    with pytest.raises(TargetError, match=r"several continuations at once.*decode with the chain") as error:
        evaluate(target, network, [Prompt("x", prompts[3])], EvaluateConfig(tree_budget=4))
    assert not begun and len(error.value.errors) == 1


def test_sampled_answers_depend_on_the_seed(make_pair, prompts):
    target, network = make_pair("qwen3")
    asked = [Prompt(str(at), ids) for at, ids in enumerate(prompts[:4])]

    def measured(**more):
        settings = EvaluateConfig(max_new_tokens=12, temperature=0.7, **more)
        return evaluate(target, network, asked, settings)

    one, again, other, together = measured(), measured(), measured(seed=9), measured(batch_size=3)
    answers, repeated, others, batched = ([row.pieces for row in found.rows] for found in (one, again, other, together))
    assert answers == repeated == batched and answers != others
    assert one.temperature == 0.7 and one.lossless is None and one.training_tau is None and one.errors == 0
    assert one.control_tau is not None and one.plain_seconds_per_token is not None
    trees = measured(tree_budget=12)
    assert [row.pieces for row in trees.rows] == answers and trees.tree.lossless is None
    assert trees.tree_tau >= 1 and trees.tree.passes > 0 and trees.errors == 0


def test_training_forward_agrees(report):
    assert report.training_agrees and report.training_tau >= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precision_differs_by_rounding_at_most(make_pair, prompts, dtype):
    target, network = make_pair("qwen3", dtype=dtype)
    asked = [Prompt(str(at), ids) for at, ids in enumerate(prompts)]
    report = evaluate(target, network, asked, EvaluateConfig(max_new_tokens=24))
    assert report.lossless.prompts == 8 and report.lossless.errors == 0
    assert report.training_agrees


def test_a_lossy_answer_is_a_error_with_its_gap(make_pair, prompts):
    target, _ = make_pair("qwen3", dtype="float32")
    prompt = Prompt("x", prompts[4])
    plain = greedy_decode(target, prompt.ids, max_new_tokens=10)
    ids = list(plain.ids)
    ids[6] = (ids[6] + 1) % 97
    found = lossless(target, [prompt], [Decoded(ids, "length")], [plain])
    with torch.no_grad():
        row = target.model(input_ids=torch.tensor([[*prompt.ids, *plain.ids[:6]]])).logits[0, -1]
    (entry,) = found.differences
    assert (found.equal, found.errors) == (0, 1) and (entry["prompt"], entry["place"]) == ("x", 6)
    assert entry["logit_gap"] == pytest.approx(float(row[plain.ids[6]] - row[ids[6]]), abs=1e-4)
    assert entry["logit_gap"] > entry["allowed_gap"] >= found.margin > 0
    shorter = lossless(target, [prompt], [Decoded(plain.ids[:5], "stop")], [plain])
    assert shorter.errors == 1 and shorter.differences[0]["place"] == 5


def test_the_control_sees_no_features(make_pair, prompts, monkeypatch):
    target, network = make_pair("qwen3")
    blind = []
    original = module.speculative_decode

    def noted(*args, without_features=False, **more):
        blind.append(without_features)
        return original(*args, without_features=without_features, **more)

    monkeypatch.setattr(module, "speculative_decode", noted)
    asked = [Prompt(str(at), ids) for at, ids in enumerate(prompts)]
    report = evaluate(target, network, asked, EvaluateConfig(max_new_tokens=8), check_lossless=False)
    assert blind == [False] * 8 + [True] * 4
    assert report.lossless is None and report.control_tau is not None and report.control_suspicious is False


def test_no_prompts_are_refused(make_pair):
    target, network = make_pair("qwen3")
    with pytest.raises(DataError, match="no prompts"):
        evaluate(target, network, [], EvaluateConfig())
