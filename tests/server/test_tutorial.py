"""The tutorials by their own commands alone, in an empty folder: each does what the page shows below it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import forks
import pytest
from representatives import seldom

ROOT = Path(__file__).resolve().parents[2]


def steps(page):
    """The page's commands in order, each with the lines that it shows."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        goes_on = ""  # what ends a command of several lines
        for line in block.splitlines():
            if goes_on:
                found[-1] = (f"{found[-1][0]}\n{line}", [])
                goes_on = (
                    ""
                    if (goes_on == "\\" and not line.endswith("\\")) or line == goes_on
                    else goes_on
                )
            elif line.startswith("$ "):
                found.append((line[2:], []))
                here = re.search(r"<<'(\w+)'", line)
                goes_on = here[1] if here else "\\" if line.endswith("\\") else ""
            else:
                found[-1][1].append(line)
    return found


def shown(said, expected):
    """The first line of ``expected`` that is not among those of ``said`` in this order; "..." stands for anything."""
    rest = said.splitlines()
    for line in expected:
        if line == "...":
            continue
        pattern = ".*".join(map(re.escape, line.split("...")))
        place = next((i for i, own in enumerate(rest) if re.fullmatch(pattern, own)), None)
        if place is None:
            return line
        rest = rest[place + 1 :]
    return ""


# MONAI takes eight seconds of CPU to be imported, in each `python` of the page anew
MONAI = "monai.data, monai.inferers, monai.transforms"
LONG = pytest.param(
    "radiology", 10, 4, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1800)]
)


@pytest.mark.parametrize("page, commands, ours", [seldom("tutorial", 20, 10), LONG])
def test_the_whole_way(tmp_path, page, commands, ours):
    """A step without an "exit code" on the page ends with 0; every line that the page shows is there, in order."""
    tools = tmp_path / "bin"
    tools.mkdir()
    silofl = f"-S {forks.__file__} {tmp_path}/forks"
    for name, program in (("silofl", silofl), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
        (tools / name).chmod(0o755)
    paths = {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{tmp_path / 'work'}{os.pathsep}{ROOT}",
    }
    folder = tmp_path / "work"
    folder.mkdir()
    found = steps((ROOT / f"docs/{page}.md").read_text("utf-8"))
    assert len(found) >= commands
    assert sum(command.startswith("silofl") for command, _ in found) >= ours
    libraries = [forks.EVERYTHING, *([MONAI] if page == "radiology" else [])]
    with forks.server(tmp_path, ", ".join(libraries)):
        for command, expected in found:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=folder,
                env={**os.environ, **paths, "LANG": "C.UTF-8", "SILOFL_TRACEBACK": ""},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}"
            assert not (missing := shown(done.stdout, expected)), (
                f"{command}\nshows no {missing!r}, but:\n{done.stdout}"
            )
