"""Evaluation of a drafter: real decoding of prompts, checked against plain decoding and the training forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paceline.config import EvaluateConfig
from paceline.evaluate.batch import batch_decode
from paceline.evaluate.decode import Decoded, greedy_decode, speculative_decode
from paceline.evaluate.fit import check_pair, fitting
from paceline.evaluate.measures import (
    GroupTau,
    Lossless,
    SlotRate,
    by_context,
    group,
    histogram,
    macro_tau,
    slot_rates,
)
from paceline.evaluate.memory import Memory, measure_memory
from paceline.evaluate.parity import training_accepted

if TYPE_CHECKING:
    from paceline.drafter.network import Drafter
    from paceline.target.frozen import Target

ROUNDING = 1e-4
"""Smallest logit gap that rounding never explains, below float64."""
AGREEMENT = 0.02
"""Relative difference between τ of the decode loop and of the training forward above which the report says so."""
CONTROL_PROMPTS = 4
"""Prompts that are decoded once more without features."""
CONTROL_TAU = 1.5
"""τ without features above this, and close to the real one, means that the drafter ignores its context."""


class EvaluationPrompt(Protocol):
    """What evaluation needs of a prompt."""

    @property
    def id(self) -> str:
        """Name in the report."""
        ...

    @property
    def ids(self) -> list[int]:
        """Token ids, generation prompt included."""
        ...

    @property
    def tags(self) -> tuple[str, ...]:
        """Words by which the report is split."""
        ...


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of the report.

    ``accepted`` lists accepted drafts per target pass; ``pieces`` is the answer's text token by token (the ids in words
    where nobody decoded them): the target's own first token, then each pass's accepted drafts and its own token.
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
class EvaluationReport:
    """Everything that an evaluation found; `to_json` gives plain values.

    Attributes:
        num_prompts, passes, new_tokens: how much was decoded.
        tau_micro, tau_macro: tokens per target pass, over passes and over prompts.
        tokens_per_pass: like `tau_micro`, but tokens beyond the length limit are not counted.
        histogram: passes by accepted length, from 0.
        slots: acceptance per draft slot.
        by_tag, by_context: τ of groups of passes.
        lossless: comparison with plain greedy decoding; None when not asked for.
        training_tau: τ of the training forward on the same blocks; None when not asked for.
        training_agrees: whether it is within 2 % of the decode loop's.
        control_tau: τ of a few prompts without features; near 1 for a drafter that reads its context.
        control_suspicious: whether that τ is so high that the evaluation or the drafter must be doubted.
        seconds_per_token, plain_seconds_per_token: wall time, prompts' forward left out; the second is None with
            several prompts at once, since plain decoding takes them one by one.
        dtype: compute type.
        rows: the prompts.
        set_aside: one line about each prompt that is longer than the target's positions.
        memory: bytes that decoding holds and moves.
    """

    num_prompts: int
    passes: int
    new_tokens: int
    tau_micro: float
    tau_macro: float
    tokens_per_pass: float
    histogram: list[int]
    slots: list[SlotRate]
    by_tag: dict[str, GroupTau]
    by_context: dict[str, GroupTau]
    lossless: Lossless | None
    training_tau: float | None
    training_agrees: bool | None
    control_tau: float | None
    control_suspicious: bool | None
    seconds_per_token: float | None
    plain_seconds_per_token: float | None
    dtype: str
    rows: list[PromptRow]
    set_aside: list[str]
    memory: Memory

    def to_json(self) -> dict[str, Any]:
        """Nested plain values."""
        return dataclasses.asdict(self)


def evaluate(
    target: Target,
    network: Drafter,
    prompts: Sequence[EvaluationPrompt],
    settings: EvaluateConfig,
    progress: Callable[[int, int], None] | None = None,
    check_lossless: bool = True,
    check_training: bool = True,
    pieces: Callable[[list[int]], list[str]] | None = None,
) -> EvaluationReport:
    """Decodes prompts greedily with drafts and measures acceptance.

    Args:
        target: loaded in the compute type, with the drafter's taps.
        network: the drafter, on the target's device.
        prompts: what to answer: the first `settings.num_prompts`, without those that are too long for the target.
        settings: limits.
        progress: called with (prompts done, prompts) after each.
        check_lossless: also decode plainly and compare.
        check_training: also run the training forward on the decoded answers and compare.
        pieces: the text of each token of an answer, for the report.

    Raises:
        DataError: no prompts, none that fits, or one that cannot be decoded.
        DrafterError: drafter and target do not fit each other.
        TargetError: several prompts at once, on a target that cannot.
    """
    check_pair(target, network.spec)
    chosen, set_aside = fitting(target, prompts[: settings.num_prompts])
    plain: list[Decoded] = []
    matched: list[int] = []
    expected: list[int] = []
    limits = {"max_new_tokens": settings.max_new_tokens, "stop_ids": target.facts.eos_token_ids}
    answers: list[Decoded] = []
    if settings.batch_size > 1:
        ids = [prompt.ids for prompt in chosen]
        answers = batch_decode(target, network, ids, batch_size=settings.batch_size, **limits)
    for done, prompt in enumerate(chosen, start=1):
        if settings.batch_size == 1:
            answers.append(speculative_decode(target, network, prompt.ids, **limits))
        answer = answers[done - 1]
        if check_lossless:
            plain.append(greedy_decode(target, prompt.ids, **limits))
        if check_training and answer.passes:
            ours, theirs = training_accepted(target, network, prompt.ids, answer)
            expected += ours
            matched += theirs
        if progress is not None:
            progress(done, len(chosen))
    control = [
        speculative_decode(target, network, prompt.ids, without_features=True, **limits)
        for prompt in chosen[:CONTROL_PROMPTS]
    ]
    texts = [pieces(answer.ids) if pieces else [f" {token}" for token in answer.ids] for answer in answers]
    report = _report(target, network, chosen, answers, plain, (expected, matched), control, check_lossless, texts)
    if settings.batch_size > 1:
        report = dataclasses.replace(report, plain_seconds_per_token=None)
    return dataclasses.replace(report, set_aside=set_aside)


def _report(
    target: Target,
    network: Drafter,
    prompts: Sequence[EvaluationPrompt],
    answers: Sequence[Decoded],
    plain: Sequence[Decoded],
    training: tuple[list[int], list[int]],
    control: Sequence[Decoded],
    check_lossless: bool,
    texts: Sequence[list[str]],
) -> EvaluationReport:
    passes = [entry for answer in answers for entry in answer.passes]
    whole = group(passes)
    tags = sorted({tag for prompt in prompts for tag in prompt.tags})
    loop, forward = training
    loop_tau, training_tau = _mean(loop), _mean(forward)
    agrees = None
    if loop_tau is not None and training_tau is not None:
        agrees = abs(training_tau - loop_tau) <= AGREEMENT * loop_tau
    controlled = group(entry for answer in control for entry in answer.passes)
    same = group(entry for answer in answers[: len(control)] for entry in answer.passes)
    kept = sum(len(answer.ids) - 1 for answer in answers)
    return EvaluationReport(
        num_prompts=len(prompts),
        passes=whole.passes,
        new_tokens=sum(len(answer.ids) for answer in answers),
        tau_micro=whole.tau,
        tau_macro=macro_tau([answer.passes for answer in answers]),
        tokens_per_pass=kept / whole.passes if whole.passes else 0.0,
        histogram=histogram(passes, network.spec.num_drafts),
        slots=slot_rates(passes, network.spec.num_drafts),
        by_tag={
            tag: group(
                entry
                for prompt, answer in zip(prompts, answers, strict=True)
                if tag in prompt.tags
                for entry in answer.passes
            )
            for tag in tags
        },
        by_context=by_context(passes),
        lossless=lossless(target, prompts, answers, plain) if check_lossless else None,
        training_tau=training_tau,
        training_agrees=agrees,
        control_tau=controlled.tau if controlled.passes else None,
        control_suspicious=(controlled.tau > CONTROL_TAU and controlled.tau > 0.8 * same.tau)
        if controlled.passes
        else None,
        seconds_per_token=_seconds(answers),
        plain_seconds_per_token=_seconds(plain),
        dtype=str(target.dtype).removeprefix("torch."),
        rows=[_row(*three) for three in zip(prompts, answers, texts, strict=True)],
        set_aside=[],
        memory=measure_memory(target, network, whole.tau or None),
    )


def lossless(
    target: Target, prompts: Sequence[EvaluationPrompt], answers: Sequence[Decoded], plain: Sequence[Decoded]
) -> Lossless:
    """Compares answers with plain ones, token for token.

    In float64 every difference is a fault. Below, the first difference is one if the two tokens' logits, in one forward
    over the common prefix, lie farther apart than 1e-4 and than four units in the last place of the larger.
    """
    exact = target.dtype == torch.float64
    equal, differences = 0, []
    for prompt, ours, theirs in zip(prompts, answers, plain, strict=True):
        if ours.ids == theirs.ids:
            equal += 1
            continue
        place = next(
            (at for at, pair in enumerate(zip(ours.ids, theirs.ids, strict=False)) if pair[0] != pair[1]),
            min(len(ours.ids), len(theirs.ids)),
        )
        entry: dict[str, str | int | float | bool] = {"prompt": prompt.id, "place": place, "fault": True}
        if place < min(len(ours.ids), len(theirs.ids)):
            gap, top = _logit_gap(target, [*prompt.ids, *theirs.ids[:place]], theirs.ids[place], ours.ids[place])
            allowed = 0.0 if exact else max(ROUNDING, 4 * torch.finfo(target.dtype).eps * top)
            entry |= {"drafted": ours.ids[place], "plain": theirs.ids[place], "logit_gap": gap, "fault": gap > allowed}
            entry["fault"] = exact or gap > allowed
        differences.append(entry)
    faults = sum(bool(entry["fault"]) for entry in differences)
    return Lossless(len(answers), equal, faults, 0.0 if exact else ROUNDING, differences)


@torch.no_grad()
def _logit_gap(target: Target, prefix: Sequence[int], one: int, other: int) -> tuple[float, float]:
    from paceline.target.session import TargetSession

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
