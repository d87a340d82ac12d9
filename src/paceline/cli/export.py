"""``paceline export``: the newest drafter of a run as a folder that engines read, verified; or a drafter folder
converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from paceline.cli import command
from paceline.errors import ConfigError

DESCRIPTION = """Write a drafter as a folder that SGLang, vLLM and z-lab dflash read, and verify it.

The folder is reloaded; tensors, configuration and logits are compared with the trained drafter, and any difference is
an error. It also holds a model card and golden tensors for checking an engine. Instead of a run, a drafter folder of
either format may be given, to convert it. Command lines are printed for the engines that serve this drafter as it was
trained; for the others it says why not.

Example: paceline export runs/first --out drafters/first

Example: paceline export runs/first --format speculators --dtype float32 --json
"""


@dataclass
class Arguments:
    """What to export, and how."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Directory of the run; or a drafter folder to convert."""
    out: Path | None = None
    """Folder to write. Unset: export/FORMAT in the run directory."""
    format: Literal["zlab", "speculators"] = "zlab"
    """zlab is read by SGLang, vLLM and z-lab dflash; speculators by vLLM."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the tensors."""
    verify: bool = True
    """Reload the folder and compare it with the drafter."""
    step: int | None = None
    """Checkpoint to export. Unset: the newest."""
    best: bool = False
    """Export the best checkpoint by checkpoint.keep_best, or where that is unset by held-out τ."""
    target: str | None = None
    """Path or hub name of the target. Unset: the run's; needed to convert a folder."""
    adapter: str | None = None
    """Folder of the adapter that was merged into the target; needed to convert the folder of such a drafter."""
    golden: Literal["random", "target", "none"] = "random"
    """Golden tensors from random features, from the target's own (loads it whole), or none."""
    push: str | None = None
    """Also upload the folder to this repository of the hub, as owner/name."""
    public: bool = False
    """A repository that is made by pushing is public."""
    json: bool = False
    """Print what was written and compared as JSON."""


def run(argv: Sequence[str]) -> int:
    """Export, verify, push; say where the folder is."""
    arguments, _ = command.parse(Arguments, argv, prog="paceline export", description=DESCRIPTION)
    from paceline.checkpoint.run_directory import is_run_directory
    from paceline.export.exporter import drafter_of_folder, drafter_of_run, export_drafter
    from paceline.export.folder import check_repository, push

    source = arguments.source
    if arguments.push is not None:
        check_repository(arguments.push)
    if not is_run_directory(source) and (source / "config.json").is_file():
        if arguments.out is None:
            raise ConfigError("--out: give the folder to write when converting a drafter folder")
        command.no_step_of_folder(source, arguments.step, best=arguments.best)
        drafter = drafter_of_folder(source, arguments.target, arguments.adapter)
    else:
        if arguments.adapter is not None:
            raise ConfigError("--adapter: only to convert a drafter folder; a run names its adapter itself")
        step = command.step_of_run(source, arguments.step, best=arguments.best)
        drafter = drafter_of_run(source, step, arguments.target)
    out = arguments.out or source / "export" / arguments.format
    result = export_drafter(
        drafter,
        out,
        format=arguments.format,
        dtype=arguments.dtype,
        check=arguments.verify,
        golden=arguments.golden,
        repository=arguments.push,
    )
    if arguments.push is not None:
        result["pushed"] = push(out, arguments.push, private=not arguments.public)
    if arguments.json:
        command.write_json(result)
    else:
        _show(result)
    return 0


def export_run(run_dir: Path) -> Path:
    """Export the newest drafter of a run, verified, to export/zlab in the run directory; gives the folder."""
    from paceline.export.exporter import drafter_of_run, export_drafter

    folder = run_dir / "export" / "zlab"
    export_drafter(drafter_of_run(run_dir), folder)
    return folder


def _show(result: Mapping[str, Any]) -> None:
    checked = result.get("verified")
    command.stdout.print(result["folder"], markup=False)
    if checked is None:
        command.stdout.print("not verified", markup=False)
    else:
        command.stdout.print(
            f"verified: {checked['num_tensors']} tensors bit for bit, {checked['parameters']:,} parameters, logits "
            f"equal; storing as {checked['dtype']} moves a logit by at most {checked['rounding_difference']:.2g}; "
            f"content {checked['content_hash']}",
            markup=False,
        )
    for engine, line in result["commands"].items():
        command.stdout.print(f"\n{engine}:\n{line}", markup=False)
    if result["notes"]:
        command.stdout.print("\n" + "\n".join(result["notes"]), markup=False)
    if "pushed" in result:
        command.stdout.print(f"\npushed: {result['pushed']}", markup=False)
