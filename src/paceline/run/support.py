"""What this machine or this version cannot do, refused before anything is read or loaded: devices and combinations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from paceline.config import Settings, devices_of
from paceline.device import why_missing
from paceline.errors import ConfigError
from paceline.pipeline.multinode import ALONE, NodeInfo
from paceline.target_model.preconditions import target_errors


def check_support(settings: Settings, node: NodeInfo = ALONE.here) -> None:
    """Refuse what cannot run; needs the settings and the place among machines alone.

    Raises:
        ConfigError: one line per error.
    """
    errors = [
        *target_errors(settings.target, len(settings.flow.target_devices)),
        *_missing_devices(settings),
        *_mode_errors(settings, node),
        *_device_list_errors(settings, node),
        *_drafter_errors(settings),
        *_order_errors(settings),
    ]
    if (settings.plan.strategy == "packed") != (settings.target.rows == "packed"):
        errors.append(
            f"plan.strategy: {settings.plan.strategy} does not go with target.rows: {settings.target.rows}: documents "
            "of a packed plan share one row of the target, those of other plans have padded rows each; "
            "set both to packed, or plan.strategy to grid and target.rows to padded"
        )
    if errors:
        raise ConfigError(*errors)


def _missing_devices(settings: Settings) -> Iterator[str]:
    for key, names in (
        ("flow.target_devices", settings.flow.target_devices),
        ("flow.drafter_devices", settings.flow.drafter_devices),
        ("evaluate.device", [settings.evaluate.device or "cpu"]),
    ):
        if not names:
            yield f"{key}: empty; list at least one device, for example cpu or cuda:0"
        for name in dict.fromkeys(device for entry in names for device in devices_of(entry)):
            if (reason := why_missing(name)) is not None:
                yield f"{key}: {reason}"


def _mode_errors(settings: Settings, node: NodeInfo) -> Iterator[str]:
    flow = settings.flow
    groups = any("+" in name for name in flow.target_devices)
    if settings.target.device_map is not None and groups:
        yield "target.device_map: a group in flow.target_devices spreads the target already; drop one of the two"
    if flow.mode != "inline":
        return
    if settings.target.engine == "vllm":
        yield "flow.mode: inline runs the target itself, and target.engine: vllm has a process of its own; use pipeline"
    if groups:
        yield "flow.target_devices: groups need flow.mode: pipeline; inline knows target.device_map"
    if len(flow.target_devices) + len(flow.drafter_devices) > 2:
        yield "flow.mode: inline runs one target and one drafter; list one device each or use pipeline"
    if node.count > 1:
        yield f"flow.mode: inline runs on one machine, WORLD_SIZE is {node.count}; use pipeline"


def _device_list_errors(settings: Settings, node: NodeInfo) -> Iterator[str]:
    """Lists whose devices exist, but not together in these roles."""
    flow = settings.flow
    targets = [_numbered(device) for entry in flow.target_devices for device in devices_of(entry)]
    drafters = [_numbered(device) for device in flow.drafter_devices]
    kinds = {device.partition(":")[0] for device in drafters}
    if len(kinds) > 1:
        yield (
            f"flow.drafter_devices: {', '.join(flow.drafter_devices)}: ranks on cpu and on GPUs cannot add up their "
            "gradients; use devices of one kind"
        )
    for key, devices in (("flow.drafter_devices", drafters), ("flow.target_devices", targets)):
        for device in _cards_listed_twice(devices):
            yield f"{key}: {device} is listed twice; each worker needs its own GPU: list every GPU once"
    both = [device for device in dict.fromkeys(targets) if device in drafters and device.startswith("cuda")]
    if flow.mode == "pipeline" and both and not flow.share_devices:
        yield (
            f"flow: {', '.join(both)} is listed for the target and for the drafter; use flow.mode: inline on one GPU, "
            "give the roles different GPUs, or set flow.share_devices: true if both fit"
        )
    on_gpu = [name for name in (*flow.target_devices, *flow.drafter_devices) if name != "cpu"]
    if node.on_this_host > 1 and on_gpu:
        yield (
            f"flow: {node.on_this_host} pipelines on this host would share {', '.join(dict.fromkeys(on_gpu))}; start "
            "one a machine (torchrun --nproc-per-node 1) and list all of its devices under flow"
        )


def _numbered(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


def _cards_listed_twice(devices: list[str]) -> list[str]:
    return [device for device, count in Counter(devices).items() if count > 1 and device.startswith("cuda")]


def _drafter_errors(settings: Settings) -> Iterator[str]:
    on_cpu = [name for name in settings.flow.drafter_devices if not name.startswith("cuda")]
    for key, value in (("attention", "flex"), ("head", "liger")):
        if on_cpu and getattr(settings.drafter, key) == value:
            other = "split" if key == "attention" else "tiled"
            yield f"drafter.{key}: {value} trains on CUDA only, and a drafter rank is on cpu; use {other}"
    if settings.optimizer.shard and len(settings.flow.drafter_devices) < 2:
        yield (
            "optimizer.shard: the ranks of a machine share the optimizer's state out, and flow.drafter_devices lists "
            f"{len(settings.flow.drafter_devices)}; list several, or drop it"
        )
    if settings.drafter.head != "tiled" and settings.objective.needs_teacher:
        yield (
            f"drafter.head: {settings.drafter.head} knows cross entropy alone, and objective.terms has terms that need "
            "the target's distributions; use tiled"
        )


def _order_errors(settings: Settings) -> Iterator[str]:
    """What gives other bits each time, whatever the devices compute."""
    flow = settings.flow
    as_they_come = flow.mode == "pipeline" and flow.delivery == "ready" and len(flow.target_devices) > 1
    if settings.train.deterministic and as_they_come:
        yield (
            "train.deterministic: with flow.delivery: ready and several flow.target_devices, micro-batches are added "
            "up as they come; set flow.delivery to ordered"
        )
