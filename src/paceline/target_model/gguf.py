"""GGUF files: one file holds configuration, tokenizer and (mostly quantized) weights; transformers widens these.

Reading the header of a large vocabulary takes seconds, so what is read from a file is kept until the file changes.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline.errors import TargetError
from paceline.target_model.files import hash_files
from paceline.text import first_line


def gguf_config(file: Path) -> Any:
    """The transformers configuration in a GGUF file.

    Raises:
        TargetError: the package gguf is missing, or the file cannot be read; one line.
    """
    return copy.deepcopy(_config(file.resolve(), *_state(file)))


def identify_gguf(file: Path) -> dict[str, str]:
    """What makes the target in a GGUF file this one: see `folder.identify`.

    Returns:
        ``configuration`` (all metadata and tensor names, the tokenizer among them) and ``weights``, hexadecimal digits.
    """
    return dict(_identity(file.resolve(), *_state(file)))


def _state(file: Path) -> tuple[int, int]:
    if importlib.util.find_spec("gguf") is None:
        raise TargetError(f"target.path = {file}: GGUF files need the package gguf; pip install 'paceline[gguf]'")
    found = file.stat()
    return found.st_size, found.st_mtime_ns


@lru_cache(maxsize=4)
def _config(file: Path, size: int, changed_ns: int) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError, ImportError, AttributeError, IndexError, struct.error) as error:
        raise TargetError(
            f"target.path = {file}: cannot be used ({first_line(error)}); fetch the file again"
        ) from error


@lru_cache(maxsize=4)
def _identity(file: Path, size: int, changed_ns: int) -> tuple[tuple[str, str], ...]:
    from gguf import GGUFReader

    try:
        end = GGUFReader(file).data_offset
    except (ValueError, KeyError, OSError, IndexError, struct.error) as error:
        raise TargetError(
            f"target.path = {file}: cannot be used ({first_line(error)}); fetch the file again"
        ) from error
    with file.open("rb") as stream:
        header = hashlib.sha256(stream.read(end)).hexdigest()
    return ("configuration", header), ("weights", hash_files([file]))


def _unusable(file: Path, error: BaseException) -> TargetError:
    return TargetError(f"target.path = {file}: cannot be used ({first_line(error)}); fetch the file again")
