"""The README's picture: the head of the demonstration's report, photographed by Chromium, with its table inside.

``make picture`` after ``make demo`` writes docs/images/report.png; ``tests/test_docs.py`` compares its table, the PNG's
text ``table``, with the README's.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from server.report.study import StudyResults
from server.report.write import silo_table

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def main(run: Path, out: Path) -> int:
    """Photograph the report of ``run`` into ``out``. Returns 2 where there is no Chromium or no report."""
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    report = (run / "report.html").absolute()
    if chromium is None or not report.is_file():
        print("picture: needs Chromium, and a report from make demo", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder, "shot.png")
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ]
        flags.append(f"--user-data-dir={folder}")
        size = ["--window-size=1200,1460", f"--screenshot={shot}", report.as_uri()]
        subprocess.run([chromium, *flags, *size], check=True, timeout=120, capture_output=True)
        text = PngInfo()
        text.add_text("table", silo_table(StudyResults(run)))
        Image.open(shot).convert("RGB").save(out, optimize=True, pnginfo=text)
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
