from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from observed_runs import Sample, random_samples, report_of
from paceline.errors import MetricError
from paceline.observe.aggregate import LineAggregator
from paceline.observe.catalogue import find
from paceline.types import BucketTotals, Ratio, TagTotals, WorkerTotals


def test_a_line_over_many_steps_equals_a_recount_of_all_samples():
    rng = np.random.default_rng(1)
    steps = [random_samples(rng, count=int(rng.integers(3, 20))) for _ in range(7)]
    tally = LineAggregator()
    for number, samples in enumerate(steps, 1):
        tally.add(report_of(number, samples, seconds=float(number)))
    values, weights = tally.values()
    everything = [sample for samples in steps for sample in samples]
    anchors = sum(s.anchors for s in everything)
    assert values["loss"] == pytest.approx(sum(s.loss * s.anchors for s in everything) / anchors)
    assert weights["loss"] == anchors
    for bucket in range(4):
        mine = [s for s in everything if s.bucket == bucket]
        own = sum(s.anchors for s in mine)
        assert values[f"loss/bucket_{bucket}"] == pytest.approx(sum(s.loss * s.anchors for s in mine) / own)
        assert values[f"samples/bucket_{bucket}"] == pytest.approx(len(mine) / 7)
        # A share of the whole line, whether or not every step held the bucket.
        assert values[f"weight_share/bucket_{bucket}"] == pytest.approx(own / anchors)
        assert weights[f"weight_share/bucket_{bucket}"] == anchors
    tokens = sum(s.length for s in everything)
    assert values["window/mean_length"] == pytest.approx(tokens / len(everything))
    lengths = np.log2([np.mean([s.length for s in samples]) for samples in steps])
    sizes = [len({s.bucket for s in samples}) for samples in steps]
    assert values["window/log2_length"] == pytest.approx(np.average(lengths, weights=sizes))
    assert values["window/log2_length_squared"] == pytest.approx(np.average(lengths**2, weights=sizes))
    assert values["window/max_length"] == max(s.length for s in everything)
    assert values["real_tokens_per_s"] == pytest.approx(tokens / sum(range(1, 8)))
    assert values["draft_positions_per_s"] == pytest.approx(anchors * 4 / sum(range(1, 8)))
    assert values["window/buckets"] == pytest.approx(np.mean([len({s.bucket for s in samples}) for samples in steps]))
    padded = sum(
        max(s.length for s in samples if s.bucket == b) * sum(s.bucket == b for s in samples)
        for samples in steps
        for b in {s.bucket for s in samples}
    )
    assert values["padding_efficiency"] == pytest.approx(tokens / padded)


def test_tau_is_one_plus_the_mean_streak_of_blocks_not_of_steps():
    rng = np.random.default_rng(2)
    tally = LineAggregator()
    tally.add(report_of(1, random_samples(rng), ratios={"acceptance/streak": Ratio(4.0, 1.0)}))
    tally.add(report_of(2, random_samples(rng), ratios={"acceptance/streak": Ratio(0.0, 3.0)}))
    assert tally.values()[0]["tau"] == 2.0


def test_all_names_of_a_step_are_in_the_catalogue():
    tally = LineAggregator()
    tally.add(report_of(1, random_samples(np.random.default_rng(3)), ratios={"tree/streak_16": Ratio(5, 2)}))
    values, _ = tally.values()
    for name in values:
        find(name)
    assert values["tree/tau_16"] == 3.5


def test_an_unknown_ratio_cannot_be_logged():
    with pytest.raises(MetricError, match="accuracy/first"):
        LineAggregator().add(
            report_of(1, random_samples(np.random.default_rng(3)), ratios={"accuracy/first": Ratio(1, 1)})
        )


def test_a_counted_metric_cannot_be_set():
    with pytest.raises(MetricError, match="loss: reduces as ratio"):
        LineAggregator().gauge("loss", 1.0)


def test_a_skipped_step_leaves_the_gradient_norm_alone():
    samples = random_samples(np.random.default_rng(4))
    tally = LineAggregator()
    tally.add(report_of(1, samples, gradient_norm=2.0))
    tally.add(report_of(2, samples, gradient_norm=math.inf, skipped=True))
    values, _ = tally.values()
    assert (values["gradient/norm"], values["gradient/norm_max"], values["gradient/skipped"]) == (2.0, 2.0, 0.5)


def test_stage_shares_sum_to_one_with_one_worker_and_with_three():
    samples = random_samples(np.random.default_rng(5))
    one, three = LineAggregator(), LineAggregator()
    one.add(report_of(1, samples, seconds=2.0, waits_s={"target/starved": 0.5, "target/blocked": 0.5}))
    three.add(
        report_of(1, samples, seconds=2.0, waits_s={"target/busy": 4.5, "target/starved": 1.0, "target/blocked": 0.5})
    )
    assert one.values()[0]["stage/target/busy"] == 0.5
    shares = three.values()[0]
    assert shares["stage/target/busy"] == 0.75
    assert sum(shares[f"stage/target/{state}"] for state in ("busy", "starved", "blocked")) == pytest.approx(1.0)


def test_a_tiny_share_of_wall_time_is_a_share_of_the_step():
    tally = LineAggregator()
    waits = {"drafter/busy": 0.5}
    tally.add(report_of(1, random_samples(np.random.default_rng(6)), seconds=2.0, waits_s=waits))
    assert tally.values()[0]["stage/drafter/busy"] == 0.25


def test_a_worker_that_did_nothing_has_zeros():
    tally = LineAggregator()
    samples = random_samples(np.random.default_rng(7))
    for step, batches in enumerate((2, 4), 1):
        workers = {"target_0": WorkerTotals(batches, 100 * batches, 1.5), "target_1": WorkerTotals()}
        tally.add(report_of(step, samples, seconds=2.0, workers=workers))
    values, _ = tally.values()
    assert values["worker/target_0/batches"] == 3 and values["worker/target_1/batches"] == 0
    assert values["worker/target_0/real_tokens_per_s"] == 150 and values["worker/target_0/busy"] == 0.75
    assert values["worker/target_1/real_tokens_per_s"] == values["worker/target_1/busy"] == 0


def test_a_bucket_or_tag_that_got_nothing_is_zero():
    nothing = BucketTotals(Ratio(0.0, 0.0), 0, 0, 0, 0, 0)
    report = report_of(1, [Sample(0, 10, 2.0, 4)])
    tags = {"code": TagTotals(Ratio(8.0, 4.0), 1), "prose": TagTotals(Ratio(0.0, 0.0), 0)}
    tally = LineAggregator()
    tally.add(replace(report, buckets={**report.buckets, 1: nothing}, tags=tags))
    values, weights = tally.values()
    for name in ("samples", "micro_batches", "anchors", "real_tokens", "padded_tokens", "weight_share", "steps_with"):
        assert values[f"{name}/bucket_1"] == 0, name
    assert values["samples/tag_prose"] == values["weight_share/tag_prose"] == 0
    assert not {"loss/bucket_1", "loss/tag_prose"} & {*values, *weights}
    assert values["window/buckets"] == 1 and values["weight_share/bucket_0"] == 1
