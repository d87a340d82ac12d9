"""Warm start: a run begins with the weights of a drafter folder instead of new ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.drafter.spec import DrafterSpec
from paceline.errors import ConfigError
from paceline.export.formats import folder_format, read_drafter
from paceline.export.weights import content_hash

if TYPE_CHECKING:
    from torch import Tensor

OF_TARGET = ("hidden_size", "vocab_size")
OF_SETTINGS = {
    "num_layers": "drafter.num_layers",
    "intermediate_size": "drafter.intermediate_size",
    "num_attention_heads": "drafter.num_attention_heads",
    "num_key_value_heads": "drafter.num_key_value_heads",
    "head_dim": "drafter.head_dim",
    "layers": "drafter.layers",
    "causal": "drafter.causal",
    "sliding_window": "drafter.sliding_window",
    "rope_theta": "drafter.rope_theta",
    "rms_norm_eps": "drafter.rms_norm_eps",
    "mask_token_id": "drafter.mask_token_id",
    "sample_from_anchor": "drafter.sample_from_anchor",
    "taps": "target.taps",
}
"""What the weights of a drafter depend on, and the setting that says it. The block size may be another."""


def check_init(folder: str, spec: DrafterSpec, target: str) -> dict[str, Any]:
    """Refuse a drafter folder that does not fit a run.

    Args:
        folder: z-lab or speculators, ours or published.
        spec: the run's drafter.
        target: path of the run's target, for the message.

    Returns:
        What the run notes of it: folder, format, hash of its tensors, block size.

    Raises:
        ExportError: no drafter folder.
        ConfigError: it is another drafter, or another target's.
    """
    theirs, state = read_drafter(folder)
    differ = [f"{name} {getattr(theirs, name)}" for name in OF_TARGET if getattr(theirs, name) != getattr(spec, name)]
    if differ:
        have = ", ".join(f"{name} {getattr(spec, name)}" for name in OF_TARGET)
        raise ConfigError(
            f"drafter.init: {folder} was made for another target, with {', '.join(differ)}; {target} has {have}"
        )
    wanted = [
        f"{setting}: {_as_setting(getattr(theirs, name))}"
        for name, setting in OF_SETTINGS.items()
        if getattr(theirs, name) != getattr(spec, name)
    ]
    if wanted:
        raise ConfigError(
            f"drafter.init: {folder} is another drafter than these settings ask for; to go on from it, set "
            f"{', '.join(wanted)}"
        )
    return {
        "folder": str(Path(folder).absolute()),
        "format": folder_format(folder),
        "content_hash": content_hash(state),
        "block_size": theirs.block_size,
    }


def initial_weights(folder: str) -> dict[str, Tensor]:
    """The folder's tensors in float32, for the masters."""
    return {name: tensor.float() for name, tensor in read_drafter(folder)[1].items()}


def _as_setting(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_setting, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else f"{value}"
