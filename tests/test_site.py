"""The documentation as a site: built without warnings, read and searched without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from report.chromium import BROWSER


@pytest.fixture(scope="module")
def site(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=project, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there(site: Path, project: Path) -> None:
    written = {page.stem for page in site.glob("*.html")}
    assert written == {page.stem for page in (project / "docs").glob("*.md")} | {"404"}


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    loaded = r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\" >]+)"
    for page in site.glob("*.html"):
        assert re.findall(loaded, page.read_text(encoding="utf-8")) == [], page.name
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")) == [], style


def test_what_the_readme_links_to_is_there(project: Path) -> None:
    text = (project / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)|(?:src|srcset)=\"([^\"]+)\"", text)
    assert len(links) > 25
    assert [link for link in map("".join, links) if not (project / link).exists()] == []


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no Chromium installed")
def test_a_page_opened_from_a_folder_can_be_searched(site: Path, tmp_path: Path) -> None:
    words = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    words += ["--virtual-time-budget=10000", "--enable-logging=stderr", "--dump-dom"]
    address = (site / "index.html").as_uri() + "?q=stratified"
    done = subprocess.run([*words, address], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    assert re.search(r'md-search-result__meta">\d+ matching documents', done.stdout)
