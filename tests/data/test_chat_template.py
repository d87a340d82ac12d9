"""The mode in which a chat is rendered, and the settings that say it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import DataConfig
from paceline.data.chat_template import Renderer
from paceline.data.rows import Conversation, RowRejected, read_row
from paceline.data.thinking import find_switches, read_source, switch_names
from paceline.data.tokenize_rows import RowTokenizer
from paceline.errors import DataError
from template_chats import CHATS
from template_constructs import CONSTRUCTS


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The beginning of a construct's name → folder of its tokenizer."""
    made: dict[str, str] = {}

    def folder(start: str) -> str:
        if start not in made:
            (name,) = (name for name in CONSTRUCTS if name.startswith(start))
            path = tmp_path_factory.mktemp("construct")
            CONSTRUCTS[name].save(path)
            made[start] = str(path)
        return made[start]

    return folder


def modes(folder: str, row: dict[str, Any], thinks: bool | None, **settings: Any) -> list[dict[str, Any]]:
    tokenizer = RowTokenizer(folder, False, DataConfig(**settings))
    conversation = read_row(row)
    assert isinstance(conversation, Conversation)
    return [dict(variables) for variables in tokenizer.renderer.modes(conversation, thinks)]


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_the_switch_is_found_whatever_its_name(name: str, folder_of: Callable[[str], str]) -> None:
    construct = CONSTRUCTS[name]
    renderer = RowTokenizer(folder_of(name), False, DataConfig()).renderer
    assert [(found.on, found.off) for found in renderer.switches[:1]] == (
        [] if construct.on is None else [(construct.on, construct.off)]
    )


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{% if no_think %}</think>{% endif %}", ({"no_think": False}, {"no_think": True})),
        (
            "{% if hush_thinking %}<think>{% else %}</think>{% endif %}",
            ({"hush_thinking": True}, {"hush_thinking": False}),
        ),
        ("{% if not think_mode %}<think>{% endif %}", ({"think_mode": False}, {"think_mode": True})),
        ("{% if mode_of_thinking == 'chat' %}</think>{% endif %}", ({}, {"mode_of_thinking": "chat"})),
        ("{% if clear_thinking %}x{% endif %}", None),
        ("Reasoning: {{ reasoning_effort }}", None),
        ("{% set thinking = true %}{{ thinking }}", None),
    ],
)
def test_on_and_off_are_told_apart_by_rendering(
    template: str, found: tuple[dict[str, Any], dict[str, Any]] | None
) -> None:
    from jinja2 import Environment

    def render(variables: dict[str, Any]) -> tuple[str, str]:
        text = Environment(autoescape=False).from_string(template).render(**variables)
        return text, text

    switches = find_switches(read_source(template), render)
    assert [(switch.on, switch.off) for switch in switches] == ([] if found is None else [found])


def test_usual_names_of_switches_come_first() -> None:
    source = read_source("{{ thinking }}{{ a_thought }}{{ enable_thinking }}{{ keep_reasoning }}{{ messages }}")
    assert switch_names(source) == ["enable_thinking", "thinking", "a_thought"]


def test_content_decides_once_a_chat_and_settings_and_rows_win(folder_of: Callable[[str], str]) -> None:
    folder, row = folder_of("Qwen3:"), dict(CHATS["plain"].row)
    on, off = {"enable_thinking": True}, {"enable_thinking": False}
    assert (
        modes(folder, row, False) == [off] and modes(folder, row, True) == [on, {}] and modes(folder, row, None) == [{}]
    )
    assert modes(folder, row, False, thinking="on") == [on] and modes(folder, row, True, thinking="off") == [off]
    assert modes(folder, row, False, template_switches=on) == [on]
    assert modes(folder, {**row, "enable_thinking": True}, False, thinking="off") == [on]
    assert modes(folder, {**row, "chat_template_kwargs": on}, False) == [on]
    answered = {**row, "prompt_hash": "0", "template": {}}
    assert modes(folder, answered, False, thinking="off") == [{}], "what regenerate wrote is what the answers had"
    assert modes(folder, {**answered, "template": on, "chat_template_kwargs": off}, True) == [off]
    assert modes(folder, {**row, "template": on}, False) == [off], "a key of another tool"


def test_switches_of_the_settings_are_in_every_prompt(folder_of: Callable[[str], str]) -> None:
    folder = folder_of("gpt-oss")
    (found,) = modes(folder, dict(CHATS["plain"].row), False, template_switches={"reasoning_effort": "high"})
    assert found == {"reasoning_effort": "high"}
    tokenizer = RowTokenizer(folder, False, DataConfig(template_switches=found))
    (sample,) = tokenizer.samples(read_row(CHATS["plain"].row))
    assert "Reasoning: high" in tokenizer.tokenizer.decode(sample.ids)


@pytest.mark.parametrize(
    ("start", "settings", "words"),
    [
        ("Qwen2.5", {"thinking": "off"}, r"data\.thinking = off: the chat template of .* has no switch for thinking"),
        (
            "Kimi K2:",
            {"template_switches": {"enable_thinking": True}},
            r"template_switches: enable_thinking: .*reads no",
        ),
        ("gpt-oss", {"template_switches": {"effort": 1}}, r"does not read it; it reads .*reasoning_effort"),
    ],
)
def test_a_setting_without_effect_is_an_error(
    start: str, settings: dict[str, Any], words: str, folder_of: Callable[[str], str]
) -> None:
    tokenizer = RowTokenizer(folder_of(start), False, DataConfig(**settings))
    with pytest.raises(DataError, match=words) as error:
        _ = tokenizer.renderer
    assert len(error.value.errors) == 1


def test_servers_get_only_variables_that_no_setting_gives(folder_of: Callable[[str], str]) -> None:
    plain, thoughtful = read_row(CHATS["plain"].row), read_row(CHATS["thought"].row)
    assert isinstance(plain, Conversation) and isinstance(thoughtful, Conversation)
    for start, thinking, needed in (
        ("Qwen3:", "auto", [{"enable_thinking": False}, {}]),
        ("DeepSeek V3.1", "auto", [{}, {"thinking": True}]),
        ("Qwen3:", "off", [{}, {}]),
        ("Qwen2.5", "auto", [{}, {}]),
    ):
        renderer = RowTokenizer(folder_of(start), False, DataConfig(thinking=thinking)).renderer
        chosen = [renderer.modes(row, thinks)[0] for row, thinks in ((plain, False), (thoughtful, True))]
        found = [renderer.found_by_content(row, mode) for row, mode in zip((plain, thoughtful), chosen, strict=True)]
        assert found == needed, (start, thinking)


def test_what_follows_an_answer_and_marks_of_thoughts(folder_of: Callable[[str], str]) -> None:
    def renderer(start: str) -> Renderer:
        return RowTokenizer(folder_of(start), False, DataConfig()).renderer

    assert renderer("GLM 4.5").follows_answer("user", calls=False).startswith("<|user|>")
    assert renderer("GLM 4.5").follows_answer("tool", calls=True).startswith("<|observation|>")
    assert renderer("Gemma 2").follows_answer("tool", calls=True) == ""
    assert renderer("Gemma 4").thought_marks({"enable_thinking": True}) == ("<|channel>thought\n", "\n<channel|>")
    assert renderer("Kimi K2 Thinking").thought_marks({}) == ("<think>", "</think>")
    assert renderer("SmolLM3").thought_marks({}) is None


def test_a_template_that_is_not_jinja_is_one_line(folder_of: Callable[[str], str], tmp_path: Path) -> None:
    tokenizer = RowTokenizer(folder_of("Qwen2.5"), False, DataConfig()).tokenizer
    tokenizer.chat_template = "{{ a }}\n{% if %}"
    with pytest.raises(DataError, match="line 2 of its chat template is broken") as error:
        Renderer(tokenizer)
    assert len(error.value.errors) == 1


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_prompts_are_those_of_apply_chat_template(name: str, folder_of: Callable[[str], str]) -> None:
    """The fast way to render gives what transformers' own gives, or its refusal."""
    tokenizer = RowTokenizer(folder_of(name), False, DataConfig())
    rendered = 0
    for chat in CHATS.values():
        row = read_row(chat.row)
        assert isinstance(row, Conversation)
        for generation in (False, True):
            try:
                (found,) = tokenizer.renderer.texts(row, [len(row.messages)], {}, generation=generation)
            except RowRejected:
                with pytest.raises(Exception, match=r"."):  # whatever the template raises
                    render(tokenizer, row, generation)
                continue
            assert found == render(tokenizer, row, generation)
            rendered += 1
    assert rendered > 20 or name.startswith("vision")  # which reads lists of parts alone


def render(tokenizer: RowTokenizer, row: Conversation, generation: bool) -> Any:
    return tokenizer.tokenizer.apply_chat_template(
        row.messages, tools=row.tools, add_generation_prompt=generation, tokenize=False
    )
