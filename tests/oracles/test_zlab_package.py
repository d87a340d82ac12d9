"""The published z-lab `dflash` reads our folder as the drafter that was trained: same logits, same accepted lengths.

It finds taps, windows, causality, mask token and block size in our configuration by itself and computes the target's
states itself, so a shift of any of them shows here. Contexts go past the window of the sliding layers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from batches import host_batch
from oracles.oracle_cases import ANSWER_TOKENS, KINDS, PROMPTS, embed_blocks, load, make_spec
from paceline.decode.draft_session import DraftSession
from paceline.drafter.network import Drafter
from paceline.export.weights import SHARD_BYTES
from paceline.export.zlab import write_zlab
from paceline.target_model.facts import describe
from paceline.target_model.model import TargetModel

pytestmark = pytest.mark.oracle
CONTEXTS = [9, 30]
"""Context tokens in front of the compared blocks; the windows are 10."""


@pytest.fixture(scope="module")
def place(ask, tmp_path_factory, target_folder, answers, fitted) -> Path:
    folders = tmp_path_factory.mktemp("drafters")
    facts = describe(str(target_folder))
    for kind, network in fitted.items():
        shard_bytes = 20_000 if kind == "full" else SHARD_BYTES
        write_zlab(folders / kind, make_spec(kind), network.state_dict(), facts, "float32", shard_bytes=shard_bytes)
    assert (folders / "full" / "model.safetensors.index.json").is_file()
    rows = [
        {"prompt": prompt, "row": row, "context": context}
        for prompt, row, context in zip(PROMPTS, answers, CONTEXTS, strict=True)
    ]
    request = {"target": str(target_folder), "drafters": {kind: str(folders / kind) for kind in KINDS}, "rows": rows}
    return ask("run_zlab.py", request)


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_and_logits_are_equal(place, target_folder, answers, fitted, kind) -> None:
    theirs = load_file(place / f"{kind}.safetensors")
    target, spec, network = load(target_folder, "float32"), make_spec(kind), fitted[kind]
    for index, (row, context) in enumerate(zip(answers, CONTEXTS, strict=True)):
        features = theirs[f"{index}.features"]
        ours = target.features(host_batch([row])).features[:context]
        assert (ours - features).abs().max() <= 1e-5 * features.abs().max()
        session = DraftSession(network)
        session.extend(features)
        hidden = session.draft(embed_blocks(spec, target, torch.tensor([row[context]]))[0], context)
        torch.testing.assert_close(hidden, theirs[f"{index}.hidden"], rtol=0, atol=1e-5)
        torch.testing.assert_close(hidden @ target.head.T, theirs[f"{index}.logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_training_forward_gives_the_same(place, target_folder, answers, fitted, kind) -> None:
    theirs = load_file(place / f"{kind}.safetensors")
    target, spec = load(target_folder, "float32"), make_spec(kind)
    features = target.features(host_batch(answers)).features
    anchor_ids = torch.tensor([row[context] for row, context in zip(answers, CONTEXTS, strict=True)])
    with torch.no_grad():
        hidden = fitted[kind].training_forward(
            features, [len(row) for row in answers], CONTEXTS, [1, 1], embed_blocks(spec, target, anchor_ids)
        )
    for index in range(len(CONTEXTS)):
        torch.testing.assert_close(hidden[index], theirs[f"{index}.hidden"], rtol=0, atol=1e-5)


@torch.no_grad()
def _expected_lengths(network: Drafter, kind: str, target: TargetModel, row: list[int], prompt: int) -> list[int]:
    """Tokens of each target pass when the output is `row`: drafts accepted plus one, the last pass cut at the end."""
    spec = make_spec(kind)
    features = target.features(host_batch([row])).features
    session, lengths, start = DraftSession(network), [], prompt
    session.extend(features)
    while start + 1 < len(row):
        slots = min(spec.block_size, len(row) - start)
        streak = 0
        if slots > 1:
            block = embed_blocks(spec, target, torch.tensor([row[start]]))[0]
            drafts = (session.draft(block[:slots], start) @ target.head.T).argmax(-1)
            while streak + 1 < slots and int(drafts[streak + 1]) == row[start + streak + 1]:
                streak += 1
        lengths.append(min(streak + 1, len(row) - start - 1))
        start += lengths[-1]
    return lengths


@pytest.mark.parametrize("kind", KINDS)
def test_generation_is_lossless_and_accepts_what_we_accept(place, target_folder, answers, fitted, kind) -> None:
    theirs = json.loads((place / "answers.json").read_text())[kind]
    target = load(target_folder, "float64")
    network = Drafter(make_spec(kind)).double()
    network.load_state_dict(fitted[kind].state_dict())
    passes = 0
    for prompt, row, made in zip(PROMPTS, answers, theirs, strict=True):
        assert made["ids"] == row
        assert made["accepted"] == _expected_lengths(network, kind, target, row, len(prompt))
        passes += len(made["accepted"])
    tokens = len(PROMPTS) * (ANSWER_TOKENS - 1)
    assert 1.3 < tokens / passes < 5.9, "the drafters must be neither useless nor perfect for this to prove anything"
