"""Settings: every error at once, one line each, with file, line and what to do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config import Settings, dump_settings, known_names, load_settings, setting_rows
from paceline.config.load import REMOVED, RENAMED
from paceline.errors import ConfigError

BASE = "run_dir: runs/x\ntarget:\n  path: models/t\n"


def errors(tmp_path: Path, text: str, **flags: str) -> list[str]:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file, {name.replace("__", "."): value for name, value in flags.items()})
    return [line.removeprefix(str(tmp_path) + "/") for line in caught.value.errors]


def test_all_errors_at_once_with_file_and_line(tmp_path: Path) -> None:
    lines = errors(
        tmp_path,
        "target:\n  path: models/t\n  dtyp: float32\nplan:\n  token_budget: 1.5\n  max_samples: 0\nsede: 3\n",
    )
    assert sorted(line.split(": ")[0] for line in lines) == [
        "run.yaml:1",
        "run.yaml:3",
        "run.yaml:5",
        "run.yaml:6",
        "run.yaml:7",
    ]
    text = "\n".join(lines)
    assert "target.dtyp: unknown key; did you mean dtype?" in text
    assert "plan.token_budget = 1.5: must be a valid integer" in text
    assert "plan.max_samples = 0: must be greater than or equal to 1" in text
    assert "sede: unknown key; did you mean seed?" in text
    assert "run_dir: required but not given" in text


def test_a_key_in_the_wrong_section_is_led_to_the_right_one(tmp_path: Path) -> None:
    assert errors(tmp_path, BASE + "drafter:\n  accumulate: 2\n") == [
        "run.yaml:5: drafter.accumulate: unknown key; did you mean plan.accumulate?"
    ]


def test_a_choice_outside_the_list_names_the_list(tmp_path: Path) -> None:
    (line,) = errors(tmp_path, BASE + "  dtype: int8\n")
    assert line.startswith("run.yaml:4: target.dtype = 'int8': not allowed;")
    assert "float32, bfloat16, float16" in line


def test_impossible_combinations_are_said_in_words(tmp_path: Path) -> None:
    (line,) = errors(tmp_path, BASE + "drafter:\n  num_layers: 2\n  layers: [full]\n")
    assert "layers lists 1 kinds for num_layers 2" in line
    (line,) = errors(tmp_path, BASE + "drafter:\n  num_layers: 1\n  layers: [sliding]\n")
    assert "sliding_window is unset" in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BASE + "seed: 1\nseed: 2\n", "run.yaml:5: seed is given twice"),
        ("run_dir: [\n", "not valid YAML"),
        ("- a\n- b\n", "settings are a mapping of sections, this is a list"),
        ("", "run_dir: required but not given"),
        ("run_dir: x\ntarget: models/t\n", "run.yaml:2: target"),
        (BASE + "drafter:\n  block_size: 1\n", "drafter.block_size = 1: must be greater than or equal to 2"),
        (BASE + "optimizer:\n  lr: .nan\n", "optimizer.lr"),
    ],
)
def test_other_bad_files(tmp_path: Path, text: str, says: str) -> None:
    assert says in "\n".join(errors(tmp_path, text))


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such settings file"):
        load_settings(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        load_settings(tmp_path / "b.yaml")


def test_flags_override_the_file_and_name_themselves_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(BASE + "optimizer:\n  lr: 0.1\n")
    settings = load_settings(
        file, {"optimizer.lr": "3e-4", "flow.target-devices": "[cuda:0, cuda:1]", "data.train": "[a]"}
    )
    assert settings.optimizer.lr == 3e-4
    assert settings.flow.target_devices == ["cuda:0", "cuda:1"]
    assert errors(tmp_path, BASE, plan__token_budget="many")[0].startswith(
        "--plan.token_budget: plan.token_budget = 'many'"
    )
    assert errors(tmp_path, BASE, optimizr__lr="1") == ["--optimizr.lr: unknown setting; did you mean optimizer.lr?"]


def test_dumped_settings_load_to_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(BASE)
    settings = load_settings(file)
    file.write_text(dump_settings(settings))
    assert load_settings(file) == settings


def test_settings_do_not_change() -> None:
    settings = Settings.model_validate({"run_dir": "x", "target": {"path": "t"}})
    with pytest.raises(ValueError, match="frozen"):
        settings.seed = 3


def test_every_setting_has_a_sentence_and_one_default() -> None:
    resolved = Settings.model_validate({"run_dir": "x", "target": {"path": "t"}}).model_dump(mode="json")
    for name, _, default, sentence in setting_rows():
        assert sentence.endswith("."), name
        value: Any = resolved
        for key in name.split("."):
            value = value[key]
        assert default == "required" or yaml.safe_load(default) == value, name


def _another(kind: str, value: Any) -> Any:
    choices = [choice for choice in kind.split(" | ") if "[" not in choice]
    if isinstance(value, bool):
        return not value
    if len(choices) > 1:
        return next(choice for choice in choices if choice != value)
    if kind.startswith("list[str"):
        return ["other"]
    if kind.startswith("list["):
        return None
    if kind in ("int", "float"):
        return (value or 0) + 1 if kind == "int" else (value or 0.25) / 2
    return "other"


def test_flipping_any_key_changes_the_resolved_settings(tmp_path: Path) -> None:
    base = {"run_dir": "x", "target": {"path": "t"}}
    before = Settings.model_validate(base)
    flipped = 0
    for name, kind, _, _ in setting_rows():
        value: Any = before.model_dump()
        for key in name.split("."):
            value = value[key]
        other = _another(kind, value)
        if other is None:
            continue
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(base))
        try:
            after = load_settings(file, {name: yaml.safe_dump(other).replace("\n...", "").strip()})
        except ConfigError as error:
            assert name.split(".")[0] in str(error), name
            continue
        assert after != before, name
        flipped += 1
    assert flipped > 30


def test_a_misspelt_key_is_answered_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(BASE + "sede: 1\n")
    script = (
        "import sys\n"
        "from paceline.cli import main\n"
        f"code = main(['plan', {str(file)!r}])\n"
        "assert code == 2, code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "sede: unknown key; did you mean seed?" in done.stderr


def test_a_worker_over_several_devices_is_one_name(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "run_dir: r\ntarget: {path: x}\n"
        "flow: {target_devices: [[cuda:0, cuda:1], cuda:2+cuda:3], drafter_devices: [cpu]}\n"
    )
    flow = load_settings(path).flow
    assert flow.target_devices == ["cuda:0+cuda:1", "cuda:2+cuda:3"]
    assert flow.num_buffers == 2 * 2 + 4 + 1  # two batches in flight on each group of cards


@pytest.mark.parametrize(("written", "read"), [("off", "off"), ("on", "on"), ("'off'", "off"), ("auto", "auto")])
def test_off_and_on_are_words_where_they_are_allowed(written: str, read: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"run_dir: r\ntarget: {{path: t}}\ndata:\n  thinking: {written}\n", encoding="utf-8")
    settings = load_settings(file, {"observe.wandb": "off", "data.thinking": written})
    assert settings.data.thinking == load_settings(file).data.thinking == read and settings.observe.wandb == "off"
    (tmp_path / "resolved.yaml").write_text(dump_settings(settings), encoding="utf-8")
    assert load_settings(tmp_path / "resolved.yaml") == settings


def test_booleans_stay_booleans_elsewhere() -> None:
    needed = {"run_dir": "r", "target.path": "t"}
    assert load_settings(None, {**needed, "target.trust_remote_code": "on"}).target.trust_remote_code is True
    with pytest.raises(ConfigError, match=r"observe\.wandb = True: not allowed; allowed: off, offline, online"):
        load_settings(None, {**needed, "observe.wandb": "on"})


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("flow: {verifier_device: cpu}", "flow.verifier_device: unknown key; did you mean evaluate.device?"),
        ("flow: {verifier_wait_s: 1}", "flow.verifier_wait_s: unknown key; did you mean evaluate.wait_s?"),
        ("drafter: {hidden_size: 64}", "drafter.hidden_size: unknown key; the drafter is always as wide as the target"),
    ],
)
def test_an_old_key_is_answered_with_the_new_one(tmp_path: Path, text: str, hint: str) -> None:
    (line,) = errors(tmp_path, BASE + text + "\n")
    assert hint in line
    name = hint.split(":")[0]
    with pytest.raises(ConfigError, match=f"--{name}: unknown setting; {re.escape(hint.split('; ')[1])}"):
        load_settings(None, {"run_dir": "r", "target.path": "t", name: "1"})


def test_names_of_today_are_in_the_table_of_renames() -> None:
    assert set(RENAMED.values()) <= set(known_names())
    assert not {*RENAMED, *REMOVED} & set(known_names())
