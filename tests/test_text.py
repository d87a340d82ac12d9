"""Numbers, times and sizes as people read them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from paceline.text import (
    MAX_DEPTH,
    absent,
    duration,
    first_line,
    fixed,
    masked,
    masked_values,
    parsed_json,
    percent,
    short,
    shortened,
    size,
)


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12.3k"), (0.5, "0.5"), (999.6, "1.00k"), (math.nan, "–"), (-2e6, "-2M"), (7, "7")]
)
def test_short_numbers(value, text):
    assert short(value) == text


def test_sizes_and_durations():
    assert [size(n) for n in (12, 2048, 150 * 2**20, 3 * 2**30, 2**41)] == [
        *("12 B", "2.0 KiB", "150 MiB", "3.0 GiB", "2.0 TiB")
    ]
    assert [duration(s) for s in (1.25, 75, 3725, 864_000, None)] == ["1.2 s", "1:15", "1:02:05", "10 d 0 h", "–"]
    assert (percent(0.0714), percent(0.5), percent(None)) == ("7.1 %", "50 %", "–")


def test_an_error_is_one_line():
    assert first_line(FileNotFoundError(2, "No such file or directory", "x")) == "No such file or directory"
    assert first_line(ValueError("these differ:\n  a\n  b")) == "these differ: a"
    assert first_line(KeyError()) == "KeyError"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pw@host:8000/v1 and s3://key:secret@bucket/x", "http://***@host:8000/v1 and s3://***@bucket/x"),
        ("https://host/x?token=abc&y=1&sig=q", "https://host/x?token=***&y=1&sig=***"),
        ("api_key: sk-123, password='hidden'; SECRET=\"x y\"", "api_key: ***, password='***'; SECRET=\"*** y\""),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("hf_" + "a" * 34, "***"),
        (
            "mask_token_id: 3, token_budget: 1024, git@host:x, a@b",
            "mask_token_id: 3, token_budget: 1024, git@host:x, a@b",
        ),
        ("/data/key=3/file:12@x", "/data/key=3/file:12@x"),
    ],
)
def test_secrets_are_masked(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert masked_values({"a": [text, {"b": text}], "n": 3}) == {"a": [shown, {"b": shown}], "n": 3}


def test_fixed_and_shortened_texts():
    assert (fixed(2.5), fixed(2.123456, 3), fixed(math.nan), fixed(None)) == ("2.50", "2.123", "–", "–")
    assert (shortened("abcdef", 6), shortened("abcdefg", 6)) == ("abcdef", "abcde…")


def test_a_link_that_leads_nowhere_says_so(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    assert absent(link, "folder") == f"is a link to {tmp_path / 'gone'}, which does not exist"
    assert absent(tmp_path / "other", "folder") == "no such folder"
    with pytest.raises(FileNotFoundError) as caught:
        link.read_bytes()
    assert first_line(caught.value) == absent(link, "file")


def test_json_that_is_nested_too_deeply_is_refused() -> None:
    within, beyond = ("[" * depth + "]" * depth for depth in (MAX_DEPTH, MAX_DEPTH + 1))
    assert parsed_json(within) and parsed_json("[" + ",".join(["{}"] * 1000) + "]") == [{}] * 1000
    for text in (beyond, beyond.encode(), '{"a": ' * 300 + "1" + "}" * 300, "[" * 100_000):
        with pytest.raises(ValueError):
            parsed_json(text)
    with pytest.raises(ValueError, match="nested too deeply"):
        parsed_json(beyond)
