"""The model card says what engines and people need, from what the run knows."""

from __future__ import annotations

from huggingface_hub import ModelCard

from paceline.export.card import Origin, acceptance_table, render_card
from paceline.export.engines import ServedTarget


def _card(spec, facts, origin=None, target="some/target", **changes) -> str:
    values = {"format": "zlab", "dtype": "bfloat16", "content_hash": "0123456789abcdef", **changes}
    return render_card(spec, ServedTarget(target, "qwen3"), facts, origin or Origin(), **values)


def test_card_of_a_run(make_spec, make_facts) -> None:
    origin = Origin(
        step=200,
        total_steps=240,
        target_fingerprint="a" * 64,
        data_fingerprint="b" * 64,
        settings={
            "objective": {"terms": {"ce": 1.0}, "alpha": None},
            "optimizer": {"name": "adamw", "lr": 6e-4, "clip_norm": 1.0, "momentum": 0.95},
            "plan": {"strategy": "grid", "jitter": 0.05, "grid_class_batches": 4, "edges": None},
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
                "conditions": {"max_new_tokens": 80, "temperature": 0, "files": ["heldout.jsonl"], "device": "cpu"},
                "dtype": "float64",
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
        "| `plan.grid_class_batches` | 4 |",
    ):
        assert line in body.splitlines(), line
    assert "at most 512 tokens (engines may ask for positions up to 512)" in body
    assert "objective.alpha" not in body and "momentum" not in body and "jitter" not in body
    assert "max_steps" not in body and "platform" not in body
    measured = "At step 200: 8 prompts of heldout.jsonl, answers of at most 80 tokens, greedy, in float64 on cpu."
    assert measured in body


def test_metadata_is_valid_for_the_hub(tmp_path, make_spec, make_facts) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# The target\n")
    cached = tmp_path / "models--owner--base" / "snapshots" / "0a1b"
    cached.mkdir(parents=True)
    (cached / "README.md").write_text((tmp_path / "README.md").read_text())
    card = ModelCard(_card(make_spec(), make_facts(make_spec()), target=str(cached)))
    assert card.data.to_dict() == {
        "base_model": "owner/base",
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["dflash", "speculative-decoding"],
    }
    assert str(tmp_path) not in str(card) and "vllm serve owner/base" in str(card)
    (cached / "README.md").write_text("no front matter")
    assert "license" not in ModelCard(_card(make_spec(), make_facts(make_spec()), target=str(cached))).data.to_dict()


def test_a_folder_of_the_author_is_not_shown(make_spec, make_facts) -> None:
    card = _card(make_spec(), make_facts(make_spec()), target="/home/me/models/target")
    assert "/home/me" not in card and "# DFlash drafter for target" in card
    assert "vllm serve TARGET" in card and '"model": "DRAFTER"' in card
    assert '"model": "owner/name"' in _card(make_spec(), make_facts(make_spec()), folder="owner/name")


def test_an_unserved_drafter_says_so(make_spec, make_facts) -> None:
    spec = make_spec(sample_from_anchor=True)
    card = _card(spec, make_facts(spec), format="speculators")
    assert "No released engine serves this drafter" in card and "vllm serve" not in card


def test_what_is_unknown_stays_out(make_spec, make_facts) -> None:
    card = _card(make_spec(), make_facts(make_spec()), target="/models/target")
    for heading in ("## Training", "## Data", "## Acceptance", "base_model"):
        assert heading not in card
    assert acceptance_table([{"step": 1, "seconds": 2.0}]) == ""
    greedy = {"step": 1, "tau_micro": 2.0, "temperature": 0.0}
    assert acceptance_table([greedy]).splitlines()[0] == "| step | τ micro |"
    sampled = acceptance_table([greedy, {**greedy, "step": 2, "temperature": 0.8}]).splitlines()
    assert sampled[0] == "| step | τ micro | temperature |" and sampled[3].endswith("0.800 |")
    assert Origin().trained_length is None
    assert Origin(settings={"data": {"max_length": 4096}}).trained_length == 4096
