"""A real browser without a window: loads a page, says what it sees, and takes pictures.

`look` puts a script into a copy of the page; the page itself has none. The script measures the page once it has loaded,
unpacks every drawing to look at its texts, and writes what it found into the document, which the browser prints.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

_SCRIPT = """
<script>
addEventListener("load", () => {
  const clash = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
  const drawings = [...document.querySelectorAll("figure img")].map(image => {
    const bytes = Uint8Array.from(atob(image.src.split(",")[1]), letter => letter.charCodeAt(0));
    const source = new TextDecoder().decode(bytes);
    const host = document.createElement("div");
    host.style.width = image.clientWidth + "px";
    host.append(new DOMParser().parseFromString(source, "image/svg+xml").documentElement);
    document.body.append(host);
    const svg = host.firstChild;
    svg.style.width = "100%";
    svg.style.height = "auto";
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
    const cut = texts.filter(([, box]) => box.left < frame.left - 1 || box.right > frame.right + 1
      || box.top < frame.top - 1 || box.bottom > frame.bottom + 1).map(([text]) => text);
    const overlapping = [];
    texts.forEach(([text, box], i) => texts.slice(i + 1).forEach(([other, place]) => {
      if (clash(box, place)) overlapping.push(text + " / " + other);
    }));
    const scale = frame.width / svg.viewBox.baseVal.width;
    const sizes = [...svg.querySelectorAll("text")].map(text => parseFloat(getComputedStyle(text).fontSize) * scale);
    const found = {
      title: image.alt, width: image.clientWidth, loaded: image.complete && image.naturalWidth > 0,
      marks: svg.querySelectorAll("path").length, cut, overlapping, smallest: Math.min(...sizes),
    };
    host.remove();
    return found;
  });
  const links = [...document.querySelectorAll("nav a")].map(link => link.hash);
  const result = {
    drawings, links: links.length, broken: links.filter(hash => !document.querySelector(hash)),
    wider: document.documentElement.scrollWidth - innerWidth, dark: matchMedia("(prefers-color-scheme: dark)").matches,
    ink: getComputedStyle(document.body).color, width: document.querySelector("main").clientWidth,
  };
  const place = document.createElement("pre");
  place.id = "seen";
  place.textContent = JSON.stringify(result);
  document.body.append(place);
});
</script>
"""


@dataclass(frozen=True)
class Sight:
    """What a browser sees.

    Attributes:
        page: what the script measured.
        messages: lines of the page on the browser's console.
    """

    page: dict[str, Any]
    messages: list[str]


def look(page: Path, folder: Path, width: int, *, dark: bool) -> Sight:
    """Load a page in a window of this width."""
    copy = folder / f"{page.stem}-{width}-{dark}.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{_SCRIPT}</body>"), encoding="utf-8")
    done = _run(copy, folder, width, 1000, dark, "--dump-dom", "--virtual-time-budget=10000")
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    if found is None:
        raise AssertionError(f"{page}: the browser printed no result\n{done.stderr}")
    return Sight(
        json.loads(html.unescape(found.group(1))), [row for row in done.stderr.splitlines() if "CONSOLE" in row]
    )


def picture(page: Path, out: Path, width: int, height: int, *, dark: bool) -> None:
    """A picture of the top of a page."""
    _run(page, out.parent, width, height, dark, f"--screenshot={out}")


def _run(
    page: Path, folder: Path, width: int, height: int, dark: bool, *words: str
) -> subprocess.CompletedProcess[str]:
    profile = folder / "profile"
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={profile}", f"--window-size={width},{height}", "--enable-logging=stderr"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", *words, page.absolute().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    shutil.rmtree(profile, ignore_errors=True)
    if done.returncode:
        raise AssertionError(f"{page}: the browser ended with code {done.returncode}\n{done.stderr}")
    return done
