"""The teacher's logits are the target's own, for families with habits of their own."""

from __future__ import annotations

import pytest
import torch

from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.target_model.load import load_target
from paceline.target_model.shared_weights import shared_weights
from paceline.target_model.teacher import Teacher
from tiny_targets import save_tiny, target_batch

DOCUMENT = [5, 9, 3, 44, 17, 8, 60, 23, 11, 70, 2]
FAMILIES = [
    ("qwen3", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("gemma2", {"final_logit_softcapping": 3.0, "sliding_window": 8}),
    ("qwen3_next", {}),
    ("gpt_oss", {"sliding_window": 8}),
    ("granite", {"embedding_multiplier": 12.0, "logits_scaling": 3.0}),
    ("cohere", {}),
]


def tiny(folder, family, changes):
    save_tiny(folder, family, **changes)
    return load_target(TargetConfig(path=str(folder), dtype="float32"), [1])


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_logits_of_last_states_are_the_targets_own(tmp_path, family, changes):
    target = tiny(tmp_path, family, changes)
    batch = target.features(target_batch([DOCUMENT]), with_last=True)
    with torch.no_grad():
        expected = target.model(input_ids=torch.tensor([DOCUMENT]), use_cache=False).logits[0]
    teacher = Teacher(shared_weights(target, with_teacher=True).teacher)
    found = teacher(batch.last_hidden)
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(teacher(batch.last_hidden.flip(0)), expected, atol=1e-2)


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_states_after_the_final_norm_are_noticed(tmp_path, family, changes):
    """Norm weights of the tiny targets are not 1: there a second norm would change nothing."""
    target = tiny(tmp_path, family, changes)
    last = target.features(target_batch([DOCUMENT]), with_last=True).last_hidden
    teacher = Teacher(shared_weights(target, with_teacher=True).teacher)
    norm = next(module for name, module in target.model.named_modules() if name.endswith(("model.norm", "ln_f")))
    twice = teacher(norm(last))
    assert float((twice - teacher(last)).norm() / teacher(last).norm()) > 0.02


def test_the_target_still_runs_after_handing_over(qwen3):
    target = load_target(TargetConfig(path=str(qwen3), dtype="float32"), [1, 3])
    before = target.features(target_batch([DOCUMENT])).features
    teacher = Teacher(shared_weights(target, with_teacher=True).teacher)
    teacher(torch.randn(3, 32))
    assert torch.equal(target.features(target_batch([DOCUMENT])).features, before)


def test_logits_that_need_more_than_the_last_states_are_refused(qwen3, monkeypatch):
    target = load_target(TargetConfig(path=str(qwen3), dtype="float32"), [1])
    honest = type(target.model).forward

    def skipping(self, input_ids, **more):
        """Logits that also look at the embedding."""
        output = honest(self, input_ids=input_ids, **more)
        output.logits = output.logits + self.get_input_embeddings()(input_ids).sum(-1, keepdim=True)
        return output

    monkeypatch.setattr(type(target.model), "forward", skipping)
    with pytest.raises(TargetError, match=r"cannot teach distributions; leave kl, tv and lk out") as error:
        Teacher(shared_weights(target, with_teacher=True).teacher)
    assert "\n" not in str(error.value)
