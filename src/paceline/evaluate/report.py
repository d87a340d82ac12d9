"""What an evaluation found, as plain values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from rich.markup import escape

from paceline.evaluate.memory import Memory
from paceline.evaluate.metrics import GroupTau, Lossless, SlotRate
from paceline.text import size


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of the report.

    ``accepted`` lists accepted drafts per target pass; ``pieces`` is the answer's text token by token (the ids as words
    where there is no tokenizer): the target's own first token, then each pass's accepted drafts and its own token.
    """

    id: str
    tags: list[str]
    prompt_tokens: int
    new_tokens: int
    finish: str
    tau: float | None
    accepted: list[int]
    pieces: list[str]


@dataclass(frozen=True, slots=True)
class TreeFigures:
    """What decoding the same prompts with draft trees found; names as in `EvaluationReport`.

    Attributes:
        budget, chain_seed, temperature: of the trees.
        below_chain: whether they came to fewer tokens per target pass than the chain.
    """

    budget: int
    chain_seed: bool
    temperature: float
    passes: int
    new_tokens: int
    tau_micro: float
    tau_macro: float
    below_chain: bool
    histogram: list[int]
    by_tag: dict[str, GroupTau]
    by_context: dict[str, GroupTau]
    lossless: Lossless | None
    seconds_per_token: float | None


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Everything that an evaluation found; `to_json` gives plain values.

    Attributes:
        num_prompts, passes, new_tokens: how much was decoded.
        tau_micro, tau_macro: tokens of the answers per target pass, over passes and over prompts (see `answers.Pass`).
        histogram: passes by accepted length, from 0.
        slots: acceptance per draft slot.
        by_tag, by_context: τ of groups of passes.
        lossless: comparison with plain greedy decoding; None when not asked for, or where answers are sampled.
        training_tau, loop_tau: τ of the same blocks by the training forward and by the decode loop, drafts inside the
            answers only; None when not asked for, or where drafts are drawn.
        training_agrees: whether they are within 2 % of each other.
        control_tau: τ of a few prompts without features; near 1 for a drafter that reads its context.
        control_suspicious: whether that τ is so high that the evaluation or the drafter must be doubted.
        seconds_per_token, plain_seconds_per_token: wall time, prompts' forward left out; the second is None with
            several prompts at once, since plain decoding takes them one by one.
        dtype: compute type.
        temperature: at which answers are sampled; 0 is greedy.
        tree_tau: `tau_micro` with draft trees; None without.
        tree: the rest of what was found with them.
        rows: the prompts.
        set_aside: one line about each prompt that is longer than the target's positions.
        memory: bytes that decoding holds and moves.
        conditions: all that makes the figures: prompts, limits, temperature, tree, compute type, device.
    """

    num_prompts: int
    passes: int
    new_tokens: int
    tau_micro: float
    tau_macro: float
    histogram: list[int]
    slots: list[SlotRate]
    by_tag: dict[str, GroupTau]
    by_context: dict[str, GroupTau]
    lossless: Lossless | None
    training_tau: float | None
    loop_tau: float | None
    training_agrees: bool | None
    control_tau: float | None
    control_suspicious: bool | None
    seconds_per_token: float | None
    plain_seconds_per_token: float | None
    dtype: str
    temperature: float
    tree_tau: float | None
    tree: TreeFigures | None
    rows: list[PromptRow]
    set_aside: list[str]
    memory: Memory
    conditions: dict[str, Any] = field(default_factory=dict)

    @property
    def errors(self) -> int:
        """Answers, with the chain and with trees, that differ from the target's own by more than rounding."""
        found = (self.lossless, self.tree.lossless if self.tree is not None else None)
        return sum(entry.errors for entry in found if entry is not None)

    def to_json(self) -> dict[str, Any]:
        """Nested plain values."""
        return dataclasses.asdict(self)


def table_rows(report: EvaluationReport) -> list[tuple[str, str]]:
    """What a table says of one report: name and text, in rich markup; names of tags are escaped."""
    rows: list[tuple[str, str]] = [
        ("τ, over target passes", f"{report.tau_micro:.3f}"),
        ("τ, over prompts", f"{report.tau_macro:.3f}"),
        ("prompts / target passes / tokens", f"{report.num_prompts} / {report.passes} / {report.new_tokens}"),
    ]
    rows += _tree_rows(report)
    if report.temperature:
        rows.append(("answers, compared with none", f"sampled at temperature {report.temperature:g}"))
    if report.lossless is not None:
        same = f"{report.lossless.equal} of {report.lossless.prompts}"
        rows.append((f"answers equal to the target's own ({report.dtype})", same))
    if report.tree is not None and report.tree.lossless is not None:
        same = f"{report.tree.lossless.equal} of {report.tree.lossless.prompts}"
        rows.append(("answers with trees equal to its own", same))
    if report.errors:
        rows.append(("[bold red]errors: differences beyond rounding[/]", str(report.errors)))
    if report.training_tau is not None:
        verdict = "" if report.training_agrees else " [bold red]differ by more than 2 %[/]"
        both = f"{report.training_tau:.3f} / {report.loop_tau:.3f}{verdict}"
        rows.append(("τ of the same blocks, training forward / decode loop", both))
    if report.control_tau is not None:
        verdict = " [bold red]suspicious[/]" if report.control_suspicious else ""
        rows.append(("τ without features (control, near 1)", f"{report.control_tau:.3f}{verdict}"))
    if report.seconds_per_token is not None:
        rows.append(("time per token", _speed(report.seconds_per_token, report.plain_seconds_per_token)))
    if report.tree is not None and report.tree.seconds_per_token is not None:
        speed = _speed(report.tree.seconds_per_token, report.plain_seconds_per_token)
        rows.append(("time per token with trees", speed))
    memory = report.memory
    rows.append(("weights, target + drafter", f"{size(memory.target_weights)} + {size(memory.drafter_weights)}"))
    cached = f"{size(memory.target_cache_per_token)} + {size(memory.drafter_cache_per_token)}"
    rows.append(("cache of a token, target + drafter", cached))
    rows.append(("features of a token", size(memory.features_per_token)))
    if report.set_aside:
        rows.append(("prompts set aside, too long for the target", str(len(report.set_aside))))
    rows += [(f"draft {rate.slot} accepted, given those before", _share(rate.conditional)) for rate in report.slots]
    # A tag of all prompts separates nothing.
    telling = {tag: entry for tag, entry in report.by_tag.items() if entry.passes != report.passes}
    rows += [(f"τ, tag {escape(tag)}", f"{entry.tau:.3f}") for tag, entry in telling.items()]
    rows += [(f"τ, context {name} tokens", f"{entry.tau:.3f}") for name, entry in report.by_context.items()]
    return rows


def _tree_rows(report: EvaluationReport) -> list[tuple[str, str]]:
    """τ with draft trees, with a mark where they do worse than the chain."""
    tree = report.tree
    if tree is None:
        return []
    verdict = " [bold red]below the chain[/]" if tree.below_chain else ""
    kind = ["chain first"] * tree.chain_seed + [f"temperature {tree.temperature:g}"] * (tree.temperature != 1)
    rows = [
        (f"τ with trees of {tree.budget} nodes", f"{tree.tau_micro:.3f}{verdict}"),
        ("τ with trees, over prompts", f"{tree.tau_macro:.3f}"),
        ("target passes / tokens with trees", f"{tree.passes} / {tree.new_tokens}"),
    ]
    return rows + ([("trees", ", ".join(kind))] if kind else [])


def _speed(seconds: float, plain: float | None) -> str:
    return f"{1e3 * seconds:.1f} ms" + (f" ({plain / seconds:.2f}x as fast as plain)" if plain else "")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
