"""One HTML file that explains a run: no network, no scripts, for light and dark, desk and phone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from paceline.checkpoint.best import best_checkpoint
from paceline.observe.diagnosis.diagnose import diagnose
from paceline.observe.run_history import History, last_part, read_history
from paceline.report import plots
from paceline.report.evaluations import conditions, evaluation_part, server_part
from paceline.report.page import flat, render_page, save_page
from paceline.report.prepared import prepared_part
from paceline.text import duration, fixed, percent, short, shortened, size

REPORT_FILE = "report.html"
MAX_EVENTS = 200
"""Events that are listed, the first and the last ones."""
Rows = list[tuple[str, ...]]


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run, finished or not.

    Args:
        run_dir: directory of the run.
        out: file to write; ``report.html`` in the run directory if unset.

    Returns:
        The file.

    Raises:
        RunDirectoryError: no run in there, or the file cannot be written or is not a page.
    """
    return save_page(render(read_history(run_dir)), out if out is not None else run_dir / REPORT_FILE)


def render(run: History, *, refresh_s: int = 0) -> str:
    """The whole page; ``refresh_s`` as for `render_page`."""
    stages = sorted({name.split("/")[1] for name in run.values if name.startswith("stage/")})
    return render_page(
        "run.html.j2",
        f"{run.name}: paceline run",
        refresh_s=refresh_s,
        run=run,
        plots=plots,
        stages=stages,
        line="every step" if run.line == "step" else f"each {run.line}",
        tiles=_tiles(run),
        findings=diagnose(run),
        evaluation=evaluation_part(run),
        served=server_part(run),
        prepared=prepared_part(run),
        trained=_trained(run),
        buckets=_buckets(run),
        plan=_plan(run),
        workers=_workers(run),
        queues=_queues(run),
        memory=_memory(run),
        changes=_changes(run),
        events=_events(run),
        settings=[(name, shortened(text, 300)) for name, text in flat(run.settings)],
        facts=[(name, shortened(text, 300)) for name, text in flat(run.facts)],
    )


def _tiles(run: History) -> Rows:
    step, late = int(run.steps[-1]) if run.steps.size else 0, last_part(run)
    planned = f"of {run.total_steps} · " if run.total_steps else ""
    tiles: Rows = [("optimizer steps", str(step), f"{planned}{run.status}")]
    if origin := run.facts.get("forked_from"):
        tiles.append(("forked", f"after step {origin['step']}", f"of {origin['run']}"))
    if begun := run.facts.get("begins"):
        tiles.append(("begins", f"after step {begun['step']}", f"with epoch {begun['epoch'] + 1} of its data"))
    if not run.steps.size:
        return tiles
    first = run.pooled("loss", slice(0, max(run.steps.size // 10, 1)))
    held_out, decoded = run.held_out_tau(), run.decoded_tau()
    if decoded:
        held_out, what = decoded, f"decoded: {conditions(run.evaluations[-1])}"
    else:
        what = "of the validation batches"
    best = best_checkpoint(run.run_dir)
    if best is not None:
        tiles.append(("best checkpoint", f"step {best.step}", f"{best.metric} {fixed(best.value, 3)}"))
    return [
        *tiles,
        ("loss", fixed(run.pooled("loss", late), 3), f"last tenth; first {fixed(first, 3)}"),
        ("training τ", fixed(run.pooled("tau", late)), "last tenth, tokens per target pass"),
        ("held-out τ", fixed(held_out[-1][1]) if held_out else "–", what if held_out else "not measured"),
        ("training time", duration(float(np.nansum(run.series("speed/seconds_per_step") * run.spans))), "all steps"),
        ("real tokens/s", short(run.pooled("real_tokens_per_s")), "through the target"),
        ("draft positions/s", short(run.pooled("draft_positions_per_s")), "through the drafter"),
        ("real tokens", percent(run.pooled("padding_efficiency")), "of all padded tokens"),
    ]


def total(run: History, name: str) -> float:
    """Sum over all steps of a count that lines average over their steps."""
    return float(np.sum(run.counts(name) * run.spans))


def _trained(run: History) -> Rows:
    samples, tokens = total(run, "window/samples"), total(run, "window/real_tokens")
    if not samples:
        return []
    return [
        ("samples trained", short(samples), "all epochs"),
        ("real tokens", short(tokens), "all epochs"),
        ("mean length", short(tokens / samples), "tokens"),
        ("epochs", str(int(run.epochs[-1]) + 1), "begun"),
    ]


def _buckets(run: History) -> Rows:
    """A row for each bucket: what was trained of it, its part of the loss, and in how many steps it was."""
    samples, tokens = total(run, "window/samples"), total(run, "window/real_tokens")
    weight = float(np.nansum(run.weights["loss"])) if "loss" in run.weights else math.nan
    edges = run.header.get("bucket_edges", [])
    rows: Rows = []
    for b in run.numbers("samples/bucket_{bucket}"):
        own_samples, own_tokens = total(run, f"samples/bucket_{b}"), total(run, f"real_tokens/bucket_{b}")
        own_weight = float(np.nansum(run.weights.get(f"loss/bucket_{b}", np.zeros(0))))
        rows.append(
            (
                f"bucket {b}" + (f" (≤ {edges[b]} tokens)" if b < len(edges) else ""),
                short(own_samples),
                percent(_over(own_samples, samples)),
                percent(_over(own_tokens, tokens)),
                percent(_over(own_weight, weight)),
                short(_over(own_tokens, own_samples)),
                percent(_over(own_tokens, total(run, f"padded_tokens/bucket_{b}"))),
                percent(_over(total(run, f"steps_with/bucket_{b}"), float(run.spans.sum()))),
                fixed(run.pooled(f"loss/bucket_{b}", last_part(run)), 3),
            )
        )
    return rows


def _plan(run: History) -> Rows:
    plan = run.settings.get("plan") or {}
    keys = ("strategy", "schedule", "token_budget", "accumulate")
    rows: Rows = [(key, shortened(str(plan[key]), 80)) for key in keys if key in plan]
    if run.steps.size:
        rows += [
            ("samples a step", fixed(run.pooled("window/samples"), 1)),
            ("micro-batches a step", fixed(run.pooled("window/micro_batches"), 1)),
            ("distinct buckets a step", fixed(run.pooled("window/buckets"))),
            ("samples a micro-batch", fixed(run.pooled("window/samples_per_micro_batch"), 1)),
            ("real of padded tokens", percent(run.pooled("padding_efficiency"))),
        ]
    return rows


def _workers(run: History) -> Rows:
    """A row for each worker process, over the whole run."""
    rows: Rows = []
    for name in sorted({name.split("/")[1] for name in run.values if name.startswith("worker/")}):
        rate, busy = run.pooled(f"worker/{name}/real_tokens_per_s"), run.pooled(f"worker/{name}/busy")
        memory = (run.counts(f"worker/{name}/{kind}_bytes") for kind in ("memory", "gpu_memory"))
        rows.append(
            (
                name.replace("_", " "),
                short(total(run, f"worker/{name}/batches")),
                short(rate),
                percent(busy),
                short(_over(rate, busy)),
                *(size(float(most.max())) if most.any() else "–" for most in memory),
            )
        )
    return rows


def _queues(run: History) -> Rows:
    late = last_part(run)
    names = sorted(name.split("/")[1].removesuffix("_items") for name in run.values if name.endswith("_items"))
    return [
        (
            name.replace("_", " "),
            short(run.pooled(f"queue/{name}_items", late)),
            size(run.pooled(f"queue/{name}_bytes", late)) if f"queue/{name}_bytes" in run.values else "–",
        )
        for name in names
    ]


def _memory(run: History) -> Rows:
    late, found = last_part(run), set()
    for name in run.values:
        group, _, rest = name.partition("/")
        if group in ("memory", "memory_peak"):
            found.add(rest.removesuffix("_bytes"))
    rows: Rows = []
    for place in sorted(found):
        now, most = run.pooled(f"memory/{place}_bytes", late), run.counts(f"memory_peak/{place}_bytes").max()
        rows.append((place.replace("_", " "), size(now) if now > 0 else "–", size(float(most)) if most else "–"))
    return rows


def _changes(run: History) -> Rows:
    """A row for each setting that changed on the way."""
    return [
        (f"from step {event.step + 1} on", name, shortened(str(change), 300))
        for event in run.events
        if event.event == "settings"
        for name, change in event.fields.items()
    ]


def _events(run: History) -> Rows:
    starts = [(step, "resumed" if step else "started", "") for step in run.starts]
    events = [(e.step, e.event, "; ".join(f"{key}: {text}" for key, text in flat(e.fields))) for e in run.events]
    rows = [(f"step {step}", *rest) for step, *rest in sorted(starts + events, key=lambda row: row[0])]
    if len(rows) > MAX_EVENTS:
        half = MAX_EVENTS // 2
        rows = [*rows[:half], ("…", f"{len(rows) - MAX_EVENTS} more", ""), *rows[-half:]]
    return [(step, event, shortened(details, 600)) for step, event, details in rows]


def _over(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
