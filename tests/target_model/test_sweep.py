"""Every architecture: taps equal transformers' own hidden states of single rows; embedding and head are its own.

Two documents of different length in one right-padded batch, stopped early, against each document alone. A part runs
always, the rest behind the `sweep` marker; its table goes to standard output (`pytest -m sweep -s`).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from paceline.config import TargetConfig
from paceline.errors import TargetError
from paceline.target_model.facts import describe
from paceline.target_model.introspect import main_input
from paceline.target_model.load import load_target
from tiny_architectures import LAYERS, MAX_PARAMETERS, build, model_types, no_target, num_parameters, tiny_config
from tiny_targets import embedding_and_head

DOCUMENTS = [[5, 9, 3, 44, 17, 8, 60, 23, 11, 7, 31], [12, 30, 31, 90, 4]]
FAST = [
    *("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "llama", "mistral", "gemma2", "gemma3_text", "gpt_oss"),
    *(
        "deepseek_v3",
        "glm4",
        "phi3",
        "olmo2",
        "mamba2",
        "falcon_h1",
        "granite",
        "cohere2",
        "gpt2",
        "gemma3",
        "qwen3_vl",
    ),
]
STREAMS = "its layers pass on four hidden states a token (hyper-connections)"
DRAFTER = "a drafter itself: runs on the keys and values of another model only"
BY_TYPE = {
    **dict.fromkeys(("deepseek_v4", "glm5_next", "hy_v4", "hy_v4_vl", "qwen4_exp", "qwen4_exp_text"), STREAMS),
    "gemma3n_text": "its layers pass on four hidden states a token (AltUp)",
    **dict.fromkeys(("dory", "hrm_text"), "runs each layer several times over, so that no id names one output"),
    "cpmant": "puts prompt tokens of its own before the text",
    "xlnet": "its layers pass states on with time first, and it predicts in an order of its own",
    "longcat_flash": "its configuration counts two attention blocks a layer, so it has half as many layers",
    "mllama": "leaves its cross-attention layers out where there is no image",
    "kosmos-2": "reads no text without an image",
    "shieldgemma2": "a classifier around a language model; saves no head",
    "evolla": "transformers lists it among its models and cannot build it",
    "diffusion_gemma": "a text diffusion model: what it puts out are no states of the tokens that it is given",
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), DRAFTER),
    **dict.fromkeys(("paligemma", "xlm"), "not causal: its tokens see later ones, which the tap guard refuses"),
    "apertus1p5": "its configuration couples the ids of sounds and images to the size of its vocabulary",
}
"""Types that fail, and why."""
CAUSES = {
    "requires the timm library": "its vision part needs a package that is not installed",
    "No module named": "needs a package that is not installed",
}
"""The same by a part of the message."""


def cause_of(model_type: str, reason: str) -> str:
    """What is known of a failure; empty where nothing is."""
    by_message = (cause for part, cause in CAUSES.items() if part in reason)
    return BY_TYPE.get(model_type) or next(by_message, "")


@dataclass
class Verdict:
    """What became of one architecture."""

    word: str
    reason: str


def alone(target, document, taps) -> torch.Tensor:
    """Features of one document by ``output_hidden_states``, whether that starts with layer 0's input or its output."""
    ids, inputs = torch.tensor([document]), []
    hook = target.structure.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(main_input(args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        states = target.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    assert len(states) == target.facts.num_layers + 1
    first = 1 if torch.equal(states[0], inputs[0]) else 0
    return torch.cat([states[tap + first][0] for tap in taps], dim=-1)


def judge(model_type: str, folder: Path) -> Verdict:
    """Builds, saves, loads and taps one architecture."""
    config = tiny_config(model_type)
    reason = no_target(config)
    if reason is None and (size := num_parameters(config)) > MAX_PARAMETERS:
        reason = f"{size / 1e6:.0f} million weights even when shrunk"
    if reason is None:
        model = build(config)
        reason = no_target(config, model)
    if reason is not None:
        return Verdict("skip", reason)
    model.save_pretrained(str(folder))
    facts = describe(str(folder))
    taps = sorted({0, facts.num_layers // 2, max(0, facts.num_layers - 2)})
    target = load_target(TargetConfig(path=str(folder), dtype="float32"), taps)
    ids = torch.zeros(2, len(DOCUMENTS[0]), dtype=torch.int64)
    for row, document in enumerate(DOCUMENTS):
        ids[row, : len(document)] = torch.tensor(document)
    features, _ = target.tap_rows(ids, [len(document) for document in DOCUMENTS])
    expected = torch.cat([alone(target, document, taps) for document in DOCUMENTS])
    if features.shape != expected.shape:
        return Verdict("fail", f"its hidden states are {list(expected.shape)} for {features.shape[0]} tokens")
    error, scale = float((features - expected).abs().max()), max(1.0, float(expected.abs().max()))
    if not error <= 1e-5 * scale:
        return Verdict("fail", f"taps differ by {error:.2g}")
    return Verdict("pass", check_ends(target, folder))


def check_ends(target, folder: Path) -> str:
    """Embedding and head read alone are the loaded model's; where they cannot be shared, why."""
    try:
        embedding, head = embedding_and_head(folder)
    except TargetError as error:
        return str(error).partition(": ")[2]
    assert torch.equal(embedding, target.embedding) and torch.equal(head, target.head)
    caught = {}
    target.structure.head.register_forward_hook(lambda _, args, output: caught.update(seen=args[0], logits=output))
    inputs = []
    target.structure.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(main_input(args, kwargs)), with_kwargs=True
    )
    ids = torch.tensor([DOCUMENTS[1]])
    with torch.no_grad():
        target.model(input_ids=ids, use_cache=False)
    torch.testing.assert_close(embedding[ids], inputs[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(caught["seen"] @ head.T, caught["logits"], atol=1e-4, rtol=1e-4)
    return ""


@pytest.mark.parametrize("model_type", FAST)
def test_architecture(model_type, tmp_path):
    verdict = judge(model_type, tmp_path)
    assert verdict.word == "pass", verdict.reason


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_all_architectures(tmp_path):
    verdicts, unknown = {}, []
    for model_type in model_types():
        folder = tmp_path / model_type
        try:
            verdicts[model_type] = judge(model_type, folder)
        except Exception as error:
            verdicts[model_type] = Verdict("fail", f"{type(error).__name__}: {error}".replace("\n", " ")[:200])
        shutil.rmtree(folder, ignore_errors=True)
        verdict = verdicts[model_type]
        cause = cause_of(model_type, verdict.reason) if verdict.word == "fail" else ""
        if verdict.word == "fail" and not cause:
            unknown.append(f"{model_type}: {verdict.reason}")
        print(f"{model_type:32} {verdict.word:5} {cause or verdict.reason}", flush=True)
    counts = {word: sum(verdict.word == word for verdict in verdicts.values()) for word in ("pass", "fail", "skip")}
    print(counts, f"of {len(verdicts)}; layers {LAYERS}")
    print("without a known cause:", *unknown, sep="\n  ")
    assert counts["pass"] >= 200 and not unknown
