"""`paceline export` on a run of the demo target: folder, card, golden tensors, verification, conversion, push."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint.checkpoints import write_checkpoint
from paceline.checkpoint.run_directory import add_evaluation, open_run
from paceline.cli.export import export_run, run
from paceline.config import Settings
from paceline.drafter.network import Drafter
from paceline.drafter.spec import DrafterSpec, derive_spec
from paceline.errors import CheckpointError, ConfigError, ExportError, RunDirectoryError
from paceline.export.exporter import drafter_of_folder
from paceline.export.formats import read_drafter
from paceline.export.weights import content_hash
from paceline.target_model.facts import describe


@pytest.fixture
def run_dir(tmp_path, demo_assets) -> Path:
    target = demo_assets / "target"
    settings = Settings.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "target": {"path": str(target), "taps": [1, 5]},
            "drafter": {
                "num_layers": 2,
                "block_size": 8,
                "layers": ["sliding", "full"],
                "sliding_window": 16,
                "causal": False,
            },
        }
    )
    facts = describe(str(target))
    spec = derive_spec(settings.drafter, facts, [1, 5], 3)
    made = {
        "drafter": spec.to_dict(),
        "target": dict(facts.identity),
        "target_fingerprint": facts.fingerprint,
        "data_fingerprint": "d" * 64,
        "total_steps": 20,
    }
    folder = open_run(settings, made)
    for step in (10, 20):
        state = Drafter(spec, seed=step).state_dict()
        write_checkpoint(folder, step, {"network": state}, keep_last=2)
        add_evaluation(folder, step, {"tau_micro": 1 + step / 10})
    return folder


def _spec(run_dir: Path) -> DrafterSpec:
    return DrafterSpec.from_dict(json.loads((run_dir / "run.json").read_text())["drafter"])


@pytest.mark.parametrize(("format", "dtype"), [("zlab", "bfloat16"), ("speculators", "float32")])
def test_export_of_a_run(run_dir, capsys, format, dtype) -> None:
    assert run([str(run_dir), "--format", format, "--dtype", dtype, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    folder = run_dir / "export" / format
    assert (result["folder"], result["format"], result["dtype"], result["step"]) == (str(folder), format, dtype, 20)
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "model.safetensors", "README.md", "paceline.json", "golden", "acceptance.png")
    }
    spec, state = read_drafter(folder)
    assert spec == _spec(run_dir)
    for name, tensor in Drafter(spec, seed=20).state_dict().items():
        assert torch.equal(state[name], tensor.to(getattr(torch, dtype)))
    checked = result["verified"]
    assert (checked["num_tensors"], checked["logit_difference"], checked["golden_difference"]) == (25, 0, 0)
    note = json.loads((folder / "paceline.json").read_text())
    assert note["content_hash"] == result["content_hash"] == checked["content_hash"] == content_hash(state)
    assert note["trained_length"] == 4096
    assert note["target"]["fingerprint"] == json.loads((run_dir / "run.json").read_text())["target_fingerprint"]
    assert str(run_dir.parent) not in (folder / "README.md").read_text() + (folder / "paceline.json").read_text()
    assert DrafterSpec.from_dict(note["drafter"]) == spec
    card = (folder / "README.md").read_text()
    assert "(acceptance.png)" in card
    assert note["content_hash"] in card and "| 20 | 3.000 |" in card and note["target"]["fingerprint"] in card


def test_export_of_an_earlier_step(run_dir, capsys) -> None:
    assert run([str(run_dir), "--step", "10", "--out", str(run_dir.parent / "ten"), "--golden", "none"]) == 0
    assert "verified: 25 tensors bit for bit" in capsys.readouterr().out
    assert not (run_dir.parent / "ten" / "golden").exists()
    spec, state = read_drafter(run_dir.parent / "ten")
    assert torch.equal(state["fc.weight"], Drafter(spec, seed=10).state_dict()["fc.weight"].bfloat16())
    assert "| 20 |" not in (run_dir.parent / "ten" / "README.md").read_text()
    with pytest.raises(CheckpointError, match="no checkpoint of step 15"):
        run([str(run_dir), "--step", "15"])


def test_verification_can_be_left_out_and_says_so(run_dir, capsys) -> None:
    assert run([str(run_dir), "--no-verify", "--golden", "none"]) == 0
    assert "not verified" in capsys.readouterr().out.splitlines()
    assert run([str(run_dir), "--no-verify", "--golden", "none", "--json"]) == 0
    assert "verified" not in json.loads(capsys.readouterr().out)


def test_export_run_gives_the_folder(run_dir) -> None:
    assert export_run(run_dir) == run_dir / "export" / "zlab"


def test_golden_tensors_from_the_target_itself(run_dir, demo_assets) -> None:
    folder = run_dir / "export" / "zlab"
    assert run([str(run_dir), "--golden", "target"]) == 0
    golden = load_file(folder / "golden" / "golden.safetensors")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_assets / "target", dtype=torch.float32)
    with torch.no_grad():
        states = model(golden["ids"][None, :-1], output_hidden_states=True).hidden_states
    expected = torch.cat([states[2][0], states[6][0]], -1)
    torch.testing.assert_close(golden["features"], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(golden["logits"], golden["hidden"] @ model.lm_head.weight.T, rtol=1e-5, atol=1e-5)


def test_a_folder_is_converted_and_pushed(run_dir, demo_assets, capsys, hub) -> None:
    first, out = export_run(run_dir), run_dir.parent / "converted"
    words = [str(first), "--target", str(demo_assets / "target"), "--format", "speculators", "--out", str(out)]
    assert run([*words, "--push", "someone/drafter", "--golden", "none", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["pushed"] == "commit of someone/drafter"
    assert content_hash(read_drafter(out)[1]) == content_hash(read_drafter(first)[1]) == result["content_hash"]
    assert read_drafter(hub / "someone" / "drafter")[0] == read_drafter(first)[0]
    assert '"model": "someone/drafter"' in (hub / "someone" / "drafter" / "README.md").read_text()


def test_a_converted_folder_keeps_what_its_note_says(run_dir, tmp_path, demo_assets) -> None:
    first = export_run(run_dir)
    words = [str(first), "--format", "speculators", "--out", str(tmp_path / "out"), "--golden", "none", "--target"]
    assert run([*words, str(demo_assets / "target")]) == 0
    before, after = (json.loads((folder / "paceline.json").read_text()) for folder in (first, tmp_path / "out"))
    same = ("step", "target", "data_fingerprint", "trained_length", "drafter", "content_hash")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    other = tmp_path / "other"
    shutil.copytree(demo_assets / "target", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    with pytest.raises(ExportError, match=r"trained on another target than .*; they differ in configuration;"):
        run([*words, str(other)])
    for text in ("{", "[]", '{"target": 3}', '{"target": {"identity": []}}'):
        (first / "paceline.json").write_text(text)
        with pytest.raises(ExportError, match=r"paceline.json: damaged .*; export the drafter again"):
            run([*words, str(demo_assets / "target")])


def test_the_folder_of_an_adapted_target_needs_its_adapter(run_dir, tmp_path, demo_assets) -> None:
    folder = export_run(run_dir)
    words = [str(folder), "--target", str(demo_assets / "target"), "--out", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match=r"--adapter mine: .* was trained without one; leave it out"):
        run([*words, "--adapter", "mine"])
    note = json.loads((folder / "paceline.json").read_text())
    note["target"]["adapter"] = "mine"
    (folder / "paceline.json").write_text(json.dumps(note))
    with pytest.raises(
        ConfigError, match=r"--adapter: .* was trained with the adapter mine; give the adapter's folder"
    ):
        run(words)
    drafter = drafter_of_folder(folder, str(demo_assets / "target"), "adapters/mine")
    assert drafter.target.adapter == "adapters/mine"
    with pytest.raises(ConfigError, match="--adapter: only to convert a drafter folder"):
        run([str(run_dir), "--adapter", "mine"])


def test_a_failed_verification_leaves_the_old_folder(run_dir, monkeypatch) -> None:
    folder = export_run(run_dir)
    before = (folder / "config.json").read_bytes()
    from paceline.export import zlab

    true_config = zlab.zlab_config

    def shifted(spec, dtype, scale):
        config = true_config(spec, dtype, scale)
        config["dflash_config"]["target_layer_ids"] = [tap + 1 for tap in spec.taps]
        return config

    monkeypatch.setattr(zlab, "zlab_config", shifted)
    with pytest.raises(ExportError, match=rf"{folder}: its configuration says taps \[2, 6\], the drafter has \[1, 5\]"):
        export_run(run_dir)
    assert (folder / "config.json").read_bytes() == before
    assert [path.name for path in folder.parent.iterdir()] == ["zlab"]


def test_misuse_is_one_line(run_dir, tmp_path) -> None:
    with pytest.raises(RunDirectoryError, match="no run here"):
        run([str(tmp_path / "nowhere")])
    folder = export_run(run_dir)
    with pytest.raises(ConfigError, match="--out: give the folder"):
        run([str(folder), "--target", "x"])
    with pytest.raises(ConfigError, match="--target: give the target"):
        run([str(folder), "--out", str(tmp_path / "out")])


def test_another_target_is_refused(run_dir, tmp_path, demo_assets) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in (demo_assets / "target").iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    with pytest.raises(ExportError, match=r"trained on another target than .*; they differ in configuration;"):
        run([str(run_dir), "--target", str(other)])
    (other / "config.json").write_text(json.dumps({**config, "hidden_size": 64, "vocab_size": 2000}))
    with pytest.raises(ExportError) as caught:
        run([str(run_dir), "--target", str(other)])
    assert [line.split(",")[0] for line in caught.value.errors][:2] == [
        "drafter: hidden_size 128",
        "drafter: vocab_size 2048",
    ]


@pytest.mark.parametrize("content", ["{", "[]", '{"report": 3}', "[" * 5000])
def test_a_damaged_store_is_one_line(run_dir, content) -> None:
    store = run_dir / "store"
    store.mkdir()
    (store / "manifest.json").write_text(content)
    with pytest.raises(ExportError, match=r"manifest\.json: damaged \(.+\); prepare the data again, or move") as error:
        run([str(run_dir)])
    assert len(error.value.errors) == 1
    (store / "manifest.json").unlink()
    assert run([str(run_dir), "--golden", "none"]) == 0
