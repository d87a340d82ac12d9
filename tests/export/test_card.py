"""The model card says what engines and people need, from what the run knows."""

from __future__ import annotations

import json
import shlex

import pytest

from paceline.export.card import Origin, acceptance_table, render_card, serving_commands, serving_notes


def _card(spec, facts, **changes) -> str:
    values = {
        "folder": "drafters/first one",
        "format": "zlab",
        "dtype": "bfloat16",
        "content_hash": "0123456789abcdef",
        "target": "some/target",
        "facts": facts,
        **changes,
    }
    return render_card(spec, **values)


def test_card_of_a_run(make_spec, make_facts) -> None:
    origin = Origin(
        step=200,
        total_steps=240,
        target_fingerprint="a" * 64,
        data_fingerprint="b" * 64,
        settings={
            "objective": {"terms": {"ce": 1.0}, "alpha": None},
            "optimizer": {"lr": 6e-4, "clip_norm": 1.0},
            "train": {"epochs": 3, "max_steps": None},
            "seed": 4,
        },
        data={
            "samples": 900,
            "tokens": 50_000,
            "length_percentiles": {"50": 60, "100": 512},
            "tags": {"chat": {"samples": 900, "tokens": 50_000}},
            "set_aside": {"too_long": {"count": 7, "example": "a.jsonl:3"}},
        },
        evaluations=[
            {"step": 0, "tau_micro": 1.01},
            {
                "step": 200,
                "tau_micro": 2.5,
                "tau_macro": 2.625,
                "num_prompts": 8,
                "by_tag": {"chat": {"passes": 40, "tokens": 90, "tau": 2.25}},
                "by_context": {},
            },
        ],
        versions={"paceline": "0.1.0", "platform": "Linux"},
    )
    card = _card(make_spec("sliding causal and full"), make_facts(make_spec()), origin=origin)
    front, body = card.split("---\n")[1:3]
    assert "base_model: some/target" in front
    for line in (
        f"| fingerprint (configuration, weights, tokenizer) | `{'a' * 64}` |",
        "| tapped layers | 1, 4 |",
        "| content hash of the tensors | `0123456789abcdef` |",
        "| draft layers | sliding 8 causal, sliding 8 causal, full bidirectional |",
        "| label convention | slot k drafts the token at anchor + k (sample_from_anchor false) |",
        "| optimizer steps | 200 of 240 |",
        "| `optimizer.lr` | 0.0006 |",
        "| `train.epochs` | 3 |",
        "| samples | 900 |",
        "| length percentiles (tokens) | 50: 60, 100: 512 |",
        "| left out | too_long: 7 |",
        "| step | τ micro | τ macro | num prompts |",
        "| 0 | 1.010 |  |  |",
        "| 200 | 2.500 | 2.625 | 8 |",
        "| tag | τ | target passes |",
        "| chat | 2.250 | 40 |",
        "| versions | paceline 0.1.0 |",
        "| `objective.terms` | ce 1 |",
    ):
        assert line in body.splitlines(), line
    assert "at most 512 tokens (engines may ask for positions up to 512)" in body
    assert "objective.alpha" not in body
    assert "max_steps" not in body and "platform" not in body


def test_what_is_unknown_stays_out(make_spec) -> None:
    card = _card(make_spec(), None, target="/models/target")
    for heading in ("## Training", "## Data", "## Acceptance", "base_model"):
        assert heading not in card
    assert acceptance_table([{"step": 1, "seconds": 2.0}]) == ""
    greedy = {"step": 1, "tau_micro": 2.0, "temperature": 0.0}
    assert acceptance_table([greedy]).splitlines()[0] == "| step | τ micro |"
    sampled = acceptance_table([greedy, {**greedy, "step": 2, "temperature": 0.8}]).splitlines()
    assert sampled[0] == "| step | τ micro | temperature |" and sampled[3].endswith("0.800 |")
    assert Origin().trained_length is None
    assert Origin(settings={"data": {"max_length": 4096}}).trained_length == 4096


@pytest.mark.parametrize(("shifted", "drafts"), [(False, 5), (True, 6)])
def test_command_lines_survive_a_shell(make_spec, shifted, drafts) -> None:
    spec = make_spec(sample_from_anchor=shifted)
    commands = serving_commands(spec, "zlab", "drafters/first one", "/models/my target")
    vllm = shlex.split(commands["vLLM"])
    assert [word for word in vllm if word != "\n"][:3] == ["vllm", "serve", "/models/my target"]
    assert json.loads(vllm[-1]) == {"method": "dflash", "model": "drafters/first one", "num_speculative_tokens": drafts}
    sglang = shlex.split(commands["SGLang"])
    assert sglang[sglang.index("--speculative-algorithm") + 1] == "DFLASH"
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == "drafters/first one"
    zlab = shlex.split(commands["z-lab dflash"])
    assert zlab[:7] == [
        "dflash",
        "generate",
        "transformers",
        "--model",
        "/models/my target",
        "--draft",
        "drafters/first one",
    ]
    assert list(serving_commands(spec, "speculators", "a", "b")) == ["vLLM"]


def test_notes_name_what_engines_get_wrong(make_spec) -> None:
    assert serving_notes(make_spec(), "zlab") == []
    assert "reads them as causal" in serving_notes(make_spec("sliding bidirectional"), "zlab")[0]
    assert "drops the window of 8 tokens" in serving_notes(make_spec("sliding causal"), "zlab")[0]
    assert "full layers are causal" in serving_notes(make_spec("full causal"), "zlab")[0]
    assert "sample_from_anchor" in serving_notes(make_spec(sample_from_anchor=True), "speculators")[0]
