"""The target's tokenizer and chat template: loading and fingerprints."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import DataError
from paceline.stop_tokens import stop_token_ids
from paceline.text import absent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SIGNS_OF_A_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")


@lru_cache(maxsize=4)
def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a target folder or hub name.

    Args:
        path: folder with `tokenizer.json` (or the files of a slow tokenizer), a `.gguf` file, or a hub name.
        trust_remote_code: whether code that comes with the target may run.

    Raises:
        DataError: nothing there, no tokenizer in the folder, or one that cannot be read.
    """
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).exists() for name in _SIGNS_OF_A_TOKENIZER):
        raise DataError(
            f"{path}: no tokenizer in this folder (looked for {', '.join(_SIGNS_OF_A_TOKENIZER)}); "
            "give the folder of the target with its tokenizer files"
        )
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if folder.suffix == ".gguf" and folder.is_file():
        options["gguf_file"], place = folder.name, str(folder.parent)
    elif not folder.is_dir() and (folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1):
        raise DataError(f"{path}: {absent(folder, 'folder')}; give the target's folder or its hub name")
    else:
        place = path
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(place, **options)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        lines = str(error).strip().splitlines()
        raise DataError(
            f"{path}: its tokenizer cannot be loaded: {lines[0] if lines else type(error).__name__}"
        ) from error
    if found is None:
        raise DataError(f"{path}: transformers knows no tokenizer for this target; give a folder with tokenizer.json")
    return found


def chat_template(tokenizer: PreTrainedTokenizerBase, *, tools: bool = False) -> str | None:
    """The text of the chat template that serving uses, or None; `tools` asks for the variant for tool calls."""
    templates: Any = tokenizer.chat_template
    if isinstance(templates, dict):
        name = "tool_use" if tools and "tool_use" in templates else "default"
        return templates.get(name)
    return templates or None


def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end an answer, as everywhere (`stop_tokens`).

    Raises:
        TargetError: a file of the target names something that is not a token.
    """
    return stop_token_ids(str(tokenizer.name_or_path), tokenizer.eos_token_id, len(tokenizer))


def fingerprint_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything that decides how text becomes ids; the chat template has another hash."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    parts = [
        rules,
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
        str(end_token_ids(tokenizer)),
    ]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def fingerprint_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the chat templates; a tokenizer without one has a hash too."""
    text = json.dumps([chat_template(tokenizer), chat_template(tokenizer, tools=True)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
