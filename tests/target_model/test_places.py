"""Types, quantized weights and devices: the same states within the type's rounding, or a refusal in words."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config import TargetConfig, load_settings
from paceline.errors import ConfigError, TargetError
from paceline.target_model.device_map import placement_options
from paceline.target_model.facts import describe_target
from paceline.target_model.load import load_target
from paceline.target_model.preconditions import check_loadable, target_errors
from paceline.target_model.shared_weights import shared_weights
from paceline.target_model.tap_guard import guard_first_batch
from paceline.target_model.teacher import Teacher
from tiny_targets import embedding_and_head, save_tiny, target_batch

DOCUMENTS = [[5, 9, 3, 44, 17, 8, 60, 23], [12, 30, 31, 90, 4]]
TAPS = [0, 2]
PARTS = ["model.embed_tokens", *(f"model.layers.{layer}" for layer in range(4)), "model.norm", "model.rotary_emb"]
ON_CPU = dict.fromkeys([*PARTS, "lm_head"], "cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Wide enough for blocks of 64 weights."""
    return save_tiny(tmp_path_factory.mktemp("base"), "qwen3", hidden_size=64, intermediate_size=128, head_dim=16)


def features(folder, **changes):
    """Features of the documents, guarded, and the target."""
    target = load_target(TargetConfig(path=str(folder), **{"dtype": "float32", **changes}), TAPS)
    batch = target.features(target_batch(DOCUMENTS))
    guard_first_batch(target, batch)
    return batch.features, target


def error_of(found, expected) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 0.0), ("bfloat16", 0.03), ("float16", 0.004)])
def test_types(base, dtype, allowed):
    expected, _ = features(base)
    found, target = features(base, dtype=dtype)
    assert found.dtype == target.dtype == getattr(torch, dtype)
    assert error_of(found, expected) <= allowed


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize(("quantization", "kind", "allowed"), [("8bit", torch.int8, 0.1), ("4bit", torch.uint8, 1.0)])
def test_weights_quantised_on_loading(base, quantization, kind, allowed):
    expected, _ = features(base)
    settings = TargetConfig(path=str(base), dtype="bfloat16", quantization=quantization)
    target = load_target(settings, TAPS)
    found = target.features(target_batch(DOCUMENTS)).features
    layer = target.structure.layers[1]
    assert {p.dtype for name, p in layer.named_parameters() if name.endswith("proj.weight")} == {kind}
    assert found.dtype == torch.bfloat16 and 0 < error_of(found, expected) < allowed
    embedding, head = embedding_and_head(base, torch.bfloat16)
    assert torch.equal(embedding, target.embedding) and torch.equal(head, target.head)
    assert describe_target(settings).identity["quantization"] == quantization
    teacher = Teacher(shared_weights(target, with_teacher=True).teacher)
    assert teacher(torch.randn(3, 64)).shape == (3, 97)


def test_weights_that_are_stored_quantised(base, tmp_path):
    """A folder of 4-bit weights: as it is, and widened by its quantizer."""
    settings = TargetConfig(path=str(base), dtype="bfloat16", quantization="4bit")
    made = load_target(settings, TAPS)
    made.model.save_pretrained(str(tmp_path))
    expected = made.features(target_batch(DOCUMENTS)).features.float()
    for quantization, kind in (("stored", torch.uint8), ("none", torch.bfloat16)):
        changes = {"path": str(tmp_path), "quantization": quantization}
        check_loadable(settings.model_copy(update=changes))
        target = load_target(settings.model_copy(update=changes), TAPS)
        layer = target.structure.layers[1]
        assert {p.dtype for name, p in layer.named_parameters() if name.endswith("proj.weight")} == {kind}
        assert error_of(target.features(target_batch(DOCUMENTS)).features, expected) < 0.02


@pytest.fixture(scope="module")
def fp8(base, tmp_path_factory):
    """The base with its layers' matrices as fp8 in blocks of 64 x 64 with a scale each; and the widened base."""
    folder, wide = (shutil.copytree(base, tmp_path_factory.mktemp(name) / "target") for name in ("fp8", "wide"))
    stored, widened = {}, {}
    for name, tensor in load_file(base / "model.safetensors").items():
        stored[name] = widened[name] = tensor
        if not name.endswith("proj.weight"):
            continue
        rows, columns = tensor.shape[0] // 64 or 1, tensor.shape[1] // 64 or 1
        blocks = tensor.reshape(rows, -1, columns, tensor.shape[1] // columns)
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        small = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        stored[name], stored[f"{name}_scale_inv"] = small.reshape(tensor.shape), scale
        widened[name] = (small.float() * scale[:, None, :, None]).reshape(tensor.shape)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(widened, wide / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, wide


@pytest.mark.skipif(torch.cuda.is_available(), reason="this hardware runs fp8")
def test_stored_fp8_is_refused_where_the_hardware_has_none(fp8):
    for act in (check_loadable, lambda settings: load_target(settings, TAPS)):
        with pytest.raises(TargetError, match=r"fp8 weights of .* do not run on this machine's hardware; set") as error:
            act(TargetConfig(path=str(fp8[0])))
        assert len(error.value.errors) == 1


def test_stored_fp8_widened_on_loading(fp8):
    folder, wide = fp8
    expected, _ = features(wide)
    found, target = features(folder, quantization="none")
    assert target.dtype == torch.float32 and error_of(found, expected) < 0.005  # scales pass through bfloat16
    check_loadable(TargetConfig(path=str(folder), quantization="none"))
    assert torch.equal(embedding_and_head(folder)[0], target.embedding)


def test_quantising_what_is_quantised_is_refused(fp8):
    with pytest.raises(TargetError, match=r"quantized by fp8 already; use stored or none"):
        check_loadable(TargetConfig(path=str(fp8[0]), quantization="8bit"))


def test_an_adapter_does_not_go_into_quantised_weights(fp8):
    with pytest.raises(TargetError, match=r"cannot be merged into the quantized weights"):
        check_loadable(TargetConfig(path=str(fp8[0]), adapter="somewhere"))
    assert "merge it into the plain model" in target_errors(TargetConfig(path="x", adapter="y", quantization="4bit"))[0]


def test_a_missing_package_is_named(base, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r"needs the package bitsandbytes; pip install 'paceline\[quantize\]'"):
        check_loadable(TargetConfig(path=str(base), quantization="8bit"))
    assert "paceline[peft]" in target_errors(TargetConfig(path="x", adapter="y"))[0]


def test_a_spread_target_asks_its_own_cards_alone(monkeypatch):
    """And fills them to a share of their size: the rest is for what it computes."""
    asked = []
    monkeypatch.setattr("paceline.target_model.device_map.total_bytes", lambda name: asked.append(name) or 1000)
    monkeypatch.setattr("paceline.device.num_cards", lambda: 4)
    found = placement_options(["cuda:2", "cuda:3", "cpu"], "cuda:2", quantised=False)
    assert found == {"device_map": "auto", "max_memory": {2: 800, 3: 800, "cpu": 800}}
    assert asked == ["cuda:2", "cuda:3", "cpu"]


@pytest.mark.parametrize(
    "device_map",
    [
        "auto",
        ["cpu"],
        {"": "cpu"},
        ON_CPU,
        {**ON_CPU, "model.layers.1": "disk", "model.layers.2": "disk", "lm_head": "disk"},
    ],
)
def test_spread_over_devices(base, device_map):
    expected, _ = features(base)
    found, target = features(base, device_map=device_map)
    assert found.device == target.device == torch.device("cpu") and torch.equal(found, expected)
    if isinstance(device_map, dict) and device_map.get("lm_head") == "disk":
        with pytest.raises(TargetError, match=r"its head is on the disk"):
            _ = target.head


def test_a_worker_over_several_devices_is_one_name(base, monkeypatch):
    from paceline.target_model import load

    asked, honest = [], load.placement_options

    def noted(device_map, device, **more):
        asked.append((device_map, device))
        return honest(device_map, device, **more)

    monkeypatch.setattr(load, "placement_options", noted)
    settings, ids = TargetConfig(path=str(base), dtype="float32"), torch.arange(3, 12)[None]
    spread, alone = (load_target(settings, [0, 2], device) for device in ("cpu+cpu", "cpu"))
    assert asked == [(["cpu", "cpu"], "cpu"), (None, "cpu")]
    assert torch.equal(spread.tap_rows(ids, [9])[0], alone.tap_rows(ids, [9])[0])


def test_an_embedding_on_the_disk_is_refused(base):
    with pytest.raises(TargetError, match=r"its embedding is on the disk; give it a device"):
        features(base, device_map={**ON_CPU, "model.embed_tokens": "disk"})


def test_devices_that_are_not_here_are_refused(base):
    for wrong in (["cuda:63"], {"": "cuda:63"}, ["gpu"]):
        with pytest.raises(TargetError, match=r"not a device of paceline|no CUDA device") as error:
            check_loadable(TargetConfig(path=str(base), device_map=wrong))
        assert len(error.value.errors) == 1
    with pytest.raises(TargetError, match=r"model.norm is inside model, which has a device of its own"):
        check_loadable(TargetConfig(path=str(base), device_map={"model": "cpu", "model.norm": "disk"}))
    assert "list one" in target_errors(TargetConfig(path="x", device_map="auto"), num_workers=2)[0]


@pytest.mark.parametrize("wrong", ["cuda:0", "3", "[]", "[1]", '{"": 1}'])
def test_a_device_map_of_another_form_is_one_error(wrong):
    with pytest.raises(ConfigError, match=r"device_map.*a list of devices like \[cuda:0, cuda:1\]") as error:
        load_settings(None, {"run_dir": "r", "target.path": "x", "target.device_map": wrong})
    assert len(error.value.errors) == 1


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("[cpu]", ["cpu"]), ('{"": cpu}', {"": "cpu"})])
def test_device_maps_from_settings(text, value):
    assert (
        load_settings(None, {"run_dir": "r", "target.path": "x", "target.device_map": text}).target.device_map == value
    )


def test_an_attention_that_is_not_here_is_refused(base):
    with pytest.raises(TargetError, match=r"weights cannot be loaded \(.*[Ff]lash") as error:
        load_target(TargetConfig(path=str(base), attention="flash_attention_2"), TAPS)
    assert len(error.value.errors) == 1
