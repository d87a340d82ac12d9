"""Pictures of the top of a run's report, on a light and on a dark page, as an installed Chromium shows it.

python scripts/report_pictures.py runs/recorded docs/img
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from paceline.report.report import write_report

WIDTH, HEIGHT = 1400, 1180
COLORS = 128
"""Colors of the pictures: a third of the bytes, and no difference that can be seen."""


def main() -> None:
    """Write report-light.png and report-dark.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    browser = next((path for path in found if path), None)
    if browser is None:
        sys.exit("error: no Chromium is installed")
    with tempfile.TemporaryDirectory() as folder:
        page = write_report(asked.run, Path(folder) / "report.html")
        for name, scheme in (("dark", 0), ("light", 1)):
            shot = Path(folder) / f"{name}.png"
            words = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            words += [f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}"]
            words += [f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={shot}", page.as_uri()]
            subprocess.run(words, check=True, capture_output=True, timeout=120)
            picture = asked.out / f"report-{name}.png"
            Image.open(shot).convert("RGB").quantize(COLORS).save(picture, optimize=True)
            print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
