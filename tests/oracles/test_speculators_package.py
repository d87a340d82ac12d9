"""The published `speculators` reads our folder as the drafter that was trained, and converts our z-lab folder to it.

Its trainer measures a sliding window from the anchor, engines (and we) from the query; the windows here are wide
enough that both see all of a document, so kinds, causality, taps, labels and rotary tables are compared without that
difference. Past the window the z-lab package is the oracle.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from batches import host_batch
from oracles.oracle_cases import KINDS, embed_blocks, load, make_spec
from paceline.drafter.network import Drafter
from paceline.drafter.spec import DrafterSpec
from paceline.export.formats import read_drafter
from paceline.export.speculators import read_speculators, write_speculators
from paceline.export.weights import content_hash
from paceline.export.zlab import write_zlab
from paceline.target_model.facts import describe
from paceline.types import TargetFacts

pytestmark = pytest.mark.oracle
ANCHORS = [[7, 9, 20, 31], [5, 6, 38]]
CASES = [
    *((kind, False) for kind in KINDS if kind != "full causal"),
    *((kind, True) for kind in ("full", "sliding causal and full")),
]
NAMES = [f"{kind}{' from anchor' if shifted else ''}" for kind, shifted in CASES]
CONVERTED = ["full", "sliding causal"]
"""The package's converter knows no flag of sliding bidirectional layers, and vLLM serves no mixture in that format."""


def _spec(kind: str, shifted: bool):
    wide = {"sliding_window": 64} if "sliding" in kind else {}
    return make_spec(kind, sample_from_anchor=shifted, **wide)


def _write(folder: Path, spec: DrafterSpec, facts: TargetFacts) -> None:
    """A folder in float32; a mixture, which is refused because vLLM reads it otherwise, as the package writes one."""
    mixed = len(set(spec.causal)) > 1
    said = dataclasses.replace(spec, causal=(False,) * spec.num_layers) if mixed else spec
    write_speculators(folder, said, Drafter(spec, seed=11).state_dict(), facts, "float32")
    if mixed:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "sliding_window_non_causal": False}))


@pytest.fixture(scope="module")
def place(ask, tmp_path_factory, target_folder, answers) -> Path:
    folders = tmp_path_factory.mktemp("drafters")
    facts = describe(str(target_folder))
    for name, (kind, shifted) in zip(NAMES, CASES, strict=True):
        spec = _spec(kind, shifted)
        _write(folders / name, spec, facts)
    for kind in CONVERTED:
        spec = _spec(kind, False)
        write_zlab(folders / f"zlab {kind}", spec, Drafter(spec, seed=11).state_dict(), facts, "bfloat16")
        write_speculators(folders / f"ours {kind}", spec, Drafter(spec, seed=11).state_dict(), facts, "bfloat16")
    features = load(target_folder, "float32").features(host_batch(answers)).features
    save_file({"features": features}, folders / "inputs.safetensors")
    request = {
        "target": str(target_folder),
        "inputs": str(folders / "inputs.safetensors"),
        "documents": answers,
        "anchors": ANCHORS,
        "drafters": {name: str(folders / name) for name in NAMES},
        "convert": {kind: str(folders / f"zlab {kind}") for kind in CONVERTED},
    }
    done = ask("run_speculators.py", request)
    (done / "folders").symlink_to(folders)
    return done


@pytest.mark.parametrize(("name", "case"), list(zip(NAMES, CASES, strict=True)), ids=NAMES)
def test_training_forward_is_equal(place, target_folder, answers, name, case) -> None:
    theirs = load_file(place / f"{name}.safetensors")
    spec = _spec(*case)
    target = load(target_folder, "float32")
    network = Drafter(spec, seed=11)
    anchor_ids = torch.tensor([row[anchor] for row, chosen in zip(answers, ANCHORS, strict=True) for anchor in chosen])
    with torch.no_grad():
        hidden = network.training_forward(
            target.features(host_batch(answers)).features,
            [len(row) for row in answers],
            [anchor for chosen in ANCHORS for anchor in chosen],
            [len(chosen) for chosen in ANCHORS],
            embed_blocks(spec, target, anchor_ids),
        )
    torch.testing.assert_close(hidden, theirs["hidden"], rtol=0, atol=1e-5)
    torch.testing.assert_close(hidden @ target.head.T, theirs["logits"], rtol=0, atol=1e-5)


def test_label_convention_is_read_from_the_folder(place, target_folder, answers) -> None:
    """Which position's target state teaches slot k: a + k - 1, or a + k when drafting from the anchor."""
    model = load(target_folder, "float32").model
    features = load_file(place / "folders" / "inputs.safetensors")["features"]
    states = features[:, : model.config.hidden_size]
    teacher = model.lm_head(model.model.norm(states))
    for name, (_, shifted) in zip(NAMES, CASES, strict=True):
        theirs = load_file(place / f"{name}.safetensors")
        spec = _spec("full", shifted)
        anchor = ANCHORS[0][2]
        for slot in range(spec.first_draft_slot, spec.block_size):
            position = anchor + slot + (1 - spec.first_draft_slot) - 1
            torch.testing.assert_close(theirs["targets"][2, slot], teacher[position], rtol=1e-4, atol=1e-4)
        assert bool(theirs["mask"][:, 0].any()) == shifted


@pytest.mark.parametrize("kind", CONVERTED)
def test_its_converter_maps_our_zlab_folder_to_ours(place, kind) -> None:
    spec, state = read_speculators(place / f"converted-{kind}")
    ours, our_state = read_drafter(place / "folders" / f"ours {kind}")
    assert content_hash(state) == content_hash(our_state)
    theirs_config = json.loads((place / f"converted-{kind}" / "config.json").read_text())
    our_config = json.loads((place / "folders" / f"ours {kind}" / "config.json").read_text())
    compared = [
        *("speculators_model_type", "speculators_config", "draft_vocab_size", "block_size", "mask_token_id"),
        *("aux_hidden_state_layer_ids", "sample_from_anchor", "tie_word_embeddings", "speculators_version"),
    ]
    assert {key: theirs_config[key] for key in compared} == {key: our_config[key] for key in compared}
    # vLLM takes false as causal for all layers, so ours says true where there are only full ones; theirs does not.
    assert theirs_config["sliding_window_non_causal"] is False
    assert our_config["sliding_window_non_causal"] is (kind == "full")
    depth = ours.num_target_layers
    assert {**spec.to_dict(), "num_target_layers": depth} == ours.to_dict()
