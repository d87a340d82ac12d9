"""`paceline train`: train a drafter, or resume a run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from paceline.checkpoint.run_directory import check_writable, is_run_directory, read_run_facts
from paceline.checkpoint.run_lock import hold_run
from paceline.cli import command
from paceline.config import Settings
from paceline.errors import NOT_TRAINED, ConfigError, Interrupted

if TYPE_CHECKING:
    from paceline.run.run import Run
    from paceline.train import Outcome
    from paceline.types import TargetFacts

DESCRIPTION = """Train a drafter, or resume a run.

The chats named in data.train are prepared first where that has not been done. The run directory then holds all there
is to know about the run; starting again with it, or with the same settings, resumes from its newest checkpoint.

Plan, objective, noise, learning rate and length of a run may change between two starts: they count from the next step
on, the change is kept in the run, and it is asked for before (--yes: it is not).

Examples:
  paceline train run.yaml
  paceline train run.yaml --optimizer.lr 3e-4 --run-dir runs/second
  paceline train runs/second
  paceline train runs/second --optimizer.lr 1e-4 --train.epochs 8 --yes
"""


@dataclass
class Arguments:
    """What to train."""

    run: Annotated[Path, tyro.conf.Positional]
    """Settings file of a new run, or the directory of a run to resume."""
    profile: tuple[int, int] | None = None
    """First and last step to watch with torch's profiler; short for --observe.profile-steps."""
    yes: bool = False
    """Change settings of a run that is under way without asking."""
    json: bool = False
    """Print the outcome as JSON on standard output."""


def run(argv: Sequence[str]) -> int:
    """Train; exit code 0 when the run is finished or was stopped with a checkpoint."""
    arguments, overrides = command.parse(Arguments, argv, prog="paceline train", description=DESCRIPTION, settings=True)
    if arguments.profile is not None:
        overrides["observe.profile_steps"] = str(list(arguments.profile))
    settings = command.read_settings(arguments.run, overrides)
    outcome = train_run(settings, yes=arguments.yes)
    if arguments.json:
        command.write_json(
            {
                "run": settings.run_dir,
                "step": outcome.step,
                "total_steps": outcome.total_steps,
                "stopped": outcome.stopped,
            }
        )
    return 0


def train_run(settings: Settings, *, yes: bool = False) -> Outcome:
    """Prepare where needed, show what is about to be trained, train, say how it ended.

    Args:
        settings: of the run.
        yes: whether settings of a run that is under way may change without a question.
    """
    from paceline.pipeline.multinode import joined, this_node

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # `paceline signal` may come before the first step
    here, run_dir = this_node(), Path(settings.run_dir)
    held = hold_run(run_dir) if here.number == 0 else nullcontext()
    quiet = settings.observe.console == "quiet"
    with _starting():
        from paceline.run.build import build_run, resolve_models
        from paceline.run.support import check_support
        from paceline.train import train

        check_support(settings, here)
        if here.number == 0:
            check_writable(run_dir)
        models = resolve_models(settings)
    with held, joined(here, settings.flow.stall_limit_s) as nodes:
        with _starting():
            if nodes.first:
                confirm_change(settings, yes=yes)
            nodes.in_turn(lambda: ready_store(settings, models.facts))
            run = build_run(settings, models, nodes)
            if not quiet:
                show_run(run)
        outcome = train(run, notice=command.notice, console=command.stderr)
    if not quiet or outcome.stopped:
        command.stderr.print(_ending(run, outcome), markup=False)
    return outcome


@contextmanager
def _starting() -> Generator[None]:
    """Ctrl-C before training has nothing to save."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(NOT_TRAINED) from None


def _ending(run: Run, outcome: Outcome) -> str:
    """How a run ended, and what comes next."""
    from paceline.checkpoint.best import best_checkpoint

    here = run.nodes.here
    if not run.nodes.first:
        return f"machine {here.number} of {here.count} is done at step {outcome.step}"
    if outcome.stopped:
        where = f"stopped at step {outcome.step} of {outcome.total_steps}, checkpoint written"
        return f"{where}; resume with: paceline train {run.run_dir}"
    best = best_checkpoint(run.run_dir)
    named = "" if best is None else f"best checkpoint: {best}; for it add --best to paceline evaluate and export\n"
    if not run.remaining:
        return f"{named}{run.run_dir}: finished before, all {outcome.step} steps; next: paceline evaluate {run.run_dir}"
    return f"{named}trained {outcome.step} steps; next: paceline evaluate {run.run_dir}"


def confirm_change(settings: Settings, *, yes: bool) -> None:
    """Show which settings of a run that is under way change from now on; go on where the user agrees.

    Args:
        settings: of this start.
        yes: whether the user agreed beforehand.

    Raises:
        RunDirectoryError: settings that may not change.
        ConfigError: the user did not agree, or cannot be asked.
    """
    from paceline.checkpoint.run_directory import check_run
    from paceline.run.build import change_of

    run_dir = Path(settings.run_dir)
    if not is_run_directory(run_dir):
        return
    check_run(settings)
    change = change_of(settings)
    if change is None:
        return
    for line in change.lines():
        command.stderr.print(line, markup=False)
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{run_dir}: settings of this run have changed since its last start; add --yes to go on so")
    if input("Train on with these settings? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ConfigError(f"{run_dir}: nothing was changed; put the settings back, or answer yes")


def ready_store(settings: Settings, facts: TargetFacts) -> None:
    """Prepare the chats of a new run; check the store of one that resumes, or make it again where it is missing.

    Args:
        settings: of the run.
        facts: of its target.
    """
    from paceline.checkpoint.checkpoints import steps
    from paceline.cli.prepare import check_prepared, prepare_heldout, prepare_run, render, use_of
    from paceline.data.holdout import heldout_files
    from paceline.data.prepare import check_store

    started = is_run_directory(Path(settings.run_dir))
    if settings.data.train and not (started and settings.store_path.is_dir()):
        if started and steps(Path(settings.run_dir)):
            command.notice(f"{settings.store_path}: the store of this run is missing; it is made again")
        report = prepare_run(settings)
        use = use_of(report.store, settings)
        # Where it was there, `paceline prepare` has shown it.
        if not report.reused and settings.observe.console != "quiet":
            command.stderr.print(render(report, use))
    else:
        target = settings.target
        check_store(settings.store_path, target.path, settings.data, trust_remote_code=target.trust_remote_code)
    measured = settings.data.train and settings.evaluate.validation_samples
    held_out = measured and heldout_files(settings.data.heldout, settings.store_path)
    if held_out and not (started and settings.heldout_store_path.is_dir()):
        prepare_heldout(settings)
    check_prepared(settings, facts)


def show_run(run: Run) -> None:
    """The run in a few lines: target, drafter, data, steps; what to know of serving it."""
    from paceline.export.engines import training_notes
    from paceline.run.warm_start import init_lines
    from paceline.target_model.preconditions import slow_layers

    facts, spec, source = run.facts, run.spec, run.source
    flow = run.settings.flow
    kinds = ", ".join(f"{spec.layers.count(kind)} {kind}" for kind in dict.fromkeys(spec.layers))
    lines = [
        f"target   {facts.path}: {facts.architecture}, {facts.num_layers} layers, hidden {facts.hidden_size}, "
        f"vocabulary {facts.vocab_size}, taps {run.taps}",
        f"drafter  {spec.num_layers} layers ({kinds}), block {spec.block_size}, mask token {spec.mask_token_id}",
        f"data     {source.path}: {len(source.lengths):,} samples, {int(source.lengths.sum()):,} tokens",
        f"steps    {run.plan.total_steps} of {run.settings.plan.accumulate} micro-batches"
        + (f", resuming after step {run.first_step}" if run.first_step else ""),
        f"flow     {flow.mode}, {flow.delivery}: {', '.join(flow.target_devices)} → {', '.join(flow.drafter_devices)}",
    ]
    slow = slow_layers(run.settings.target, flow.target_devices[0], run.plan.largest.padded_tokens[0])
    if slow is not None:
        command.notice(slow)
    evaluate = run.settings.evaluate
    if evaluate.device is not None:
        lines.append(f"decode   {evaluate.device}: up to {evaluate.num_prompts} held-out prompts with each checkpoint")
    noted = read_run_facts(run.run_dir).get("init") if run.nodes.first else None
    if noted is not None and run.first_step == run.plan.begin.step:
        lines += [f"init     {line}" for line in init_lines(noted)]
    here = run.nodes.here
    if here.count > 1:
        lines.append(f"machine  {here.number} of {here.count}, joined at {here.where}")
    for line in lines:
        command.stderr.print(line, markup=False)
    for note in training_notes(spec):
        command.notice(note)
