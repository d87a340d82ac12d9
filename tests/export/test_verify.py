"""Verification refuses every way in which a folder can differ from the drafter that was trained."""

from __future__ import annotations

import functools
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ExportError
from paceline.export.golden import draft_logits, golden_ids, stand_ins, target_inputs, write_golden
from paceline.export.speculators import write_speculators
from paceline.export.verify import verify
from paceline.export.weights import content_hash
from paceline.export.zlab import write_zlab


@pytest.mark.parametrize("format", ["zlab", "speculators"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["full", "sliding bidirectional and full", "sliding bidirectional"])
def test_a_faithful_folder_passes(tmp_path, make_spec, make_state, make_facts, kind, dtype, format) -> None:
    spec = make_spec(kind)
    state = make_state(spec)
    write = write_zlab if format == "zlab" else write_speculators
    stored = write(tmp_path / "drafter", spec, state, make_facts(spec), dtype)
    result = verify(tmp_path / "drafter", spec, state)
    assert (result.format, result.dtype, result.num_tensors) == (format, dtype, 36)
    assert result.parameters == sum(tensor.numel() for tensor in state.values())
    assert result.logit_difference == 0
    assert (result.rounding_difference == 0) == (dtype == "float32")
    assert result.content_hash == content_hash(stored)
    assert result.golden_difference is None


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda c: (c.update(block_size=7), c["dflash_config"].update(block_size=7)), "block_size 7"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[2, 5]), r"taps \[2, 5\]"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[4, 1]), r"taps \[4, 1\]"),
        (lambda c: c["dflash_config"].update(mask_token_id=94), "mask_token_id 94"),
        (lambda c: c.update(sliding_window=9), "sliding_window 9"),
        (lambda c: c["layer_types"].reverse(), r"layers \['full', 'sliding', 'sliding'\]"),
        (lambda c: c.update(is_causal=False), r"causal \[False, False, False\]"),
        (lambda c: (c.update(rope_theta=5e5), c["rope_parameters"].update(rope_theta=5e5)), "rope_theta 500000.0"),
        (lambda c: c.update(rms_norm_eps=1e-5), "rms_norm_eps 1e-05"),
        (lambda c: c.update(vocab_size=98), "vocab_size 98"),
        (lambda c: c.update(num_target_layers=7), "num_target_layers 7"),
        (lambda c: c.update(dtype="float32"), "dtype is 'float32', but the tensors are bfloat16"),
    ],
)
def test_a_configuration_that_says_something_else_is_refused(tmp_path, make_spec, make_state, change, name) -> None:
    spec = make_spec("sliding causal and full")
    state = make_state(spec)
    write_zlab(tmp_path / "drafter", spec, state)
    path = tmp_path / "drafter" / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    with pytest.raises(ExportError, match=name):
        verify(tmp_path / "drafter", spec, state)


def keys(config, above=()):
    """Places of all keys, nested ones included."""
    for key, value in config.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from keys(value, (*above, key))


@pytest.mark.parametrize("format", ["zlab", "speculators"])
@pytest.mark.parametrize("kind", ["full", "sliding bidirectional and full"])
def test_no_key_can_be_changed_or_dropped_unseen(tmp_path, make_spec, make_state, make_facts, kind, format) -> None:
    """Whether an engine reads a key is the engine's affair: a base left out of one spelling is another base to some."""
    spec = make_spec(kind)
    state, facts, folder = make_state(spec), make_facts(spec), tmp_path / "drafter"
    (write_zlab if format == "zlab" else write_speculators)(folder, spec, state, facts)
    text = (folder / "config.json").read_text()
    verify(folder, spec, state, facts)
    for place in keys(json.loads(text)):
        for change in (lambda part, key: part.pop(key), lambda part, key: part.update({key: "other"})):
            config = json.loads(text)
            part = functools.reduce(lambda inner, key: inner[key], place[:-1], config)
            change(part, place[-1])
            (folder / "config.json").write_text(json.dumps(config))
            with pytest.raises(ExportError, match=str(folder)):
                verify(folder, spec, state, facts)
    (folder / "config.json").write_text(json.dumps({**json.loads(text), "added": 1}))
    with pytest.raises(ExportError, match="added is 1, written was nothing"):
        verify(folder, spec, state, facts)


def test_one_bit_in_one_tensor_is_refused(tmp_path, make_spec, make_state) -> None:
    spec = make_spec()
    state = make_state(spec)
    write_zlab(tmp_path / "drafter", spec, state)
    path = tmp_path / "drafter" / "model.safetensors"
    tensors = load_file(path)
    tensors["layers.1.mlp.up_proj.weight"].view(torch.int16)[3, 5] ^= 1
    save_file(tensors, path)
    with pytest.raises(ExportError, match=r"layers\.1\.mlp\.up_proj\.weight differs .* in 1 of 1536 numbers"):
        verify(tmp_path / "drafter", spec, state)


def test_mixed_types_are_refused(tmp_path, make_spec, make_state) -> None:
    spec = make_spec()
    state = make_state(spec)
    write_zlab(tmp_path / "drafter", spec, state)
    path = tmp_path / "drafter" / "model.safetensors"
    save_file({**load_file(path), "norm.weight": state["norm.weight"]}, path)
    with pytest.raises(ExportError, match="tensors are of type"):
        verify(tmp_path / "drafter", spec, state)


def _plain_draft(spec, state, features, block):
    """The drafter written out with loops: one block behind its context, float64."""
    weights = {name: tensor.double() for name, tensor in state.items()}

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt() * weights[name]

    def rotated(x, position):
        half = spec.head_dim // 2
        angles = position / spec.rope_theta ** (torch.arange(half, dtype=torch.float64) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    context = norm(features.double() @ weights["fc.weight"].T, "hidden_norm.weight")
    length, x = len(context), block.double()
    for index in range(spec.num_layers):
        layer = f"layers.{index}"
        inner = norm(x, f"{layer}.input_layernorm.weight")
        rows = torch.cat([context, inner])
        attended = []
        for slot in range(spec.block_size):
            position, heads = length + slot, []
            for head in range(spec.num_attention_heads):
                group = head * spec.num_key_value_heads // spec.num_attention_heads
                mine = slice(head * spec.head_dim, (head + 1) * spec.head_dim)
                shared = slice(group * spec.head_dim, (group + 1) * spec.head_dim)
                query = inner[slot] @ weights[f"{layer}.self_attn.q_proj.weight"][mine].T
                query = rotated(norm(query, f"{layer}.self_attn.q_norm.weight"), position)
                scores, values = [], []
                for other, row in enumerate(rows):
                    if spec.layers[index] == "sliding" and position - other >= spec.sliding_window:
                        continue
                    if spec.causal[index] and other > position:
                        continue
                    key = row @ weights[f"{layer}.self_attn.k_proj.weight"][shared].T
                    key = rotated(norm(key, f"{layer}.self_attn.k_norm.weight"), other)
                    scores.append(query @ key / math.sqrt(spec.head_dim))
                    values.append(row @ weights[f"{layer}.self_attn.v_proj.weight"][shared].T)
                heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            attended.append(torch.cat(heads))
        x = x + torch.stack(attended) @ weights[f"{layer}.self_attn.o_proj.weight"].T
        inner = norm(x, f"{layer}.post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(inner @ weights[f"{layer}.mlp.gate_proj.weight"].T)
        x = x + (gate * (inner @ weights[f"{layer}.mlp.up_proj.weight"].T)) @ weights[f"{layer}.mlp.down_proj.weight"].T
    return norm(x, "norm.weight")


@pytest.mark.parametrize(
    "kind", ["full", "full causal", "sliding causal and full", "sliding bidirectional", "sliding causal"]
)
def test_golden_tensors_equal_a_drafter_written_with_loops(tmp_path, make_spec, make_state, kind) -> None:
    spec = make_spec(kind)
    state = make_state(spec)
    generator = torch.Generator().manual_seed(4)
    embedding, head = torch.randn(2, spec.vocab_size, spec.hidden_size, generator=generator)
    inputs = target_inputs(spec, embedding, head)
    write_golden(tmp_path, spec, state, inputs)
    golden = load_file(tmp_path / "golden" / "golden.safetensors")
    assert len(golden["features"]) > (spec.sliding_window or 0) + spec.block_size
    assert torch.equal(golden["ids"], golden_ids(spec)) and len(golden["ids"]) == len(golden["features"]) + 1
    assert golden["block_ids"].tolist() == [int(golden["ids"][-1]), *[95] * 5]
    assert torch.equal(golden["block_embeddings"], embedding[golden["block_ids"]])
    expected = _plain_draft(spec, state, golden["features"], golden["block_embeddings"])
    torch.testing.assert_close(golden["hidden"].double(), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(golden["logits"].double(), expected @ head.double().T, rtol=0, atol=2e-4)
    note = json.loads((tmp_path / "golden" / "golden.json").read_text())
    assert (note["anchor_position"], note["features"], note["taps"]) == (len(golden["features"]), "random", [1, 4])


def test_golden_tensors_of_another_drafter_are_refused(tmp_path, make_spec, make_state) -> None:
    spec = make_spec()
    state = make_state(spec)
    inputs = target_inputs(spec, torch.randn(97, 32), torch.randn(97, 32))
    write_zlab(tmp_path / "a", spec, state, extras=lambda folder, stored: write_golden(folder, spec, stored, inputs))
    assert verify(tmp_path / "a", spec, state).golden_difference == 0
    write_zlab(
        tmp_path / "b", spec, state, extras=lambda folder, _: write_golden(folder, spec, make_state(spec, 8), inputs)
    )
    with pytest.raises(ExportError, match="golden hidden states differ"):
        verify(tmp_path / "b", spec, state)
    with pytest.raises(ExportError, match="ids, embedding and head of the target are needed"):
        write_golden(tmp_path, spec, state, stand_ins(spec))


def test_golden_features_of_the_target_are_taken_over(make_spec, make_state) -> None:
    spec = make_spec()
    features = torch.randn(len(golden_ids(spec)) - 1, 64)
    inputs = target_inputs(spec, torch.randn(97, 32), torch.randn(97, 32), features)
    assert inputs.origin == "target" and torch.equal(inputs.features, features)
    moved = target_inputs(spec, torch.randn(97, 32), torch.randn(97, 32), features.roll(1, 0))
    state = make_state(spec)
    assert not torch.allclose(draft_logits(spec, state, inputs)[0], draft_logits(spec, state, moved)[0])
