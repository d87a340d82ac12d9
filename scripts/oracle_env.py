"""Make the environment in which the published packages run as test oracles.

    python scripts/oracle_env.py

Their pins clash with ours, so they live in an environment of their own: `.venv-oracle` in the project root, or the
folder named by `PACELINE_ORACLE_VENV`. A second call does nothing unless the requirements, the Python version or the
folder changed. Writes the interpreter's path to standard output.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "tests" / "oracles" / "requirements.txt"
BARE_REQUIREMENTS = ROOT / "tests" / "oracles" / "requirements-bare.txt"
STAMP = "paceline-oracles.json"
PROBE = "import dflash.model, speculators.models.dflash, speculators.convert.dflash"


def default_folder() -> Path:
    """`PACELINE_ORACLE_VENV`, or `.venv-oracle` in the project root."""
    return Path(os.environ.get("PACELINE_ORACLE_VENV") or ROOT / ".venv-oracle")


def wanted() -> dict[str, str]:
    """What a finished environment's stamp says: a hash of the requirements, and the Python version."""
    text = REQUIREMENTS.read_bytes() + b"\0" + BARE_REQUIREMENTS.read_bytes()
    return {"requirements": hashlib.sha256(text).hexdigest(), "python": ".".join(map(str, sys.version_info[:3]))}


def interpreter(folder: Path) -> Path:
    """The environment's Python."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def is_ready(folder: Path) -> bool:
    """Whether the folder holds a finished environment for the requirements as they stand."""
    stamp = folder / STAMP
    return stamp.is_file() and interpreter(folder).is_file() and json.loads(stamp.read_text()) == wanted()


def make(folder: Path) -> None:
    """Build the environment from nothing; the stamp is written last, so that an interrupted build is built again."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    venv.create(folder, clear=True, with_pip=True)
    install = [str(interpreter(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "-r", str(REQUIREMENTS)], check=True, stdout=sys.stderr)
    subprocess.run([*install, "--no-deps", "-r", str(BARE_REQUIREMENTS)], check=True, stdout=sys.stderr)
    subprocess.run([str(interpreter(folder)), "-c", PROBE], check=True, stdout=sys.stderr)
    (folder / STAMP).write_text(json.dumps(wanted()) + "\n")


def main() -> int:
    """Command line. Exit code 1 when the environment cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where the environment lies")
    folder = parser.parse_args().folder.absolute()
    if not is_ready(folder):
        print(f"making the oracle environment in {folder} (once; about 1.5 GB)", file=sys.stderr)
        try:
            make(folder)
        except subprocess.CalledProcessError as error:
            print(f"error: {' '.join(map(str, error.cmd))}: exit code {error.returncode}", file=sys.stderr)
            return 1
    print(interpreter(folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
