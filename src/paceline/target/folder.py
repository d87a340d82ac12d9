"""The target's folder on disk: finding it, its weight files, its fingerprint. Torch-free.

A safetensors file starts with an 8-byte little-endian header length, then that many bytes of JSON, then the data.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

from paceline.errors import TargetError

HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
"""What may be a name on the hub rather than a path."""
NOT_IDENTITY = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")
"""Keys of config.json that do not change what the model is."""
SAMPLES, SAMPLE_BYTES = 16, 4096
"""Evenly spaced pieces of every weights file that enter the fingerprint."""


def resolve_folder(path: str) -> Path:
    """The folder of a target.

    Args:
        path: a folder, a ``.gguf`` file (its folder is returned), or a hub name whose files are fetched (from the
            local cache alone when offline).

    Raises:
        TargetError: neither exists; one line.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        return place
    if place.is_file():
        if place.suffix == ".gguf":
            return place.parent
        raise TargetError(f"target.path = {path}: is a file; give the folder that holds config.json, or a .gguf file")
    if not HUB_NAME.match(path) or place.parent.is_dir():
        raise TargetError(f"target.path = {path}: no such folder; give the folder of a Hugging Face causal LM")
    return _fetch(path)


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja", "*.py"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as fault:
        reason = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
        raise TargetError(
            f"target.path = {name}: no such folder, and it could not be fetched from the hub ({reason}); "
            "give an existing folder or a hub name that this machine can reach"
        ) from fault


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, sorted; empty where weights lie in another format."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else []


def read_header(file: Path) -> dict[str, Any]:
    """Header of a safetensors file: tensor name → dtype, shape, offsets; metadata left out.

    Raises:
        TargetError: missing, truncated or not safetensors; one line.
    """
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > 1 << 28:
                raise ValueError("header length is absurd")
            header: dict[str, Any] = json.loads(stream.read(size))
            end = 8 + size + max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"))
        if file.stat().st_size < end:
            raise ValueError(f"has {file.stat().st_size} of {end} bytes")
    except (OSError, ValueError, struct.error, KeyError, TypeError) as fault:
        raise TargetError(
            f"{file}: unreadable as safetensors ({fault}); fetch the file again or name the right folder"
        ) from fault
    header.pop("__metadata__", None)
    return header


def fingerprint(folder: Path, config: dict[str, Any]) -> str:
    """Stable hash of a target: configuration (quantisation included), weights and tokenizer.

    Weights enter with names, types, shapes and sizes of every file and evenly spaced samples of its bytes, so that
    other weights of the same shape give another fingerprint without reading terabytes.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    kept = {key: value for key, value in config.items() if key not in NOT_IDENTITY and value is not None}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    files = weight_files(folder) or sorted([*folder.glob("*.bin"), *folder.glob("*.gguf")])
    for file in files:
        if file.suffix == ".safetensors":
            digest.update(json.dumps(read_header(file), sort_keys=True).encode())
        _sample(digest, file)
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"):
        if (folder / name).is_file():
            digest.update(name.encode() + hashlib.sha256((folder / name).read_bytes()).digest())
    return digest.hexdigest()


def _sample(digest: Any, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name} {size}".encode())
    with file.open("rb") as stream:
        for piece in range(SAMPLES):
            stream.seek(max(0, size - SAMPLE_BYTES) * piece // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
