"""The check of the template names what a server must be given, for every way in which templates switch thinking."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.check.data_checks import check_template
from paceline.check.results import CheckResult
from paceline.check.sample_data import gather
from paceline.config import DataConfig, Settings, TargetConfig
from template_chats import CHATS
from template_constructs import CONSTRUCTS

PLAIN = ("plain", "system", "several turns")
THOUGHTFUL = ("thought", "thought, system", "thoughts, several turns")


def checked(tmp_path: Path, start: str, kinds: tuple[str, ...], **data: Any) -> CheckResult:
    (name,) = (name for name in CONSTRUCTS if name.startswith(start))
    target, rows, scratch = tmp_path / "target", tmp_path / "rows.jsonl", tmp_path / "scratch"
    CONSTRUCTS[name].save(target)
    scratch.mkdir()
    rows.write_text("".join(json.dumps(CHATS[kind].row) + "\n" for kind in kinds), encoding="utf-8")
    settings = Settings(
        run_dir=str(tmp_path / "run"),
        target=TargetConfig(path=str(target)),
        data=DataConfig(train=[str(rows)], **data),
    )
    context: Any = SimpleNamespace(settings=settings, material=gather(settings, scratch, 64))
    return check_template(context)


@pytest.mark.parametrize(
    ("start", "kinds", "needed"),
    [
        ("GLM 4.7", PLAIN, "enable_thinking=false"),  # on opens a thought, off closes it
        ("DeepSeek V3.1", THOUGHTFUL, "thinking=true"),  # the same, off by default
        ("SmolLM3", PLAIN, "enable_thinking=false"),  # the switch changes the system text
        ("QwQ", PLAIN, "enable_thinking=false"),  # off closes a thought in the prompt that history does not have
        ("Qwen3:", PLAIN, "enable_thinking=false"),  # answers that could follow either prompt
        ("Mistral with", THOUGHTFUL, 'reasoning_effort="high"'),
    ],
)
def test_what_servers_must_be_given_is_named(start: str, kinds: tuple[str, ...], needed: str, tmp_path: Path) -> None:
    found = checked(tmp_path, start, kinds)
    assert found.status == "warn" and "3 of 3 answers continue the prompt" in found.detail
    assert f"3 with {needed}" in found.detail and f"only with {needed} in chat_template_kwargs" in found.advice


@pytest.mark.parametrize(
    ("start", "kinds", "data"),
    [
        ("Qwen3:", PLAIN, {"thinking": "off"}),
        ("Mistral with", THOUGHTFUL, {"template_switches": {"reasoning_effort": "high"}}),
        ("DeepSeek V3.1", PLAIN, {}),
        ("Qwen3:", THOUGHTFUL, {}),
        ("Qwen2.5", PLAIN, {}),
    ],
)
def test_nothing_is_said_where_settings_or_defaults_do(
    start: str, kinds: tuple[str, ...], data: dict[str, Any], tmp_path: Path
) -> None:
    found = checked(tmp_path, start, kinds, **data)
    assert (found.status, found.advice) == ("pass", "") and "3 of 3" in found.detail


def test_empty_thoughts_that_no_server_sends_are_counted(tmp_path: Path) -> None:
    found = checked(tmp_path, "Kimi K2 Thinking", ("plain", "thought"))
    assert found.status == "warn" and "1 of 2 answers" in found.detail and "another prompt" in found.advice
