"""The model card of a drafter folder: what it was made for, from what, how good it is, and how to serve it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.drafter.spec import DrafterSpec
    from paceline.types import TargetFacts

HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
"""A target that the hub knows, if no folder has that name."""
RECIPE = (
    *("objective", "optimizer", "plan"),
    *(
        "train.epochs",
        "train.max_steps",
        "drafter.num_anchors",
        "drafter.dtype",
        "target.dtype",
        "target.adapter",
        "target.quantization",
        "data.max_length",
        "seed",
    ),
)
"""Settings that a card shows, sections whole."""


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
    *,
    folder: str,
    format: str,
    dtype: str,
    content_hash: str,
    target: str,
    facts: TargetFacts | None = None,
    origin: Origin | None = None,
) -> str:
    """The card as Markdown with front matter.

    Args:
        spec: the drafter.
        folder: where it lies, as the commands name it.
        format: ``zlab`` or ``speculators``.
        dtype: of the tensors.
        content_hash: of the tensors.
        target: path or hub name of the target, as the commands name it.
        facts: of the target.
        origin: of the drafter.
    """
    origin = origin or Origin()
    sections = [
        _front(target),
        f"# DFlash drafter for {target}\n\nA block-diffusion drafter for speculative decoding: one forward pass drafts "
        f"{spec.num_drafts} tokens, which the target verifies in one pass. Its embedding and head are the target's.",
        "## Target\n\n" + _table(list(_target_rows(spec, target, facts, origin))),
        "## Drafter\n\n" + _table(list(_drafter_rows(spec, format, dtype, content_hash))),
    ]
    if rows := list(_recipe_rows(origin)):
        sections.append("## Training\n\n" + _table(rows))
    if rows := list(_data_rows(origin)):
        sections.append("## Data\n\n" + _table(rows))
    if table := acceptance_table(origin.evaluations):
        sections.append(
            "## Acceptance\n\nτ is the number of tokens per target pass, the target's own included, in a real decode "
            "loop on held-out prompts.\n\n" + table
        )
    sections.append("## Serving\n\n" + "\n\n".join(_serving(spec, format, folder, target, origin)))
    sections.append(_checking(spec))
    return "\n\n".join(sections) + "\n"


def _front(target: str) -> str:
    base = [f"base_model: {target}"] if HUB_NAME.match(target) and not Path(target).exists() else []
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [dflash, speculative-decoding]"]
    return "\n".join(["---", *lines, *base, "---"])


def _table(rows: Sequence[tuple[str, Any]]) -> str:
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


def _target_rows(
    spec: DrafterSpec, target: str, facts: TargetFacts | None, origin: Origin
) -> Iterator[tuple[str, Any]]:
    yield "path", target
    if facts is not None:
        yield "architecture", facts.architecture
    if fingerprint := origin.target_fingerprint or (facts.fingerprint if facts else None):
        yield "fingerprint (configuration, weights, tokenizer)", f"`{fingerprint}`"
    yield "layers, hidden size, vocabulary", [spec.num_target_layers, spec.hidden_size, spec.vocab_size]
    yield "tapped layers", list(spec.taps)
    yield "meaning of a tap", "id i is the output of 0-based decoder layer i"


def _drafter_rows(spec: DrafterSpec, format: str, dtype: str, content_hash: str) -> Iterator[tuple[str, Any]]:
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
    said = (
        "slot k drafts the token at anchor + 1 + k"
        if spec.sample_from_anchor
        else "slot k drafts the token at anchor + k"
    )
    yield "label convention", f"{said} (sample_from_anchor {str(spec.sample_from_anchor).lower()})"
    yield "mask token id", spec.mask_token_id
    yield "MLP width", spec.intermediate_size
    yield "heads, key/value heads, head size", [spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim]
    yield "rotary base", f"{spec.rope_theta:.0f}, over the whole head"


def _recipe_rows(origin: Origin) -> Iterator[tuple[str, Any]]:
    if origin.step is not None:
        yield "optimizer steps", f"{origin.step}{f' of {origin.total_steps}' if origin.total_steps else ''}"
    for name in RECIPE:
        value: Any = origin.settings
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping):
            yield from ((f"`{name}.{key}`", inner) for key, inner in value.items() if inner not in (None, {}, []))
        elif value is not None:
            yield f"`{name}`", value
    if origin.versions:
        yield "versions", [f"{name} {version}" for name, version in origin.versions.items() if name != "platform"]


def _data_rows(origin: Origin) -> Iterator[tuple[str, Any]]:
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


def serving_commands(spec: DrafterSpec, format: str, folder: str, target: str) -> dict[str, str]:
    """Engine → the command line that serves target and drafter with it."""
    model, draft = shlex.quote(target), shlex.quote(folder)
    speculative = json.dumps({"method": "dflash", "model": folder, "num_speculative_tokens": spec.num_drafts})
    commands = {"vLLM": f"vllm serve {model} \\\n    --speculative-config {shlex.quote(speculative)}"}
    if format == "zlab":
        sglang = (
            f"python -m sglang.launch_server \\\n    --model-path {model} \\\n    --speculative-algorithm DFLASH \\\n"
            f"    --speculative-draft-model-path {draft}"
        )
        zlab = f'dflash generate transformers --model {model} --draft {draft} "Why is the sky blue?"'
        commands = {"SGLang": sglang, **commands, "z-lab dflash": zlab}
    return commands


def serving_notes(spec: DrafterSpec, format: str) -> list[str]:
    """What to know before serving this drafter, one sentence each."""
    notes = []
    kinds = set(zip(spec.layers, spec.causal, strict=True))
    if ("sliding", False) in kinds:
        notes.append(
            "Its sliding layers are bidirectional: SGLang reads them as causal, serve it with z-lab dflash or with a "
            "vLLM that reads " + ("`is_causal`." if format == "zlab" else "`sliding_window_non_causal`.")
        )
    if ("full", True) in kinds:
        notes.append("Its full layers are causal: only engines that read `is_causal` compute them so.")
    if spec.sample_from_anchor:
        notes.append("It drafts from the anchor: check that your engine reads `sample_from_anchor`; not all do.")
    if "sliding" in spec.layers:
        notes.append(
            f"An engine that drops the window of {spec.sliding_window} tokens accepts as well on short contexts and "
            "fails on long ones: compare the golden tensors."
        )
    return notes


def _serving(spec: DrafterSpec, format: str, folder: str, target: str, origin: Origin) -> Iterator[str]:
    for engine, command in serving_commands(spec, format, folder, target).items():
        yield f"{engine}:\n\n```bash\n{command}\n```"
    yield from serving_notes(spec, format)
    if origin.trained_length is not None:
        yield (
            f"It was trained on samples of at most {origin.trained_length} tokens (engines may ask for positions up to "
            f"{spec.max_position_embeddings}): measure acceptance before relying on it on longer contexts."
        )


def _checking(spec: DrafterSpec) -> str:
    return f"""## Checking an engine

Where there is a folder `golden/`, its `golden.safetensors` holds a context (`ids`, `features`), a block (`block_ids`,
`block_embeddings`) and what the drafter makes of it in float32 (`hidden`, `logits`). Context token t stands at position
t with `features[t]`; slot k of the block at the context's length + k. Drafts start at slot {spec.first_draft_slot}. An
engine in float32 should agree to 1e-4, one in bfloat16 to a few hundredths."""
