"""Runs tests on every other supported Python that is installed, each in an environment of its own (.venv-3.12, ...).

    python scripts/other_pythons.py [PYTEST ARGUMENTS ...]

Looked for: python3.11 to python3.13 on the path, and what pyenv has. None found is said, and is no error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
MINORS = (11, 12, 13)


def interpreters() -> dict[str, str]:
    """Version, such as 3.12 → a program that runs it; without the version that runs this script."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: dict[str, str] = {}
    for minor in MINORS:
        version = f"3.{minor}"
        candidates = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))]
        for candidate in candidates:
            if minor == sys.version_info.minor or candidate is None or version in found:
                continue
            seen = subprocess.run(
                [candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"],
                capture_output=True,
                text=True,
                check=False,
            )
            if seen.stdout.strip() == version:
                found[version] = candidate
    return found


def environment(version: str, program: str) -> Path:
    """The Python of an environment with the project and its development tools; made where it is not there."""
    folder = PROJECT / f".venv-{version}"
    python, mark = folder / "bin" / "python", folder / ".installed-dev"
    newest = max((PROJECT / name).stat().st_mtime for name in ("pyproject.toml", "constraints.txt"))
    if not mark.exists() or mark.stat().st_mtime < newest:
        print(f"making {folder.name}", flush=True)
        subprocess.run([program, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "-c", "constraints.txt", "-e", ".[dev]"], check=True, cwd=PROJECT)
        mark.touch()
    return python


def main() -> int:
    """Exit code 1 when the tests fail on one of them."""
    found = interpreters()
    if not found:
        print("no other Python from 3.11 to 3.13 is installed here")
    failed = []
    for version, program in found.items():
        python = environment(version, program)
        print(f"== Python {version}", flush=True)
        if subprocess.run([str(python), "-m", "pytest", *sys.argv[1:]], check=False, cwd=PROJECT).returncode:
            failed.append(version)
    if failed:
        print(f"failed on Python {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
