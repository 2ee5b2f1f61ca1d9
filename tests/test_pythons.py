"""The Python versions that silofl takes: said in one way everywhere, and the code is checked against the oldest.

`make check` compiles everything and looks up every name in the oldest version's standard library: ruff's
`target-version` and mypy's `python_version`. They do not know what only a patch release brought: that is listed here,
and found by running the suite with the system's own Python (`.ci/run`).
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from requirements.lock import OLDEST

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_oldest_and_the_newest_version_are_the_same_everywhere():
    matched = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["project"]["requires-python"])
    assert matched is not None
    oldest, newest = f"3.{matched[1]}", f"3.{int(matched[2]) - 1}"
    assert oldest == OLDEST == PROJECT["tool"]["mypy"]["python_version"]
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")
    assert (
        f"(3, {matched[1]}) <= sys.version_info < (3, {matched[2]})"
        in (ROOT / "Makefile").read_text()
    )
    for page in ("README.md", "Makefile"):
        assert f"Python {oldest} to {newest}" in (ROOT / page).read_text(), page


PATCHES = {r"extractall\([^)]*filter": "3.11.4"}  # what Debian 12's 3.11.2 lacks


def test_nothing_is_used_that_only_a_patch_release_brought():
    own = Path(__file__).resolve()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for path in (ROOT / name for name in listed.stdout.split("\0") if name):
        if path.exists() and path not in (own, ROOT / "tests/helpers/archives.py"):
            for pattern, version in PATCHES.items():
                assert not re.search(pattern, path.read_text("utf-8")), (
                    f"{path}: {pattern} needs Python {version}"
                )


@pytest.mark.parametrize(
    "version, accepted", [((3, 10), False), ((3, 11), True), ((3, 13), True), ((3, 14), False)]
)
def test_make_install_refuses_another_version(tmp_path, version, accepted):
    """`python` is a stand-in that says it is of this version; it makes no environment."""
    python = tmp_path / "python"
    code = f"import sys; sys.version_info = (*{version}, 0); exec(sys.argv[1])"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} -c \'{code}\' "$2"\necho made; exit 9\n'
    )
    python.chmod(0o755)
    command = [
        "make",
        f"PYTHON={python}",
        f"VENV={tmp_path / 'venv'}",
        f"{tmp_path / 'venv'}/bin/python",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert ("made" in done.stdout) == accepted, done.stderr
    assert (
        "is not Python 3.11 to 3.13: make PYTHON=python3.12 names another" in done.stderr
    ) != accepted
