"""Settings of what is measured and who hears it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.section import Section


class ObserveConfig(Section):
    """Who hears what the run measures. metrics.jsonl in the run directory is always written."""

    every_steps: int = Field(default=1, ge=1)
    """Optimizer steps between metric lines; a line covers all steps since the one before."""
    console: Literal["auto", "rich", "plain", "quiet"] = "auto"
    """Progress on the terminal; auto is rich on a terminal and plain lines elsewhere, quiet shows warnings only."""
    plain_every_s: float = Field(default=10.0, ge=0)
    """Seconds of training between plain lines; the first and the last step always have one."""
    diagnose_every_steps: int = Field(default=200, ge=0)
    """Optimizer steps between looks at the numbers so far; what looks wrong is told as a warning. 0: never."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Mirror to Weights & Biases (extra `wandb`)."""
    wandb_project: str = Field(default="paceline", min_length=1)
    """Project of the mirror."""
    wandb_entity: str | None = None
    """User or team of the mirror. Unset: the default of the account."""
    tensorboard: bool = False
    """Mirror to TensorBoard event files in the run directory (extra `tensorboard`)."""
    trackio: bool = False
    """Mirror to trackio on this machine (extra `trackio`)."""
    alert_command: list[str] = []
    """Program and arguments that are run at an alert, which is one JSON object on its standard input. Empty: none."""
    alert_webhook: str | None = None
    """Address that gets the same object in a POST; its `text` is a sentence. Unset: none."""
    alert_after_s: float = Field(default=900.0, gt=0)
    """Seconds without an optimizer step after which an alert says so."""
    alert_jump: float = Field(default=8.0, gt=0)
    """A step loss this many times its usual scatter above the recent steps is an alert."""
    trace: bool = False
    """Write spans of every stage to trace.json in the run directory, which ui.perfetto.dev opens."""
    profile_steps: list[int] | None = None
    """First and last optimizer step that torch's profiler records, written to profile.json in the run directory."""
    peak_tflops: dict[str, float] = {}
    """Peak TFLOP/s of a device in its compute type, by name (cuda:0) or kind (cuda); gives the share that is used."""
    mirror_queue_lines: int = Field(default=256, ge=1)
    """Lines waiting for a slow mirror at most; beyond that the oldest are dropped for that mirror, and counted."""
    mirror_start_limit_s: float = Field(default=30.0, gt=0)
    """A mirror that has not started by then stops the run before any work."""
    mirror_close_limit_s: float = Field(default=30.0, gt=0)
    """A mirror that has not finished by then is left behind at the end of the run."""

    @model_validator(mode="after")
    def _fits(self) -> ObserveConfig:
        steps = self.profile_steps
        if steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise ValueError(f"profile_steps: {steps} is no range of steps; write [first, last], 1-based")
        for device, peak in self.peak_tflops.items():
            if not peak > 0:
                raise ValueError(f"peak_tflops: {device}: {peak:g}; a peak is above zero, leave out what is not known")
        return self
