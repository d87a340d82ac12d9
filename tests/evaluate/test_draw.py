"""Evaluations as a picture: what is in the reports is in the drawing, for several drafters, readable without color."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from paceline.config import EvaluateConfig
from paceline.errors import ConfigError, DataError
from paceline.evaluate.evaluate import evaluate
from paceline.evaluate.plots import MAX_TAGS, draw_evaluations


@dataclass(frozen=True)
class Prompt:
    """A prompt as evaluation wants it."""

    id: str
    ids: list[int]
    tags: tuple[str, ...]


@pytest.fixture(scope="module")
def reports(make_pair, prompts):
    """Evaluations of two drafters of one target."""
    asked = [Prompt(str(at), ids, ("all", f"tag-{at:02}")) for at, ids in enumerate(prompts * 3)]
    found = {}
    for name, block_size in (("small", 3), ("large", 6)):
        target, network = make_pair("qwen3", drafter={"block_size": block_size})
        settings = EvaluateConfig(num_prompts=24, max_new_tokens=5)
        found[name] = evaluate(target, network, asked, settings, check_lossless=False, check_training=False)
    return found


def test_the_drawing_holds_the_figures_of_all_drafters(reports, tmp_path):
    draw_evaluations(reports, tmp_path / "made" / "tau.svg")
    drawn = (tmp_path / "made" / "tau.svg").read_text(encoding="utf-8")
    texts = re.findall(r">([^<>]+)</text>", drawn)
    for title in ("Acceptance by slot", "Accepted lengths", "τ by tag", "τ by context length (tokens)"):
        assert title in texts
    for name, report in reports.items():
        passes = f"{report.passes:,} target passes, {report.num_prompts} prompts"
        assert f"{name}: τ {report.tau_micro:.2f} over {passes}" in texts
        assert f"{report.by_tag['all'].tau:.2f}" in texts and f"{report.by_context['0-255'].tau:.2f}" in texts
    assert "0-255" in texts and "all" in texts
    tags = [text for text in texts if text.startswith("tag-")]
    assert len(tags) == MAX_TAGS - 1 and tags == sorted(tags)
    assert len(set(re.findall(r'<pattern id="(\w+)"', drawn))) == 1, "the second drafter's bars are hatched"
    assert "stroke-dasharray: 8,3.2" in drawn, "and its line is dashed"


def test_two_drawings_of_one_evaluation_are_the_same_file(reports, tmp_path):
    for name in ("one.svg", "two.svg"):
        draw_evaluations(reports, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_pictures_in_pixels_and_errors(reports, tmp_path):
    draw_evaluations({"small": reports["small"]}, tmp_path / "tau.png")
    assert (tmp_path / "tau.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"tau.pdf: a picture is written as .png or .svg; name the file so"):
        draw_evaluations(reports, tmp_path / "tau.pdf")
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tau.svg: cannot be written; name a file in a folder"):
        draw_evaluations(reports, tmp_path / "file" / "tau.svg")
    with pytest.raises(ConfigError, match=r"svg: cannot be written \(.*too long\); give another name"):
        draw_evaluations(reports, tmp_path / f"{'x' * 300}.svg")
    (tmp_path / "full.svg").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"full.svg: cannot be written \(.*No space left"):
        draw_evaluations(reports, tmp_path / "full.svg")
