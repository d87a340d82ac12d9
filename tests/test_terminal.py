"""Nothing but our styles reaches a terminal as a control sequence, however it is printed."""

from __future__ import annotations

import io
import re

import pytest
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paceline.cli import command
from paceline.terminal import PlainConsole, visible

HOSTILE = "a\x1b]0;title\x07\x1b[2Jb\x9bc\u202ed\rx"
STYLES = re.compile(r"\x1b\[[0-9;]*m")


def printed(thing: object) -> str:
    console = PlainConsole()
    console.file, console._force_terminal, console._color_system = io.StringIO(), True, None
    console.print(thing)
    return console.file.getvalue()


def table() -> Table:
    found = Table("name", escape(HOSTILE))
    found.add_row(escape(HOSTILE), Text(HOSTILE))
    return found


@pytest.mark.parametrize("thing", [escape(HOSTILE), Text(HOSTILE), table(), Panel(Text(HOSTILE, style="bold red"))])
def test_control_characters_are_shown(thing: object) -> None:
    text = STYLES.sub("", printed(thing))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "\\x1b]0;title" in text
    if not isinstance(thing, Table):  # a table cuts its cells
        assert "\\x9bc" in text and "\\u202ed" in text


def test_lines_tabs_and_other_scripts_are_kept() -> None:
    assert printed(Text("a\nb\tc é 漢 👍")) == "a\nb       c é 漢 👍\n"
    assert visible("x\udce9\x00") == "x\\udce9\\x00"


def test_codes_of_emoji_are_text() -> None:
    assert printed(":x: and :warning:") == ":x: and :warning:\n"


def test_errors_are_one_line_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    command.show_error("http://me:pw@host/[/x]:x:\x1b[31m\nsecond: hf_" + "a" * 30)
    command.notice("Authorization: Bearer abc.def [/b]")
    assert capsys.readouterr().err == (
        "error: http://***@host/[/x]:x:\\x1b[31m\\nsecond: ***\nAuthorization: Bearer *** [/b]\n"
    )


def test_an_unknown_command_may_look_like_markup(capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.cli import main

    assert main(["[/x]:x:"]) == 2
    assert capsys.readouterr().err.startswith("error: [/x]:x:: unknown command; ")
