"""Sending a drafter folder to the Hugging Face hub, or to a folder that stands in for it.

The folder goes as it is, in one commit. `LocalHub` has the two calls of the hub's client that are used, so the same
code runs where no hub can be reached: a mirror on a shared disk, or a test.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import ExportError
from paceline.export.folder import MARKER, appearing

REPOSITORY = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
"""owner/name."""


class Hub(Protocol):
    """What is used of ``huggingface_hub.HfApi``."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any:
        """Make the repository unless it is there."""
        ...

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> Any:
        """Upload all files in one commit; gives something that reads as its address."""
        ...


class LocalHub:
    """A folder with a sub-folder for each owner/name."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        """Make the repository's folder; `private` has no meaning here.

        Raises:
            FileExistsError: it is there and `exist_ok` is false.
        """
        (self.root / repo_id).mkdir(parents=True, exist_ok=exist_ok)

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> str:
        """Replace the repository's content; gives its path."""
        with appearing(self.root / repo_id) as aside:
            shutil.copytree(folder_path, aside, dirs_exist_ok=True)
        return str(self.root / repo_id)


def push(folder: str | Path, repository: str, *, private: bool = True, hub: Hub | None = None) -> str:
    """Upload a drafter folder.

    Args:
        folder: of either format.
        repository: owner/name.
        private: whether a repository that is made now is private.
        hub: where to; None is the Hugging Face hub with the token that ``hf auth login`` stored.

    Returns:
        Address of the commit, or the path.

    Raises:
        ExportError: a wrong name, no drafter folder, no access, or no network; one line.
    """
    if not REPOSITORY.match(repository):
        raise ExportError(f"push {repository}: give the repository as owner/name")
    if not (Path(folder) / MARKER).is_file():
        raise ExportError(f"{folder}: no {MARKER}; only a drafter folder can be pushed")
    if hub is None:
        from huggingface_hub import HfApi

        hub = HfApi()
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        commit = hub.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="Upload DFlash drafter")
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ExportError(
            f"push {repository}: {reason}; the folder {folder} is complete and can be pushed later"
        ) from error
    return str(commit)
