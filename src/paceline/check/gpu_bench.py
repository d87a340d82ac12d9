"""What the checks of a device share: the demo's settings on that device, a scratch folder, the form of a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.check.context import CheckContext, CheckLimits
from paceline.check.results import CheckResult
from paceline.config import Settings, load_settings


@dataclass
class Bench:
    """What the checks of a device share.

    Attributes:
        device: under test, for example cuda:0 or cpu.
        tiny: small sizes, for a CPU.
        folder: scratch folder.
        contexts: targets, data and learners of the demo, by device.
        peak_flops: of a bfloat16 product on the device (float32 on a CPU), measured by the first check.
    """

    device: str
    tiny: bool
    folder: Path
    peak_flops: float = float("nan")
    contexts: dict[str, CheckContext] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    """Memory that is page-locked, and stays so until the process ends."""

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a card."""
        return self.device.startswith("cuda")

    def settings(self, device: str, **flags: str) -> Settings:
        """The demo's settings with everything on one device."""
        assets = Path(str(files("paceline"))) / "assets" / "demo"
        return load_settings(
            assets / "demo.yaml",
            {
                "run_dir": str(self.folder / "unused"),
                "target.path": str(assets / "target"),
                "data.train": f"[{assets / 'chats.jsonl'}]",
                "data.heldout": f"[{assets / 'heldout.jsonl'}]",
                "flow.target_devices": f"[{device}]",
                "flow.drafter_devices": f"[{device}]",
                **flags,
            },
        )

    def context(self, device: str) -> CheckContext:
        """Target, data and learners of the demo on a device."""
        if device not in self.contexts:
            folder = self.folder / device.replace(":", "-")
            folder.mkdir(exist_ok=True)
            self.contexts[device] = CheckContext(self.settings(device), folder, CheckLimits(rows=96, steps=40))
        return self.contexts[device]


Check = Callable[[Bench], CheckResult]


def verdict(
    name: str, passed: bool, detail: str, advice: str = "", figures: Mapping[str, Any] | None = None
) -> CheckResult:
    """A result that passes or fails."""
    return CheckResult(name, "pass" if passed else "fail", detail, "" if passed else advice, dict(figures or {}))


def skipped(name: str, why: str) -> CheckResult:
    """A result of a check that has nothing to look at here."""
    return CheckResult(name, "skipped", why)
