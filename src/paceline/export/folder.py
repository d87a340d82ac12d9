"""A drafter folder as a whole: it appears whole, carries a note of its origin, and can be pushed to the hub."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.atomic_files import make_folder, replacing
from paceline.checkpoint.run_directory import EXPORTS
from paceline.errors import ExportError
from paceline.text import first_line, parsed_json

MARKER = "config.json"
"""What a drafter folder has; only such a folder, or an empty one, is replaced."""
NOTE = "paceline.json"
"""What paceline notes in the folders that it writes: step, target, the whole specification."""
REPOSITORY = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
"""owner/name."""


def read_note(folder: str | Path) -> dict[str, Any]:
    """The note of a drafter folder; empty in folders that others wrote.

    Raises:
        ExportError: it is damaged.
    """
    path = Path(folder) / NOTE
    if not path.is_file():
        return {}
    try:
        note = parsed_json(path.read_text(encoding="utf-8"))
        if not isinstance(note, dict) or not isinstance(note.get("target"), dict):
            raise ValueError("it names no target")
        if not isinstance(note["target"].get("identity", {}), dict):
            raise ValueError("its target's identity is not an object")
    except ValueError as error:
        raise ExportError(f"{path}: damaged ({error}); export the drafter again") from error
    return note


def newest_export(run_dir: Path) -> Path | None:
    """The drafter folder in a run's ``export`` that was made from the latest step; None where there is none."""
    folders = sorted(path.parent for path in (run_dir / EXPORTS).glob(f"*/{NOTE}"))
    steps = {folder: read_note(folder).get("step") or 0 for folder in folders}
    return max(reversed(folders), key=lambda folder: steps[folder], default=None)


@contextmanager
def appearing(folder: str | Path) -> Generator[Path]:
    """A fresh folder beside `folder` to write into; on leaving without an error it takes the name `folder`.

    An older drafter folder of that name is replaced. When anything fails the old one stays as it was.

    Raises:
        ExportError: `folder` is a file, or a folder that holds something else than a drafter.
    """
    final = Path(folder).absolute()
    if final.exists() and not final.is_dir():
        raise ExportError(f"{final}: is a file; give a folder for the drafter")
    if final.is_dir() and any(final.iterdir()) and not (final / MARKER).is_file():
        raise ExportError(f"{final}: holds something else than a drafter (no {MARKER}); give another folder")
    make_folder(final.parent)
    with replacing(final) as aside:
        aside.mkdir()
        yield aside


def check_repository(repository: str) -> None:
    """Refuse a name that the hub cannot have.

    Raises:
        ExportError: not owner/name.
    """
    if not REPOSITORY.match(repository):
        raise ExportError(f"push {repository}: give the repository as owner/name")


def push(folder: str | Path, repository: str, *, private: bool = True) -> str:
    """Upload a drafter folder to the Hugging Face hub, in one commit, with the token that ``hf auth login`` stored.

    Args:
        folder: of either format.
        repository: owner/name.
        private: whether a repository that is made now is private.

    Returns:
        Address of the commit.

    Raises:
        ExportError: a wrong name, no drafter folder, no access, or no network; one line.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    check_repository(repository)
    if not (Path(folder) / MARKER).is_file():
        raise ExportError(f"{folder}: no {MARKER}; only a drafter folder can be pushed")
    hub = HfApi()
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        commit = hub.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="Upload DFlash drafter")
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError, ValueError) as error:
        raise ExportError(
            f"push {repository}: {first_line(error)}; the folder {folder} is complete and can be pushed later"
        ) from error
    return str(commit)
