"""A run that begins with the weights of a drafter folder, of either format."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

import foreign_layouts
from paceline.checkpoint import checkpoints, run_directory
from paceline.cli import main
from paceline.drafter.network import Drafter
from paceline.drafter.spec import DrafterSpec
from paceline.errors import ConfigError, ExportError
from paceline.export.speculators import write_speculators
from paceline.export.zlab import write_zlab
from paceline.target_model.facts import describe
from paceline.target_model.shared_weights import load_shared_weights
from small_runs import built

MakeRun = Callable[..., Path]


@pytest.fixture(scope="module")
def drafter(finished: Path) -> tuple[DrafterSpec, dict[str, torch.Tensor]]:
    values, state, _ = checkpoints.load_drafter(finished)
    return DrafterSpec.from_dict(values), state


@pytest.fixture
def folder_of(drafter, demo_assets: Path, tmp_path: Path) -> Callable[..., Path]:
    def write(format: str, dtype: str = "float32", **changes: object) -> Path:
        spec, state = drafter
        writer = {"zlab": write_zlab, "speculators": write_speculators}[format]
        facts = describe(str(demo_assets / "target"))
        writer(tmp_path / format, dataclasses.replace(spec, **changes), state, facts, dtype)
        return tmp_path / format

    return write


@pytest.mark.parametrize(("format", "dtype"), [("zlab", "float32"), ("speculators", "bfloat16")])
def test_the_run_begins_with_the_folders_weights(
    make_run: MakeRun, folder_of, drafter, finished: Path, format: str, dtype: str
) -> None:
    from paceline.run.learner_factory import learner_factory

    folder = folder_of(format, dtype)
    run = built(make_run(drafter={"init": str(folder)}))
    learner = learner_factory(run)(load_shared_weights(run.settings.target, run.settings.target.dtype))
    for name, tensor in drafter[1].items():
        mine = learner.network.state_dict()[name]
        assert mine.dtype == torch.float32
        assert torch.equal(mine, tensor.to(getattr(torch, dtype)).float()), name
    assert learner.steps_done == 0
    noted = run_directory.read_run_facts(run.run_dir)["init"]
    assert noted["folder"] == str(folder) and noted["format"] == format and len(noted["content_hash"]) == 16


def test_a_run_goes_on_without_its_folder(make_run: MakeRun, folder_of) -> None:
    """What the run began with matters at its first step alone; its weights are in the checkpoints then."""
    folder = folder_of("zlab")
    settings = make_run("warm", drafter={"init": str(folder)}, train={"max_steps": 4})
    assert main(["train", str(settings)]) == 0
    run = settings.with_suffix("")
    kept = checkpoints.load_drafter(run, 4)[1]
    (folder / "config.json").unlink()
    for path in checkpoints.checkpoint_path(run, 4).iterdir():
        path.unlink()
    assert main(["train", str(run)]) == 0
    assert all(torch.equal(tensor, kept[name]) for name, tensor in checkpoints.load_drafter(run, 4)[1].items())
    cold = make_run("cold", train={"max_steps": 4})
    assert main(["train", str(cold)]) == 0
    losses = [
        json.loads(line)["values"]["loss"]
        for name in ("warm", "cold")
        for line in (cold.parent / name / "metrics.jsonl").read_text().splitlines()
        if '"kind":"step"' in line
    ]
    assert losses[0] < losses[4], "a drafter that has learnt is not better than a new one"


def test_another_shape_says_which_settings_it_needs(make_run: MakeRun, folder_of) -> None:
    settings = make_run(drafter={"init": str(folder_of("zlab")), "num_layers": 2, "rope_theta": 7.0})
    with pytest.raises(ConfigError, match=r"to go on from it, set drafter.num_layers: 1, ") as caught:
        built(settings)
    assert len(caught.value.errors) == 1 and "drafter.rope_theta: " in str(caught.value)
    assert not settings.with_suffix("").joinpath("settings.yaml").exists()


def test_the_settings_it_names_are_enough(make_run: MakeRun, folder_of) -> None:
    """Taps of another drafter: the line can be put into the settings as it stands."""
    folder = folder_of("zlab", taps=(0, 2))
    with pytest.raises(ConfigError, match=r"set target.taps: \[0, 2\]$"):
        built(make_run(drafter={"init": str(folder)}))
    assert built(make_run(drafter={"init": str(folder)}, target={"taps": [0, 2]})).first_step == 0


def test_another_targets_drafter_is_refused(make_run: MakeRun, folder_of) -> None:
    folder = folder_of("speculators")
    config = json.loads((folder / "config.json").read_text())
    config["draft_vocab_size"] = config["transformer_layer_config"]["vocab_size"] = 99
    config["mask_token_id"] = 5
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"was made for another target, with vocab_size 99; .* has hidden_size "):
        built(make_run(drafter={"init": str(folder)}))


def test_no_drafter_folder_is_one_line(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(ExportError) as caught:
        built(make_run(drafter={"init": str(tmp_path / "nothing")}))
    assert len(caught.value.errors) == 1


def test_the_setting_is_written_out(make_run: MakeRun, folder_of) -> None:
    folder = folder_of("zlab")
    run = built(make_run(drafter={"init": str(folder)}))
    assert yaml.safe_load((run.run_dir / "settings.yaml").read_text())["drafter"]["init"] == str(folder)


def moments_of(run: Path, step: int, names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """AdamW's moments in a checkpoint of ours by name: its matrices come first there, then the norms."""
    state = checkpoints.read_checkpoint(run, step)
    ordered = sorted(names, key=lambda name: state["network"][name].ndim < 2)
    return {name: dict(state["optimizer"]["adamw"]["state"][place]) for place, name in enumerate(ordered)}


@pytest.mark.usefixtures("finished")
def test_another_trainers_run_goes_on_as_if_it_were_ours(
    make_run: MakeRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run of two epochs, and runs that take over what its first epoch left, in three layouts: the same weights."""
    one = {"train": {"epochs": 2, "max_steps": None}, "plan": {"accumulate": 3}}
    planned = built(make_run("whole", **one))
    step = sum(planned.epoch == 0 for planned in planned.steps)
    settings = make_run("whole", **one, checkpoint={"every_steps": step, "keep_last": 9})
    assert main(["train", str(settings)]) == 0
    whole, total = settings.with_suffix(""), planned.plan.total_steps
    state, wanted = (checkpoints.load_drafter(whole, at)[1] for at in (step, total))
    names = list(Drafter(planned.spec).state_dict())
    for trainer in ("SpecForge", "TorchSpec", "NeMo AutoModel"):
        theirs, moments = tmp_path / f"theirs-{trainer[:4]}", moments_of(whole, step, names)
        foreign_layouts.WRITERS[trainer](theirs, planned.spec, state, moments, step, 1)
        init = {"init": str(theirs), "init_step": step, "init_epoch": 1}
        mine = make_run(f"on-{trainer[:4]}", **one, drafter=init, observe={"console": "plain"})
        capfd.readouterr()
        assert main(["train", str(mine)]) == 0
        said = capfd.readouterr().err
        assert f"moments of {len(names)} of {len(names)} tensors" in said and "warning" not in said, said
        kept = checkpoints.load_drafter(mine.with_suffix(""), total)[1]
        assert all(torch.equal(tensor, kept[name]) for name, tensor in wanted.items()), trainer
        facts = run_directory.read_run_facts(mine.with_suffix(""))
        assert facts["begins"] == {"step": step, "epoch": 1} and facts["init"]["format"] == trainer
        assert len(kept) == len(names) and facts["init"]["without_moments"] == []
        lines = (mine.with_suffix("") / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines if '"kind":"step"' in line]
        assert steps == list(range(step + 1, total + 1))
    assert main(["train", str(mine)]) == 0


def test_what_is_behind_a_run_must_be_less_than_it_trains(make_run: MakeRun, folder_of) -> None:
    init = {"init": str(folder_of("zlab")), "num_layers": 1}
    with pytest.raises(ConfigError, match="40 steps and 3 epochs are behind this run already"):
        built(make_run(drafter={**init, "init_step": 40, "init_epoch": 3}, train={"epochs": 3, "max_steps": None}))
    with pytest.raises(ConfigError, match="40 steps and 0 epochs are behind this run already"):
        built(make_run(drafter={**init, "init_step": 40}, train={"max_steps": 40}))


@pytest.mark.usefixtures("finished")
def test_a_foreign_drafter_that_does_not_fit_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    """Where the layout holds no configuration, shapes alone speak."""
    spec = built(make_run("one", drafter={"num_layers": 2})).spec
    network = Drafter(spec).state_dict()
    foreign_layouts.specforge(tmp_path / "theirs", spec, network, {}, 5, 0)
    with pytest.raises(ExportError, match=r"tensors that no drafter of this configuration has: layers\.1\."):
        built(make_run("two", drafter={"init": str(tmp_path / "theirs")}))
