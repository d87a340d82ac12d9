"""Where a target's weights lie: on one device, or spread over several by accelerate."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from paceline.device import main_device, total_bytes, why_missing
from paceline.errors import TargetError

WEIGHTS_SHARE = 0.8
"""Share of a device that a spread target's weights may fill; the rest is for features and what a layer computes."""

Map = str | list[str] | dict[str, str] | None


def placement_options(device_map: Map, device: str | torch.device, *, quantised: bool) -> dict[str, Any]:
    """What transformers gets about devices.

    Args:
        device_map: see `TargetConfig`.
        device: of the worker, used where `device_map` is unset.
        quantized: whether weights are quantized, which transformers must place itself.

    Returns:
        Options of ``from_pretrained``; empty where the model is loaded on the CPU and moved as a whole.

    Raises:
        TargetError: accelerate is not installed, or a device that is not here; one line.
    """
    if device_map is None and not quantised:
        return {}
    if importlib.util.find_spec("accelerate") is None:
        what = f"target.device_map = {device_map}" if device_map is not None else "quantized weights"
        raise TargetError(f"{what}: needs the package accelerate; pip install accelerate")
    if device_map is None:
        return {"device_map": {"": str(device)}}
    if isinstance(device_map, dict):
        check_devices(list(device_map.values()), allowed=("disk",))
        inside = [(inner, outer) for inner in device_map for outer in device_map if _lies_in(inner, outer)]
        if inside:
            raise TargetError(
                f"target.device_map: {inside[0][0]} is inside {inside[0][1] or 'the model'}, which has a device of "
                "its own; name the parts so that each is in one of them"
            )
        return {"device_map": dict(device_map)}
    if device_map == "auto":
        return {"device_map": "auto"}
    assert isinstance(device_map, list), "the settings allow nothing else"
    check_devices(device_map)
    # accelerate's own figures open a context on every card of the machine, and leave no room for what is computed.
    room = {name: int(WEIGHTS_SHARE * total_bytes(name)) for name in device_map}
    keys = {name: main_device(name).index if name.startswith("cuda") else name for name in device_map}
    return {"device_map": "auto", "max_memory": {keys[name]: room[name] for name in device_map}}


def _lies_in(inner: str, outer: str) -> bool:
    return inner != outer and (not outer or inner.startswith(f"{outer}."))


def check_devices(names: list[str], allowed: tuple[str, ...] = ()) -> None:
    """Refuse devices that this machine does not have.

    Raises:
        TargetError: one line.
    """
    for name in names:
        if name not in allowed and (reason := why_missing(name)):
            raise TargetError(f"target.device_map: {reason}")


def home_of(embedding: Any, path: str) -> torch.device:
    """Device of a target's embedding, where ids go in and features come out.

    Raises:
        TargetError: it is on the disk; one line.
    """
    device: torch.device = embedding.weight.device
    if device.type == "meta":
        raise TargetError(
            f"target.path = {path}: its embedding is on the disk; give it a device in target.device_map, for "
            "example the first"
        )
    return device
