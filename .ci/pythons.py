"""Print the other Pythons that the suite runs with: a line `3.12 /path/to/python3.12` for each, the newest first.

They are those that pyproject.toml allows and this machine has, on PATH or installed by pyenv or uv, but not the
system's own: `as-new-user` runs with that. Where there is no other, the system's own is printed: container tests need
root.
"""

import os
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SYSTEM = "/usr/bin/python3"
FOLDERS = (".pyenv/versions/*/bin", ".local/share/uv/python/*/bin")
VERSION = "import sys, ensurepip; print('%d.%d' % sys.version_info[:2])"


def version_of(python: str | Path) -> str:
    """Return `major.minor`; empty where it is no Python, or one that makes no environments."""
    done = subprocess.run([python, "-c", VERSION], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def allowed() -> list[str]:
    """Return the versions of `requires-python`, the newest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, too_new = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"]).groups()
    return [f"3.{minor}" for minor in reversed(range(int(oldest), int(too_new)))]


def find(version: str) -> str | None:
    """Return a Python of this version."""
    folders = [Path(folder) for folder in os.get_exec_path()]
    folders += [found for pattern in FOLDERS for found in sorted(Path.home().glob(pattern))]
    for python in (folder / f"python{version}" for folder in folders):
        if python.exists() and version_of(python) == version:
            return str(python)
    return None


def main() -> None:
    own = version_of(SYSTEM)
    others = {
        version: python for version in allowed() if version != own and (python := find(version))
    }
    for version, python in (others or {own: SYSTEM}).items():
        print(version, python)


if __name__ == "__main__":
    main()
