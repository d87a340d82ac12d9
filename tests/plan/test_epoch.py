"""The epoch plan: every sample once, budgets kept, whole windows even, the same plan everywhere."""

import subprocess
import sys

import numpy as np
import pytest

from paceline.config.schema import PlanConfig
from paceline.errors import PlanError
from paceline.plan.epoch import plan_epoch

SHAPE = {"num_anchors": 512, "block_size": 16}


def skewed(count, seed=0, top=8191):
    draws = np.random.default_rng(seed).lognormal(7.3, 0.7, count)
    return np.clip(draws, 1, top).astype(np.int64)


def plan(lengths, settings=None, eligible=None, **options):
    options = {**SHAPE, "seed": 3, "epoch": 0, **options}
    return plan_epoch(lengths, eligible, settings or PlanConfig(), **options)


def test_every_sample_once_within_budgets_and_widths_rounded():
    lengths = skewed(5_000)
    made = plan(lengths)
    rows = np.concatenate([made.batch(i).rows for i in range(made.num_batches)])
    assert np.array_equal(np.sort(rows), np.arange(len(lengths)))
    for i in range(made.num_batches):
        batch = made.batch(i)
        assert batch.index == i
        assert batch.padded_tokens == len(batch.rows) * batch.width <= 49_152
        assert len(batch.rows) <= 64
        assert batch.width % 64 == 0
        assert batch.width - 64 < lengths[batch.rows].max() <= batch.width
        assert batch.real_tokens == lengths[batch.rows].sum()


def test_windows_are_contiguous_and_cover_replicas_and_slots():
    made = plan(skewed(3_000), replicas=3)
    seen = []
    for w in range(made.num_windows):
        places = made.window(w)
        seen += list(places)
        batches = [made.batch(i) for i in places]
        assert {batch.window for batch in batches} == {w}
        if len(batches) == 12:
            assert sorted((batch.slot, batch.replica) for batch in batches) == [
                (slot, replica) for slot in range(4) for replica in range(3)
            ]
    assert seen == list(range(made.num_batches))
    assert np.array_equal(made.buckets, [made.batch(i).bucket for i in range(made.num_batches)])


def test_every_window_holds_floor_or_ceiling_of_every_bucket():
    for antithetic in (False, True):
        for replicas in (1, 2):
            made = plan(skewed(20_000), PlanConfig(antithetic=antithetic), replicas=replicas)
            whole = made.num_batches // made.window_size
            buckets = made.buckets[: whole * made.window_size].reshape(whole, -1)
            for bucket in range(len(made.edges)):
                counts = (buckets == bucket).sum(axis=1)
                assert counts.max() - counts.min() <= 1


def test_same_key_same_plan_and_every_key_another():
    lengths = skewed(2_000)
    made = plan(lengths)
    assert plan(lengths.astype(np.uint16)).fingerprint == made.fingerprint
    assert plan(lengths.tolist()).fingerprint == made.fingerprint
    others = {plan(lengths, epoch=1).fingerprint, plan(lengths, seed=4).fingerprint}
    assert len(others | {made.fingerprint}) == 3


def test_fingerprint_is_the_same_in_another_process_and_forever():
    code = (
        "import numpy as np; from paceline.config import PlanConfig; from paceline.plan.epoch import plan_epoch\n"
        "lengths = np.arange(1, 3001) * 7919 % 4096 + 1\n"
        "print(plan_epoch(lengths, None, PlanConfig(), num_anchors=8, block_size=4, seed=1, epoch=2).fingerprint)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    lengths = np.arange(1, 3001) * 7919 % 4096 + 1
    made = plan_epoch(lengths, None, PlanConfig(), num_anchors=8, block_size=4, seed=1, epoch=2)
    assert out == made.fingerprint


def test_batches_are_composed_anew_every_epoch():
    lengths = skewed(5_000)
    first, second = plan(lengths), plan(lengths, epoch=1)
    mates = {frozenset(first.batch(i).rows.tolist()) for i in range(first.num_batches)}
    again = {frozenset(second.batch(i).rows.tolist()) for i in range(second.num_batches)}
    assert not mates & again


def test_samples_without_anchors_are_left_out_and_counted():
    lengths = skewed(500)
    eligible = lengths // 2
    eligible[:7] = 0
    made = plan(lengths, eligible=eligible)
    assert made.left_out == {"without_anchors": 7}
    assert made.num_samples == 493
    kept = plan(lengths, PlanConfig(without_anchors="keep"), eligible=eligible)
    assert kept.num_samples == 500
    assert kept.left_out == {}


def test_draft_positions_are_counted_and_budgeted():
    lengths = skewed(2_000)
    eligible = np.maximum(lengths // 3, 1)
    made = plan(lengths, PlanConfig(draft_position_budget=60_000), eligible=eligible, num_anchors=300)
    totals = [made.batch(i).draft_positions for i in range(made.num_batches)]
    expected = [16 * sum(min(300, int(eligible[row])) for row in made.batch(i).rows) for i in range(made.num_batches)]
    assert totals == expected
    assert max(totals) <= 60_000
    assert sum(made.counts) == 2_000


def test_a_sample_beyond_the_token_budget_is_refused_in_one_line():
    with pytest.raises(PlanError, match="token_budget 49152 is smaller than the longest sample"):
        plan([100_000, 5])


def test_draft_budget_below_one_sample_is_refused():
    with pytest.raises(PlanError, match="draft_position_budget 100 is smaller than the 8192"):
        plan([2_000, 1_000], PlanConfig(draft_position_budget=100))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_budget", 2**31),
        ("draft_position_budget", 2**31),
        ("width_multiple", 2**32),
        ("sort_window", 2**63),
        ("curriculum_stages", 10**11),
        ("accumulate", 65_536),
        ("edges", [10, 10**23]),
        ("weights", {"a": float("nan")}),
    ],
)
def test_absurd_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        PlanConfig(**{name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epoch": -1}, "epoch -1: allowed: 0 or more"),
        ({"seed": -1}, "seed -1, epoch 0: allowed: 0 or more"),
        ({"replicas": 0}, "replicas 0: allowed: 1 to"),
        ({"num_anchors": 2**31}, "num_anchors 2147483648, .*: allowed: 1 to 2147483647"),
        ({"lengths": [3_000_000_000]}, r"lengths\[0\] is 3000000000; allowed: 1 to 2147483647"),
        ({"eligible": [4, 9]}, r"eligible\[1\] is 9, but the sample has 6 tokens"),
    ],
)
def test_what_no_plan_can_count_is_refused(change, words):
    request = {"lengths": [5, 6], "eligible": None, "num_anchors": 4, "block_size": 4, "seed": 0, "epoch": 0} | change
    with pytest.raises(PlanError, match=words):
        plan_epoch(request.pop("lengths"), request.pop("eligible"), PlanConfig(), **request)


def test_the_longest_lengths_that_can_be_counted_are_planned():
    lengths = [2**31 - 1025, 5]
    config = PlanConfig(token_budget=2**31 - 1, width_multiple=1024)
    made = plan_epoch(lengths, None, config, num_anchors=4, block_size=4, seed=0, epoch=0)
    assert sorted(made.widths.tolist()) == [1024, 2**31 - 1024]


def test_the_fingerprint_covers_all_that_a_plan_was_made_from():
    lengths, eligible = np.array([5, 6, 7], np.uint16), np.array([5, 6, 7])
    shape = {"num_anchors": 4, "block_size": 4, "seed": 0, "epoch": 0}

    def named(lengths=lengths, eligible=None, settings=None, **change):
        return plan_epoch(lengths, eligible, settings or PlanConfig(), **(shape | change)).fingerprint

    prints = [
        named(),
        named(lengths=[5, 6, 8]),
        named(eligible=eligible),
        named(eligible=[5, 6, 6]),
        named(num_anchors=5),
        named(block_size=5),
        named(seed=1),
        named(epoch=1),
        named(replicas=2),
        named(settings=PlanConfig(jitter=0.1)),
    ]
    assert len(set(prints)) == len(prints)
    assert named(lengths=lengths.astype(np.int64)) == named(lengths=lengths.tolist()) == prints[0]
    assert named(eligible=eligible.astype(np.int32)) == prints[2]
