"""Cutting sequences into batches: the fast paths against a slow readable one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan.batches import cut_runs, cut_sequence
from paceline.plan.budget import BatchBudget


def greedy(widths, limits, drafts=None):
    """Batches as lists of positions: a batch takes the next sample unless that breaks a budget."""
    batches = []
    for position in range(len(widths)):
        batch = [*batches[-1], position] if batches else [position]
        fits = (
            bool(batches)
            and len(batch) <= limits.max_samples
            and len(batch) * limits.cost(max(widths[p] for p in batch)) <= limits.token_budget
            and (drafts is None or sum(drafts[p] for p in batch) <= limits.draft_limit)
        )
        if fits:
            batches[-1] = batch
        else:
            batches.append([position])
    return batches


def offsets_of(batches):
    return [0, *np.cumsum([len(batch) for batch in batches]).tolist()]


limits_strategy = st.builds(
    BatchBudget,
    token_budget=st.integers(200, 900),
    max_samples=st.integers(1, 12),
    draft_position_budget=st.one_of(st.none(), st.integers(40, 120)),
    width_multiple=st.sampled_from([1, 8, 16]),
    attention_length=st.one_of(st.none(), st.integers(150, 400)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 80), min_size=1, max_size=120), limits_strategy, st.randoms(use_true_random=False))
def test_sequences_are_cut_as_the_slow_greedy_cuts_them(lengths, limits, random):
    widths = limits.widths(np.array(lengths))
    drafts = np.array([random.randint(0, 40) for _ in lengths]) if limits.draft_position_budget else None
    listed = drafts.tolist() if drafts is not None else None
    assert cut_sequence(widths, limits, drafts).tolist() == offsets_of(greedy(widths.tolist(), limits, listed))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 80), min_size=1, max_size=120), limits_strategy, st.randoms(use_true_random=False))
def test_runs_are_cut_as_the_slow_greedy_cuts_them(lengths, limits, random):
    widths = np.sort(limits.widths(np.array(lengths)))
    kinds = np.arange(1, widths[-1] // limits.width_multiple + 1) * limits.width_multiple
    bounds = np.concatenate([[0], np.searchsorted(widths, kinds, side="right")])
    drafts = np.array([random.randint(0, 40) for _ in lengths]) if limits.draft_position_budget else None
    listed = drafts.tolist() if drafts is not None else None
    assert cut_runs(bounds, kinds, limits, drafts).tolist() == offsets_of(greedy(widths.tolist(), limits, listed))


def test_attention_cost_shrinks_batches_of_long_samples_only():
    limits = BatchBudget(49_152, 64, None, 64, 8192)
    assert limits.cost(64) == 64 + 1
    assert limits.cost(8192) == 16_384
    assert limits.capacity(8192) == 3
    assert BatchBudget(49_152, 64, None, 64, None).capacity(8192) == 6
