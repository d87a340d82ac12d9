"""The forecast: every number against a slow count over the plan's batches, warnings in words."""

import json
from collections import Counter
from itertools import combinations, groupby

import numpy as np
import pytest

from paceline.config.schema import PlanConfig
from paceline.plan.epoch import plan_epoch
from paceline.plan.forecast import describe, forecast
from paceline.plan.metrics import batch_totals, kept_by_length, mean_slots, repairing, repeats, step_deviation

SHAPE = {"num_anchors": 20, "block_size": 4, "seed": 1}
LENGTHS = np.clip(np.random.default_rng(3).lognormal(5, 0.8, 1500), 3, 2000).astype(int)
ELIGIBLE = np.maximum(LENGTHS // 3 - 5, 0)
SMALL = PlanConfig(token_budget=4096, width_multiple=32, num_buckets=4, accumulate=3)


def of(lengths, eligible, settings, epochs=1, replicas=1, **options):
    """The forecast of a run over some lengths."""
    shape = {"num_anchors": 20, "block_size": 4, "seed": 1, "replicas": replicas}
    return forecast(lambda epoch: plan_epoch(lengths, eligible, settings, epoch=epoch, **shape), epochs, **options)


def batches(made):
    return [made.batch(index) for index in range(made.num_batches)]


def test_totals_equal_those_of_the_batches():
    for strategy in ("grid", "shuffled", "packed"):
        made = plan_epoch(LENGTHS, ELIGIBLE, SMALL.model_copy(update={"strategy": strategy}), epoch=0, **SHAPE)
        totals, slow = batch_totals(made), batches(made)
        assert totals.samples.tolist() == [len(batch.rows) for batch in slow]
        assert totals.real_tokens.tolist() == [batch.real_tokens for batch in slow]
        assert totals.padded_tokens.tolist() == [batch.padded_tokens for batch in slow]
        assert (totals.anchors * 4).tolist() == [batch.draft_positions for batch in slow]


@pytest.mark.parametrize("schedule", ["stratified", "diverse", "shuffled", "round_robin"])
def test_repeats_runs_and_spread_equal_slow_counts(schedule):
    made = plan_epoch(LENGTHS, None, SMALL.model_copy(update={"schedule": schedule}), epoch=0, **SHAPE)
    slow = batches(made)
    windows = [[slow[index] for index in made.window(number)] for number in range(made.num_windows)]
    windows = [window for window in windows if len(window) == 3]
    top = [max(Counter(batch.bucket for batch in window).values()) for window in windows]
    found = repeats(made)
    assert found.crowded == pytest.approx(np.mean([count >= 0.75 * 3 for count in top]))
    last = max(len(top) // 10, 1)
    assert found.crowded_last_tenth == pytest.approx(np.mean([count >= 0.75 * 3 for count in top[-last:]]))
    assert found.longest_run == max(len(list(run)) for _, run in groupby(batch.bucket for batch in slow))
    assert found.mean_distinct == pytest.approx(np.mean([len({b.bucket for b in window}) for window in windows]))
    assert found.mean_distinct <= found.distinct_bound + 1e-9
    means = [np.mean([batch.real_tokens / len(batch.rows) for batch in window]) for window in windows]
    assert step_deviation(made, batch_totals(made)) == pytest.approx(np.std(means))


@pytest.mark.parametrize("weighting", ["token", "anchor", "sample"])
@pytest.mark.parametrize("eligible", [None, ELIGIBLE])
def test_a_step_weighs_its_samples_as_the_loss_does(weighting, eligible):
    first = plan_epoch(LENGTHS, eligible, SMALL, epoch=0, **SHAPE)
    slots = {"token": lambda room: min(room, 3), "anchor": lambda room: 1}
    means, sums = [], np.zeros(2)
    for number in range(first.num_windows):
        top = bottom = 0.0
        for row in (row for index in first.window(number) for row in first.rows(index).tolist()):
            rooms = range(1, 1 + int(LENGTHS[row] if eligible is None else eligible[row]))
            own = min(20, len(rooms)) / len(rooms)  # anchors are drawn evenly from all places
            weight = 1.0 if weighting == "sample" else own * sum(map(slots[weighting], rooms))
            top, bottom = top + weight * LENGTHS[row], bottom + weight
        sums += top, bottom
        if len(first.window(number)) == 3:
            means.append(top / bottom)
    told = describe(first, 0.0, [first.num_windows], weighting=weighting)
    assert told.weighting == weighting
    assert told.step_deviation_tokens == pytest.approx(np.std(means))
    assert told.mean_tokens == pytest.approx(sums[0] / sums[1])
    assert told.batch_mean_deviation_tokens == pytest.approx(step_deviation(first, batch_totals(first)))


def test_repairing_equals_a_count_of_pairs():
    first, second = (plan_epoch(LENGTHS[:300], None, SMALL, epoch=epoch, **SHAPE) for epoch in (0, 1))

    def pairs(made):
        return {frozenset(pair) for batch in batches(made) for pair in combinations(batch.rows.tolist(), 2)}

    assert repairing(first, second) == pytest.approx(len(pairs(first) & pairs(second)) / len(pairs(first)))
    assert repairing(first, first) == 1


def test_buckets_hold_samples_batches_and_loss_weight():
    made = plan_epoch(LENGTHS, ELIGIBLE, SMALL, epoch=0, **SHAPE)
    told = of(LENGTHS, ELIGIBLE, SMALL)
    rows = [row for row in range(1500) if ELIGIBLE[row] > 0]
    assert told.num_samples == len(rows) == sum(bucket.samples for bucket in told.buckets)
    assert told.left_out == {"without_anchors": 1500 - len(rows)}
    weights = {"sample": Counter(), "anchor": Counter(), "token": Counter()}
    for row in rows:
        place = int(np.searchsorted(made.edges, LENGTHS[row]))
        eligible, anchors = int(ELIGIBLE[row]), min(20, int(ELIGIBLE[row]))
        weights["sample"][place] += 1
        weights["anchor"][place] += anchors
        weights["token"][place] += anchors * sum(min(3, d) for d in range(1, eligible + 1)) / eligible
    for place, bucket in enumerate(told.buckets):
        for name, counted in weights.items():
            assert bucket.share_weight[name] == pytest.approx(counted[place] / sum(counted.values()))
        assert bucket.batches == sum(batch.bucket == place for batch in batches(made))
        assert bucket.share_weight["batch_mean"] == pytest.approx(bucket.batches / made.num_batches)
    assert told.draft_positions == 4 * sum(weights["anchor"].values())
    assert told.efficiency == pytest.approx(
        sum(batch.real_tokens for batch in batches(made)) / sum(batch.padded_tokens for batch in batches(made))
    )
    assert told.shapes == len({(len(batch.rows), batch.width) for batch in batches(made)})


def test_mean_slots_is_the_mean_over_the_stretch():
    assert mean_slots(np.array([1, 2, 3, 10]), 4) == pytest.approx([1, 1.5, 2, (1 + 2 + 3 * 8) / 10])


def test_steps_are_counted_epoch_by_epoch():
    made = of(LENGTHS, ELIGIBLE, SMALL, epochs=4)
    windows = [plan_epoch(LENGTHS, ELIGIBLE, SMALL, epoch=epoch, **SHAPE).num_windows for epoch in range(4)]
    assert (made.epochs, made.total_windows) == (4, sum(windows))
    assert made.seconds is None
    timed = of(LENGTHS, ELIGIBLE, SMALL, epochs=2, real_tokens_per_s=1000.0)
    assert timed.seconds == pytest.approx(2 * timed.real_tokens / 1000)
    assert of(LENGTHS, ELIGIBLE, SMALL).total_windows == windows[0]


def test_warnings_say_what_is_wrong_in_words():
    lengths = np.concatenate([np.full(2000, 60), np.full(600, 2000)])
    told = of(lengths, None, SMALL.model_copy(update={"edges": [100, 2048]}))
    assert any("23% of the samples but make" in text for text in told.warnings)
    assert any("alone makes" in text for text in told.warnings)
    shuffled = of(lengths, None, SMALL.model_copy(update={"strategy": "shuffled"}))
    assert any("are padding; strategy: grid" in text for text in shuffled.warnings)
    assert shuffled.repeats is None
    gappy = of(np.array([1] * 5), None, SMALL)
    assert any("are padding; a lower plan.width_multiple" in text for text in gappy.warnings)
    assert not any("grid wastes least" in text for text in gappy.warnings)
    bins = of(lengths, None, SMALL.model_copy(update={"strategy": "packed"}))
    assert any("forwards that keep documents apart" in text for text in bins.warnings)
    frozen = of(LENGTHS, None, SMALL.model_copy(update={"strategy": "sorted"}))
    assert any("100% of the samples that share a batch" in text for text in frozen.warnings)
    tail = SMALL.model_copy(update={"schedule": "round_robin", "accumulate": 4})
    assert any("schedule: stratified avoids it" in text for text in of(LENGTHS, None, tail).warnings)  # fmt: skip
    tiny = of(np.array([5, 6]), None, SMALL)
    assert any("fill no window of 3" in text for text in tiny.warnings)


def test_a_forecast_is_plain_json():
    told = of(np.array([5, 6]), None, SMALL)
    assert json.loads(json.dumps(told.to_dict(), allow_nan=False))["repeats"]["crowded"] is None


def test_what_a_longest_length_keeps_is_a_plain_count():
    lengths, supervised = np.array([100, 2048, 2049, 5000]), np.array([10, 20, 30, 40])
    kept = kept_by_length(lengths, supervised)
    assert [(row.max_length, row.samples, row.tokens) for row in kept] == [(2048, 2, 30), (4096, 3, 60), (8192, 4, 100)]
    assert (kept[0].share_samples, kept[0].share_tokens) == (0.5, 0.3)
