"""Masks of one's own: who takes them, and that they do what they say."""

from __future__ import annotations

import pytest
import torch

from paceline.config import TargetConfig
from paceline.decode.kv_cache import new_cache
from paceline.decode.masked_forward import MaskedForward, Visibility, check_masks
from paceline.errors import TargetError
from paceline.target_model.load import load_target
from tiny_architectures import build, tiny_config

TAKES = ["qwen3", "opt", "llama", "gpt2", "mistral", "gemma3", "gpt_oss", "qwen3_moe"]
REFUSES = {
    "bloom": "counts positions by itself",
    "qwen3_next": "has recurrent layers",
    "falcon_h1": "has recurrent layers",
    "lfm2": "has recurrent layers",
    "llama4_text": "attend within chunks",
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A tiny target of a kind, in float64."""

    def make(name):
        folder = tmp_path_factory.mktemp(name)
        build(tiny_config(name)).save_pretrained(str(folder))
        return load_target(TargetConfig(path=str(folder)), [0, 2], dtype="float64")

    return make


@pytest.mark.parametrize("name", TAKES)
def test_rows_with_holes_equal_rows_alone(load, name):
    """Two sequences side by side, of other lengths, with holes in the middle: longer than the windows of 8."""
    target = load(name)
    check_masks(target)
    torch.manual_seed(0)
    rows = torch.randint(3, 97, (2, 24))
    real = torch.ones(2, 24, dtype=torch.bool)
    real[0, 5:9] = real[1, 14:17] = False
    places = torch.where(real, real.long().cumsum(1) - 1, -1)
    reader, cache = MaskedForward(target), new_cache(target.model.config, forgets=False)
    got = []
    for begin, end in ((0, 11), (11, 24)):
        keys, queries = places[:, :end], places[:, begin:end]
        seen = (keys[:, None] >= 0) & (keys[:, None] <= queries[..., None])
        got.append(reader.read(cache, rows[:, begin:end], queries.clamp_min(0), Visibility(seen, keys)))
    logits, features = (torch.cat(parts, dim=1) for parts in zip(*got, strict=True))
    for row in range(2):
        ids = rows[row][real[row]]
        with torch.no_grad():
            alone = target.model(input_ids=ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(logits[row][real[row]], alone, atol=1e-4, rtol=1e-4)
        taps, _ = target.tap_rows(ids[None], [len(ids)])
        torch.testing.assert_close(features[row][real[row]], taps, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", REFUSES)
def test_others_are_refused_in_one_line(load, name):
    with pytest.raises(TargetError, match=REFUSES[name]) as error:
        check_masks(load(name))
    assert len(error.value.errors) == 1 and "decode with the chain, one prompt at a time" in str(error.value)


def test_an_attention_that_takes_no_masks_is_refused(load, monkeypatch):
    target = load("qwen3")
    monkeypatch.setattr(target.model.config, "_attn_implementation", "flash_attention_2")
    with pytest.raises(TargetError, match=r"attends by flash_attention_2.*target\.attention to sdpa"):
        check_masks(target)


def test_a_model_that_ignores_its_mask_is_refused(load):
    target = load("qwen3")
    target.model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
    )
    with pytest.raises(TargetError, match="gives other logits with a mask"):
        check_masks(target)
