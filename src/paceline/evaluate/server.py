"""A running server measured with a run's prompts: τ and acceptance by slot from its counters, speed, and its answers.

τ is counted as in `evaluate.metrics`: every answer's first token comes from the prompt's pass, so τ is (tokens of the
answers - answers) / passes. The server's own count, 1 + accepted / passes, is higher, because it also counts drafts
behind the end of an answer.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.config import EvaluateConfig
from paceline.errors import DataError
from paceline.evaluate.metrics import SlotRate
from paceline.evaluate.prompts import Prompt
from paceline.evaluate.server_client import MeasuredServer, ServedAnswer, ServedModel
from paceline.evaluate.server_counters import SGLANG, Counters


@dataclass(frozen=True, slots=True)
class ServerSpeed:
    """Speed with so many requests under way at once.

    Attributes:
        concurrency, requests: under way at once; in all.
        tokens, seconds: of all answers; from the first request to the last token.
        tokens_per_second: output tokens of all requests together.
        first_token_s, first_token_s_90: from a request to its first token: the median, and the 90th percentile.
        tau: tokens per target pass; None without a drafter.
    """

    concurrency: int
    requests: int
    tokens: int
    seconds: float
    tokens_per_second: float
    first_token_s: float
    first_token_s_90: float
    tau: float | None


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What a server did with the prompts; `to_json` gives plain values.

    Attributes:
        engine, model: vLLM or SGLang; its name of the model.
        num_prompts, new_tokens, passes: of the answers at the lowest concurrency, from which τ and slots are.
        tau_micro: tokens of the answers per target pass, as `paceline evaluate` counts.
        counted_tau: 1 + accepted drafts / passes, as the server counts; None where it does not count drafts.
        num_drafts: drafts of a block; None where it does not count them.
        slots: acceptance by slot, as the server counts; empty where it does not.
        speeds, baseline_speeds: by concurrency; of the server without a drafter, empty without one.
        equal_answers: prompts with the same answer from both servers; None without the other.
        differing: ids of the other prompts.
        notes: what to know of these figures, one sentence each.
        conditions: all that makes the figures.
    """

    engine: str
    model: str
    num_prompts: int
    new_tokens: int
    passes: int
    tau_micro: float
    counted_tau: float | None
    num_drafts: int | None
    slots: list[SlotRate]
    speeds: list[ServerSpeed]
    baseline_speeds: list[ServerSpeed]
    equal_answers: int | None
    differing: list[str]
    notes: list[str]
    conditions: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Nested plain values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class _Level:
    """What was found at one concurrency; `counted` is None where the server shows no counters."""

    speed: ServerSpeed
    answers: list[ServedAnswer]
    counted: Counters | None


def check_model(server: MeasuredServer, model: ServedModel, names: Sequence[str]) -> None:
    """Refuse a server of another model.

    Args:
        server, model: what is asked.
        names: of the run's target.

    Raises:
        DataError: the server's model has none of these names.
    """
    if model.known_as.isdisjoint(names):
        raise DataError(
            f"{server.url}: serves {model.name}, but the target is {names[-1]}; give the server of that target, or "
            "--other-target where this is the same model under another name"
        )


def check_counters(server: MeasuredServer, *, drafts: bool) -> str:
    """Refuse a server whose counters cannot tell what is asked; gives its engine.

    Raises:
        DataError: it does not draft, or shows no counters; or, without `drafts`, it does draft.
    """
    found = server.counters()
    if found is None and not drafts:
        return "unknown"
    if found is None:
        raise DataError(
            f"{server.url}/metrics: no counters of vLLM or SGLang; give one of these (SGLang with --enable-metrics)"
        )
    if drafts and found.passes is None:
        more = " and with --enable-metrics" if found.engine == SGLANG else ""
        raise DataError(
            f"{server.url}: this {found.engine} serves without a drafter: /metrics has no counters of drafts; start it "
            f"as `paceline serve RUN` prints it{more}, or give it as --baseline"
        )
    if not drafts and found.passes:
        raise DataError(f"{server.url}: drafts too; --baseline is the same target served without a drafter")
    return found.engine


def fitting_prompts(
    prompts: Sequence[Prompt], model: ServedModel, max_new_tokens: int
) -> tuple[list[Prompt], list[str]]:
    """Prompts that the server takes with the longest answer, and a sentence about the others.

    Raises:
        DataError: none is left.
    """
    limit = model.max_length
    kept = [prompt for prompt in prompts if limit is None or len(prompt.ids) + max_new_tokens <= limit]
    if not kept:
        raise DataError(f"no prompt fits: the server takes {limit} tokens of prompt and answer; lower max_new_tokens")
    left = len(prompts) - len(kept)
    note = f"{left} prompts left out: with answers of {max_new_tokens} tokens they exceed the server's {limit} tokens."
    return kept, [note] if left else []


def measure_server(
    server: MeasuredServer,
    model: ServedModel,
    prompts: Sequence[Prompt],
    limits: EvaluateConfig,
    *,
    baseline: tuple[MeasuredServer, ServedModel] | None = None,
    num_drafts: int | None = None,
    progress: Callable[[], None] | None = None,
) -> ServerReport:
    """Send the prompts at every concurrency and read the counters before and after each.

    Args:
        server, model: with a drafter, checked.
        prompts: from `fitting_prompts`.
        limits: longest answer, temperature, seed, concurrencies.
        baseline: the same target without a drafter.
        num_drafts: drafts of a block of the run's drafter, for a note where the server makes others.
        progress: called after each answer.

    Raises:
        DataError: a server failed or refused; one line.
    """
    levels = _levels(server, model, prompts, limits, progress)
    first = levels[0]
    counted = first.counted
    if counted is None or not counted.passes:
        raise DataError(f"{server.url}: drafted nothing in {first.speed.requests} answers; see its log for the reason")
    notes = list(_notes(server, levels, num_drafts))
    plain = _levels(*baseline, prompts, limits, progress) if baseline is not None else []
    differing = []
    if plain:
        pairs = zip(prompts, first.answers, plain[0].answers, strict=False)
        differing = [prompt.id for prompt, ours, theirs in pairs if not ours.same(theirs)]
    accepted = counted.accepted
    return ServerReport(
        engine=counted.engine,
        model=model.name,
        num_prompts=len(prompts),
        new_tokens=first.speed.tokens,
        passes=counted.passes,
        tau_micro=(first.speed.tokens - first.speed.requests) / counted.passes,
        counted_tau=None if accepted is None else 1 + accepted / counted.passes,
        num_drafts=None if counted.drafted is None else round(counted.drafted / counted.passes),
        slots=_slots(counted),
        speeds=[level.speed for level in levels],
        baseline_speeds=[level.speed for level in plain],
        equal_answers=len(prompts) - len(differing) if plain else None,
        differing=differing,
        notes=notes,
    )


def num_requests(num_prompts: int, limits: EvaluateConfig) -> int:
    """Answers that measuring one server takes."""
    return sum(max(num_prompts, concurrency) for concurrency in limits.concurrency)


def _levels(
    server: MeasuredServer,
    model: ServedModel,
    prompts: Sequence[Prompt],
    limits: EvaluateConfig,
    progress: Callable[[], None] | None,
) -> list[_Level]:
    run = secrets.token_hex(8)
    _ask(server, model, prompts[0], limits, 0, f"{run}-warm")
    return [_level(server, model, prompts, limits, concurrency, run, progress) for concurrency in limits.concurrency]


def _level(
    server: MeasuredServer,
    model: ServedModel,
    prompts: Sequence[Prompt],
    limits: EvaluateConfig,
    concurrency: int,
    run: str,
    progress: Callable[[], None] | None,
) -> _Level:
    """All prompts once; again from the first where they are fewer than may be under way at once."""
    places = list(itertools.islice(itertools.cycle(range(len(prompts))), max(len(prompts), concurrency)))

    def ask(number: int) -> ServedAnswer:
        """One request of the level; raises what the server raises."""
        place = places[number]
        # A salt for each time that a prompt is sent: no request finds its prompt in the server's prefix cache.
        salt = f"{run}-{concurrency}-{number // len(prompts)}"
        answer = _ask(server, model, prompts[place], limits, place, salt)
        if progress is not None:
            progress()
        return answer

    before = server.counters()
    began_s = time.perf_counter()
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="ask")
    try:
        answers = list(pool.map(ask, range(len(places))))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    seconds = time.perf_counter() - began_s
    tokens = sum(answer.tokens for answer in answers)
    after = server.settled(before.generated + tokens) if before is not None else None
    counted = after.since(before) if after is not None and before is not None else None
    waits = [answer.first_s for answer in answers]
    speed = ServerSpeed(
        concurrency=concurrency,
        requests=len(answers),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        first_token_s=float(np.median(waits)),
        first_token_s_90=float(np.percentile(waits, 90)),
        tau=(tokens - len(answers)) / counted.passes if counted is not None and counted.passes else None,
    )
    return _Level(speed, answers, counted)


def _ask(
    server: MeasuredServer, model: ServedModel, prompt: Prompt, limits: EvaluateConfig, place: int, salt: str
) -> ServedAnswer:
    """The answer to the prompt at a place, whose draws are its own."""
    try:
        return server.answer(
            model.name,
            prompt.ids,
            limits.max_new_tokens,
            temperature=limits.temperature,
            seed=limits.seed + place,
            salt=salt,
        )
    except DataError as error:
        raise DataError(*(f"{line} (prompt {prompt.id})" for line in error.errors)) from error


def _slots(counted: Counters) -> list[SlotRate]:
    passes = counted.passes or 0
    reached = (passes, *counted.by_slot)
    return [
        SlotRate(slot, before, accepted, accepted / before if before else None, accepted / passes)
        for slot, (before, accepted) in enumerate(zip(reached, counted.by_slot, strict=False), start=1)
    ]


def _notes(server: MeasuredServer, levels: Sequence[_Level], num_drafts: int | None) -> Iterator[str]:
    first = levels[0].counted
    assert first is not None and first.passes
    if (
        first.drafted is not None
        and num_drafts is not None
        and (made := round(first.drafted / first.passes)) != num_drafts
    ):
        yield f"The server makes {made} drafts a pass, the drafter was trained for {num_drafts}."
    tokens = sum(level.speed.tokens for level in levels)
    generated = sum(level.counted.generated for level in levels if level.counted is not None)
    if generated != tokens:
        yield (
            f"{server.url} generated {generated} tokens, and {tokens} were asked for here: others use it, so its "
            "counters are not those of these prompts alone."
        )


def table_rows(report: ServerReport) -> list[tuple[str, str]]:
    """What a table says of the first level: name and text."""
    rows = [
        ("server", f"{report.engine}, {report.model}"),
        ("τ, over target passes", f"{report.tau_micro:.3f}"),
        ("prompts / target passes / tokens", f"{report.num_prompts} / {report.passes} / {report.new_tokens}"),
    ]
    if report.counted_tau is not None:
        rows.append(("τ as the server counts, drafts behind the answer's end too", f"{report.counted_tau:.3f}"))
    if report.equal_answers is not None:
        rows.append(("answers equal to those without a drafter", f"{report.equal_answers} of {report.num_prompts}"))
    for rate in report.slots:
        share = "-" if rate.conditional is None else f"{rate.conditional:.1%}"
        rows.append((f"draft {rate.slot} accepted, given those before", share))
    return rows


def speed_rows(report: ServerReport) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of speeds."""
    head = ["requests at once", "tokens/s", "first token, ms", "90 % within, ms", "τ"]
    plain = {speed.concurrency: speed for speed in report.baseline_speeds}
    if plain:
        head += ["without drafter, tokens/s", "first token, ms", "speedup"]
    rows = []
    for speed in report.speeds:
        row = [
            str(speed.concurrency),
            f"{speed.tokens_per_second:,.1f}",
            f"{1e3 * speed.first_token_s:,.1f}",
            f"{1e3 * speed.first_token_s_90:,.1f}",
            "-" if speed.tau is None else f"{speed.tau:.3f}",
        ]
        if other := plain.get(speed.concurrency):
            row += [
                f"{other.tokens_per_second:,.1f}",
                f"{1e3 * other.first_token_s:,.1f}",
                f"{speed.tokens_per_second / other.tokens_per_second:.2f}x",
            ]
        rows.append(row)
    return head, rows
