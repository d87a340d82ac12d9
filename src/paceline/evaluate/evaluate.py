"""Evaluation of a drafter: real decoding of prompts, checked against plain decoding and the training forward.

Prompts are decoded with the chain of drafts and, where a budget is set, once more with draft trees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.config import EvaluateConfig
from paceline.decode.answers import Decoded, first_difference
from paceline.decode.batch_session import open_batch
from paceline.decode.batched import batch_decode
from paceline.decode.chain import speculative_decode
from paceline.decode.compatibility import check_pair, fitting
from paceline.decode.loop import plain_decode
from paceline.decode.sampling import Greedy, Sampled, TokenChooser
from paceline.decode.session import TargetSession
from paceline.decode.tree import tree_decode
from paceline.evaluate.memory import measure_memory
from paceline.evaluate.metrics import GroupTau, Lossless, by_context, group, histogram, macro_tau, slot_rates
from paceline.evaluate.parity import training_accepted
from paceline.evaluate.report import EvaluationReport, PromptRow, TreeFigures
from paceline.types import EvaluationPrompt

if TYPE_CHECKING:
    from paceline.drafter.network import Drafter
    from paceline.target_model.model import TargetModel

ROUNDING = 1e-4
"""Smallest logit gap that rounding never explains, below float64."""
AGREEMENT = 0.02
"""Relative difference between τ of the decode loop and of the training forward above which the report says so."""
CONTROL_PROMPTS = 4
"""Prompts that are decoded once more without features."""
CONTROL_TAU = 1.5
"""τ without features above this, and close to the real one, means that the drafter ignores its context."""


def check_way(target: TargetModel, settings: EvaluateConfig) -> None:
    """Refuses what a target cannot decode, before anything is decoded.

    Raises:
        TargetError: several prompts at once, or draft trees, on a target that cannot: one line with the reason.
    """
    if settings.batch_size > 1:
        open_batch(target)
    elif settings.tree_budget is not None:
        TargetSession(target).check_branches()


def evaluate(
    target: TargetModel,
    network: Drafter,
    prompts: Sequence[EvaluationPrompt],
    settings: EvaluateConfig,
    progress: Callable[[int, int], None] | None = None,
    check_lossless: bool = True,
    check_training: bool = True,
    pieces: Callable[[list[int]], list[str]] | None = None,
) -> EvaluationReport:
    """Decodes prompts with drafts and measures acceptance.

    Args:
        target: loaded in the compute type, with the drafter's taps.
        network: the drafter, on the target's device.
        prompts: what to answer: the first `settings.num_prompts`, without those that are too long for the target.
        settings: limits, and how tokens are chosen and drafts verified.
        progress: called with (prompts done, prompts) after each.
        check_lossless: also decode plainly and, in greedy decoding, compare.
        check_training: also run the training forward on the decoded answers and compare; in greedy decoding.
        pieces: the text of each token of an answer, for the report.

    Raises:
        DataError: no prompts, none that fits, or one that cannot be decoded.
        DrafterError: drafter and target do not fit each other.
        TargetError: see `check_way`.
    """
    check_pair(target, network.spec)
    check_way(target, settings)
    chosen, set_aside = fitting(target, prompts[: settings.num_prompts])
    found = _decode(target, network, chosen, settings, progress, check_lossless, check_training)
    answers = found.answers
    texts = [pieces(answer.ids) if pieces else [f" {token}" for token in answer.ids] for answer in answers]
    report = _report(target, network, chosen, found, settings, check_lossless and settings.temperature == 0, texts)
    return dataclasses.replace(report, set_aside=set_aside)


@dataclass(slots=True)
class _Found:
    """Answers of the prompts by each way of decoding; `expected` and `matched` as from `training_accepted`."""

    answers: list[Decoded] = dataclasses.field(default_factory=list)
    trees: list[Decoded] = dataclasses.field(default_factory=list)
    plain: list[Decoded] = dataclasses.field(default_factory=list)
    control: list[Decoded] = dataclasses.field(default_factory=list)
    expected: list[int] = dataclasses.field(default_factory=list)
    matched: list[int] = dataclasses.field(default_factory=list)


def choice_of(settings: EvaluateConfig, place: int) -> TokenChooser:
    """How tokens of the prompt at a place are chosen; every way of decoding it draws from the same beginning."""
    return Sampled(settings.temperature, settings.seed + place) if settings.temperature else Greedy()


def tree_of(settings: EvaluateConfig) -> dict[str, Any]:
    """Arguments of `tree_decode` that say how trees are built."""
    return {
        "budget": settings.tree_budget,
        "temperature": settings.tree_temperature,
        "chain": settings.tree_chain_seed,
    }


def _decode(
    target: TargetModel,
    network: Drafter,
    prompts: Sequence[EvaluationPrompt],
    settings: EvaluateConfig,
    progress: Callable[[int, int], None] | None,
    check_lossless: bool,
    check_training: bool,
) -> _Found:
    limits = {"max_new_tokens": settings.max_new_tokens, "stop_ids": target.facts.eos_token_ids}
    found = _Found()
    if settings.batch_size > 1:
        ids, choices = [prompt.ids for prompt in prompts], [choice_of(settings, at) for at in range(len(prompts))]
        found.answers = batch_decode(target, network, ids, batch_size=settings.batch_size, choices=choices, **limits)
    for place, prompt in enumerate(prompts):
        if settings.batch_size == 1:
            choice = choice_of(settings, place)
            found.answers.append(speculative_decode(target, network, prompt.ids, choice=choice, **limits))
        if settings.tree_budget is not None:
            choice = choice_of(settings, place)
            found.trees.append(tree_decode(target, network, prompt.ids, choice=choice, **tree_of(settings), **limits))
        if check_lossless:
            found.plain.append(plain_decode(target, prompt.ids, choice=choice_of(settings, place), **limits))
        answer = found.answers[place]
        if check_training and answer.passes and settings.temperature == 0:
            ours, theirs = training_accepted(target, network, prompt.ids, answer)
            found.expected += ours
            found.matched += theirs
        if progress is not None:
            progress(place + 1, len(prompts))
    found.control = [
        speculative_decode(
            target, network, prompt.ids, choice=choice_of(settings, place), without_features=True, **limits
        )
        for place, prompt in enumerate(prompts[:CONTROL_PROMPTS])
    ]
    return found


def _report(
    target: TargetModel,
    network: Drafter,
    prompts: Sequence[EvaluationPrompt],
    found: _Found,
    settings: EvaluateConfig,
    compare: bool,
    texts: Sequence[list[str]],
) -> EvaluationReport:
    answers = found.answers
    passes = [entry for answer in answers for entry in answer.passes]
    whole = group(passes)
    loop_tau, training_tau = _mean(found.expected), _mean(found.matched)
    agrees = None
    if loop_tau is not None and training_tau is not None:
        agrees = abs(training_tau - loop_tau) <= AGREEMENT * loop_tau
    controlled = group(entry for answer in found.control for entry in answer.passes)
    same = group(entry for answer in answers[: len(found.control)] for entry in answer.passes)
    tree = _tree(target, network, prompts, found, settings, compare, whole.tau)
    return EvaluationReport(
        num_prompts=len(prompts),
        passes=whole.passes,
        new_tokens=sum(len(answer.ids) for answer in answers),
        tau_micro=whole.tau,
        tau_macro=macro_tau([answer.passes for answer in answers]),
        histogram=histogram(passes, network.spec.num_drafts),
        slots=slot_rates(passes, network.spec.num_drafts),
        by_tag=_by_tag(prompts, answers),
        by_context=by_context(passes),
        lossless=lossless(target, prompts, answers, found.plain) if compare else None,
        training_tau=training_tau,
        loop_tau=loop_tau,
        training_agrees=agrees,
        control_tau=controlled.tau if controlled.passes else None,
        control_suspicious=(controlled.tau > CONTROL_TAU and controlled.tau > 0.8 * same.tau)
        if controlled.passes
        else None,
        seconds_per_token=_seconds(answers),
        plain_seconds_per_token=_seconds(found.plain) if settings.batch_size == 1 else None,
        dtype=str(target.dtype).removeprefix("torch."),
        temperature=settings.temperature,
        tree_tau=tree.tau_micro if tree is not None else None,
        tree=tree,
        rows=[_row(*three) for three in zip(prompts, answers, texts, strict=True)],
        set_aside=[],
        memory=measure_memory(target, network, whole.tau or None),
    )


def _tree(
    target: TargetModel,
    network: Drafter,
    prompts: Sequence[EvaluationPrompt],
    found: _Found,
    settings: EvaluateConfig,
    compare: bool,
    chain_tau: float,
) -> TreeFigures | None:
    """The figures of draft trees; None where there were none."""
    if settings.tree_budget is None:
        return None
    passes = [entry for answer in found.trees for entry in answer.passes]
    whole = group(passes)
    return TreeFigures(
        budget=settings.tree_budget,
        chain_seed=settings.tree_chain_seed,
        temperature=settings.tree_temperature,
        passes=whole.passes,
        new_tokens=sum(len(answer.ids) for answer in found.trees),
        tau_micro=whole.tau,
        tau_macro=macro_tau([answer.passes for answer in found.trees]),
        below_chain=whole.tau < chain_tau,
        histogram=histogram(passes, network.spec.num_drafts),
        by_tag=_by_tag(prompts, found.trees),
        by_context=by_context(passes),
        lossless=lossless(target, prompts, found.trees, found.plain) if compare else None,
        seconds_per_token=_seconds(found.trees),
    )


def _by_tag(prompts: Sequence[EvaluationPrompt], answers: Sequence[Decoded]) -> dict[str, GroupTau]:
    pairs = list(zip(prompts, answers, strict=True))
    return {
        tag: group(entry for prompt, answer in pairs if tag in prompt.tags for entry in answer.passes)
        for tag in sorted({tag for prompt in prompts for tag in prompt.tags})
    }


def lossless(
    target: TargetModel, prompts: Sequence[EvaluationPrompt], answers: Sequence[Decoded], plain: Sequence[Decoded]
) -> Lossless:
    """Compares answers with plain ones, token for token.

    In float64 every difference is an error. Below, the first difference is one if the two tokens' logits, in one
    forward over the common prefix, differ by more than 1e-4 and by more than four units in the last place of the row's
    largest magnitude; each difference says by how much.
    """
    exact = target.dtype == torch.float64
    equal, differences = 0, []
    for prompt, ours, theirs in zip(prompts, answers, plain, strict=True):
        if ours.ids == theirs.ids:
            equal += 1
            continue
        place = first_difference(ours.ids, theirs.ids)
        entry: dict[str, str | int | float | bool] = {"prompt": prompt.id, "place": place, "error": True}
        if place < min(len(ours.ids), len(theirs.ids)):
            gap, top = _logit_gap(target, [*prompt.ids, *theirs.ids[:place]], theirs.ids[place], ours.ids[place])
            allowed = 0.0 if exact else max(ROUNDING, 4 * torch.finfo(target.dtype).eps * top)
            entry |= {"drafted": ours.ids[place], "plain": theirs.ids[place], "logit_gap": gap, "allowed_gap": allowed}
            entry["error"] = exact or gap > allowed
        differences.append(entry)
    errors = sum(bool(entry["error"]) for entry in differences)
    return Lossless(len(answers), equal, errors, 0.0 if exact else ROUNDING, differences)


@torch.no_grad()
def _logit_gap(target: TargetModel, prefix: Sequence[int], one: int, other: int) -> tuple[float, float]:
    logits, _ = TargetSession(target).read(torch.tensor(list(prefix), device=target.device), last_only=True)
    row = logits[-1].double()
    return abs(float(row[one] - row[other])), float(row.abs().max())


def _row(prompt: EvaluationPrompt, answer: Decoded, pieces: list[str]) -> PromptRow:
    tau = answer.tau if answer.passes else None
    tags, tokens = list(prompt.tags), len(answer.ids)
    return PromptRow(prompt.id, tags, len(prompt.ids), tokens, answer.finish, tau, answer.accepted, pieces)


def _mean(accepted: Sequence[int]) -> float | None:
    return 1 + sum(accepted) / len(accepted) if accepted else None


def _seconds(answers: Sequence[Decoded]) -> float | None:
    tokens = sum(len(answer.ids) - 1 for answer in answers)
    return sum(answer.seconds for answer in answers) / tokens if tokens else None
