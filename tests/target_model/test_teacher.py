"""The teacher's logits are the target's own, for families with habits of their own."""

from __future__ import annotations

import pytest
import torch

from paceline.config import TargetConfig
from paceline.target_model.load import load_model
from paceline.target_model.teacher import load_teacher
from tiny_targets import save_tiny


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        ("llama", {}),
        ("gemma2", {"final_logit_softcapping": 3.0, "sliding_window": 8}),
        ("qwen3_next", {}),
        ("gpt_oss", {"sliding_window": 8}),
    ],
)
def test_logits_are_the_targets_own(tmp_path, family: str, changes: dict) -> None:
    save_tiny(tmp_path, family, **changes)
    settings = TargetConfig(path=str(tmp_path), dtype="float32")
    model, structure, _ = load_model(settings)
    torch.manual_seed(0)
    ids = torch.randint(4, 90, (1, 11))
    seen: list = []
    handle = structure.layers[-1].register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[0]
    handle.remove()
    states = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    teacher = load_teacher(settings)
    got = teacher(states.reshape(11, -1))
    assert torch.allclose(got, expected, atol=1e-5)
    assert not torch.allclose(teacher(states.reshape(11, -1).flip(0)), expected, atol=1e-2)
