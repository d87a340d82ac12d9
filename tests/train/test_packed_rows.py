"""Training with packed plans and packed rows: the features are those of padded rows."""

from __future__ import annotations

import torch

from paceline.checkpoint.checkpoints import load_drafter
from paceline.cli import main
from paceline.target_model.load import load_target
from small_runs import built


def test_a_packed_run_has_the_features_of_single_rows(make_run, tmp_path) -> None:
    file = make_run(plan={"strategy": "packed"}, target={"rows": "packed"}, train={"max_steps": 2})
    assert main(["train", str(file)]) == 0
    assert load_drafter(tmp_path / "run")[2] == 2
    run = built(file)
    host = next(run.plan.host_batches(run.steps[:1], run.local_ranks, run.num_ranks))
    assert len(host.lengths) > 1
    packed = load_target(run.settings.target, run.taps, dtype="float32")
    padded = load_target(run.settings.target.model_copy(update={"rows": "padded"}), run.taps, dtype="float32")
    expected = padded.features(host).features
    assert torch.allclose(packed.features(host).features, expected, atol=1e-4 * float(expected.abs().max()))
