"""``paceline regenerate``: answers to prompts by the target itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from paceline.cli import command
from paceline.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.progress import Progress

    from paceline.regenerate.client import ServerAnswers
    from paceline.regenerate.local import LocalAnswers
    from paceline.regenerate.loop import RegenerateSettings
    from paceline.types import GenerateAnswers, Sampling


@dataclass
class Arguments:
    """Which prompts, who answers, and how."""

    prompts: Annotated[list[str], tyro.conf.Positional]
    """Data files with `messages`; answers that they hold are made anew."""
    out: Path
    """JSON lines file of the answered rows; continued where it is there."""
    target: str
    """Folder of the target: its tokenizer, its chat template, and with --local its weights."""
    local: bool = False
    """Answer with the target in this process."""
    endpoint: str | None = None
    """Answer with an OpenAI-compatible server: its address, for example http://localhost:8000/v1; user:password@ before
    the host logs in."""
    model: str | None = None
    """Name of the model at the server. Unset: the only one that the server names."""
    max_new_tokens: int = 1024
    """Longest answer in tokens."""
    temperature: float = 0.0
    """0 is greedy: the target's most probable token."""
    top_k: int = 0
    """Draw among the k most probable tokens; 0 is all."""
    top_p: float = 1.0
    """Draw among the smallest set of tokens with this much probability."""
    seed: int = 0
    """Key of the draws."""
    cut: Literal["drop", "mark"] = "drop"
    """Rows whose answer reaches the limit: to a file of cut rows, or kept and marked."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """The template's switch for thinking, whatever its name; auto leaves the template's default."""
    template_switches: str | None = None
    """Further variables of the chat template for every prompt, for example 'reasoning_effort: high'."""
    max_context: int | None = None
    """Turns whose prompt and longest answer exceed this many tokens are not asked."""
    batch_size: int = 16
    """Conversations answered side by side with --local."""
    in_flight: int = 32
    """Requests under way at once with --endpoint."""
    timeout_s: float = 600.0
    """Longest wait for one answer of the server."""
    key_variable: str | None = None
    """Environment variable that holds the server's key."""
    attempts: int = 6
    """Tries of one request before the run stops."""
    device: str = "cpu"
    """Where the target runs with --local."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of its weights with --local."""
    adapter: str | None = None
    """Folder of a LoRA adapter that is merged into the weights with --local."""
    trust_remote_code: bool = False
    """Whether code that comes with the target may run."""
    json: bool = False
    """Print the counts as JSON."""


def run(argv: Sequence[str]) -> int:
    """Answer prompts and say how many rows were written."""
    from paceline.types import Sampling

    arguments, _ = command.parse(
        Arguments,
        argv,
        prog="paceline regenerate",
        description="Answer prompts with the target, so that the drafter learns the text that its target writes.\n\n"
        "Examples:\n"
        "  paceline regenerate prompts.jsonl --target models/small --local --out answers.jsonl\n"
        "  paceline regenerate prompts.jsonl --target models/large --endpoint http://localhost:8000/v1 --out a.jsonl",
    )
    if arguments.local == (arguments.endpoint is not None):
        raise ConfigError("regenerate: give either --local or --endpoint URL")
    _check_numbers(arguments)
    sampling = Sampling(
        arguments.max_new_tokens, arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed
    )
    passed_over: list[str] = []
    counts = _answer(arguments, sampling, passed_over)
    counts["passed_over"] = len(passed_over)
    if arguments.json:
        command.write_json(counts)
        return 0
    command.stdout.print(
        f"{arguments.out}: {counts['written']:,} rows added, {counts['already_there']:,} were there, "
        f"{counts['cut']:,} cut, {counts['repeated']:,} repeated prompts",
        markup=False,
    )
    for line in passed_over[:3]:
        command.stdout.print(f"passed over: {line}", markup=False)
    if len(passed_over) > 3:
        command.stdout.print(f"passed over: {len(passed_over) - 3:,} more rows")
    return 0


def _check_numbers(arguments: Arguments) -> None:
    """Refuse numbers with which nothing can be answered, all at once."""
    least_one = ("max_new_tokens", "batch_size", "in_flight", "attempts", "max_context")
    values = [(name, getattr(arguments, name)) for name in least_one]
    errors = [(name, value, "at least 1") for name, value in values if value is not None and value < 1]
    if not 0 <= arguments.temperature < float("inf"):
        errors.append(("temperature", arguments.temperature, "0 or more"))
    if not 0 < arguments.top_p <= 1:
        errors.append(("top_p", arguments.top_p, "above 0 and at most 1"))
    if arguments.top_k < 0:
        errors.append(("top_k", arguments.top_k, "0 or more"))
    if not 0 < arguments.timeout_s < float("inf"):
        errors.append(("timeout_s", arguments.timeout_s, "more than 0"))
    if errors:
        named = [(f"--{name.replace('_', '-')}", value, wanted) for name, value, wanted in errors]
        raise ConfigError(*(f"regenerate: {name} is {value}; it must be {wanted}" for name, value, wanted in named))


def _answer(arguments: Arguments, sampling: Sampling, passed_over: list[str]) -> dict[str, Any]:
    """Answer the prompts; what cannot be asked, or is refused, is noted in `passed_over`."""
    from paceline.data.tokenizer import load_tokenizer
    from paceline.regenerate.loop import RegenerateSettings, regenerate

    tokenizer: Any = load_tokenizer(arguments.target, arguments.trust_remote_code)
    settings = RegenerateSettings(
        sampling,
        cut=arguments.cut,
        max_context_tokens=arguments.max_context,
        model=str(Path(arguments.target)),
        template=_template(arguments, tokenizer),
    )
    rows = list(_prompts(arguments, passed_over))
    answers, settings = (_local if arguments.local else _remote)(arguments, settings, tokenizer)
    with _bars() as bars:
        task = bars.add_task("prompts", total=len(rows))
        report = regenerate(
            rows, answers, settings, arguments.out, tokenizer=tokenizer, progress=lambda: bars.advance(task)
        )
    counts = asdict(report)
    passed_over.extend(counts.pop("refused"))
    return counts


def _local(
    arguments: Arguments, settings: RegenerateSettings, tokenizer: Any
) -> tuple[LocalAnswers, RegenerateSettings]:
    from paceline.regenerate.local import LocalAnswers

    return LocalAnswers(_generator(arguments), tokenizer, settings, arguments.batch_size), settings


def _remote(
    arguments: Arguments, settings: RegenerateSettings, tokenizer: Any
) -> tuple[ServerAnswers, RegenerateSettings]:
    import os

    from paceline.data.tokenizer import chat_template
    from paceline.regenerate.client import Endpoint, answers_of

    key = os.environ.get(arguments.key_variable) if arguments.key_variable else None
    if arguments.key_variable and not key:
        raise ConfigError(f"--key-variable {arguments.key_variable}: no such environment variable is set")
    assert arguments.endpoint is not None
    endpoint = Endpoint(
        arguments.endpoint, arguments.model, key, arguments.in_flight, arguments.timeout_s, arguments.attempts
    )
    return answers_of(endpoint, settings, send_reasoning="reasoning_content" in (chat_template(tokenizer) or ""))


def _bars() -> Progress:
    from rich.progress import (
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    class Rate(ProgressColumn):
        """Rows per second."""

        def render(self, task: Task) -> str:
            return f"{task.speed or 0:.1f} rows/s"

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), Rate(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=command.stderr, transient=True)


def _template(arguments: Arguments, tokenizer: Any) -> dict[str, Any]:
    """Variables of the chat template for every prompt.

    Raises:
        ConfigError: the template does not read them.
    """
    import yaml

    from paceline.data.chat_template import Renderer
    from paceline.data.rows import Conversation

    given = yaml.safe_load(arguments.template_switches or "{}")
    if not isinstance(given, dict):
        raise ConfigError(f"--template-switches {given!r}: give names and values, for example 'reasoning_effort: high'")
    if arguments.thinking == "auto" and not given:
        return {}
    try:
        renderer = Renderer(tokenizer, arguments.thinking, given)
    except DataError as error:
        lines = (line.replace("data.template_switches", "--template-switches") for line in error.errors)
        raise ConfigError(*(line.replace("data.thinking", "--thinking") for line in lines)) from error
    return dict(renderer.modes(Conversation([]), None)[0])


def _prompts(arguments: Arguments, passed_over: list[str]) -> Iterator[dict[str, Any]]:
    """Rows that ask something to be answered in text; others are noted in `passed_over`."""
    from paceline.data.readers import read_rows
    from paceline.data.rows import Conversation, RowRejected, read_row
    from paceline.regenerate.loop import unanswerable

    for where, values in read_rows(arguments.prompts, "prompts"):
        try:
            if isinstance(values, RowRejected):
                raise values
            row = read_row(values, answered=False)
            if not isinstance(row, Conversation):
                raise RowRejected("no_messages", "not a chat")
            if error := unanswerable(row.messages):
                raise RowRejected("wrong_roles", error)
        except RowRejected as found:
            passed_over.append(f"{where} ({found.reason}: {found.detail})")
            continue
        rest = {key: value for key, value in values.items() if key not in ("conversations", "prompt", "response")}
        yield {**rest, "messages": row.messages}


def _generator(arguments: Arguments) -> GenerateAnswers:
    from paceline.config import TargetConfig
    from paceline.decode.generate import TargetGenerator
    from paceline.target_model.load import load_model

    settings = TargetConfig(
        path=arguments.target,
        dtype=arguments.dtype,
        adapter=arguments.adapter,
        trust_remote_code=arguments.trust_remote_code,
    )
    model, _, facts = load_model(settings, arguments.device)
    stops = facts.eos_token_ids
    pad = facts.pad_token_id if facts.pad_token_id is not None else (stops[0] if stops else 0)
    return TargetGenerator(model, pad, stops)
