"""The README's first command as a new user types it: an empty home, nothing activated, nothing left from before.

``python3 tests/server/first_command.py`` from a checkout, with nothing but the standard library; ``.ci/run`` calls it
in a fresh clone. ``make demo`` must end with exit code 0, a report with twelve silos, a gain in its headline and the
README's numbers, and no process left; then once more on the state that the first time left behind.
Where there is Chromium, ``make picture`` makes the README's picture of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SILOS = [f"hospital-{number:02d}" for number in range(1, 13)]
# What an own shell may have set
OURS = ("XDG_", "SILOFL_", "FLWR_", "VIRTUAL_ENV", "PYTHON", "MAKE", "OMP_")


def fresh_environment(home: Path) -> dict[str, str]:
    """This environment without what a developer's has of its own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
    return kept | {"HOME": str(home)}


def left_behind(home: Path) -> list[str]:
    """The processes that were started with this home."""
    wanted, found = f"HOME={home}".encode(), []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it ended meanwhile
            continue
    return [command for command in found if command]  # a zombie has none


def check_gain(report: str) -> None:
    """The report shows a gain, and the README's table has its silos, test samples, and mean gain within two points."""
    assert re.search(r'<h1>Federating gains <em class="shown">\+', report), (
        "the report shows no gain"
    )
    runs = json.loads((ROOT / "runs/demo/summary.json").read_text())["runs"]
    found = next(run for run in runs if run["strategy"] == "fedala")["per_silo"]
    table = re.search(
        r"^silo  .*?^mean .*?$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert table is not None, "the README has no table"
    rows = [line.split() for line in table[0].splitlines() if line.startswith("hospital-")]
    assert rows and all(int(row[1]) == found[row[0]]["n_test"] for row in rows), (
        "the README's table is of other data"
    )
    mean = statistics.fmean(silo["gain_over_local"] for silo in found.values())
    shown = float(table[0].split()[-1])
    assert abs(100 * mean - shown) < 2, (
        f"the mean gain is {100 * mean:+.1f} points, the README says {shown:+.1f}"
    )


def check(home: Path) -> None:
    done = subprocess.run(
        ["make", "demo"],
        cwd=ROOT,
        env=fresh_environment(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout, flush=True)
    assert done.returncode == 0, f"make demo: exit code {done.returncode}"
    assert re.search(r"(?m)^hospital-12 .*\n-+\nmean  ", done.stdout), "it prints no table"
    report = (ROOT / "runs/demo/report.html").read_text()
    table = re.search(
        r"<table[^>]*>(?:(?!</table>).)*hospital-01.*?</table>", report, re.DOTALL
    )
    assert table is not None, "the report has no table of silos"
    rows = [
        name for name in SILOS if re.search(rf"<t[dh][^>]*>\s*(?:<[^>]+>)*{name}\b", table[0])
    ]
    assert rows == SILOS, f"the report's table has {rows}"
    check_gain(report)
    assert not left_behind(home), f"still running: {left_behind(home)}"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        for time in ("the first time", "on the state of the first time"):
            try:
                check(Path(folder))
            except AssertionError as error:
                print(f"first_command: {time}: {error}", file=sys.stderr)
                return 1
            print(f"make demo works {time}", flush=True)
        if shutil.which("chromium"):
            command = ["make", "picture", f"PICTURE={folder}/report.png"]
            subprocess.run(command, cwd=ROOT, env=fresh_environment(Path(folder)), check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
