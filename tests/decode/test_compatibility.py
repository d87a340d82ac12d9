"""Who fits whom, before anything is decoded; what decoding holds in bytes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from paceline.config import EvaluateConfig
from paceline.decode.compatibility import fitting
from paceline.errors import DataError
from paceline.evaluate.evaluate import evaluate
from paceline.evaluate.memory import measure_memory


@dataclass(frozen=True)
class Prompt:
    id: str
    ids: list[int]
    tags: tuple[str, ...] = ()


def test_prompts_longer_than_the_context_are_set_aside_by_name(make_pair):
    target, network = make_pair("qwen3", max_position_embeddings=30)
    long, whole, short = Prompt("long", [5] * 31), Prompt("whole", [5] * 30), Prompt("short", [5] * 9)
    kept, lines = fitting(target, [long, whole, short])
    assert [prompt.id for prompt in kept] == ["whole", "short"]
    assert len(lines) == 1 and lines[0].startswith("prompt long: set aside; it has 31 tokens, but")
    report = evaluate(target, network, [long, whole, short], EvaluateConfig(max_new_tokens=4))
    assert report.set_aside == lines and [row.id for row in report.rows] == ["whole", "short"]
    with pytest.raises(DataError, match="prompt long: set aside") as error:
        evaluate(target, network, [long], EvaluateConfig())
    assert error.value.errors[-1] == "evaluate: no prompt fits into the target's positions; give shorter ones"


def test_bad_prompts_are_refused_together_before_any_is_decoded(make_pair):
    target, network = make_pair("qwen3")
    with pytest.raises(DataError) as error:
        evaluate(target, network, [Prompt("a", [5]), Prompt("b", []), Prompt("c", [5, 97])], EvaluateConfig())
    assert [line.split(";")[0] for line in error.value.errors] == [
        "prompt b: holds no tokens",
        "prompt c: token id 97 is outside the target's vocabulary of 97",
    ]


@pytest.mark.parametrize("model_type", ["qwen3", "mistral", "qwen3_5_text"])
def test_bytes_by_hand(make_pair, model_type):
    target, network = make_pair(model_type, **({"sliding_window": 8} if model_type == "mistral" else {}))
    memory, config = measure_memory(target, network, 2.0), target.model.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    attending = sum(kind != "linear_attention" for kind in kinds)
    assert memory.target_cache_per_token == 2 * attending * config.num_key_value_heads * config.head_dim * 8
    assert (memory.target_state > 0) == (attending < len(kinds))
    assert memory.features_per_token == 2 * 32 * 8
    spec = network.spec
    assert memory.drafter_cache_per_token == 2 * 2 * spec.num_key_value_heads * spec.head_dim * 8
    assert memory.target_weights == sum(p.numel() for p in target.model.parameters()) * 8
    assert memory.drafter_weights == sum(p.numel() for p in network.parameters()) * 4
    assert memory.weights_read_per_token == round((memory.target_weights + memory.drafter_weights) / 2)
    assert measure_memory(target, network, None).weights_read_per_token is None
