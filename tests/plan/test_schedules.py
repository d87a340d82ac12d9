"""What each schedule does over an epoch: tails, runs, replicas, balance, curriculum, leftovers."""

import numpy as np
import pytest

from paceline.config.schema import PlanConfig
from paceline.errors import PlanError
from paceline.plan.epoch import plan_epoch
from paceline.plan.metrics import batch_totals, cost_spread, repeats, step_deviation

SHAPE = {"num_anchors": 8, "block_size": 4, "seed": 5}


def skewed(count=200_000, seed=0):
    return np.clip(np.random.default_rng(seed).lognormal(7.3, 0.7, count), 65, 8191).astype(np.int64)


LENGTHS = skewed()


def one(schedule, epoch=0, replicas=1, **settings):
    config = PlanConfig(**{"schedule": schedule, "edges": [770, 1216, 1728, 2432, 3296, 8192], **settings})
    return plan_epoch(LENGTHS, None, config, epoch=epoch, replicas=replicas, **SHAPE)


def windows_of(made, values):
    whole = made.num_batches // made.window_size
    return values[: whole * made.window_size].reshape(whole, made.window_size)


def shares_over_the_epoch(made, pieces=10):
    return np.array([np.bincount(piece, minlength=6) / len(piece) for piece in np.array_split(made.buckets, pieces)])


def test_stratified_has_no_crowded_window_and_no_tail():
    made = one("stratified")
    found = repeats(made)
    assert (found.crowded, found.crowded_last_tenth) == (0, 0)
    assert found.mean_distinct == pytest.approx(found.distinct_bound)
    assert min(np.flatnonzero(made.buckets == bucket)[-1] for bucket in range(6)) > 0.95 * made.num_batches
    shares = shares_over_the_epoch(made)
    assert np.abs(shares - shares.mean(axis=0)).max() < 0.03


def test_last_tenth_of_a_stratified_epoch_is_like_all_of_it():
    for antithetic in (False, True):
        made = one("stratified", antithetic=antithetic)
        windows = windows_of(made, made.buckets)
        distinct = np.array([len(set(window)) for window in windows.tolist()])
        last = distinct[-len(distinct) // 10 :]
        assert last.mean() == pytest.approx(distinct.mean(), abs=3 * distinct.std() / np.sqrt(len(last)) + 1e-9)


def test_antithetic_windows_vary_least():
    spreads = [
        step_deviation(made, batch_totals(made))
        for made in (one("stratified"), one("stratified", antithetic=False), one("shuffled"))
    ]
    assert spreads[0] < 0.6 * spreads[1] < 0.3 * spreads[2]


def test_slots_replicas_and_windows_are_in_random_order():
    made = one("stratified", replicas=2, grid_class_batches=1)
    whole = made.num_batches // 8
    ranks = made.sequence[: 8 * whole].reshape(whole, 4, 2) / made.num_batches
    # A mean of W uniform draws: five standard deviations, 5 / sqrt(12 W).
    assert np.abs(ranks.mean(axis=(0, 2)) - 0.5).max() < 5 / np.sqrt(12 * 2 * whole)
    assert np.abs(ranks.mean(axis=(0, 1)) - 0.5).max() < 5 / np.sqrt(12 * 4 * whole)
    longest = ranks.max(axis=(1, 2))
    assert abs(np.corrcoef(longest, np.arange(whole))[0, 1]) < 5 / np.sqrt(whole)


def test_windows_follow_one_another_without_a_trend():
    made = one("stratified")
    means = windows_of(made, batch_totals(made).real_tokens / made.counts).mean(axis=1)
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.2


def test_proportional_keeps_each_bucket_near_its_share():
    made = one("proportional", leftover="carry")
    served = np.cumsum(made.buckets[:, None] == np.arange(6), axis=0)
    due = np.bincount(made.buckets, minlength=6) * np.arange(1, made.num_batches + 1)[:, None] / made.num_batches
    assert np.abs(served - due).max() < 1 + 1e-9


def test_diverse_never_repeats_before_its_tail_and_then_does():
    made = one("diverse", leftover="carry", edges=[1000, 1500, 8192])
    again = np.flatnonzero(np.diff(made.buckets.astype(int)) == 0)
    last = made.buckets[-1]
    assert (made.buckets[again + 1] == last).all()
    tail = again[0]
    assert (made.buckets[tail:] == last).all()
    assert repeats(made).crowded_last_tenth > 0.9
    assert repeats(one("stratified", leftover="carry", edges=[800, 1200, 1800, 8192])).longest_run < 10


def test_round_robin_takes_turns_until_buckets_are_used_up():
    made = one("round_robin", leftover="carry")
    counts = np.bincount(made.buckets, minlength=6)
    rounds = counts.min()
    assert np.array_equal(made.buckets[: 6 * rounds].reshape(-1, 6), np.tile(np.arange(6), (rounds, 1)))
    assert repeats(made).crowded_last_tenth == 1


def test_nested_strata_give_every_replica_every_coarse_stratum():
    made = one("stratified", replicas=3, grid_class_batches=1)
    lengths = batch_totals(made).real_tokens / made.counts
    whole = made.num_batches // 12
    rank = np.empty(12 * whole, int)
    order = np.argsort(made.sequence[: 12 * whole], kind="stable")  # grid batches ascend in length as composed
    rank[order] = np.arange(12 * whole)
    coarse = (rank // (3 * whole)).reshape(whole, 4, 3)
    fine = (rank // whole).reshape(whole, 12)
    assert (np.sort(coarse, axis=1) == np.arange(4)[None, :, None]).all()
    assert (np.sort(fine, axis=1) == np.arange(12)).all()
    assert (coarse == coarse[:, :, :1]).all(), "replicas work on one stratum at the same time"
    assert cost_spread(made, batch_totals(made)) < 1.1
    by_replica = lengths[: 12 * whole].reshape(whole, 4, 3).mean(axis=1)
    assert by_replica.std() < 0.6 * lengths.std() / 2


def test_curriculum_rises_and_then_is_the_whole_mixture():
    made = one("curriculum", curriculum_share=0.5, curriculum_stages=5)
    means = windows_of(made, batch_totals(made).real_tokens / made.counts).mean(axis=1)
    half = len(means) // 2
    stages = [part.mean() for part in np.array_split(means[:half], 5)]
    assert stages == sorted(stages)
    assert stages[-1] > 2 * stages[0]
    rest = [part.mean() for part in np.array_split(means[half:], 5)]
    assert np.ptp(rest) < 0.05 * np.mean(rest)
    assert np.mean(rest) == pytest.approx(means.mean(), rel=0.03)
    assert np.array_equal(one("curriculum", epoch=1).sequence, one("stratified", epoch=1).sequence)
    assert one("curriculum", epoch=1, curriculum_epochs=2).fingerprint != one("stratified", epoch=1).fingerprint


def test_leftover_batches_form_one_short_mixed_window():
    made = one("stratified", accumulate=17, grid_class_batches=1)
    rest = made.num_batches % 17
    assert 1 < rest == len(made.window(made.num_windows - 1))
    ranks = np.sort(made.sequence[-rest:]).astype(int)  # grid batches ascend in length as composed
    assert (ranks * rest // made.num_batches).tolist() == list(range(rest)), "one of every part of the lengths"


def test_carried_samples_come_back_in_the_next_epoch():
    carried = np.empty(0, int)
    for epoch in range(4):
        made = one("stratified", epoch=epoch, accumulate=7, leftover="carry")
        assert made.num_batches % 7 == 0
        assert np.array_equal(made.carried_in, carried)
        trained = np.concatenate([made.rows(index) for index in range(made.num_batches)])
        expected = np.sort(np.concatenate([np.arange(len(LENGTHS)), carried]))
        carried = made.carried_out
        assert np.array_equal(np.sort(np.concatenate([trained, carried])), expected)
    assert len(carried)


def test_carrying_less_than_a_window_is_refused():
    with pytest.raises(PlanError, match="fill no window of 40"):
        plan_epoch([10, 20], None, PlanConfig(leftover="carry", accumulate=40), epoch=0, **SHAPE)


def test_rescheduled_is_the_plan_of_that_schedule():
    config = PlanConfig(leftover="carry", accumulate=3)
    first = plan_epoch(LENGTHS[:3000], None, config, epoch=2, replicas=2, **SHAPE)
    for name in ("stratified", "diverse", "shuffled"):
        alone = config.model_copy(update={"schedule": name})
        made = first.rescheduled(name)
        assert plan_epoch(LENGTHS[:3000], None, alone, epoch=2, replicas=2, **SHAPE).fingerprint == made.fingerprint
        assert made.settings.schedule == name and np.array_equal(made.carried_out, first.carried_out)


def test_a_short_window_gives_some_replicas_a_batch_less():
    lengths = np.random.default_rng(1).integers(100, 3000, 997)
    for replicas in (2, 3, 5, 8):
        made = plan_epoch(lengths, None, PlanConfig(), epoch=0, replicas=replicas, **SHAPE)
        rows = np.concatenate([made.rows(index) for index in range(made.num_batches)])
        assert np.array_equal(np.sort(rows), np.arange(997))
        held = np.bincount([made.batch(index).replica for index in range(made.num_batches)], minlength=replicas)
        assert held.max() - held.min() <= 1
