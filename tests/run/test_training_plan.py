"""What a run is made of: validation batches keep the budgets of training."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from paceline.config import Settings
from paceline.run.training_plan import TrainingPlan


class Heldout:
    """Samples of one token each repeated, all supervised."""

    def __init__(self, lengths):
        self.lengths = np.array(lengths)
        self.eligible = self.lengths - 1

    def read(self, rows):
        return [
            (np.full(self.lengths[row], row, np.int64), np.ones(self.lengths[row], bool))
            for row in np.asarray(rows).tolist()
        ]


def validation_of(lengths, **plan):
    settings = Settings.model_validate(
        {"run_dir": "r", "target": {"path": "t"}, "plan": plan, "drafter": {"num_anchors": 16, "block_size": 8}}
    )
    spec, facts = SimpleNamespace(block_size=8), SimpleNamespace(pad_token_id=0)
    plan = TrainingPlan(settings, spec, facts, Heldout([9, 9]), 1)
    return plan.validation_batches(Heldout(lengths))


@pytest.mark.parametrize("strategy", ["grid", "packed", "shuffled"])
def test_validation_keeps_the_budgets_of_training(strategy):
    lengths = np.random.default_rng(0).integers(5, 200, 60).tolist()
    found = validation_of(lengths, token_budget=512, draft_position_budget=512, max_samples=9, strategy=strategy)
    assert sorted(np.concatenate([host.planned.rows for host in found]).tolist()) == list(range(60))
    for host in found:
        assert len(host.planned.rows) <= 9
        assert len(host.anchors) * 8 == host.planned.draft_positions <= 512
        assert host.planned.real_tokens <= host.planned.padded_tokens <= 512
        assert [int(ids[0]) for ids in host.ids] == host.planned.rows.tolist()


def test_a_heldout_sample_beyond_a_budget_is_left_out():
    (host,) = validation_of([700, 20, 30, 40], token_budget=512, draft_position_budget=300)[-1:]
    assert 0 not in host.planned.rows
    assert validation_of([700], token_budget=512) == []
    assert validation_of([1, 1], token_budget=512) == []
