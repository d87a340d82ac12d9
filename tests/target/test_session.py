"""A sequence read in pieces, with pieces taken back, gives what the whole sequence gives: every kind of cache."""

from __future__ import annotations

import pytest
import torch

from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.target import kvcache
from paceline.target.load import load_target
from paceline.target.session import TargetSession
from tiny_architectures import build, tiny_config

KINDS = ["qwen3", "gpt2", "mistral", "gpt_oss", "gemma3", "qwen3_next", "qwen3_5_text", "falcon_h1", "mamba2", "lfm2"]
HYBRID = {"lfm2", "qwen3_next", "qwen3_5_text", "falcon_h1", "mamba2"}
TAPS = [2, 0]


@pytest.fixture(scope="module", params=KINDS)
def target(request, tmp_path_factory):
    """A tiny target in float64; sliding windows are 8 tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    build(tiny_config(request.param)).save_pretrained(str(folder))
    return request.param, load_target(TargetConfig(path=str(folder)), TAPS, dtype="float64")


def whole(target, ids):
    """Logits and features without a cache."""
    with torch.no_grad():
        logits = target.model(input_ids=ids[None], use_cache=False).logits[0]
    return logits, target.tap_rows(ids[None], [ids.shape[0]])[0]


@pytest.mark.parametrize("room", [4, 256], ids=["growing", "roomy"])
def test_pieces_and_rewinds_equal_the_whole(target, room, monkeypatch):
    monkeypatch.setattr(kvcache, "SMALLEST", room)
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
