"""``paceline chat``: answers of target and drafter to the user's own prompts, as they grow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.markup import escape
from rich.text import Text

from paceline.cli import command
from paceline.cli.evaluate import check_device, check_target_of, device_of, load_network, settings_of
from paceline.config import Settings
from paceline.errors import ConfigError, DataError

if TYPE_CHECKING:
    from paceline.decode.answers import Decoded
    from paceline.drafter.network import Drafter

DESCRIPTION = """Answer a prompt with target and drafter: accepted drafts are in color, the target's own tokens are not.

Below the answer are the speed with the drafter and of the target alone. Without a prompt it asks for one after
another, as a chat; an empty line or Ctrl-D ends it. A prompt can also come from a pipe.

Examples:
  paceline chat runs/first
  paceline chat runs/first "What does json.dumps return?"
  paceline chat drafters/a "Write a class for points." --target models/target --evaluate.max-new-tokens 512
"""
DRAFTED = "green"
WARM_UP = 4
"""Tokens that are decoded before the first answer is timed."""


@dataclass
class Arguments:
    """Whose answers, to what."""

    drafter: Annotated[Path, tyro.conf.Positional]
    """Run directory (its newest checkpoint), or an exported drafter folder."""
    prompt: Annotated[str | None, tyro.conf.Positional] = None
    """What to answer. Unset: asked for, or read from a pipe."""
    system: str | None = None
    """System message before the chat."""
    target: str | None = None
    """Folder or hub name of the target. Unset: the run's; needed for a drafter folder."""
    step: int | None = None
    """Checkpoint of a run. Unset: the newest."""
    best: bool = False
    """The best checkpoint of the run, as for `paceline evaluate`."""
    device: str | None = None
    """Where both models run. Unset: as for `paceline evaluate`."""
    dtype: str | None = None
    """Compute type of both models. Unset: the target's own, as when it is served."""
    compare: bool = True
    """Also answer with the target alone, for its speed."""
    other_target: bool = False
    """The target is not the one of the drafter's note, and that is meant."""


def run(argv: Sequence[str]) -> int:
    """Answer; exit code 0."""
    arguments, overrides = command.parse(Arguments, argv, prog="paceline chat", description=DESCRIPTION, settings=True)
    if arguments.device is not None:
        check_device(arguments.device)
    if arguments.dtype is not None:
        overrides["target.dtype"] = arguments.dtype
    settings, step = settings_of(arguments.drafter, arguments.step, arguments.target, overrides, best=arguments.best)
    network, _ = load_network(arguments.drafter, step)
    check_target_of(arguments.drafter, settings, network, other_target=arguments.other_target)
    if arguments.prompt is None and not sys.stdin.isatty():
        arguments.prompt = sys.stdin.read().strip()
        if not arguments.prompt:
            raise ConfigError("PROMPT: the pipe is empty; write a prompt into it, or give one as an argument")
    chat = Chat(settings, network, arguments.device or device_of(settings), arguments.system, compare=arguments.compare)
    for prompt in [arguments.prompt] if arguments.prompt is not None else asked():
        chat.answer(prompt)
    return 0


def asked() -> Iterator[str]:
    """Prompts as the user types them, until an empty line, Ctrl-D or Ctrl-C."""
    import readline  # noqa: F401  (gives `input` its line editing)

    while True:
        try:
            prompt = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            prompt = ""
        if not prompt:
            return
        yield prompt


@dataclass
class _Shown:
    """Writes an answer while it grows, and keeps its text."""

    text_of: Callable[[int], str]
    stop_ids: frozenset[int]
    text: str = ""
    drafted: int = field(default=0)

    def __call__(self, tokens: list[int], accepted: int) -> None:
        for place, token in enumerate(tokens):
            self.drafted += place < accepted
            if token not in self.stop_ids:
                self.write(self.text_of(token), DRAFTED if place < accepted else "")

    def write(self, piece: str, style: str = "") -> None:
        """Shows a piece of the answer."""
        self.text += piece
        # Line by line: rich drops an end of line that ends what it prints.
        for line in piece.splitlines(keepends=True):
            command.stdout.print(Text(line.rstrip("\n"), style=style), end="\n" if line.endswith("\n") else "")
        command.stdout.file.flush()


class Chat:
    """One chat with a target and its drafter.

    Args:
        settings: target, chat template, and limits of `evaluate`.
        network: the drafter.
        device: where both run.
        system: system message, or None.
        compare: whether the target also answers alone.

    Raises:
        PacelineError: one line for each error.
    """

    def __init__(self, settings: Settings, network: Drafter, device: str, system: str | None, *, compare: bool) -> None:
        from paceline.data.tokenizer import load_tokenizer
        from paceline.decode.compatibility import check_pair
        from paceline.device import main_device
        from paceline.evaluate.evaluate import check_way
        from paceline.evaluate.prompts import PromptRenderer
        from paceline.target_model.load import load_target

        data, target = settings.data, settings.target
        self._limits, self._compare = settings.evaluate, compare
        self._tokenizer = load_tokenizer(target.path, target.trust_remote_code)
        self._renderer = PromptRenderer(target.path, data.thinking, data.template_switches, target.trust_remote_code)
        self._target = load_target(target, list(network.spec.taps), device, target.dtype)
        check_way(self._target, settings.evaluate)
        check_pair(self._target, network.spec)
        self._network = network.to(main_device(device)).eval()
        self._messages = [{"role": "system", "content": system}] if system else []
        self._warm = False

    def answer(self, prompt: str) -> None:
        """Answers the user's next turn, shows the answer as it grows, and the speed of it.

        Raises:
            DataError: the template refuses the chat, or it is longer than the target's positions.
        """
        from paceline.data.rows import RowRejected
        from paceline.data.token_text import TokenText

        self._messages.append({"role": "user", "content": prompt})
        try:
            ids = self._renderer.of_row("the chat", {"messages": self._messages}).ids
        except RowRejected as error:
            raise DataError(f"the chat: {error.detail or error.reason}; begin a new one") from error
        if not self._warm:
            for drafted in (True, False):
                self._decode(ids, WARM_UP, drafted=drafted)
            self._warm = True
        text = TokenText(self._tokenizer)
        shown = _Shown(text.add, frozenset(self._target.facts.eos_token_ids))
        ours = self._decode(ids, self._limits.max_new_tokens, shown, drafted=True)
        shown.write(text.rest())
        self._messages.append({"role": "assistant", "content": shown.text})
        command.stdout.print()
        command.stderr.print(f"[bold]with the drafter[/]  {_speed(ours)}  {_drafted(ours, shown.drafted)}")
        if self._compare:
            with command.stderr.status("the target alone"):
                alone = self._decode(ids, self._limits.max_new_tokens, drafted=False)
            command.stderr.print(f"[bold]target alone[/]      {_speed(alone)}  {escape(self._compared(ours, alone))}")

    def _decode(
        self, ids: list[int], limit: int, on_tokens: Callable[[list[int], int], None] | None = None, *, drafted: bool
    ) -> Decoded:
        from paceline.decode.chain import speculative_decode
        from paceline.decode.loop import plain_decode
        from paceline.decode.tree import tree_decode
        from paceline.evaluate.evaluate import choice_of, tree_of

        limits = {
            "max_new_tokens": limit,
            "stop_ids": self._target.facts.eos_token_ids,
            "choice": choice_of(self._limits, 0),
            "on_tokens": on_tokens,
        }
        if not drafted:
            return plain_decode(self._target, ids, **limits)
        if self._limits.tree_budget is None:
            return speculative_decode(self._target, self._network, ids, **limits)
        return tree_decode(self._target, self._network, ids, **tree_of(self._limits), **limits)

    def _compared(self, ours: Decoded, alone: Decoded) -> str:
        """How much faster the drafter makes the target, and whether the answers are equal."""
        from paceline.decode.answers import first_difference

        faster = ""
        if ours.passes and alone.seconds > 0:
            ratio = (len(ours.ids) - 1) / ours.seconds * alone.seconds / max(1, len(alone.ids) - 1)
            faster = f"{ratio:.2f} x as fast with the drafter; "
        if self._limits.temperature:
            return faster + "sampled, so the answers differ"
        if ours.ids == alone.ids:
            return faster + "the same answer"
        place = first_difference(ours.ids, alone.ids)
        return (
            f"{faster}the answers differ from token {place + 1} on: with {str(self._target.dtype)[6:]} rounding can do "
            "that, `paceline evaluate` tells"
        )


def _speed(answer: Decoded) -> str:
    """Tokens after the first one, in the time after the prompt's forward."""
    tokens = len(answer.ids) - 1
    return f"{tokens / answer.seconds:7.1f} tokens/s" if tokens and answer.seconds else "   one token"


def _drafted(answer: Decoded, drafted: int) -> str:
    """τ, and how much of the answer the drafter wrote."""
    tau = f"τ {answer.tau:.2f}  " if answer.passes else ""
    return f"{tau}{drafted} of {len(answer.ids)} tokens were drafts"
