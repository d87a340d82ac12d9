"""One self-contained HTML file that explains a run: no network, no scripts, for light and dark, desk and phone."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from paceline.observe.diagnosis import Finding
from paceline.observe.diagnosis.diagnose import diagnose
from paceline.observe.run_history import History, read_history
from paceline.report import plots
from paceline.report.data_section import prepared_data
from paceline.report.decoding import decoded_slots, decoding
from paceline.report.page import Html, check_place, element, figure, fitted, joined, nested, save, table, tiles
from paceline.report.svg import MAX_BUCKET
from paceline.report.values import shortened, whole_numbers
from paceline.text import duration, percent, short

REPORT_FILE = "report.html"
QUEUE = re.compile(r"queue/.+_items")
MEMORY = re.compile(r"memory(?:_peak)?/(.+)_bytes")
MAX_NOTES = 30
"""Sentences on what is missing."""
MAX_STAGES = 12
"""Stages that are drawn."""
MAX_EVENTS = 200
"""Events that are listed, the first and the last ones."""
MAX_DETAILS = 600
"""Characters of an event's details."""


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run, finished or not.

    Args:
        run_dir: directory of the run.
        out: file to write; ``report.html`` in the run directory if unset.

    Returns:
        The file.

    Raises:
        RunDirectoryError: no run in there, or the file cannot be written or is no page.
    """
    path = out if out is not None else run_dir / REPORT_FILE
    check_place(path)
    return save(render(read_history(run_dir)), path)


def render(run: History) -> str:
    """The whole page; under 3 MB whatever the run holds."""
    prepared, stages = prepared_data(run), _stages(run)  # they may add to what is missing
    parts = [
        ("summary", "Summary", _summary(run)),
        ("missing", "What is missing", _missing(run)),
        ("loss", "Loss", _loss(run)),
        ("acceptance", "Acceptance", _acceptance(run)),
        ("evaluation", "Decoding held-out prompts", decoding(run)),
        ("prepared", "Prepared data", prepared),
        ("data", "Data", _data(run)),
        ("plan", "Plan and padding", _plan(run)),
        ("optimizer", "Optimizer", _plots(_gradient(run))),
        ("stages", "Stages and speed", stages),
        ("history", "What happened", _events(run)),
        ("configuration", "Configuration", _details("All settings", run.settings)),
        ("environment", "Environment", _details("Versions, fingerprints and the drafter", run.facts)),
    ]
    buckets = run.numbers("samples/bucket_{bucket}")
    ramp = min(max(buckets, default=0), MAX_BUCKET) + 1
    return fitted(f"{run.name}: paceline run", parts, ramp=ramp)


def _summary(run: History) -> Html:
    late = plots.last_tenth(run)
    step = int(run.steps[-1]) if run.steps.size else 0
    decoded = plots.decoded_tau(run)
    seconds = float(np.nansum(run.series("speed/seconds_per_step") * run.spans)) if run.steps.size else 0.0
    planned = f"of {run.total_steps}" if run.total_steps else ""
    pairs = [("optimizer steps", str(step), f"{planned} · {run.status}".removeprefix(" · "))]
    if run.steps.size:
        first = slice(0, max(run.steps.size // 10, 1))
        pairs += [
            ("loss", _fixed(run.pooled("loss", late), 3), f"last tenth; first {_fixed(run.pooled('loss', first), 3)}"),
            ("training τ", _fixed(run.pooled("tau", late)), "last tenth, tokens per target pass"),
            ("decoded τ", _fixed(decoded[-1][1]) if decoded else "–", "held-out prompts, real decoding"),
            ("training time", duration(seconds), "sum of the steps"),
            ("real tokens/s", short(run.pooled("real_tokens_per_s")), "through the target"),
            ("draft positions/s", short(run.pooled("draft_positions_per_s")), "through the drafter"),
            ("real tokens", percent(run.pooled("padding_efficiency")), "of all padded tokens"),
        ]
    findings = diagnose(run)
    return joined((tiles(pairs), _findings(findings), _next_steps(findings)))


def _findings(findings: list[Finding]) -> Html:
    """What the numbers say; the level is written out, the color only repeats it."""
    rows = [
        element(
            "li",
            element("b", "Warning" if finding.level == "warning" else "Note"),
            _unbroken(finding.text),
            class_=finding.level,
        )
        for finding in findings
    ]
    return element("ul", *rows, class_="findings") if rows else Html("")


def _unbroken(text: str) -> str:
    """Numbers stay on one line with their signs and units."""
    return text.replace(" %", "\u00a0%").replace(" ±", "\u00a0±").replace("± ", "±\u00a0").replace(" nat", "\u00a0nat")


def _next_steps(findings: list[Finding]) -> Html:
    advice = list(dict.fromkeys(finding.advice for finding in findings if finding.advice))
    if not advice:
        return Html("")
    rows = (element("li", text[0].upper() + text[1:] + ".") for text in advice)
    return joined((element("h3", "What to do next"), element("ol", *rows)))


def _missing(run: History) -> Html:
    rows = [element("li", shortened(note, 400)) for note in run.notes[:MAX_NOTES]]
    if len(run.notes) > MAX_NOTES:
        rows.append(element("li", f"{len(run.notes) - MAX_NOTES} more"))
    return element("ul", *rows) if rows else Html("")


def _loss(run: History) -> Html:
    return _plots(
        (
            plots.loss(run),
            "Loss",
            f"Grey: {_each(run)}; first ones may lie above. Line: smoothed over 4 % of the run. "
            "Dotted uprights: resumed.",
        ),
        (
            plots.loss_by_bucket(run),
            "Loss by length bucket",
            "Smoothed; bucket 0 holds the shortest samples. Each bucket's own loss, whatever its share of the step.",
        ),
    )


def _acceptance(run: History) -> Html:
    return _plots(
        (
            plots.acceptance(run, plots.decoded_tau(run)),
            "Acceptance length τ",
            "Tokens per target pass, bonus included. Training counts blocks at random anchors; decoding serves.",
        ),
        (
            plots.slots_now(run, decoded_slots(run)),
            "By slot, last tenth of the run",
            "Accuracy counts a slot whatever came before it; acceptance only where all earlier slots were accepted.",
        ),
        (plots.slots_over_time(run), "Slot accuracy over time", "Slot 1 is the first draft after the anchor."),
    )


def _data(run: History) -> Html:
    buckets = run.numbers("samples/bucket_{bucket}")
    if not buckets:
        return Html("")
    spans, late = run.spans, plots.last_tenth(run)

    def total(name: str) -> float:
        return float(np.sum(run.counts(name) * spans))

    samples, tokens = total("window/samples") or math.nan, total("window/real_tokens") or math.nan
    edges = _edges(run)
    rows = [
        (
            f"bucket {b}" + (f" (≤ {edges[b]} tokens)" if b < len(edges) else ""),
            short(total(f"samples/bucket_{b}")),
            percent(total(f"samples/bucket_{b}") / samples),
            percent(total(f"real_tokens/bucket_{b}") / tokens),
            percent(run.pooled(f"weight_share/bucket_{b}") * _present(run, f"weight_share/bucket_{b}")),
            short(_over(total(f"real_tokens/bucket_{b}"), total(f"samples/bucket_{b}"))),
            percent(_over(total(f"real_tokens/bucket_{b}"), total(f"padded_tokens/bucket_{b}"))),
            percent(_steps_with(run, b)),
            _fixed(run.pooled(f"loss/bucket_{b}", late), 3),
        )
        for b in buckets
    ]
    columns = ("", "samples", "of samples", "of real tokens", "of loss weight", "mean length", "real of padded")
    head = tiles(
        (
            ("samples trained", short(samples), "all epochs"),
            ("real tokens", short(tokens), "all epochs"),
            ("mean length", short(_over(tokens, samples)), "tokens"),
            ("epochs", short(float(run.epochs[-1]) + 1), "begun"),
        )
    )
    return joined(
        (
            head,
            table((*columns, "in steps", "loss, last tenth"), rows),
            _plots(
                (
                    plots.mix(run, "samples/bucket_{}", "share of samples", "mix-samples"),
                    "Which lengths trained when",
                    f"Share of each length bucket in the samples of a {run.line}. " + _bands(run),
                ),
                (
                    plots.lengths(run),
                    "Sample length",
                    f"Mean (line; grey: {_each(run)}) and longest sample of {_each(run)}.",
                ),
            ),
        )
    )


def _plan(run: History) -> Html:
    plan = run.settings.get("plan") or {}
    facts = [
        (key, shortened(str(plan[key]), 80))
        for key in ("strategy", "schedule", "token_budget", "accumulate")
        if key in plan
    ]
    if run.steps.size:
        facts += [
            ("samples a step", _fixed(run.pooled("window/samples"), 1)),
            ("micro-batches a step", _fixed(run.pooled("window/micro_batches"), 1)),
            ("distinct buckets a step", _fixed(run.pooled("window/buckets"))),
            ("samples a micro-batch", _fixed(run.pooled("window/samples_per_micro_batch"), 1)),
            ("real of padded tokens", percent(run.pooled("padding_efficiency"))),
        ]
    drawn = _plots((plots.padding(run), "Padding", "Real tokens / padded tokens of the target's batches, smoothed."))
    return joined((table(("", ""), facts), drawn)) if facts else drawn


def _gradient(run: History) -> tuple[str | None, str, str]:
    clipped, skipped = run.pooled("gradient/clipped"), run.pooled("gradient/skipped")
    return (
        plots.gradient(run),
        "Gradient norm",
        f"Before clipping. {percent(clipped)} of the steps were clipped, {percent(skipped)} skipped (×).",
    )


def _stages(run: History) -> Html:
    names = sorted({name.split("/")[1] for name in run.values if name.startswith("stage/")})
    caption = (
        "Share of the stage's time: busy, starved (waits for work), blocked (waits for room to put it). "
        "At the end of a run a stage that is done waits too, and a feed that is done is in no state."
    )
    drawn = [(plots.stage(run, name), f"Stage: {name}", caption) for name in names[:MAX_STAGES]]
    if len(names) > MAX_STAGES:
        run.notes.append(f"{len(names) - MAX_STAGES} of {len(names)} stages are left out")
    speeds = _plots(
        *drawn,
        (
            plots.speed(run, "real_tokens_per_s", "tokens/s"),
            "Real tokens a second",
            "Through the target, padding excluded.",
        ),
        (
            plots.speed(run, "draft_positions_per_s", "positions/s"),
            "Draft positions a second",
            "Anchors × block size: the drafter's work, which tokens alone do not show.",
        ),
    )
    return joined((speeds, _depths(run)))


def _depths(run: History) -> Html:
    """Queues and memory: means over the last tenth, and the most that was ever seen."""
    late = plots.last_tenth(run)
    queues = [name.removeprefix("queue/").removesuffix("_items") for name in run.values if QUEUE.fullmatch(name)]
    rows = [
        (
            f"queue {name}",
            short(run.pooled(f"queue/{name}_items", late)),
            _bytes(run.pooled(f"queue/{name}_bytes", late)),
        )
        for name in sorted(queues)[:MAX_STAGES]
    ]
    places = sorted({found.group(1) for name in run.values if (found := MEMORY.fullmatch(name))})
    memory = [
        (
            f"memory of {name}",
            _bytes(run.pooled(f"memory/{name}_bytes", late)),
            _bytes(float(np.max(run.counts(f"memory_peak/{name}_bytes")))),
        )
        for name in places[:MAX_STAGES]
    ]
    tables = [table(("waiting, last tenth", "items", "bytes"), rows)] if rows else []
    if memory:
        tables.append(table(("", "in use, last tenth", "most so far"), memory))
    return joined(tables)


def _bytes(size: float) -> str:
    if not math.isfinite(size) or size <= 0:
        return "–"
    text = short(size)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def _events(run: History) -> Html:
    rows = [(f"step {start}", "started" if not start else "resumed", "") for start in run.starts]
    rows += [
        (f"step {event.step}", shortened(event.event, 80), "; ".join(f"{k}: {v}" for k, v in event.fields.items()))
        for event in run.events
    ]
    rows.sort(key=lambda row: int(row[0].split()[1]))
    if len(rows) > MAX_EVENTS:
        half = MAX_EVENTS // 2
        rows = [*rows[:half], ("…", f"{len(rows) - MAX_EVENTS} more", ""), *rows[-half:]]
    rows = [(*row[:2], shortened(row[2], MAX_DETAILS)) for row in rows]
    return table(("", "event", "details"), rows) if rows else Html("")


def _plots(*drawn: tuple[str | None, str, str]) -> Html:
    figures = [figure(svg, title, caption) for svg, title, caption in drawn if svg is not None]
    return element("div", *figures, class_="plots") if figures else Html("")


def _details(title: str, value: dict[str, Any]) -> Html:
    return element("details", element("summary", title), nested(value)) if value else Html("")


def _edges(run: History) -> list[int]:
    """Longest length of each bucket; empty where the header has no list of such."""
    given = run.header.get("bucket_edges")
    edges = whole_numbers(given)
    return edges if isinstance(given, list) and len(edges) == len(given) else []


def _steps_with(run: History, bucket: int) -> float:
    """Share of the optimizer steps in which a bucket was trained; NaN where that was not counted."""
    name = f"steps_with/bucket_{bucket}"
    return float(np.sum(run.counts(name) * run.spans) / run.spans.sum()) if name in run.values else math.nan


def _present(run: History, name: str) -> float:
    """Share of the whole weight that the lines with this name carry: turns a mean where present into a share of all."""
    weights, whole = run.weights.get(name), run.weights.get("loss")
    return (
        _over(float(np.nansum(weights)), float(np.nansum(whole))) if weights is not None and whole is not None else 1.0
    )


def _each(run: History) -> str:
    return "every step" if run.line == "step" else f"each {run.line}"


def _bands(run: History) -> str:
    """What level bands of the mixture mean; over several steps they mean little."""
    if run.line == "step":
        return "Level bands: every step saw every length."
    return "The mixture inside a line cannot be seen here; column “in steps” counts single steps."


def _over(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _fixed(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"
