"""Training with packed plans and packed rows: the features are those of padded rows."""

from __future__ import annotations

import torch

from paceline.checkpoint.checkpoints import load_drafter
from paceline.cli import main
from paceline.config import load_settings
from paceline.run.build import build_run, host_batches
from paceline.target_model.load import load_target


def test_a_packed_run_trains_and_a_bin_has_the_features_of_single_rows(make_run, tmp_path) -> None:
    file = make_run(plan={"strategy": "packed"}, target={"rows": "packed"}, train={"max_steps": 2})
    assert main(["train", str(file)]) == 0
    assert load_drafter(tmp_path / "run")[2] == 2
    run = build_run(load_settings(file))
    host = next(host_batches(run, run.orders[:1]))
    assert len(host.lengths) > 1
    packed = load_target(run.settings.target, run.taps, dtype="float32")
    padded = load_target(run.settings.target.model_copy(update={"rows": "padded"}), run.taps, dtype="float32")
    expected = padded.features(host).features
    assert torch.allclose(packed.features(host).features, expected, atol=1e-4 * float(expected.abs().max()))
