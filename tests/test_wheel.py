"""The package as a wheel in a new environment: nothing is missing, and the demo works in any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


def run(words: list[str], folder: Path) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


@pytest.fixture(scope="module")
def programs(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the programs of a new environment, in which the wheel is installed beside this one's dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(project)], folder)
    (wheel,) = folder.glob("paceline-*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", "env"], folder)
    packages = sysconfig.get_path("purelib", "venv", {"base": str(folder / "env")})
    # A folder that a .pth file names is searched, but not its own .pth files, such as an editable paceline's.
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "env" / "bin" / "python"
    run([*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], folder)
    return python.parent


@pytest.mark.slow
def test_the_demo_of_the_wheel_in_any_folder(programs: Path, tmp_path: Path) -> None:
    place = run([str(programs / "python"), "-c", "import paceline; print(paceline.__file__)"], tmp_path)
    assert Path(place.strip()).is_relative_to(programs.parent)
    assert "paceline demo" in run([str(programs / "paceline"), "demo", "--help"], tmp_path)
    short = ["--train.max_steps", "1", "--flow.mode", "inline", "--evaluate.num_prompts", "1"]
    said = run([str(programs / "paceline"), "demo", *short, "--evaluate.max_new_tokens", "4"], tmp_path)
    assert "acceptance length τ" in said and "1 of 1 equal" in said
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
