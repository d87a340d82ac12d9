"""``paceline prepare``: chats to a tokenized store with loss masks and lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.text import Text

from paceline.checkpoint.run_directory import is_run_directory, read_run_facts
from paceline.cli import command
from paceline.config import Settings
from paceline.errors import ConfigError, DataError
from paceline.text import percent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paceline.data.coverage import StoreUse
    from paceline.data.report import Count, PrepareReport
    from paceline.data.store import TokenStore
    from paceline.evaluate.on_policy import OnPolicyReport
    from paceline.types import TargetFacts

_SHOWN_TOKENS = 1500
"""Tokens of a sample that `--show` prints at most."""


@dataclass
class Arguments:
    """Which settings, and what is printed."""

    run: Annotated[Path, tyro.conf.Positional]
    """Settings file of a run, or a run directory."""
    show: int = 0
    """Print this many samples, supervised tokens in color; with --json on standard error."""
    json: bool = False
    """Print the report as JSON."""
    on_policy: int = 0
    """Score the answers of this many rows with the target: are they its own?"""
    replace: bool = False
    """Replace a store that was made from something else."""


def run(argv: Sequence[str]) -> int:
    """Prepare the data of a run and print the report."""
    arguments, overrides = command.parse(
        Arguments,
        argv,
        prog="paceline prepare",
        description="Tokenize chats with the target's chat template into a store, with loss masks and lengths.\n"
        "Of a run directory: make its store again, from the same files and settings.\n\n"
        "Example: paceline prepare run.yaml --show 2 --data.max_length 2048",
        settings=True,
    )
    for name, count in (("--show", arguments.show), ("--on-policy", arguments.on_policy)):
        if count < 0:
            raise ConfigError(f"prepare: {name} is {count}; it must be 0 or more")
    settings = command.read_settings(arguments.run, overrides)
    report = prepare_run(settings, replace=arguments.replace)
    use = use_of(report.store, settings)
    scored = score_answers(report.store, settings, arguments.on_policy) if arguments.on_policy else None
    if arguments.json:
        more = {"anchors": asdict(use.anchors), "passes": use.passes, "on_policy": asdict(scored) if scored else None}
        command.write_json({**asdict(report), **more})
    else:
        command.stdout.print(render(report, use))
        if scored:
            command.stdout.print(f"on policy: {scored.sentence} ({scored.mean_nll:.3f} nats a token)", markup=False)
    check_prepared(settings)
    if arguments.show:
        # Standard output is one JSON document where a program reads it.
        _show(report.store, settings, arguments.show, command.stderr if arguments.json else command.stdout)
    return 0


def check_prepared(settings: Settings, facts: TargetFacts | None = None) -> None:
    """Say what does not fit between the store of a run and its target, and refuse a mask token that is in the text.

    Args:
        settings: of the run.
        facts: of its target, where they are known already.

    Raises:
        ConfigError: the mask token that is asked for cannot be used.
        DataError: the mask token occurs in the text.
    """
    from paceline.data.coverage import beyond_positions, check_mask_token
    from paceline.data.holdout import without_heldout
    from paceline.data.mask_token import choose_mask_token
    from paceline.data.prepare import other_target
    from paceline.data.store import open_store
    from paceline.data.tokenizer import load_tokenizer
    from paceline.target_model.facts import identify_target, num_positions

    store, target = open_store(settings.store_path), settings.target
    ours = identify_target(target) if facts is None else facts.identity
    for line in (
        other_target(store.path, ours),
        beyond_positions(store, num_positions(target)),
        without_heldout(settings.data.heldout, store.path),
    ):
        if line:
            command.notice(line)
    tokenizer = load_tokenizer(target.path, target.trust_remote_code)
    size, named = (facts.vocab_size, facts.named_tokens) if facts is not None else (None, frozenset[int]())
    mask = choose_mask_token(tokenizer, settings.drafter.mask_token_id, size, named)
    if mask is not None:
        if mask.note:
            command.notice(mask.note)
        check_mask_token(store, mask.id, len(tokenizer))


def prepare_run(settings: Settings, *, replace: bool = False) -> PrepareReport:
    """Prepare the data of a run, with progress on standard error.

    Raises:
        DataError: a run that was started needs another store than these settings make.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from paceline.data.prepare import prepare
    from paceline.drafter.anchors import count_eligible
    from paceline.target_model.facts import identify_target

    run_dir = Path(settings.run_dir)
    expected = read_run_facts(run_dir).get("data_fingerprint") if is_run_directory(run_dir) else None
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    hidden = settings.observe.console == "quiet" or not command.stderr.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=command.stderr, transient=True, disable=hidden) as bars:
        tasks = {
            name: bars.add_task(name, total=None, visible=False) for name in ("reading", "tokenizing", "finishing")
        }

        def hear(stage: str, done: int, total: int) -> None:
            if stage == "waiting":
                command.notice(f"{settings.store_path}: another process is preparing it; waiting until it is done")
                return
            bars.update(tasks[stage], completed=done, total=total, visible=True)

        return prepare(
            settings.data.train,
            settings.store_path,
            settings.target.path,
            settings.data,
            count_eligible=count_eligible,
            trust_remote_code=settings.target.trust_remote_code,
            progress=hear,
            replace=replace,
            target=identify_target(settings.target),
            expected=expected,
        )


def use_of(store: str, settings: Settings) -> StoreUse:
    """What these settings make of a store; noted in it for the HTML report."""
    from paceline.data.coverage import note_use

    drafter = settings.drafter
    return note_use(
        Path(store), num_anchors=drafter.num_anchors, block_size=drafter.block_size, epochs=settings.train.epochs
    )


def score_answers(store: str, settings: Settings, count: int) -> OnPolicyReport:
    """Score the answers of `count` rows, spread over the store, with the target; see `paceline.evaluate.on_policy`."""
    import numpy as np
    import torch
    from rich.progress import track

    from paceline.data.store import open_store
    from paceline.evaluate.on_policy import on_policy
    from paceline.target_model.load import load_model

    opened = open_store(store)
    model, _, _ = load_model(settings.target, settings.flow.target_devices[0])

    @torch.no_grad()
    def score(ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the tokens at these places: whether each is the target's first choice, and its nats."""
        tokens = torch.from_numpy(ids).to(model.device)
        # The logits at position p choose the token at p + 1.
        kept = torch.from_numpy(labels - 1).to(model.device)
        logits = model(input_ids=tokens[None], use_cache=False, logits_to_keep=kept).logits[0].float()
        wanted = tokens[kept + 1]
        nll = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        return (logits.argmax(-1) == wanted).cpu().numpy(), nll.cpu().numpy()

    rows = np.unique(np.linspace(0, len(opened) - 1, min(count, len(opened))).astype(np.int64)).tolist()
    told = iter(track(rows, "scoring", console=command.stderr, transient=True))
    return on_policy(opened, rows, score, block_size=settings.drafter.block_size, progress=lambda _: next(told, None))


def prepare_heldout(settings: Settings) -> PrepareReport:
    """Tokenize the held-out chats beside the store, to measure the drafter on while it trains.

    Raises:
        DataError: there is nothing to measure in them.
    """
    from paceline.data.holdout import heldout_files, unmeasurable
    from paceline.data.prepare import prepare
    from paceline.data.report import REASONS
    from paceline.drafter.anchors import count_eligible
    from paceline.target_model.facts import identify_target

    try:
        report = prepare(
            heldout_files(settings.data.heldout, settings.store_path),
            settings.heldout_store_path,
            settings.target.path,
            settings.data.model_copy(update={"heldout": [], "heldout_share": 0.0, "duplicates": "keep"}),
            count_eligible=count_eligible,
            trust_remote_code=settings.target.trust_remote_code,
            replace=True,
            target=identify_target(settings.target),
        )
    except DataError as error:
        raise unmeasurable(error) from error
    for reason, count in report.set_aside.items():
        command.notice(
            f"{report.store}: {count.count:,} held-out rows are not measured: {REASONS[reason]} "
            f"(first: {count.example})"
        )
    return report


def render(report: PrepareReport, use: StoreUse | None = None) -> Text:
    """The report for a terminal; with what the anchor cap leaves, and the passes, where that is given."""
    from paceline.data.coverage import cap_lines
    from paceline.data.report import NOTES, REASONS

    text = Text()
    if report.reused:
        text.append(f"{report.store}: a store of the same data, tokenizer and settings is there; nothing to do\n")
    else:
        text.append(f"{report.store}: written\n")
    share = report.supervised_tokens / report.tokens if report.tokens else 0.0
    text.append(f"rows     {report.rows_in:,} in, {report.rows_used:,} used, {report.samples:,} samples\n")
    if report.heldout_rows:
        text.append(f"held out {report.heldout_rows:,} rows of {report.heldout_documents:,} documents\n")
    text.append(f"tokens   {report.tokens:,}, of them {report.supervised_tokens:,} supervised ({share:.1%})\n")
    text.append(f"anchors  {report.eligible_anchors:,} eligible positions\n")
    if use is not None:
        coverage = use.anchors
        text.append(
            f"an epoch {coverage.anchors:,} anchors, {coverage.covered_labels:.1%} of the labels in a block; "
            f"{coverage.capped_samples:,} samples at the cap\n"
        )
        text.append(f"passes   {use.passes}\n")
    text.append("lengths  " + ", ".join(f"{p} %: {n:,}" for p, n in report.length_percentiles.items()) + "\n")
    text.append(_histogram(report))
    text.append("".join(line + "\n" for line in cap_lines(report)))
    known = report.supervised_tokens + report.lost_supervised_tokens
    text.append(_counts("left out", report.set_aside, REASONS, known))
    warned = "\n".join(report.warnings)
    noted = {key: count for key, count in report.notes.items() if NOTES[key] not in warned}
    text.append(_counts("noted", noted, NOTES, known))
    telling = {tag: total for tag, total in report.tags.items() if total.samples != report.samples}
    if telling:
        text.append("\ntags (samples, supervised tokens, share of them that is lost)\n")
        for tag, total in telling.items():
            lost = percent(total.lost / (total.supervised_tokens + total.lost)) if total.lost else ""
            text.append(f"  {tag:<20} {total.samples:>10,} {total.supervised_tokens:>14,} {lost:>6}\n")
    for warning in report.warnings:
        text.append("warning: ", style="bold yellow")
        text.append(warning + "\n")
    text.rstrip()
    return text


def _histogram(report: PrepareReport) -> Text:
    most = max((row[1] for row in report.length_histogram), default=1)
    lines = [
        f"  ≤ {upper:>7,} tokens {samples:>10,} samples {'█' * max(1 if samples else 0, samples * 40 // most)}\n"
        for upper, samples, _ in report.length_histogram
    ]
    return Text("".join(lines))


def _counts(title: str, counts: Mapping[str, Count], words: Mapping[str, str], supervised: int) -> Text:
    """One line a reason; with the supervised tokens that are lost, and their share of `supervised`."""
    text = Text()
    if counts:
        text.append(f"\n{title}\n")
        for key, count in counts.items():
            detail = f": {count.detail}" if count.detail else ""
            lost = f", {count.lost:,} supervised tokens ({percent(count.lost / supervised)})" if count.lost else ""
            text.append(f"  {count.count:>8,}  {words[key]}{lost}  (first: {count.example}{detail})\n")
    return text


def _show(store: str, settings: Settings, count: int, console: Console) -> None:
    from paceline.data.store import open_store
    from paceline.data.tokenizer import load_tokenizer

    opened = open_store(store)
    tokenizer = load_tokenizer(settings.target.path, settings.target.trust_remote_code)
    for row in range(min(count, len(opened))):
        console.print(draw_sample(opened, row, tokenizer))


def draw_sample(store: TokenStore, row: int, tokenizer: PreTrainedTokenizerBase) -> Text:
    """One sample as text: what is supervised in green on its own, what is not dimmed; borders between tokens are kept.

    Args:
        store: opened store.
        row: sample.
        tokenizer: of the target, with `decode`.
    """
    (ids, mask) = store.read([row])[0]
    text = Text(
        f"\nsample {row} ({store.origin(row)}; {len(ids)} tokens, {int(mask.sum())} supervised)\n", style="bold"
    )
    start = 0
    for position in range(1, min(len(ids), _SHOWN_TOKENS) + 1):
        if position == min(len(ids), _SHOWN_TOKENS) or mask[position] != mask[start]:
            piece = tokenizer.decode(ids[start:position].tolist(), skip_special_tokens=False)
            text.append(f"⟦{piece}⟧" if mask[start] else str(piece), style="bold green" if mask[start] else "dim")
            start = position
    if len(ids) > _SHOWN_TOKENS:
        text.append(f"\n… {len(ids) - _SHOWN_TOKENS} more tokens", style="italic")
    return text
