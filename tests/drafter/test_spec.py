"""The spec: derived from a target, written out, refused in words."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from pydantic import ValidationError

from drafter_cases import small_spec
from paceline.config import DrafterConfig
from paceline.drafter.spec import DrafterSpec, derive_spec
from paceline.errors import DrafterError
from paceline.types import TargetFacts

FACTS = TargetFacts(
    path="target", architecture="LM", model_type="lm", num_layers=12, hidden_size=64, vocab_size=1000,
    intermediate_size=160, num_attention_heads=8, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6,
    rope_theta=1e6, max_position_embeddings=4096, initializer_range=0.02, tied_head=True, bos_token_id=1,
    eos_token_ids=(2, 3), pad_token_id=0, fingerprint="f",
)  # fmt: skip
TAPS = [1, 5, 8]


def test_unset_values_are_the_targets_and_written_out():
    spec = derive_spec(DrafterConfig(), FACTS, TAPS, 999)
    assert (spec.intermediate_size, spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (
        160,
        8,
        2,
        16,
    )
    assert (spec.rope_theta, spec.vocab_size, spec.taps, spec.num_target_layers) == (1e6, 1000, (1, 5, 8), 12)
    assert spec.layers == ("full",) * 5 and spec.causal == (False,) * 5 and spec.mask_token_id == 999


def test_everything_may_differ_from_the_target():
    config = DrafterConfig(
        num_layers=2, intermediate_size=10, num_attention_heads=6, num_key_value_heads=3, head_dim=8, rope_theta=1e4,
        mask_token_id=77,
    )  # fmt: skip
    spec = derive_spec(config, FACTS, TAPS, 999)
    assert (spec.intermediate_size, spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (10, 6, 3, 8)
    assert (spec.rope_theta, spec.mask_token_id) == (1e4, 77)


def test_the_published_mix_is_one_line():
    config = DrafterConfig(layers=["sliding"] * 4 + ["full"], sliding_window=2048)
    spec = derive_spec(config, FACTS, TAPS, 999)
    assert spec.causal == (True,) * 4 + (False,)
    assert [spec.window(i) for i in range(5)] == [2048] * 4 + [None]


def test_round_trip_through_plain_values():
    spec = small_spec(layers=("sliding", "full"), causal=(True, False), sliding_window=9, sample_from_anchor=True)
    values = spec.to_dict()
    assert DrafterSpec.from_dict(values) == spec
    with pytest.raises(DrafterError, match="missing or unknown: taps"):
        DrafterSpec.from_dict({name: value for name, value in values.items() if name != "taps"})


def test_drafts_and_their_slots():
    assert (small_spec().num_drafts, small_spec().first_draft_slot) == (3, 1)
    anchored = small_spec(sample_from_anchor=True)
    assert (anchored.num_drafts, anchored.first_draft_slot) == (4, 0)


@pytest.mark.parametrize(
    ("config", "mask", "text"),
    [
        ({"mask_token_id": 0}, None, "is the target's pad token"),
        ({"mask_token_id": 1}, None, "is the target's bos token"),
        ({}, 3, "is the target's eos token"),
        ({"mask_token_id": 1000}, None, "outside the target's embedding; allowed: 0 to 999"),
        ({}, None, "tokenizer has no mask token"),
        ({"num_key_value_heads": 3}, 999, "not a multiple"),
        ({"head_dim": 7}, 999, "even"),
    ],
)
def test_refused_in_one_line(config, mask, text):
    with pytest.raises(DrafterError, match=text) as error:
        derive_spec(DrafterConfig(**config), FACTS, TAPS, mask)
    assert len(error.value.errors) == 1 and "\n" not in str(error.value)


def test_the_own_mask_goes_before_the_tokenizers():
    assert derive_spec(DrafterConfig(mask_token_id=7), FACTS, TAPS, 9).mask_token_id == 7


@pytest.mark.parametrize(
    ("taps", "text"), [([], "none"), ([1, 12], r"\[12\]: outside"), ([-1], "outside"), ([3, 3], "tapped once")]
)
def test_taps_that_cannot_be(taps, text):
    with pytest.raises(DrafterError, match=text):
        derive_spec(DrafterConfig(), FACTS, taps, 999)


def test_what_the_target_does_not_say_must_be_given():
    facts = replace(FACTS, intermediate_size=None, rope_theta=None)
    with pytest.raises(DrafterError) as error:
        derive_spec(DrafterConfig(), facts, TAPS, 999)
    assert len(error.value.errors) == 2 and "give drafter.intermediate_size" in error.value.errors[0]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"block_size": 1}, "greater than or equal to 2"),
        ({"num_layers": 2, "layers": ["full"]}, "list one a layer"),
        ({"num_layers": 1, "layers": ["sliding"]}, "sliding_window is unset"),
        ({"sliding_window": 5}, "no layer is sliding"),
        ({"num_layers": 2, "causal": [True]}, "causal lists 1"),
        ({"num_layers": 1, "layers": ["sliding"], "sliding_window": 5, "causal": False}, "shorter than block_size"),
    ],
)
def test_settings_that_are_refused(values, text):
    with pytest.raises(ValidationError, match=text):
        DrafterConfig(**values)


def test_spec_and_anchors_need_no_torch():
    code = "import sys, paceline.drafter.spec, paceline.drafter.anchors, paceline.drafter.schedule\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
