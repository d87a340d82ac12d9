"""Warm start: a run begins with the weights of a drafter folder, or takes over what another trainer wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import DrafterConfig, OptimizerConfig, Settings
from paceline.drafter.spec import DrafterSpec
from paceline.errors import ConfigError
from paceline.export.foreign import ForeignCheckpoint, Moments, read_foreign
from paceline.export.formats import check_numbers, folder_format, read_drafter
from paceline.export.weights import check_shapes, content_hash, expected_shapes, listed

if TYPE_CHECKING:
    from torch import Tensor

FORKED = "forked"
"""Folder in a forked run that holds the checkpoint which it begins with, where data or shape are others."""
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


def check_init(settings: Settings, spec: DrafterSpec) -> dict[str, Any]:
    """Refuse a folder that does not fit a run.

    Args:
        settings: of the run; `drafter.init` is a drafter folder, ours or published, or a checkpoint of another trainer.
        spec: the run's drafter.

    Returns:
        What the run notes of it: folder, format, hash of its tensors, block size; of another trainer's checkpoint also
        what of it the run takes, and what is missing or left over.

    Raises:
        ExportError: no drafter folder.
        ConfigError: it is another drafter, or another target's.
    """
    folder = str(settings.drafter.init)
    foreign = read_foreign(folder)
    if foreign is None:
        theirs, state = read_drafter(folder)
        _check_spec(folder, theirs, spec, settings.target.path)
        return {**_noted(folder, folder_format(folder), state), "block_size": theirs.block_size}
    where = str(foreign.folder)
    check_numbers(where, foreign.state)
    state = foreign.state
    if _forked(foreign):
        _check_target(where, foreign.spec, spec, settings.target.path)
        state = _fitting(state, spec)
    else:
        if foreign.spec is not None:
            _check_spec(where, foreign.spec, spec, settings.target.path)
        check_shapes(where, spec, {name: tuple(tensor.shape) for name, tensor in state.items()})
    taken = _moments(foreign, settings.drafter, settings.optimizer, spec)
    return {
        **_noted(where, foreign.trainer, foreign.state),
        "block_size": None if foreign.spec is None else foreign.spec.block_size,
        "step": foreign.step,
        "epoch": foreign.epoch,
        "moments": len(taken),
        "without_moments": [name for name in state if name not in taken],
        "new": [name for name in expected_shapes(spec) if name not in state],
        "left_over": [*foreign.left_over, *(name for name in foreign.state if name not in state)],
        "not_in_it": [] if foreign.spec is not None else list(OF_SETTINGS.values()),
    }


def init_lines(noted: Mapping[str, Any]) -> list[str]:
    """What a run takes over, for the one who starts it: one sentence a line.

    Args:
        noted: from `check_init`.
    """
    lines = [f"{noted['format']} {noted['folder']}, tensors {noted['content_hash']}"]
    if "moments" not in noted:
        return lines
    without, left = noted["without_moments"], noted["left_over"]
    lines.append(f"moments of {noted['moments']} of {noted['moments'] + len(without)} tensors")
    if noted["moments"] and without:
        lines.append(f"moments that begin at zero: {listed(without)}")
    if noted["new"]:
        lines.append(f"new tensors, with weights of their own: {listed(noted['new'])}")
    if left:
        lines.append(f"left over, not taken: {listed(left)}")
    if noted["not_in_it"]:
        lines.append(f"not written there, taken from the settings: {', '.join(noted['not_in_it'])}")
    return lines


def initial_state(drafter: DrafterConfig, optimizer: OptimizerConfig, spec: DrafterSpec) -> dict[str, Any]:
    """What `Learner.begin` takes: weights in float32; with `init_step` also the steps, and what moments there are.

    Tensors that a fork does not take over are not among them.
    """
    folder = str(drafter.init)
    foreign = read_foreign(folder)
    state = read_drafter(folder)[1] if foreign is None else _fitting(foreign.state, spec)
    begun: dict[str, Any] = {"network": {name: tensor.float() for name, tensor in state.items()}}
    if drafter.init_step is not None:
        moments = {} if foreign is None else _moments(foreign, drafter, optimizer, spec)
        begun |= {"steps_done": drafter.init_step, "moments": moments}
    return begun


def _moments(
    foreign: ForeignCheckpoint, drafter: DrafterConfig, optimizer: OptimizerConfig, spec: DrafterSpec
) -> Moments:
    """The moments that a run takes: those of parameters which its own AdamW moves, where it counts on."""
    if drafter.init_step is None or optimizer.state != "float32":
        return {}
    fitting, of_muon = _fitting(foreign.state, spec), optimizer.name == "muon"
    return {
        name: foreign.moments[name]
        for name in fitting
        if name in foreign.moments
        if not of_muon or fitting[name].ndim < 2
    }


def _forked(foreign: ForeignCheckpoint) -> bool:
    """Whether this is the checkpoint that a fork begins with, whose shape may be another."""
    return foreign.trainer == "paceline" and foreign.folder.parent.parent.name == FORKED


def _fitting(state: Mapping[str, Tensor], spec: DrafterSpec) -> dict[str, Tensor]:
    wanted = expected_shapes(spec)
    return {name: tensor for name, tensor in state.items() if tuple(tensor.shape) == wanted.get(name)}


def _noted(folder: str, format: str, state: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"folder": str(Path(folder).absolute()), "format": format, "content_hash": content_hash(state)}


def _check_target(folder: str, theirs: DrafterSpec | None, spec: DrafterSpec, target: str) -> None:
    assert theirs is not None, "a checkpoint of ours says what drafter it is"
    differ = [f"{name} {getattr(theirs, name)}" for name in OF_TARGET if getattr(theirs, name) != getattr(spec, name)]
    if differ:
        have = ", ".join(f"{name} {getattr(spec, name)}" for name in OF_TARGET)
        raise ConfigError(
            f"drafter.init: {folder} was made for another target, with {', '.join(differ)}; {target} has {have}"
        )


def _check_spec(folder: str, theirs: DrafterSpec, spec: DrafterSpec, target: str) -> None:
    _check_target(folder, theirs, spec, target)
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


def _as_setting(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_setting, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else f"{value}"
