"""The README's first command as a new user types it: an empty home, nothing activated, nothing left from before.

``python3 tests/server/first_command.py`` from a checkout, with nothing but the standard library; ``.ci/run`` calls it
in a fresh clone. ``make demo`` must end with exit code 0, a report whose table has twelve silos, and no process left;
then once more on the state that the first time left behind.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SILOS = [f"hospital-{number:02d}" for number in range(1, 13)]
OURS = ("XDG_", "SILOFL_", "FLWR_", "VIRTUAL_ENV", "PYTHON", "MAKE", "OMP_")  # what an own shell may have set


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


def check(home: Path) -> None:
    done = subprocess.run(
        ["make", "demo"], cwd=ROOT, env=fresh_environment(home), stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, f"make demo: exit code {done.returncode}"
    report = (ROOT / "runs/demo/report.html").read_text()
    table = re.search(r"<table[^>]*>(?:(?!</table>).)*hospital-01.*?</table>", report, re.DOTALL)
    assert table is not None, "the report has no table of silos"
    rows = [name for name in SILOS if re.search(rf"<t[dh][^>]*>\s*(?:<[^>]+>)*{name}\b", table[0])]
    assert rows == SILOS, f"the report's table has {rows}"
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
