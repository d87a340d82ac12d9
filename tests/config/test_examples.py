"""Every shipped settings file loads."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from paceline.config import load_settings
from paceline.target_model.taps import check_taps

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("examples", "src") for path in (ROOT / folder).rglob("*.y*ml"))


def test_there_are_examples_for_cpu_one_gpu_and_eight() -> None:
    assert {path.stem for path in FILES} >= {"cpu", "one_gpu", "eight_gpus"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_shipped_settings_file_loads(path: Path) -> None:
    settings = load_settings(path)
    if path.stem == "eight_gpus":
        assert len(settings.flow.target_devices) + len(settings.flow.drafter_devices) == 8


def test_the_example_for_a_cpu_taps_a_model_of_four_layers() -> None:
    check_taps(load_settings(ROOT / "examples" / "cpu.yaml").target.taps or [], 4)


def test_the_settings_of_the_quickstart_load(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    block = page[page.index("    run_dir:") : page.index("Llama's tokenizer")]
    (tmp_path / "run.yaml").write_text(textwrap.dedent(block), encoding="utf-8")
    settings = load_settings(tmp_path / "run.yaml")
    assert settings.data.heldout_share == 0.02 and settings.drafter.block_size == 10 and settings.flow.mode == "inline"
