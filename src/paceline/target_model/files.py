"""The target's folder on disk: finding it, its weight files, its fingerprint. Torch-free.

A safetensors file starts with an 8-byte little-endian header length, then that many bytes of JSON, then the data.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import TargetError
from paceline.text import absent, first_line, parsed_json

HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
"""What may be a name on the hub rather than a path."""
NOT_IDENTITY = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")
"""Keys of config.json that do not change what the model is."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
"""Files that decide how text becomes ids."""
SAMPLES, SAMPLE_BYTES = 16, 4096
"""Evenly spaced pieces of every weights file that enter the fingerprint."""


def resolve_folder(path: str, *, weights: bool = True) -> Path:
    """The folder of a target.

    Args:
        path: a folder, a ``.gguf`` file (its folder is returned), or a hub name whose files are fetched (from the
            local cache alone when offline).
        weights: whether the weights are fetched too.

    Raises:
        TargetError: neither exists; one line.
    """
    place = Path(path).expanduser()
    if place.is_dir() and place.suffix == ".gguf":
        raise TargetError(f"target.path = {path}: is a folder that is named like a GGUF file; give it another name")
    if place.is_dir():
        return place
    if place.is_file():
        if place.suffix == ".gguf":
            return place.parent
        raise TargetError(f"target.path = {path}: is a file; give the folder that holds config.json, or a .gguf file")
    if not HUB_NAME.match(path) or place.parent.is_dir():
        raise TargetError(
            f"target.path = {path}: {absent(place, 'folder')} (looked at {place.absolute()}); give the folder of a "
            "Hugging Face causal LM"
        )
    return _fetch(path, weights=weights)


def _fetch(name: str, *, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.model", "*.txt", "*.jinja", "*.py", *(["*.safetensors", "*.bin"] if weights else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise TargetError(
            f"target.path = {name}: no folder {Path(name).absolute()}, and it could not be fetched from the hub "
            f"({first_line(error)}); "
            "give an existing folder or a hub name that this machine can reach"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, sorted; empty where weights lie in another format.

    Where one whole file and shards lie side by side, transformers loads the file; so that is what counts.

    Raises:
        TargetError: an index that names no files; one line.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    try:
        names = set(parsed_json(index.read_text(encoding="utf-8"))["weight_map"].values())
        if not names:
            raise ValueError("names no file")
        return [folder / name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetError(f"{index}: not the index of weight files ({error}); fetch the folder again") from error


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
            header: dict[str, Any] = parsed_json(stream.read(size))
            end = 8 + size + max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"))
        if file.stat().st_size < end:
            raise ValueError(f"has {file.stat().st_size} of {end} bytes")
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise TargetError(
            f"{file}: unreadable as safetensors ({error}); fetch the file again or name the right folder"
        ) from error
    header.pop("__metadata__", None)
    return header


def identify(folder: Path, config: Mapping[str, Any], weights: Sequence[Path] | None = None) -> dict[str, str]:
    """What makes a target this one, a hash for each part, from its files alone.

    Weights enter with names, types, shapes and sizes of every file and evenly spaced samples of its bytes, so that
    other weights of the same shape give another hash without reading terabytes.

    Args:
        folder: of the target.
        config: its configuration as plain values.
        weights: its weight files; those in the folder where None.

    Returns:
        ``configuration``, ``quantization``, ``weights`` and ``tokenizer``, each as hexadecimal digits. Parts that are
        not there (weights where only data is prepared) are left out; so is the quantization of a target without one.
    """
    kept = {key: value for key, value in config.items() if key not in NOT_IDENTITY and value is not None}
    quantization = kept.pop("quantization_config", None)
    parts = {"configuration": _hash(json.dumps(kept, sort_keys=True).encode())} if kept else {}
    if quantization is not None:
        parts["quantization"] = _hash(json.dumps(quantization, sort_keys=True, default=str).encode())
    files = weights or weight_files(folder) or sorted([*folder.glob("*.bin"), *folder.glob("*.gguf")])
    if any(file.is_file() for file in files):
        parts["weights"] = hash_files(files)
    words = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if words:
        parts["tokenizer"] = _hash(*(file.name.encode() + hashlib.sha256(file.read_bytes()).digest() for file in words))
    return parts


def fingerprint(identity: Mapping[str, str]) -> str:
    """One hash, 64 hexadecimal digits, of all parts of an identity."""
    return _hash(json.dumps(dict(identity), sort_keys=True).encode())


def hash_files(files: Sequence[Path]) -> str:
    """Hash of weight files, or of small files beside them: headers and samples of their bytes; see `identify`."""
    digest = hashlib.sha256()
    for file in files:
        if file.suffix == ".safetensors":
            digest.update(json.dumps(read_header(file), sort_keys=True).encode())
        _sample(digest, file)
    return digest.hexdigest()


def _hash(*pieces: bytes) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _sample(digest: Any, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name} {size}".encode())
    with file.open("rb") as stream:
        for piece in range(SAMPLES):
            stream.seek(max(0, size - SAMPLE_BYTES) * piece // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
