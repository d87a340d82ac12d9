"""What a run is from configurations alone: all errors of taps, mask token and sizes together, with values to use."""

from __future__ import annotations

import pytest

from paceline.config import load_settings
from paceline.errors import PacelineError, TargetError
from paceline.run.build import resolve_models


def test_taps_mask_token_and_sizes_are_refused_together(make_run) -> None:
    drafter = {"mask_token_id": "<|mas|>", "head_dim": 7}
    with pytest.raises(PacelineError) as caught:
        resolve_models(load_settings(make_run(target={"num_taps": 9}, drafter=drafter)))
    taps, mask, sizes = caught.value.errors
    assert "for example target.taps: [0, 1, 2, 3, 4, 5, 6]" in taps
    assert mask == "drafter.mask_token_id = <|mas|>: the tokenizer has no such token; did you mean <|mask|>?"
    assert sizes == "drafter.head_dim = 7: rotary embeddings need an even size; for example drafter.head_dim: 8"


@pytest.mark.parametrize(("heads", "groups", "instead"), [(5, 2, 4), (7, 4, 8), (2, 4, 4), (9, 6, 12)])
def test_suggested_numbers_of_heads_can_be_used(make_run, heads: int, groups: int, instead: int) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups}
    with pytest.raises(PacelineError) as caught:
        resolve_models(load_settings(make_run(drafter=sizes)))
    (said,) = caught.value.errors
    assert f"set drafter.num_attention_heads: {instead}, or drafter.num_key_value_heads to one of 1, " in said
    settings = load_settings(make_run(drafter={**sizes, "num_attention_heads": instead}))
    assert resolve_models(settings).spec.num_attention_heads == instead


def test_the_suggested_taps_can_be_used(make_run) -> None:
    with pytest.raises(TargetError) as caught:
        resolve_models(load_settings(make_run(target={"num_taps": 9})))
    said = str(caught.value).rpartition("target.taps: ")[2]
    assert resolve_models(load_settings(make_run(), {"target.taps": said})).taps == list(range(7))


def test_a_token_may_be_asked_for_by_its_text(make_run) -> None:
    models = resolve_models(load_settings(make_run(drafter={"mask_token_id": "<|mask|>"})))
    assert models.spec.mask_token_id == models.mask.id
    assert models.spec == resolve_models(load_settings(make_run())).spec
