"""Checks with the loaded target: taps, overfit of a few samples, decoding with what was overfitted."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from paceline.check.context import CheckContext
from paceline.check.results import CheckResult
from paceline.config import EvaluateConfig
from paceline.decode.session import TargetSession
from paceline.errors import TargetError
from paceline.evaluate.evaluate import evaluate
from paceline.target_model.engine_proof import prove_engine
from paceline.target_model.preconditions import slow_layers
from paceline.target_model.row_check import TOLERANCE
from paceline.target_model.tap_guard import guard_first_batch
from paceline.target_model.vllm_target import VllmTarget
from paceline.text import duration, size
from paceline.types import PlannedStep

LEARNT, LEARNING = 0.9, 0.5
"""Slot accuracy on the few samples at which the overfit passes, and below which it fails unless the loss halved."""
PROMPTS, NEW_TOKENS = 4, 32
"""Prompts that are decoded, and the longest answer."""


def check_target(context: CheckContext) -> CheckResult:
    """The target loads, and what the drafter shares with it are numbers."""
    target = context.target
    for name, rows in (("embedding", target.embedding), ("head", target.head)):
        if len(bad := (~torch.isfinite(rows.sum(dim=1, dtype=torch.float32))).nonzero().flatten()):
            detail = f"{len(bad)} rows of its {name}, the first {int(bad[0])}, are not finite"
            return CheckResult("target", "fail", detail, "fetch its weights again, or use a wider target.dtype")
    parameters = sum(p.numel() for p in target.model.parameters())
    held = weights_bytes(context)
    detail = (
        f"{context.facts.architecture}, {parameters / 1e6:,.1f} M parameters, {size(held)} in "
        f"{str(target.dtype).removeprefix('torch.')} on {target.device}, loaded in {duration(context.load_seconds)}"
    )
    figures = {"parameters": parameters, "bytes": held}
    settings = context.settings
    slow = slow_layers(settings.target, settings.flow.target_devices[0], settings.plan.token_budget)
    return CheckResult("target", "pass" if slow is None else "warn", detail, slow or "", figures)


def weights_bytes(context: CheckContext) -> int:
    """Bytes of the loaded target's parameters and buffers."""
    model = context.target.model
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def check_taps(context: CheckContext) -> CheckResult:
    """The tap guard on a small real batch."""
    found = guard_first_batch(context.target, context.few)
    rms = {entry.layer: entry.rms for entry in found}
    error = max(entry.batch_error or 0.0 for entry in found)
    change = min(entry.shift_change or 0.0 for entry in found)
    detail = (
        f"layers {', '.join(f'{layer} (RMS {value:.3g})' for layer, value in rms.items())}; batch against alone "
        f"{error:.1e}; the neighbouring layer differs by {change:.1%}"
    )
    figures: dict[str, object] = {"rms": rms, "batch_error": error, "shift_change": change}
    if context.settings.target.engine == "vllm":
        version, errors = engine_errors(context)
        figures["engine_errors"] = errors
        detail += f"; vllm {version} differs from transformers by {max(errors):.1e} (relative)"
    return CheckResult("taps", "pass", detail, figures=figures)


def engine_errors(context: CheckContext) -> tuple[str, list[float]]:
    """Version of the run's vLLM, and the largest relative error of its states per layer, on a small real batch.

    Raises:
        TargetError: vLLM does not run the target, or computes other states.
    """
    settings = context.settings
    target = VllmTarget(
        settings.target,
        context.target.taps,
        settings.flow.target_devices[0],
        with_last=settings.objective.needs_teacher,
        longest=settings.data.max_length,
        log=context.folder / "vllm.log",
    )
    try:
        return target.version, prove_engine(context.target, target.features(context.few.host), f"vllm {target.version}")
    finally:
        target.close()


@dataclass(frozen=True, slots=True)
class Overfit:
    """How the few samples were learnt: loss of the first and last step, accuracy over all slots, steps."""

    first: float
    last: float
    accuracy: float
    steps: int
    seconds: float


def check_overfit(context: CheckContext) -> CheckResult:
    """A new drafter memorizes a few samples, with the run's own objective and optimizer."""
    found = overfit(context)
    detail = (
        f"{len(context.few.host.lengths)} samples: loss {found.first:.3f} to {found.last:.3f}, {found.accuracy:.1%} of "
        f"the drafts right after {found.steps} steps ({duration(found.seconds)})"
    )
    figures = {"first": found.first, "last": found.last, "accuracy": found.accuracy, "steps": found.steps}
    if found.accuracy >= LEARNT:
        return CheckResult("overfit", "pass", detail, figures=figures)
    if found.steps < context.limits.steps and found.last < found.first:
        advice = f"it ran out of its {duration(context.limits.seconds)} while the loss fell; give --seconds more"
        return CheckResult("overfit", "warn", detail, advice, figures)
    if found.accuracy >= LEARNING or found.last < 0.5 * found.first:
        advice = "it learns, slowly; try another optimizer.lr (its schedule is squeezed into these steps)"
        return CheckResult("overfit", "warn", detail, advice, figures)
    advice = "a drafter that cannot learn a few samples will not learn many: look at optimizer.lr, clip_norm, objective"
    return CheckResult("overfit", "fail", detail, advice, figures)


def overfit(context: CheckContext) -> Overfit:
    """Train on the same small batch until it is learnt, the steps are done, or the time is up."""
    learner, began = context.learner, time.perf_counter()
    losses: list[float] = []
    accuracy = 0.0
    while len(losses) < context.limits.steps:
        learner.accumulate(context.few)
        report = learner.step(PlannedStep(len(losses) + 1, 0, len(losses), range(0), save=False))
        losses.append(report.loss.value)
        accuracy = report.ratios["accuracy/all"].value
        if accuracy >= 0.99 or time.perf_counter() - began > context.limits.seconds:
            break
    return Overfit(losses[0], losses[-1], accuracy, len(losses), time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class _Prompt:
    id: str
    ids: list[int]
    tags: tuple[str, ...] = ()


@torch.no_grad()
def session_error(context: CheckContext) -> float:
    """Largest relative difference, over tokens and taps, between the states that decoding sees and those of training.

    A sample is read in two pieces, with wrong tokens read and taken back between them, as rejected drafts are. In 16
    bits it is the median over tokens, as the tap guard judges.

    Raises:
        TargetError: the target's logits are not finite.
    """
    target, host = context.target, context.few.host
    place = int(host.lengths.argmax())
    length, start = int(host.lengths[place]), int(host.lengths[:place].sum())
    ids = torch.as_tensor(host.ids[place, :length], device=target.device)
    session, middle = TargetSession(target), length // 2
    logits, first = session.read(ids[:middle])
    if not bool(torch.isfinite(logits).all()):
        raise TargetError(
            f"the target's own logits are not finite for {int((~torch.isfinite(logits)).any(dim=1).sum())} of {middle} "
            "tokens, though its taps are; look at its later layers, final norm and head, or use a wider target.dtype"
        )
    session.read(ids[:middle].flip(0)[:8])
    session.rewind(middle)
    _, second = session.read(ids[middle:])
    trained = context.few.features[start : start + length]
    errors = []
    for one, other in zip(
        torch.cat([first, second]).chunk(len(target.taps), 1), trained.chunk(len(target.taps), 1), strict=True
    ):
        relative = (one.double() - other.double()).norm(dim=1) / other.double().norm(dim=1).clamp_min(1e-30)
        errors.append(relative.median() if target.dtype in (torch.float16, torch.bfloat16) else relative.max())
    return float(torch.stack(errors).max())


def check_decode(context: CheckContext) -> CheckResult:
    """Real decoding with the overfitted drafter: the target's own answers, and the drafts of the training forward."""
    error = session_error(context)
    if not error <= TOLERANCE[context.target.dtype]:
        detail = f"decoding sees other states than training: relative difference {error:.2g}"
        advice = "the target's cache does not give what its plain forward gives; acceptance will not follow training"
        return CheckResult("decoding", "fail", detail, advice, {"state_error": error})
    prompts = []
    for row, (ids, mask) in zip(
        context.few.host.planned.rows, context.material.store.read(context.few.host.planned.rows), strict=True
    ):
        start = int(mask.argmax())
        if start:
            prompts.append(_Prompt(context.material.store.origin(int(row)), [int(token) for token in ids[:start]]))
    if not prompts:
        return CheckResult("decoding", "skipped", "every sample begins with supervised text; there are no prompts")
    network = context.learner.network.to(context.target.device).eval()
    settings = EvaluateConfig(num_prompts=PROMPTS, max_new_tokens=NEW_TOKENS)
    report = evaluate(context.target, network, prompts, settings)
    lossless = report.lossless
    assert lossless is not None, "asked for"
    agrees = {None: "not compared with", True: "agrees with", False: "differs from"}[report.training_agrees]
    detail = (
        f"{lossless.equal} of {lossless.prompts} answers equal to the target's own in {report.dtype}, τ "
        f"{report.tau_micro:.2f}; {agrees} the training forward on the same blocks; states equal to {error:.0e}"
    )
    figures = {
        "tau": report.tau_micro,
        "training_tau": report.training_tau,
        "errors": lossless.errors,
        "state_error": error,
    }
    if lossless.errors:
        advice = "speculative and plain decoding differ by more than rounding; do not serve this pair"
        return CheckResult("decoding", "fail", detail, advice, figures)
    if report.training_agrees is False:
        exact = context.target.dtype in (torch.float32, torch.float64)
        advice = (
            "the decode loop does not see what training sees; acceptance will not follow training"
            if exact
            else "in 16 bits a few blocks may differ; check again with --target.dtype float32"
        )
        return CheckResult("decoding", "fail" if exact else "warn", detail, advice, figures)
    return CheckResult("decoding", "pass", detail, figures=figures)
