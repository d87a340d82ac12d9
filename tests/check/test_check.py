"""`paceline check` on the embedded target: a sound run passes, each broken one fails in the line that names it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from paceline.check import memory_budget
from paceline.check.context import CheckContext, CheckLimits
from paceline.check.data_checks import _continues
from paceline.check.preflight import CHECKS, preflight
from paceline.check.results import CheckResult
from paceline.check.run_checks import check_disk, check_split
from paceline.check.sample_data import take_rows
from paceline.checkpoint.run_directory import open_run
from paceline.cli import main
from paceline.config import Settings, load_settings
from paceline.data.tokenizer import load_tokenizer
from paceline.drafter import memory
from paceline.drafter.learner import Learner
from paceline.drafter.network import Drafter
from paceline.evaluate import parity
from paceline.run.build import resolve_models
from paceline.target_model.model import TargetModel

MakeSettings = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, demo_assets: Path) -> MakeSettings:
    """Writes a settings file of a small run."""

    def write(**changes: Any) -> Path:
        values: dict[str, Any] = {
            "run_dir": str(tmp_path / "run"),
            "target": {"path": str(demo_assets / "target"), "dtype": "float32", "num_taps": 3},
            "data": {"train": [str(demo_assets / "chats.jsonl")], "max_length": 512, "heldout_share": 0.02},
            "plan": {"token_budget": 1024, "width_multiple": 32, "accumulate": 2, "max_samples": 8},
            "drafter": {"num_layers": 2, "block_size": 4, "num_anchors": 8, "dtype": "float32"},
            "optimizer": {"name": "muon", "lr": 0.01, "clip_norm": 5.0},
        }
        for section, entries in changes.items():
            values[section] = {**values.get(section, {}), **entries}
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    return write


def checked(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code = main(["check", str(path), "--json", "--rows", "48", *flags])
    out = capsys.readouterr().out
    assert "paceline-check-" not in out, "scratch files are the tool's own affair"
    return code, {entry["name"]: entry for entry in json.loads(out)}


def findings_of(settings: Settings) -> dict[str, CheckResult]:
    return {finding.name: finding for finding in preflight(settings, CheckLimits(rows=48, steps=3), lambda *_: None)}


def test_a_sound_run_passes_and_nothing_of_it_is_written(
    make: MakeSettings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = make()
    code, found = checked(path, capsys, "--price", "3600")
    assert {name: entry["status"] for name, entry in found.items()} == dict.fromkeys(CHECKS, "pass")
    assert code == 0
    assert list(tmp_path.iterdir()) == [path]
    assert found["overfit"]["figures"]["accuracy"] >= 0.9
    assert found["decoding"]["figures"]["tau"] > 1.5
    time = found["time"]["figures"]
    assert time["cost"] == pytest.approx(time["device_hours"] * 3600)
    assert found["memory"]["figures"]["measured"]["this process"] > sum(found["memory"]["figures"]["target"].values())


def test_the_lines_on_a_terminal_say_what_to_do(make: MakeSettings, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(drafter={"mask_token_id": 400_000})
    assert main(["check", str(path), "--rows", "16"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["pass", "settings"]
    said = next(line for line in lines if "400000" in line.replace(",", ""))
    assert said.startswith("fail")
    assert lines[-1].endswith("fix what fails first")


def test_a_mask_token_that_occurs_in_text(
    make: MakeSettings, capsys: pytest.CaptureFixture[str], demo_assets: Path
) -> None:
    common = load_tokenizer(str(demo_assets / "target")).encode("a.", add_special_tokens=False)[-1]
    code, found = checked(make(drafter={"mask_token_id": common}), capsys)
    assert code == 1
    assert found["mask token"]["status"] == "fail"
    assert found["mask token"]["figures"]["times_in_text"] > 0
    assert [found[name]["status"] for name in ("overfit", "decoding", "memory")] == ["skipped"] * 3


def test_data_that_cannot_be_used(make: MakeSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "user", "content": "a"}]}\nnot json\n', encoding="utf-8")
    code, found = checked(make(data={"train": [str(bad)]}), capsys)
    assert code == 1
    assert found["data"]["status"] == "fail"
    assert found["taps"]["status"] == found["plan"]["status"] == "skipped"
    assert found["target"]["status"] == "pass"


def test_rows_left_out_are_named_by_their_own_place(
    make: MakeSettings, demo_assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (demo_assets / "chats.jsonl").read_text(encoding="utf-8").splitlines()[:20]
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("\n".join([*lines, "{broken", "{broken"]) + "\n", encoding="utf-8")
    _, found = checked(make(data={"train": [str(mixed)]}), capsys)
    assert found["data"]["status"] == "warn"
    assert f"{mixed}:21" in found["data"]["advice"]


def test_warnings_name_the_users_files(make: MakeSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nearly the same chats, of which a warning names one as it names no row that is left out."""
    words = "It writes the object as text in the JSON format and returns the text as one string to its caller"
    rows = [
        [{"role": "user", "content": "What?"}, {"role": "assistant", "content": f"{words}, {n}."}] for n in range(9)
    ]
    chats = tmp_path / "mine.jsonl"
    chats.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    _, found = checked(make(data={"train": [str(chats)]}), capsys)
    assert f"(first: {chats}:" in found["data"]["advice"] and found["data"]["status"] == "warn"


@pytest.mark.parametrize(
    ("changes", "checkpoints"),
    [({}, 3), ({"keep_last": 5, "keep_best": "validation/loss"}, 7), ({"keep_every": 4, "export": "zlab"}, 18)],
)
def test_checkpoints_are_compared_with_the_disk(
    changes: dict[str, Any], checkpoints: int, make: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings(make(checkpoint=changes))
    spec = resolve_models(settings).spec
    context: Any = SimpleNamespace(
        settings=settings, spec=spec, plan=SimpleNamespace(num_windows=10), material=SimpleNamespace(share=1.0)
    )
    drafter = memory.num_parameters(spec)
    one = drafter * 8 + (2 * drafter if "export" in changes else 0)  # Muon: masters and one moment, in float32
    found = check_disk(context)
    assert found.status == "pass" and found.figures["needed"] == checkpoints * one
    disk = SimpleNamespace(f_bavail=checkpoints * one - 1, f_frsize=1, f_files=9, f_favail=10**6)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    assert check_disk(context).status == "fail"
    disk.f_bavail += 1
    assert check_disk(context).status == "pass"
    disk.f_favail = 8
    assert check_disk(context).status == "fail" and "inodes" in check_disk(context).detail
    disk.f_files = disk.f_favail = 0  # a disk that does not count them
    assert check_disk(context).status == "pass"


def test_a_learning_rate_of_nothing_does_not_overfit(make: MakeSettings, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = checked(make(optimizer={"lr": 1e-9, "name": "adamw"}), capsys, "--seconds", "60")
    assert code == 1
    assert found["overfit"]["status"] == "fail"
    assert "optimizer.lr" in found["overfit"]["advice"]
    assert found["decoding"]["status"] == "skipped"
    assert found["time"]["status"] == "pass"


def test_decoding_that_does_not_see_what_training_sees(
    make: MakeSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = TargetModel.tap_rows

    def shifted(self: TargetModel, *given: Any, **named: Any) -> Any:
        features, last = honest(self, *given, **named)
        return features.roll(1, 0), last

    # The tap guard cannot see it: every batching is shifted alike. The decode loop reads through a session.
    monkeypatch.setattr(TargetModel, "tap_rows", shifted)
    monkeypatch.setattr("paceline.check.model_checks.guard_first_batch", lambda *_: [GUARDED])
    code, found = checked(make(), capsys)
    assert code == 1
    assert found["decoding"]["status"] == "fail"
    assert "decoding sees other states than training" in found["decoding"]["detail"]


def test_drafts_that_training_would_not_make(
    make: MakeSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """States are equal, but the training forward drafts from the position before."""
    honest = parity.training_accepted

    def early(target: TargetModel, network: Drafter, prompt: list[int], answer: Any) -> Any:
        class Shifted:
            spec = network.spec

            def training_forward(self, features: torch.Tensor, *rest: Any) -> torch.Tensor:
                return network.training_forward(features.roll(1, 0), *rest)

        return honest(target, Shifted(), prompt, answer)  # type: ignore[arg-type]

    monkeypatch.setattr(import_module("paceline.evaluate.evaluate"), "training_accepted", early)
    code, found = checked(make(), capsys)
    assert code == 1
    assert found["decoding"]["status"] == "fail"
    assert "differs from the training forward" in found["decoding"]["detail"]


class GUARDED:
    """What a guard that saw nothing would say."""

    layer, rms, batch_error, shift_change = 1, 1.0, 0.0, 1.0


def test_a_batch_that_does_not_fit(make: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(make(), {})

    def full(self: Learner, batch: Any) -> None:
        if len(batch.host.anchors) > 3:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setitem(CHECKS, "overfit", (lambda bench: CheckResult("overfit", "pass", ""), ()))
    monkeypatch.setitem(CHECKS, "decoding", (lambda bench: CheckResult("decoding", "pass", ""), ()))
    monkeypatch.setattr(Learner, "accumulate", full)
    found = findings_of(settings)
    assert found["memory"].status == "fail"
    assert "plan.token_budget" in found["memory"].advice
    assert "optimizer state" in found["memory"].advice
    assert found["time"].status == "skipped"


def test_a_card_that_is_too_small_by_the_forecast(make: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest batch runs here, on a CPU; the roles of the run would be on one card."""
    monkeypatch.setitem(CHECKS, "overfit", (lambda bench: CheckResult("overfit", "pass", ""), ()))
    monkeypatch.setitem(CHECKS, "decoding", (lambda bench: CheckResult("decoding", "pass", ""), ()))
    sizes = {"target": {"weights": 7 * 2**30}, "drafter": {"gradients": 2**30}}
    monkeypatch.setattr(memory_budget, "by_device", lambda *_: {"cuda:0": 8 * 2**30})
    monkeypatch.setattr(memory_budget, "target_bytes", lambda *_: sizes["target"])
    monkeypatch.setattr(memory_budget, "drafter_bytes", lambda *_: sizes["drafter"])
    for size, status in ((7.9, "fail"), (8.5, "warn"), (9.5, "pass")):
        monkeypatch.setattr("paceline.check.run_checks.total_bytes", lambda name, size=size: size * 2**30)
        found = findings_of(load_settings(make(), {}))["memory"]
        assert found.status == status
        assert ("cuda:0 is too small" in found.advice) == (status == "fail")


def test_shared_memory_that_is_too_small(make: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHECKS, "overfit", (lambda bench: CheckResult("overfit", "pass", ""), ()))
    monkeypatch.setitem(CHECKS, "decoding", (lambda bench: CheckResult("decoding", "pass", ""), ()))
    monkeypatch.setattr(memory_budget, "shared_memory", lambda: 1000)
    found = findings_of(load_settings(make(), {}))
    assert found["memory"].status == "fail"
    assert "flow.pool_buffers" in found["memory"].advice


def test_a_split_that_leaves_devices_idle(make: MakeSettings, tmp_path: Path) -> None:
    flow = {"target_devices": ["cuda:0"], "drafter_devices": ["cuda:1", "cuda:2", "cuda:3"]}
    bench = CheckContext(load_settings(make(flow=flow), {}), tmp_path, CheckLimits())
    bench.target_s, bench.drafter_s = 30.0, 10.0
    found = check_split(bench)
    assert found.status == "warn"
    assert (found.figures["best_targets"], found.figures["best_drafters"]) == (3, 1)
    assert "3.0x" in found.advice
    bench.target_s, bench.drafter_s = 10.0, 30.0
    assert check_split(bench).status == "pass"


def test_the_runs_own_store_is_used_where_it_is_there(
    make: MakeSettings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = make(data={"store": str(tmp_path / "store")})
    assert main(["prepare", str(path)]) == 0
    capsys.readouterr()
    _, found = checked(path, capsys)
    assert found["plan"]["figures"]["share"] == 1.0
    assert "reckoned" not in found["time"]["detail"]


def test_answers_must_begin_right_behind_the_prompt() -> None:
    ids = np.array([5, 6, 7, 8, 9])
    prompt, mask = ids[:3], np.array([0, 0, 0, 1, 1], dtype=bool)
    assert _continues(prompt, ids, mask)
    assert not _continues(prompt, ids, np.array([0, 0, 1, 1, 1], dtype=bool))
    assert not _continues(prompt, ids, np.array([0, 0, 0, 0, 1], dtype=bool))
    assert not _continues(np.array([5, 6, 1]), ids, mask)
    assert not _continues(ids, ids, mask)


def test_training_behind_another_prompt_than_is_served(
    make: MakeSettings, demo_assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The template opens a thought by default; the data was answered without one."""
    target = tmp_path / "target"
    shutil.copytree(demo_assets / "target", target)
    template = target / "chat_template.jinja"
    text = template.read_text(encoding="utf-8")
    assert "add_generation_prompt" in text
    template.write_text(
        text
        + "{% if add_generation_prompt and (enable_thinking is not defined or enable_thinking) %}ponder{% endif %}",
        encoding="utf-8",
    )
    _, found = checked(make(target={"path": str(target)}), capsys)
    assert found["template"]["status"] in ("warn", "fail"), found["template"]
    assert "data.thinking" in found["template"]["advice"]


def test_rows_come_from_all_over_the_files(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    filler = "x" * 2000
    path.write_text(
        "".join(json.dumps({"id": str(n), "text": f"{n} {filler}"}) + "\n" for n in range(4000)), encoding="utf-8"
    )
    origins, total = take_rows([str(path)], tmp_path / "rows.jsonl", 64)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    places = [int(row["text"].split()[0]) for row in rows]
    assert places == sorted(places)
    assert [f"{path}:{place + 1}" for place in places] == list(origins.values())
    assert min(places) == 0
    assert max(places) > 3000
    assert all("id" not in row for row in rows)
    assert total == pytest.approx(4000, rel=0.05)


@pytest.mark.parametrize("flags", [("--rows", "0"), ("--price", "-1"), ("--seconds", "0")])
def test_numbers_that_mean_nothing(
    make: MakeSettings, capsys: pytest.CaptureFixture[str], flags: tuple[str, str]
) -> None:
    assert main(["check", str(make()), *flags]) == 2
    assert "must be more than 0" in capsys.readouterr().err


def spoil(demo_assets: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> str:
    """A copy of the embedded target with other weights; returns its folder."""
    shutil.copytree(demo_assets / "target", folder)
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.7.mlp.down_proj.weight"])
def test_weights_behind_the_last_tap_that_are_no_numbers(
    make: MakeSettings, demo_assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """No tap sees them, and speculative and plain decoding choose the same token from logits that are all NaN."""
    path = spoil(demo_assets, tmp_path / "t", lambda stored: stored[name].view(-1)[:1].fill_(float("nan")))
    code, found = checked(make(target={"path": path}), capsys)
    assert code == 1
    assert found["decoding"]["status"] == "fail"
    assert "logits are not finite" in found["decoding"]["detail"]


def test_an_embedding_row_that_is_no_number(
    make: MakeSettings, demo_assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    path = spoil(
        demo_assets,
        tmp_path / "t",
        lambda stored: [stored[end][100].fill_(float("inf")) for end in ends if end in stored],
    )
    code, found = checked(make(target={"path": path}), capsys)
    assert code == 1
    assert found["target"]["status"] == "fail"
    assert "1 rows of its embedding, the first 100" in found["target"]["detail"]


def test_files_without_a_row(make: MakeSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "blank.jsonl").write_text("\n\n", encoding="utf-8")
    _, found = checked(make(data={"train": [str(tmp_path / "blank.jsonl")]}), capsys)
    assert found["data"]["status"] == "fail"
    assert "no rows" in found["data"]["detail"]


def test_unusable_rows_are_named_by_their_own_place(
    make: MakeSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 4, encoding="utf-8")
    _, found = checked(make(data={"train": [str(file)]}), capsys)
    assert found["data"]["status"] == "fail"
    assert f"{file}:1" in found["data"]["detail"]


def fails_early(path: Path) -> dict[str, CheckResult]:
    """Findings before anything is loaded; what needs weights is not asked."""
    return findings_of(load_settings(path, {}))


def test_a_place_that_holds_something_else(make: MakeSettings, tmp_path: Path) -> None:
    path = make()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "letters.txt").write_text("not a run", encoding="utf-8")
    found = fails_early(path)["settings"]
    assert found.status == "fail"
    assert "letters.txt" in found.detail
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["letters.txt"]


def test_a_run_with_other_settings_or_target_is_refused(make: MakeSettings, tmp_path: Path) -> None:
    settings = load_settings(make(), {})
    models = resolve_models(settings)
    facts, spec = models.facts, models.spec
    open_run(settings, {"drafter": spec.to_dict(), "target": dict(facts.identity)})
    before = {entry.name: entry.read_bytes() for entry in (tmp_path / "run").iterdir()}
    found = findings_of(settings)
    assert found["settings"].status == "pass"
    assert "resumes the run there" in found["settings"].detail
    assert found["drafter"].status == "pass"
    other = fails_early(make(optimizer={"name": "adamw"}))["settings"]
    assert other.status == "fail"
    assert "made with optimizer.name = 'muon', asked for 'adamw'" in other.detail
    note = json.loads(before["run.json"])
    note["target"]["weights"] = "0" * 64
    (tmp_path / "run" / "run.json").write_text(json.dumps(note), encoding="utf-8")
    other = fails_early(make())["drafter"]
    assert other.status == "fail"
    assert "another target, which differs in weights" in other.detail
    assert (tmp_path / "run" / "settings.yaml").read_bytes() == before["settings.yaml"]


def test_a_drafter_to_begin_with_that_is_not_there(make: MakeSettings, tmp_path: Path) -> None:
    found = fails_early(make(drafter={"init": str(tmp_path / "none")}))
    assert found["drafter"].status == "fail"
    assert found["overfit"].status == "skipped"


def test_a_store_of_another_target_and_tags_that_it_lacks(
    make: MakeSettings, demo_assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = {"store": str(tmp_path / "store")}
    assert main(["prepare", str(make(data=store))]) == 0
    capsys.readouterr()
    path = spoil(demo_assets, tmp_path / "t", lambda stored: stored["model.norm.weight"].mul_(1.5))
    _, found = checked(make(data=store, target={"path": path}, plan={"weights": {"nowhere": 2.0}}), capsys)
    assert found["data"]["status"] == "warn"
    assert "prepared for another target, which differs in weights" in found["data"]["advice"]
    assert found["plan"]["status"] == "fail"
    assert "nowhere" in found["plan"]["detail"]
