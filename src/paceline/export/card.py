"""The model card of a drafter folder: what it was made for, from what, how good it is, and how to serve it.

The text is in `card.md.j2`; here are its rows. Nothing of the machine that wrote it is shown: folders of the user
appear by their last part, commands name placeholders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from paceline.checkpoint.best import BestCheckpoint
from paceline.export.engines import serving_commands, serving_notes

if TYPE_CHECKING:
    from paceline.drafter.spec import DrafterSpec
    from paceline.export.engines import ServedTarget
    from paceline.types import TargetFacts

Row = tuple[str, Any]
SETTINGS = (
    *("objective.name", "objective.terms", "objective.terms_end", "objective.gamma", "objective.gamma_end"),
    *("objective.alpha", "objective.weighting", "optimizer.name", "optimizer.lr", "optimizer.weight_decay"),
    *("optimizer.beta1", "optimizer.beta2", "optimizer.momentum", "optimizer.schedule", "optimizer.warmup"),
    *("optimizer.final_lr", "optimizer.clip_norm", "plan.strategy", "plan.schedule", "plan.token_budget"),
    *("plan.max_samples", "plan.accumulate", "plan.weights", "plan.jitter", "plan.sort_window", "plan.mixed_span"),
    *("plan.grid_class_batches", "train.epochs", "train.max_steps", "drafter.num_anchors", "drafter.noise.kind"),
    *("drafter.noise.ratio", "drafter.dtype", "target.dtype", "target.quantization", "data.max_length", "seed"),
)
"""Settings that a card shows where they played a part."""
PART_ONLY_WITH = {
    "objective.alpha": ("objective.name", "dpace"),
    "objective.gamma": ("objective.name", "decay"),
    "optimizer.momentum": ("optimizer.name", "muon"),
    "plan.jitter": ("plan.strategy", "jittered"),
    "plan.sort_window": ("plan.strategy", "windowed"),
    "plan.mixed_span": ("plan.strategy", "mixed"),
    "plan.grid_class_batches": ("plan.strategy", "grid"),
    "drafter.noise.ratio": ("drafter.noise.kind", "gaussian", "uniform"),
}
"""Setting → the other setting, and its values with which it plays a part."""
NEUTRAL = {"drafter.noise.kind": "none", "target.quantization": "stored"}
"""Values that mean that nothing was done."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a drafter comes from; what is unknown stays empty and out of the card.

    Attributes:
        step, total_steps: optimizer steps taken and planned.
        target: identity of the target that it was trained on, part by part.
        target_fingerprint, data_fingerprint: of what it was trained on.
        settings: resolved settings of the run, nested.
        data: the report of its data.
        evaluations: decoding of held-out prompts, oldest first, each with its ``step``.
        versions: of the packages that trained it.
        max_trained_length: longest training sample in tokens, where neither data nor settings are known.
        best_checkpoint: of the checkpoints that the run had kept when this was written.
    """

    step: int | None = None
    total_steps: int | None = None
    target: Mapping[str, str] = field(default_factory=dict)
    target_fingerprint: str | None = None
    data_fingerprint: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    evaluations: Sequence[Mapping[str, Any]] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    max_trained_length: int | None = None
    best_checkpoint: BestCheckpoint | None = None

    @property
    def trained_length(self) -> int | None:
        """Longest training sample in tokens: from the data's report, else the limit in the settings."""
        percentiles = self.data.get("length_percentiles")
        if isinstance(percentiles, Mapping) and percentiles:
            return max(percentiles.values())
        limits = self.settings.get("data")
        return limits.get("max_length") if isinstance(limits, Mapping) else self.max_trained_length


def render_card(
    spec: DrafterSpec,
    target: ServedTarget,
    facts: TargetFacts,
    origin: Origin,
    *,
    format: str,
    dtype: str,
    content_hash: str,
    folder: str | None = None,
    picture: str | None = None,
) -> str:
    """The card as Markdown with front matter.

    Args:
        spec: the drafter.
        target: as engines name it.
        facts: of the target.
        origin: of the drafter.
        format: ``zlab`` or ``speculators``.
        dtype: of the tensors.
        content_hash: of the tensors.
        folder: how the commands name the folder; None for a placeholder.
        picture: file name of the picture of `origin.evaluations`, where there is one.
    """
    model = "MERGED_TARGET" if target.adapter is not None else target.hub_name or "TARGET"
    folder = folder or "DRAFTER"
    return _template().render(
        front=_front(target),
        spec=spec,
        target=target,
        own_embedding=format == "speculators" and target.embedding_scale != 1,
        target_rows=list(_target_rows(spec, target, facts, origin)),
        drafter_rows=list(_drafter_rows(spec, format, dtype, content_hash)),
        training_rows=list(_training_rows(origin)),
        data_rows=list(_data_rows(origin)),
        acceptance=acceptance_table(origin.evaluations),
        measured=_measured(origin.evaluations),
        picture=picture,
        folder=folder,
        model=model,
        commands=serving_commands(spec, format, folder, target, model=model),
        notes=serving_notes(spec, format, target),
        trained_length=origin.trained_length,
    )


@lru_cache(maxsize=1)
def _template() -> Template:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, autoescape=False)
    environment.filters["table"] = _table
    return environment.get_template("card.md.j2")


def _front(target: ServedTarget) -> str:
    """Metadata that the hub reads: the base model where the hub knows it, its license where its folder says."""
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["dflash", "speculative-decoding"],
        base_model=target.hub_name,
        license=target_license(target.path),
    )
    return f"---\n{data.to_yaml()}\n---"


def target_license(path: str) -> str | None:
    """The license in the card of a target's folder; None where there is no card, or it says none."""
    card = Path(path).expanduser() / "README.md"
    if not card.is_file():
        return None
    try:
        found = ModelCard(card.read_text(encoding="utf-8"), ignore_metadata_errors=True).data.get("license")
    except ValueError:  # a front matter that is no YAML mapping
        return None
    return found if isinstance(found, str) else None


def _table(rows: Sequence[Row]) -> str:
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_cell, value)) or "none"
    return "unset" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _target_rows(spec: DrafterSpec, target: ServedTarget, facts: TargetFacts, origin: Origin) -> Iterator[Row]:
    yield "model", target.changed or target.name
    yield "architecture", facts.architecture
    fingerprint = origin.target_fingerprint or facts.fingerprint
    yield "fingerprint (configuration, weights, tokenizer)", f"`{fingerprint}`"
    yield "layers, hidden size, vocabulary", [spec.num_target_layers, spec.hidden_size, spec.vocab_size]
    yield "tapped layers", list(spec.taps)
    yield "meaning of a tap", "id i is the output of 0-based decoder layer i"


def _drafter_rows(spec: DrafterSpec, format: str, dtype: str, content_hash: str) -> Iterator[Row]:
    yield "format", f"{format}, {dtype}"
    yield "content hash of the tensors", f"`{content_hash}`"
    yield (
        "draft layers",
        [
            f"{kind}{f' {spec.sliding_window}' if kind == 'sliding' else ''} {'causal' if causal else 'bidirectional'}"
            for kind, causal in zip(spec.layers, spec.causal, strict=True)
        ],
    )
    yield "block size", spec.block_size
    yield "drafts a block", spec.num_drafts
    token = "anchor + 1 + k" if spec.sample_from_anchor else "anchor + k"
    flag = str(spec.sample_from_anchor).lower()
    yield "label convention", f"slot k drafts the token at {token} (sample_from_anchor {flag})"
    yield "mask token id", spec.mask_token_id
    yield "MLP width", spec.intermediate_size
    yield "heads, key/value heads, head size", [spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim]
    yield "rotary base", f"{spec.rope_theta:.0f}, over the whole head"


def _setting(settings: Mapping[str, Any], name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _training_rows(origin: Origin) -> Iterator[Row]:
    if origin.step is not None:
        yield "optimizer steps", f"{origin.step}{f' of {origin.total_steps}' if origin.total_steps else ''}"
    if origin.best_checkpoint is not None:
        this = "this one, " if origin.best_checkpoint.step == origin.step else ""
        yield "best checkpoint of the run", f"{this}{origin.best_checkpoint}"
    for name in SETTINGS:
        value = _setting(origin.settings, name)
        if value in (None, {}, []) or value == NEUTRAL.get(name):
            continue
        other, *values = PART_ONLY_WITH.get(name, (None,))
        if other is None or _setting(origin.settings, other) in values:
            yield f"`{name}`", value
    if origin.versions:
        yield "versions", [f"{name} {version}" for name, version in origin.versions.items() if name != "platform"]


def _data_rows(origin: Origin) -> Iterator[Row]:
    if origin.data_fingerprint:
        yield "fingerprint", f"`{origin.data_fingerprint}`"
    for key in ("samples", "tokens", "supervised_tokens", "eligible_anchors"):
        if key in origin.data:
            yield key.replace("_", " "), origin.data[key]
    percentiles = origin.data.get("length_percentiles")
    if isinstance(percentiles, Mapping) and percentiles:
        yield "length percentiles (tokens)", [f"{name}: {value}" for name, value in percentiles.items()]
    tags = origin.data.get("tags")
    if isinstance(tags, Mapping) and tags:
        yield "samples by tag", [f"{name}: {totals['samples']}" for name, totals in tags.items()]
    set_aside = origin.data.get("set_aside")
    if isinstance(set_aside, Mapping) and set_aside:
        yield "left out", [f"{name}: {count['count']}" for name, count in set_aside.items()]


def _measured(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Under which conditions the newest τ was measured; empty where that is not known."""
    how = evaluations[-1].get("conditions") if evaluations else None
    if not isinstance(how, Mapping):
        return ""
    choice = "greedy" if not how.get("temperature") else f"temperature {how['temperature']:g}"
    files = ", ".join(map(str, how.get("files", ()))) or "its held-out prompts"
    return (
        f"At step {evaluations[-1]['step']}: {evaluations[-1].get('num_prompts', how.get('num_prompts'))} prompts of "
        f"{files}, answers of at most {how.get('max_new_tokens')} tokens, {choice}, in "
        f"{evaluations[-1].get('dtype', how.get('dtype'))} on {how.get('device')}."
    )


def acceptance_table(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Markdown tables of decoding held-out prompts: τ by step; then the newest step's by tag and by context length.

    Every number whose name says tau becomes a column, and the number of prompts; empty without any. So does the
    temperature, where answers were sampled.
    """
    columns: dict[str, None] = {}
    for entry in evaluations:
        named = (key for key, value in entry.items() if type(value) in (int, float) and key != "step")
        columns |= dict.fromkeys(key for key in named if "tau" in key or key in ("prompts", "num_prompts"))
    if not columns:
        return ""
    if any(entry.get("temperature") for entry in evaluations):
        columns["temperature"] = None
    head = ["step", *(name.replace("_", " ").replace("tau", "τ") for name in columns)]
    rows = [[entry["step"], *(entry.get(name, "") for name in columns)] for entry in evaluations]
    tables = [_columns(head, rows)]
    for key, title in (("by_tag", "tag"), ("by_context", "context tokens")):
        if groups := evaluations[-1].get(key):
            rows = [[name, group["tau"], group["passes"]] for name, group in groups.items()]
            tables.append(_columns([title, "τ", "target passes"], rows))
    return "\n\n".join(tables)


def _columns(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(_number, row)) + " |" for row in rows)])


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
