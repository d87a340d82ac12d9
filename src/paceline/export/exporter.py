"""One way to write a drafter folder: from a run, from a checkpoint while it trains, from another folder.

Whatever it comes from, the folder gets its model card and its note, is read back and compared, and appears whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.checkpoint import run_directory
from paceline.checkpoint.best import best_checkpoint
from paceline.checkpoint.checkpoints import load_drafter
from paceline.config import TargetConfig, settings_copy
from paceline.drafter.spec import DrafterSpec
from paceline.errors import ConfigError, ExportError
from paceline.export.card import Origin, render_card
from paceline.export.card_plot import NAME as PICTURE
from paceline.export.card_plot import draw_acceptance
from paceline.export.compatibility import check_target
from paceline.export.engines import ServedTarget, serving_commands, serving_notes
from paceline.export.folder import NOTE, read_note
from paceline.export.formats import read_drafter
from paceline.export.golden import GoldenInputs, golden_ids, target_inputs, write_golden
from paceline.export.speculators import write_speculators
from paceline.export.verify import verify
from paceline.export.weights import content_hash
from paceline.export.zlab import write_zlab
from paceline.target_model.facts import describe_target
from paceline.target_model.load import load_target
from paceline.target_model.shared_weights import load_shared_weights
from paceline.text import first_line, parsed_json
from paceline.types import TargetFacts
from paceline.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

Format = Literal["zlab", "speculators"]
Golden = Literal["random", "target", "none"]


@dataclass(frozen=True, slots=True)
class TrainedDrafter:
    """A drafter before it is exported.

    Attributes:
        spec, state: the drafter.
        target: settings of its target.
        origin: for the model card.
    """

    spec: DrafterSpec
    state: Mapping[str, Tensor]
    target: TargetConfig
    origin: Origin


@dataclass(frozen=True, slots=True)
class TargetInput:
    """What the target's first layer gets for a token.

    Attributes:
        scale: it is this times the stored embedding; None where it is no multiple.
        table: of all tokens, [V, D]; None where it is the stored embedding.
    """

    scale: float | None = 1.0
    table: Tensor | None = None


def target_input(target: TargetConfig) -> TargetInput:
    """Read a target's embedding, in the type that the drafter was trained with.

    Raises:
        TargetError: no such target, or an embedding that no drafter can share.
    """
    weights = load_shared_weights(target, target.dtype)
    return TargetInput() if weights.embedding_scale == 1 else TargetInput(weights.embedding_scale, weights.embedding)


def drafter_of_run(run_dir: Path, step: int | None = None, target: str | None = None) -> TrainedDrafter:
    """The drafter of a run's checkpoint.

    Args:
        run_dir: of the run.
        step: which checkpoint; None is the newest.
        target: path or hub name that the target has now; None is the run's.

    Raises:
        PacelineError: no run, or no such checkpoint.
    """
    settings = run_directory.read_run_settings(run_dir)
    values, state, at = load_drafter(run_dir, step)
    of_run = settings.target if target is None else settings.target.model_copy(update={"path": target})
    return TrainedDrafter(DrafterSpec.from_dict(values), state, of_run, origin_of_run(run_dir, at))


def origin_of_run(run_dir: Path, step: int) -> Origin:
    """What a run directory knows of its drafter at a step."""
    settings = run_directory.read_run_settings(run_dir)
    facts = run_directory.read_run_facts(run_dir)
    return Origin(
        step=step,
        total_steps=facts.get("total_steps"),
        target=facts.get("target", {}),
        target_fingerprint=facts.get("target_fingerprint"),
        data_fingerprint=facts.get("data_fingerprint"),
        settings=settings_copy(settings),
        data=_data_report(Path(settings.store_path)),
        evaluations=[entry for entry in run_directory.read_evaluations(run_dir) if entry["step"] <= step],
        versions=facts.get("versions", {}),
        best_checkpoint=best_checkpoint(run_dir),
    )


def _data_report(store: Path) -> dict[str, Any]:
    """The report in the store's manifest; empty where the store is gone.

    Raises:
        ExportError: the manifest is damaged.
    """
    manifest = store / "manifest.json"
    if not manifest.is_file():
        return {}
    try:
        found = parsed_json(manifest.read_text(encoding="utf-8"))
        report = found.get("report", {}) if isinstance(found, dict) else None
        if not isinstance(report, dict):
            raise ValueError("it holds no report")
    except (OSError, ValueError) as error:
        raise ExportError(
            f"{manifest}: damaged ({first_line(error)}); prepare the data again, or move the store away to export "
            "without its figures"
        ) from error
    return report


def drafter_of_folder(folder: Path, target: str | None, adapter: str | None = None) -> TrainedDrafter:
    """The drafter of a folder in either format, for its target.

    Args:
        folder: of the drafter.
        target: path or hub name.
        adapter: folder of the adapter that was merged into it, where the folder's note names one.

    Raises:
        ConfigError: no target is given, or no adapter where one is needed, or one where none is.
        ExportError: no drafter folder.
    """
    if target is None:
        raise ConfigError("--target: give the target of the drafter folder")
    spec, state = read_drafter(folder)
    note = read_note(folder)
    of_target = note.get("target", {})
    merged = of_target.get("adapter")
    if merged is not None and adapter is None:
        raise ConfigError(f"--adapter: {folder} was trained with the adapter {merged}; give the adapter's folder")
    if merged is None and adapter is not None:
        raise ConfigError(f"--adapter {adapter}: {folder} was trained without one; leave it out")
    origin = Origin(
        step=note.get("step"),
        target=of_target.get("identity", {}),
        target_fingerprint=of_target.get("fingerprint"),
        data_fingerprint=note.get("data_fingerprint"),
        max_trained_length=note.get("trained_length"),
    )
    settings = TargetConfig(
        path=target,
        dtype="float32",
        adapter=adapter,
        quantization=of_target.get("quantization", "stored"),
    )
    return TrainedDrafter(spec, state, settings, origin)


def export_drafter(
    drafter: TrainedDrafter,
    out: Path,
    *,
    format: Format = "zlab",
    dtype: str = "bfloat16",
    check: bool = True,
    golden: Golden = "random",
    given: TargetInput | None = None,
    repository: str | None = None,
) -> dict[str, Any]:
    """Write the folder with card, note and golden tensors, and verify it.

    Args:
        drafter: what is exported.
        out: the folder; an older drafter folder there is replaced.
        format, dtype: of the folder.
        check: reload the folder and compare it with the drafter before it takes its name.
        golden: golden tensors from random features, from the target's own (loads it whole), or none.
        given: what `target_input` gave for the target; None reads it.
        repository: hub name under which the folder will be found, for the card.

    Returns:
        What was written and compared, as plain values.

    Raises:
        PacelineError: one line for each error; an older folder stays as it was.
    """
    spec, origin = drafter.spec, drafter.origin
    facts = describe_target(drafter.target)
    check_target("drafter", spec, facts, origin.target)
    given = target_input(drafter.target) if given is None else given
    inputs = _golden_inputs(drafter, golden)
    served = ServedTarget.of(drafter.target, facts.model_type, given.scale)
    note: dict[str, Any] = {"format": format, "dtype": dtype, "step": origin.step}

    def extras(aside: Path, stored: Mapping[str, Tensor]) -> None:
        """Card, golden tensors and note, beside the tensors; then the folder is verified."""
        note["content_hash"] = content_hash(stored)
        drawn = draw_acceptance(origin.evaluations, aside / PICTURE)
        card = render_card(
            spec,
            served,
            facts,
            origin,
            format=format,
            dtype=dtype,
            content_hash=note["content_hash"],
            folder=repository,
            picture=PICTURE if drawn else None,
        )
        (aside / "README.md").write_text(card, encoding="utf-8")
        if inputs is not None:
            write_golden(aside, spec, stored, inputs)
        (aside / NOTE).write_text(json.dumps(_note(note, drafter, facts, served), indent=2) + "\n", encoding="utf-8")
        if check:
            note["verified"] = _verified(aside, out, drafter, facts, given)

    if format == "zlab":
        write_zlab(out, spec, drafter.state, facts, dtype, embedding_scale=given.scale, extras=extras)
    else:
        write_speculators(out, spec, drafter.state, facts, dtype, embedding=given.table, extras=extras)
    commands = serving_commands(spec, format, str(out), served)
    return {"folder": str(out), **note, "commands": commands, "notes": serving_notes(spec, format, served)}


def _verified(
    aside: Path, out: Path, drafter: TrainedDrafter, facts: TargetFacts, given: TargetInput
) -> dict[str, Any]:
    """Verify the folder before it takes its name, so that a wrong one never does."""
    try:
        return asdict(verify(aside, drafter.spec, drafter.state, facts, given.scale, given.table))
    except ExportError as error:
        raise ExportError(*(line.replace(str(aside), str(out)) for line in error.errors)) from error


def _note(note: Mapping[str, Any], drafter: TrainedDrafter, facts: TargetFacts, served: ServedTarget) -> dict[str, Any]:
    """What the folder keeps of its origin; no path of this machine."""
    how = {"adapter": served.adapter and Path(served.adapter).name, "quantization": served.quantization}
    return {
        **note,
        "paceline": __version__,
        "target": {
            "name": served.name,
            "architecture": facts.architecture,
            "fingerprint": facts.fingerprint,
            "identity": dict(facts.identity),
            "embedding_scale": served.embedding_scale,
            **{key: value for key, value in how.items() if value not in (None, "stored")},
        },
        "data_fingerprint": drafter.origin.data_fingerprint,
        "trained_length": drafter.origin.trained_length,
        "drafter": drafter.spec.to_dict(),
    }


def _golden_inputs(drafter: TrainedDrafter, golden: Golden) -> GoldenInputs | None:
    spec, exact = drafter.spec, drafter.target.model_copy(update={"dtype": "float32"})
    if golden == "none":
        return None
    if golden == "random":
        weights = load_shared_weights(exact)
        return target_inputs(spec, weights.embedding, weights.head)
    target = load_target(exact, spec.taps)
    ids = golden_ids(spec)[None, :-1]
    features, _ = target.tap_rows(ids, [ids.shape[1]])
    return target_inputs(spec, target.embedding, target.head, features)
