"""A sequence read in pieces, with pieces taken back, gives what the whole sequence gives: every kind of cache."""

from __future__ import annotations

import pytest
import torch

from paceline.config import TargetConfig
from paceline.decode import kv_cache
from paceline.decode.session import TargetSession, reads_blocks
from paceline.errors import TargetError
from paceline.target_model.load import load_target
from tiny_architectures import build, tiny_config

HYBRID = {"lfm2", "qwen3_next", "qwen3_5_text", "falcon_h1", "mamba2", "mamba"}
KINDS = ["qwen3", "gpt2", "mistral", "gpt_oss", "gemma3", *sorted(HYBRID)]
TAPS = [0, 2]


@pytest.fixture(scope="module", params=KINDS)
def target(request, tmp_path_factory):
    """A tiny target in float64; sliding windows are 8 tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    build(tiny_config(request.param)).save_pretrained(str(folder))
    return request.param, load_target(TargetConfig(path=str(folder)), TAPS, dtype="float64")


def saved(folder, name):
    build(tiny_config(name)).save_pretrained(str(folder))
    return load_target(TargetConfig(path=str(folder)), TAPS, dtype="float64")


def whole(target, ids):
    """Logits and features without a cache."""
    with torch.no_grad():
        logits = target.model(input_ids=ids[None], use_cache=False).logits[0]
    return logits, target.tap_rows(ids[None], [ids.shape[0]])[0]


@pytest.mark.parametrize("room", [4, 256], ids=["growing", "roomy"])
def test_pieces_and_rewinds_equal_the_whole(target, room, monkeypatch):
    monkeypatch.setattr(kv_cache, "SMALLEST", room)
    name, target = target
    torch.manual_seed(1)
    ids = torch.randint(3, 97, (31,))
    logits, features = whole(target, ids)
    session = TargetSession(target)
    got_logits, got_features = session.read(ids[:9], last_only=True)
    assert got_logits.shape[0] == 1
    torch.testing.assert_close(got_logits[0], logits[8], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got_features, features[:9], atol=1e-4, rtol=1e-4)
    at = 9
    for kept, tried in ((1, 5), (4, 4), (3, 6), (1, 1), (2, 7), (6, 6), (1, 6), (4, 4)):
        wrong = torch.randint(3, 97, (tried - kept,))
        got_logits, got_features = session.read(torch.cat([ids[at : at + kept], wrong]))
        torch.testing.assert_close(got_logits[:kept], logits[at : at + kept], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got_features[:kept], features[at : at + kept], atol=1e-4, rtol=1e-4)
        at += kept
        session.rewind(at)
        assert session.length == at
    assert at == 31
    assert session.replays == (name in HYBRID)
    assert (session.replayed_tokens > 0) == session.replays


def read_in_two(target, ids, **how):
    session = TargetSession(target, **how)
    session.read(ids[:11])
    return session.read(ids[11:])[0]


def test_a_state_that_takes_no_block_is_found_out(tmp_path):
    """Mamba starts a block afresh; were it trusted, the answer would be another one."""
    target = saved(tmp_path, "mamba")
    ids = torch.arange(5, 25)
    expected = whole(target, ids)[0][11:]
    assert float((read_in_two(target, ids, by_token=False) - expected).abs().max()) > 1e-3
    torch.testing.assert_close(read_in_two(target, ids), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_states_that_take_blocks_are_read_in_blocks(name, tmp_path):
    target = saved(tmp_path, name)
    assert reads_blocks(target)


@pytest.mark.parametrize(
    ("name", "why"), [("jamba", "fails when it continues"), ("recurrent_gemma", "other logits from its cache")]
)
def test_a_target_that_cannot_go_on_from_its_cache_is_refused(name, why, tmp_path):
    """Jamba asks its first layer for a length that it has not; RecurrentGemma keeps its state outside the cache."""
    target = saved(tmp_path, name)
    with pytest.raises(TargetError, match=f"{why}.*so it cannot decode; it can still be trained for") as error:
        TargetSession(target)
    assert len(error.value.errors) == 1


def test_a_whole_read_can_be_taken_back(target):
    _, target = target
    ids = torch.arange(5, 25)
    logits, _ = whole(target, ids)
    session = TargetSession(target)
    session.read(ids[:11])
    session.rewind(11)
    session.read(torch.arange(30, 35))
    session.rewind(11)
    got, _ = session.read(ids[11:])
    torch.testing.assert_close(got, logits[11:], atol=1e-4, rtol=1e-4)


def test_earlier_tokens_cannot_be_taken_back(target):
    _, target = target
    session = TargetSession(target)
    session.read(torch.arange(5, 11))
    session.rewind(6)
    session.read(torch.arange(5, 8))
    with pytest.raises(TargetError, match="can be rewound to 6 or later, not to 5"):
        session.rewind(5)
