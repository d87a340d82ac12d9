"""Drafter folders with anything at all in their configuration and index: an error in words, or a drafter that works."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ExportError
from paceline.export.formats import read_drafter
from paceline.export.golden import draft_logits, stand_ins
from paceline.export.speculators import write_speculators
from paceline.export.weights import write_weights
from paceline.export.zlab import write_zlab

ODD: list[Any] = [None, "", "x", True, -1, 0, 3, 1.5, math.nan, math.inf, 1e30, 2**70, [], [None], ["x"], {}, {"a": 1}]


@pytest.fixture
def folder(tmp_path, make_spec, make_state, make_facts):
    """A function: format → a faithful folder."""

    def made(format: str):
        spec = make_spec("sliding bidirectional and full")
        if format == "zlab":
            write_zlab(tmp_path / format, spec, make_state(spec), make_facts(spec))
        else:
            write_speculators(tmp_path / format, spec, make_state(spec), make_facts(spec))
        return tmp_path / format

    return made


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key and list entry below a value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from places(inner, (*path, key))


def replaced(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> str:
    """The configuration as text with another value in one place."""
    changed = json.loads(json.dumps(config))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(changed)


@pytest.mark.parametrize("format", ["zlab", "speculators"])
def test_odd_values_are_errors_or_make_a_working_drafter(folder, format) -> None:
    made = folder(format)
    faithful, _ = read_drafter(made)
    config = json.loads((made / "config.json").read_text())
    refused, taken = 0, set()
    for path in places(config):
        for value in ODD:
            (made / "config.json").write_text(replaced(config, path, value))
            try:
                spec, state = read_drafter(made)
            except ExportError as error:
                refused += 1
                assert all("\n" not in line and line.startswith(str(made)) for line in error.errors), (path, value)
                continue
            if spec != faithful:
                taken.add((path[-1], str(value)))
                assert draft_logits(spec, state, stand_ins(spec))[1].isfinite().all(), (path, value)
    assert refused > 300
    others = {"mask_token_id", "sliding_window", "max_position_embeddings", "initializer_range", "num_target_layers"}
    others |= {"bos_token_id", "eos_token_id", "pad_token_id", "sliding_window_non_causal", "sample_from_anchor", 0, 1}
    others |= {"is_causal"}
    assert {name for name, _ in taken} <= others, "only what makes another drafter of the same tensors is taken"


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ([1], "no index of safetensors shards"),
        ({"weight_map": ["a"]}, "no index of safetensors shards"),
        ({"weight_map": {"a": 3}}, "no index of safetensors shards"),
        ({"weight_map": {"fc.weight": "../other.safetensors"}}, "names a file outside the folder"),
        ({"weight_map": {}}, "tensors missing: fc.weight"),
    ],
)
def test_an_index_that_is_none_is_one_line(folder, index, says) -> None:
    made = folder("zlab")
    (made / "model.safetensors").unlink()
    (made / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ExportError, match=says) as caught:
        read_drafter(made)
    assert len(caught.value.errors) == 1


def test_tensors_of_shards_are_checked_too(folder) -> None:
    made = folder("zlab")
    tensors = load_file(made / "model.safetensors")
    (made / "model.safetensors").unlink()
    tensors["layers.0.mlp.up_proj.weight"] = tensors["layers.0.mlp.up_proj.weight"][:-1].clone()
    tensors["layers.9.mlp.up_proj.weight"] = tensors["norm.weight"].clone()
    del tensors["hidden_norm.weight"]
    write_weights(made, tensors, shard_bytes=4000)
    with pytest.raises(ExportError) as caught:
        read_drafter(made)
    missing, extra, misshaped = caught.value.errors
    assert "tensors missing: hidden_norm.weight;" in missing and "layers.9.mlp.up_proj.weight;" in extra
    assert misshaped.endswith("layers.0.mlp.up_proj.weight has shape [47, 32], the configuration asks for [48, 32]")


def test_bytes_that_are_no_text_are_one_line(folder) -> None:
    made = folder("zlab")
    for content in (b"\xff\xfe{}", b"", b'{"a": '):
        (made / "config.json").write_bytes(content)
        with pytest.raises(ExportError, match="is no JSON"):
            read_drafter(made)


CHANGES: dict[str, Any] = {
    "shape": (lambda weight: weight[:-1].contiguous(), "has shape"),
    "scalar": (lambda weight: torch.tensor(1.0), "has shape []"),
    "int8": (lambda weight: weight.to(torch.int8), "is int8"),
    "bool": (lambda weight: weight > 0, "is bool"),
    "complex64": (lambda weight: weight.to(torch.complex64), "is complex64"),
    "nan": (lambda weight: weight * math.nan, "holds values that are not finite"),
    "inf": (lambda weight: weight / 0, "holds values that are not finite"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("format", ["zlab", "speculators"])
def test_a_tensor_that_is_none_of_a_drafter_is_one_line(folder, format, change) -> None:
    file = folder(format) / "model.safetensors"
    tensors, (make, says) = load_file(file), CHANGES[change]
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    save_file({**tensors, name: make(tensors[name].float())}, file)
    with pytest.raises(ExportError) as error:
        read_drafter(file.parent)
    (line,) = error.value.errors
    assert f"{name.removeprefix('model.')} {says}" in line and str(file.parent) in line


@pytest.mark.parametrize("content", [b"", b"\xff" * 4096, 20, 5000])
def test_a_damaged_file_is_one_line(folder, content) -> None:
    file = folder("zlab") / "model.safetensors"
    file.write_bytes(content if isinstance(content, bytes) else file.read_bytes()[:content])
    with pytest.raises(ExportError, match="cannot be read as safetensors") as error:
        read_drafter(file.parent)
    assert len(error.value.errors) == 1 and str(file) in error.value.errors[0]
