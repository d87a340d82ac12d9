"""``paceline export``: the newest drafter of a run as a folder that engines read, verified; or a drafter folder
converted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from paceline.cli import command
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.config import TargetConfig
    from paceline.config.schema import Quantization
    from paceline.drafter.spec import DrafterSpec
    from paceline.export.card import Origin
    from paceline.export.golden import GoldenInputs
    from paceline.export.verify import Verification
    from paceline.types import TargetFacts

Format = Literal["zlab", "speculators"]
Golden = Literal["random", "target", "none"]
DESCRIPTION = """Write a drafter as a folder that SGLang, vLLM and z-lab dflash read, and verify it.

The folder is reloaded; tensors, configuration and logits are compared with the trained drafter, and any difference is
an error. It also holds a model card and golden tensors for checking an engine. Instead of a run, a drafter folder of
either format may be given, to convert it.

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
    format: Format = "zlab"
    """zlab is read by SGLang, vLLM and z-lab dflash; speculators by vLLM."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the tensors."""
    verify: bool = True
    """Reload the folder and compare it with the drafter."""
    step: int | None = None
    """Checkpoint to export. Unset: the newest."""
    target: str | None = None
    """Path or hub name of the target. Unset: the run's; needed to convert a folder."""
    golden: Golden = "random"
    """Golden tensors from random features, from the target's own (loads it whole), or none."""
    push: str | None = None
    """Also upload the folder to this repository, as owner/name."""
    hub: Path | None = None
    """Folder that stands in for the hub when pushing."""
    public: bool = False
    """A repository that is made by pushing is public."""
    json: bool = False
    """Print what was written and compared as JSON."""


@dataclass(frozen=True)
class Source:
    """A drafter before it is exported.

    Attributes:
        spec, state: the drafter.
        target: path or hub name of its target.
        trust_remote_code: whether code that comes with the target may run.
        origin: for the model card.
        adapter, quantization: of the target; see `TargetConfig`.
    """

    spec: DrafterSpec
    state: Mapping[str, Tensor]
    target: str
    trust_remote_code: bool
    origin: Origin
    adapter: str | None = None
    quantization: Quantization = "stored"

    @property
    def target_settings(self) -> TargetConfig:
        """The target as settings, in float32."""
        from paceline.config import TargetConfig

        return TargetConfig(
            path=self.target,
            dtype="float32",
            adapter=self.adapter,
            quantization=self.quantization,
            trust_remote_code=self.trust_remote_code,
        )


def run(argv: Sequence[str]) -> int:
    """Export, verify, push; say where the folder is."""
    arguments, _ = command.parse(Arguments, argv, prog="paceline export", description=DESCRIPTION)
    from paceline.checkpoint.run_directory import is_run_directory

    is_run = is_run_directory(arguments.source)
    if not is_run and (arguments.source / "config.json").is_file() and arguments.out is None:
        raise ConfigError("--out: give the folder to write when converting a drafter folder")
    source = run_source(arguments.source, arguments.step, arguments.target)
    out = arguments.out or arguments.source / "export" / arguments.format
    result = export(
        source,
        out,
        format=arguments.format,
        dtype=arguments.dtype,
        check=arguments.verify,
        golden=arguments.golden,
    )
    if arguments.push is not None:
        from paceline.export.hub import LocalHub, push

        hub = LocalHub(arguments.hub) if arguments.hub is not None else None
        result["pushed"] = push(out, arguments.push, private=not arguments.public, hub=hub)
    if arguments.json:
        command.write_json(result)
    else:
        _show(result)
    return 0


def export_run(
    run_dir: Path,
    out: Path | None = None,
    *,
    format: Format = "zlab",
    dtype: str = "bfloat16",
    golden: Golden = "random",
) -> Path:
    """Export the newest drafter of a run, verified; gives the folder (export/FORMAT in the run directory by
    default)."""
    folder = out or run_dir / "export" / format
    export(run_source(run_dir, None, None), folder, format=format, dtype=dtype, check=True, golden=golden)
    return folder


def run_source(source: Path, step: int | None, target: str | None) -> Source:
    """The drafter of a run directory, or of a drafter folder.

    Raises:
        PacelineError: neither, or no such checkpoint.
    """
    from paceline.checkpoint import checkpoints, run_directory
    from paceline.drafter.spec import DrafterSpec
    from paceline.export.card import Origin

    if not run_directory.is_run_directory(source) and (source / "config.json").is_file():
        return _folder_source(source, step, target)
    settings = run_directory.read_run_settings(source)
    values, state, at = checkpoints.load_drafter(source, step)
    facts = run_directory.read_run_facts(source)
    origin = Origin(
        step=at,
        total_steps=facts.get("total_steps"),
        target=facts.get("target", {}),
        target_fingerprint=facts.get("target_fingerprint"),
        data_fingerprint=facts.get("data_fingerprint"),
        settings=settings.model_dump(mode="json"),
        data=_data_report(Path(settings.data.store) if settings.data.store else source / "store"),
        evaluations=[entry for entry in run_directory.read_evaluations(source) if entry["step"] <= at],
        versions=facts.get("versions", {}),
    )
    return Source(
        DrafterSpec.from_dict(values),
        state,
        target or settings.target.path,
        settings.target.trust_remote_code,
        origin,
        settings.target.adapter,
        settings.target.quantization,
    )


def _folder_source(folder: Path, step: int | None, target: str | None) -> Source:
    from paceline.export.card import Origin
    from paceline.export.folder import read_note
    from paceline.export.formats import read_drafter

    if target is None or step is not None:
        raise ConfigError(
            "--target: give the target of the drafter folder" if target is None else "--step: only runs have steps"
        )
    spec, state = read_drafter(folder)
    note = read_note(folder)
    of_target = note.get("target", {})
    origin = Origin(
        step=note.get("step"),
        target=of_target.get("identity", {}),
        target_fingerprint=of_target.get("fingerprint"),
        data_fingerprint=note.get("data_fingerprint"),
        max_trained_length=note.get("trained_length"),
    )
    return Source(spec, state, target, False, origin)


def _data_report(checkpoints: Path) -> dict[str, Any]:
    manifest = checkpoints / "manifest.json"
    return json.loads(manifest.read_text(encoding="utf-8")).get("report", {}) if manifest.is_file() else {}


def export(source: Source, out: Path, *, format: Format, dtype: str, check: bool, golden: Golden) -> dict[str, Any]:
    """Write the folder with card, note and golden tensors, and verify it.

    Returns:
        What was written and compared, as plain values.

    Raises:
        PacelineError: one line for each error; an older folder stays as it was.
    """
    import paceline
    from paceline.export.card import render_card, serving_commands
    from paceline.export.compatibility import check_target
    from paceline.export.folder import NOTE
    from paceline.export.golden import write_golden
    from paceline.export.speculators import write_speculators
    from paceline.export.weights import content_hash
    from paceline.export.zlab import write_zlab
    from paceline.target_model.facts import describe_target

    spec, origin = source.spec, source.origin
    facts = describe_target(source.target_settings)
    check_target("drafter", spec, facts, origin.target)
    inputs = _golden_inputs(source, golden)
    note: dict[str, Any] = {"folder": str(out), "format": format, "dtype": dtype, "step": origin.step}

    def extras(aside: Path, stored: Mapping[str, Tensor]) -> None:
        """Card, golden tensors and note, beside the tensors; then the folder is verified."""
        note["content_hash"] = content_hash(stored)
        card = render_card(
            spec,
            folder=str(out),
            format=format,
            dtype=dtype,
            content_hash=note["content_hash"],
            target=source.target,
            facts=facts,
            origin=origin,
        )
        (aside / "README.md").write_text(card, encoding="utf-8")
        if inputs is not None:
            write_golden(aside, spec, stored, inputs)
        text = json.dumps(_note(note, source, facts, paceline.__version__), indent=2)
        (aside / NOTE).write_text(text + "\n", encoding="utf-8")
        if check:
            note["verified"] = asdict(_verified(aside, out, source, facts))

    writers = {"zlab": write_zlab, "speculators": write_speculators}
    writers[format](out, spec, source.state, facts, dtype, extras=extras)
    return {**note, "commands": serving_commands(spec, format, str(out), source.target)}


def _verified(aside: Path, out: Path, source: Source, facts: TargetFacts) -> Verification:
    """Verify the folder before it takes its name, so that a wrong one never does."""
    from paceline.errors import ExportError
    from paceline.export.verify import verify

    try:
        return verify(aside, source.spec, source.state, facts)
    except ExportError as error:
        raise ExportError(*(line.replace(str(aside), str(out)) for line in error.errors)) from error


def _note(note: Mapping[str, Any], source: Source, facts: TargetFacts, version: str) -> dict[str, Any]:
    return {
        **{key: value for key, value in note.items() if key != "folder"},
        "paceline": version,
        "target": {
            "path": source.target,
            "architecture": facts.architecture,
            "fingerprint": facts.fingerprint,
            "identity": dict(facts.identity),
        },
        "data_fingerprint": source.origin.data_fingerprint,
        "trained_length": source.origin.trained_length,
        "drafter": source.spec.to_dict(),
    }


def _golden_inputs(source: Source, golden: Golden) -> GoldenInputs | None:
    if golden == "none":
        return None
    import numpy as np

    from paceline.export.golden import golden_ids, target_inputs
    from paceline.target_model.load import load_target
    from paceline.target_model.shared_weights import load_shared_weights
    from paceline.types import HostBatch, PlannedBatch

    spec = source.spec
    if golden == "random":
        weights = load_shared_weights(source.target_settings)
        return target_inputs(spec, weights.embedding, weights.head)
    target = load_target(source.target_settings, spec.taps)
    ids = golden_ids(spec)[:-1].numpy()[None]
    length, none = np.array([ids.shape[1]]), np.zeros(0, np.int64)
    planned = PlannedBatch(0, 0, 0, 0, 0, 0, np.zeros(1, np.int64), ids.shape[1], ids.size, ids.size, 0)
    host = HostBatch(planned, ids, np.ones_like(ids, dtype=bool), length, none, np.zeros(1, np.int64))
    return target_inputs(spec, target.embedding, target.head, target.features(host).features)


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
    if "pushed" in result:
        command.stdout.print(f"\npushed: {result['pushed']}", markup=False)
