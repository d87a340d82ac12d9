"""The two formats side by side: which one a folder has, and reading whichever it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.errors import ExportError
from paceline.export.config_keys import read_config
from paceline.export.speculators import MODEL_TYPE_KEY, read_speculators
from paceline.export.zlab import read_zlab

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.drafter.spec import DrafterSpec

READERS = {"zlab": read_zlab, "speculators": read_speculators}
"""Format → its reader."""


def folder_format(folder: str | Path) -> str:
    """``speculators`` or ``zlab``, by the folder's configuration.

    Raises:
        ExportError: there is none.
    """
    _, config = read_config(folder)
    return "speculators" if MODEL_TYPE_KEY in config else "zlab"


def read_drafter(folder: str | Path) -> tuple[DrafterSpec, dict[str, Tensor]]:
    """Spec and tensors of a drafter folder of either format, ours or published.

    Raises:
        ExportError: a folder that is no DFlash drafter; one line for each error.
    """
    spec, state = READERS[folder_format(folder)](folder)
    check_numbers(folder, state)
    return spec, state


def check_numbers(folder: str | Path, state: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are no weights.

    Raises:
        ExportError: whole numbers, or values that are not finite.
    """
    wrong = [f"{name} is {str(tensor.dtype)[6:]}" for name, tensor in state.items() if not tensor.is_floating_point()]
    floats = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
    wrong += [f"{name} holds values that are not finite" for name, tensor in floats.items() if not _finite(tensor)]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ExportError(f"{folder}: no weights of a drafter ({', '.join(wrong[:3])}{more}); export it again")


def _finite(tensor: Tensor) -> bool:
    """Whether all values are numbers: their sum is, unless some are not or it overflows."""
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())
