"""Thoughts in chat templates: how they are marked, and the variable that turns thinking on and off.

Servers hand variables to templates (`chat_template_kwargs`). Which one switches thinking has many names, and some of
them take words instead of true and false, so it is found in the template's own source and by rendering.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning", "thought")
"""Names under which templates read the thought of a turn."""
_TAGS = "think|thinking|thought|reasoning|seed:think"
OPENS_THOUGHT = re.compile(rf"(?:<(?P<tag>{_TAGS})>|\[(?P<word>THINK)\])\s*$")
"""A prompt that ends so has the target write on inside a thought."""
CLOSES_THOUGHT = re.compile(
    rf"(?:(?:<(?:{_TAGS})>\s*)?</(?:{_TAGS})>|(?:\[THINK\]\s*)?\[/THINK\]|(?:<\|channel>thought\s*)?<channel\|>"
    r"|(?:<\|START_THINKING\|>\s*)?<\|END_THINKING\|>)\s*$"
)
"""A prompt that ends so has the target answer without a thought."""
_EMPTY_MARKS = (
    rf"<({_TAGS})>\s*</\1>|\[THINK\]\s*\[/THINK\]|<\|channel>thought\s*<channel\|>"
    r"|<\|START_THINKING\|>\s*<\|END_THINKING\|>|<\|inner_prefix\|>\s*<\|inner_suffix\|>"
)
EMPTY_MARKS = re.compile(rf"\s*(?:{_EMPTY_MARKS})")
"""An empty pair of the usual marks of a thought."""
EMPTY_THOUGHT = re.compile(
    rf"\s*(?:{_EMPTY_MARKS}|</(?:{_TAGS})>|\[/THINK\]"
    r"|[^\w\s]+(\w+)[^\w\s]+\s*[^\w\s]+\2[^\w\s<\[]+|[^\w\s]*/\w+[^\w\s<\[]+)\s*"
)
"""An empty pair of marks around a thought, or the closing one of a pair that the generation prompt opened; after the
usual ones, anything that looks like such a pair."""
_MARK_LENGTH = 80
"""Characters at the end of a prompt in which such a mark is looked for."""
_SWITCH_NAME = re.compile("think|reason|thought", re.IGNORECASE)
_OF_HISTORY = re.compile("clear|keep|preserve|past|previous|histor|truncat|strip|remove|drop|budget|content", re.I)
"""Switches that hold this decide what becomes of earlier thoughts, not whether the target thinks."""
_NEGATED = re.compile("no_?think|non_?think|disable|skip|without|hide|suppress", re.IGNORECASE)
_OFF_WORDS = ("none", "off", "disabled", "no_think", "chat", "non-thinking", "false")
_ON_WORDS = ("on", "enabled", "think", "thinking", "high", "medium", "true")
_USUAL = ("enable_thinking", "thinking", "enable_reasoning", "reasoning", "reasoning_effort")
_GENERATION_TAGS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class ThinkingSwitch:
    """A variable of the chat template that turns thinking on and off.

    Attributes:
        name: of the variable.
        on, off: variables that say either.
        default: which of the two renders as the template does by itself; "" where neither does.
    """

    name: str
    on: Mapping[str, Any]
    off: Mapping[str, Any]
    default: str


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """What a chat template's source names.

    Attributes:
        variables: that it reads and does not set itself.
        keys: attributes and items that it reads of anything, such as `reasoning_content` of a message.
        words: variable → texts that it is compared with.
    """

    variables: frozenset[str]
    keys: frozenset[str]
    words: Mapping[str, frozenset[str]]


def read_source(template: str) -> TemplateSource:
    """What the source of a chat template names.

    Raises:
        TemplateSyntaxError: the template is not valid Jinja.
    """
    from jinja2 import Environment, meta, nodes

    tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAGS.sub("", template))
    keys = {node.attr for node in tree.find_all(nodes.Getattr)}
    for kind in (nodes.Getitem, nodes.Call, nodes.Compare):
        keys |= {value for node in tree.find_all(kind) for value in _texts(node)}
    aliases: dict[str, set[str]] = {}
    for assigned in tree.find_all(nodes.Assign):
        if isinstance(assigned.target, nodes.Name):
            aliases.setdefault(assigned.target.name, set()).update(n.name for n in assigned.node.find_all(nodes.Name))
    words: dict[str, set[str]] = {}
    for compared in tree.find_all(nodes.Compare):
        names = {node.name for node in compared.find_all(nodes.Name)}
        for name in names.union(*(aliases.get(name, set()) for name in names)):
            words.setdefault(name, set()).update(_texts(compared))
    return TemplateSource(
        frozenset(meta.find_undeclared_variables(tree)),
        frozenset(keys),
        {name: frozenset(found) for name, found in words.items()},
    )


def _texts(node: Any) -> set[str]:
    from jinja2 import nodes

    return {inner.value for inner in node.find_all(nodes.Const) if isinstance(inner.value, str)}


def mark_at_end(prompt: str) -> tuple[re.Match[str] | None, re.Match[str] | None]:
    """The mark with which a prompt opens a thought, or closes one; only its end is looked at."""
    if not prompt.rstrip().endswith((">", "]")):
        return None, None  # as most prompts: every mark ends so
    start = max(0, len(prompt) - _MARK_LENGTH)
    opened = OPENS_THOUGHT.search(prompt, start)
    return opened, None if opened else CLOSES_THOUGHT.search(prompt, start)


def switch_names(source: TemplateSource) -> list[str]:
    """Variables of a template that may turn thinking on and off, the usual names first."""
    found = [name for name in source.variables if _SWITCH_NAME.search(name) and not _OF_HISTORY.search(name)]
    return sorted(found, key=lambda name: (_USUAL.index(name) if name in _USUAL else len(_USUAL), name))


def find_switches(
    source: TemplateSource, render: Callable[[Mapping[str, Any]], tuple[str, str] | None]
) -> list[ThinkingSwitch]:
    """The variables that turn thinking on and off, the usual names first.

    Args:
        source: of the template.
        render: variables → prompt of a question, and the question with a thoughtful answer; None where the template
            refuses them.
    """
    found: list[ThinkingSwitch] = []
    for name in switch_names(source):
        on, off = _values(name, source.words.get(name, frozenset()))
        with_on, with_off = render(on), render(off)
        if with_on is None or with_off is None or with_on == with_off:
            continue
        if any(str(value) in with_on[0] + with_off[0] for value in (True, False)):
            continue  # the template prints the value: it takes other values than true and false
        signs = _sign(with_on[0]) - _sign(with_off[0])
        if signs < 0 or (signs == 0 and _NEGATED.search(name)):
            on, off = off, on
        default = render({})
        found.append(ThinkingSwitch(name, on, off, {render(on): "on", render(off): "off"}.get(default, "")))
    return found


def _values(name: str, words: frozenset[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Variables that may turn thinking on, and off: words where the template knows some, else true and false."""
    off = next((word for word in _OFF_WORDS if word in words), None)
    if off is None:
        return {name: True}, {name: False}
    on = next((word for word in _ON_WORDS if word in words), None)
    return {} if on is None else {name: on}, {name: off}


def _sign(prompt: str) -> int:
    """1 where a prompt opens a thought, -1 where it closes one."""
    opened, closed = mark_at_end(prompt)
    return 1 if opened else -1 if closed else 0
