"""Which checkpoints are kept."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.checkpoint.retention import Best, Candidate, kept

candidates = st.lists(
    st.tuples(st.integers(1, 60), st.one_of(st.none(), st.floats(-3, 3), st.just(math.nan))), unique_by=lambda c: c[0]
).map(lambda pairs: [Candidate(*pair) for pair in pairs])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(candidates, st.integers(1, 5), st.one_of(st.none(), st.integers(1, 9)), st.sampled_from(["lower", "higher"]))
def test_the_newest_the_multiples_and_the_best_stay(found, last, every, better) -> None:
    keep = kept(found, keep_last=last, keep_every=every, keep_best=Best("loss", better))
    steps = sorted(c.step for c in found)
    measured = [c for c in found if c.value is not None and not math.isnan(c.value)]
    best = [c.step for c in measured if c.value == (min if better == "lower" else max)(m.value for m in measured)]
    assert keep <= set(steps) and set(steps[-last:]) <= keep
    assert {step for step in steps if every and step % every == 0} <= keep
    assert not measured or min(best) in keep
    assert len(keep) <= last + 1 + (sum(step % every == 0 for step in steps) if every else 0)


def test_without_a_metric_no_more_than_asked_stays() -> None:
    found = [Candidate(step, -float(step)) for step in range(1, 9)]
    assert kept(found, keep_last=2, keep_every=None, keep_best=None) == {7, 8}
    assert kept(found, keep_last=1, keep_every=3, keep_best=None) == {3, 6, 8}
    assert kept(found, keep_last=1, keep_every=None, keep_best=Best("tau", "higher")) == {1, 8}
