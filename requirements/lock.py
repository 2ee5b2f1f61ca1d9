"""`make lock`: write down, with versions and SHA-256 sums, what images and `make install` install.

    requirements/silo.txt                the packages of a silo's image, without PyTorch
    requirements/server.txt, dev.txt     what the server's image, and `make install`, have beyond those
    requirements/docs.txt                what `make docs` has, in an environment of its own
    requirements/torch-cpu.txt           PyTorch, as its own index of CPU builds has it
    requirements/torch-cuda.txt          PyTorch, as the package index has it, and what that needs for CUDA

    python requirements/lock.py [--upgrade] [--torch-index URL]

uv resolves (Flower brings it along), for every Python from 3.11 on and every platform at once. Versions stay as they
are where they still fit; `--upgrade` moves them all. No index is in the files: uv asks the one that this machine is set
up with. `--torch-index` is the index of PyTorch's CPU builds, https://download.pytorch.org/whl/cpu, which has to be
asked only when PyTorch's version changes.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from uv import find_uv_bin

FOLDER = Path(__file__).resolve().parent
# Each holds the one before; the last one's versions are everybody's
PARTS = ("silo", "server", "dev")
# A silo reads its own file and trains; it downloads no public data set and draws no report.
LEFT_OUT = {
    "server": {"ray"},
    "silo": {"ray", "torchvision", "medmnist", "scikit-learn", "scipy", "pandas", "matplotlib"},
}
TOLD = {
    "silo": "A silo.",
    "server": "The server, beyond silo.txt.",
    "dev": "`make install`, beyond server.txt.",
}
OLDEST = "3.11"
LINUX = "sys_platform == 'linux'"  # in the markers of what PyTorch needs for CUDA, and of nothing else it needs


def requirements(part: str, pyproject: str) -> list[str]:
    """What a part asks for by name, one requirement per entry, in the order of pyproject.toml; what builds silofl last.

    That a silo imports nothing of what its image leaves out is a test (tests/server/deploy/test_compose.py).
    """
    content: dict[str, Any] = tomllib.loads(pyproject)
    kept: list[str] = []
    for requirement in content["project"]["dependencies"]:
        # Flower's extra brings Ray, which simulates silos; in containers they are real.
        plain = requirement if part == "dev" else requirement.replace("[simulation]", "")
        if name_of(plain) not in LEFT_OUT.get(part, ()):
            kept.append(plain)
    if part == "dev":
        extras = content["project"]["optional-dependencies"]
        kept += extras["tuning"] + extras["imaging"] + extras["onnx"]
        kept += (
            extras["monai"]
            + extras["signals"]
            + extras["tables"]
            + extras["trees"]
            + extras["centres"]
            + extras["dev"]
        )
    return [*kept, *content["build-system"]["requires"]]


def name_of(requirement: str) -> str:
    """The normalised name of the package that a requirement, or a line of a lock file, is for."""
    return re.sub(
        r"[-_.]+", "-", re.split(r"[^A-Za-z0-9_.-]", requirement.strip(), maxsplit=1)[0]
    ).lower()


def entries(text: str) -> list[str]:
    """A lock file's entries: a line with name, version and marker, and the lines of its sums below it."""
    lines = "".join(
        line
        for line in text.splitlines(keepends=True)
        if line.strip() and not line.startswith("#")
    )
    return re.findall(r"^\S.*\n(?:[ \t].*\n)*", lines, flags=re.MULTILINE)


def resolve(wanted: Iterable[str], before: Iterable[str], *options: str) -> list[str]:
    """The entries of all that these requirements need; the versions of `before` stay where they fit."""
    uniform = [
        "--universal",
        "--python-version",
        OLDEST,
        "--generate-hashes",
        "--only-binary",
        ":all:",
    ]
    command = [
        find_uv_bin(),
        "pip",
        "compile",
        "-",
        *uniform,
        "--no-header",
        "--no-annotate",
        "--quiet",
        *options,
    ]
    with tempfile.TemporaryDirectory(prefix="silofl-") as folder:
        made = Path(folder, "made.txt")
        made.write_text("".join(before))
        command += ["--output-file", str(made)]
        done = subprocess.run(
            command, input="\n".join(wanted), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ValueError(f"uv pip compile: {done.stderr.strip()}")
        return entries(made.read_text())


def lock(pyproject: str, torch_index: str = "", *options: str) -> None:
    """Write all lock files."""
    own = next(r for r in requirements("silo", pyproject) if name_of(r) == "torch")
    closure = resolve([own], locked("torch-cuda"), *options)
    torch = next(entry for entry in closure if name_of(entry) == "torch")
    cuda = [torch, *(entry for entry in closure if LINUX in entry.partition("\n")[0])]
    cpu = cpu_build(re.split(r"[=\s]+", torch)[1], torch_index)
    every = resolve(requirements("dev", pyproject), locked(*PARTS), *options)
    extras = tomllib.loads(pyproject)["project"]["optional-dependencies"]
    write(
        "docs", resolve(extras.get("docs", ()), locked("docs"), *options), "", by="`make docs`"
    )
    write("torch-cpu", cpu, "PyTorch for CPUs.")
    write("torch-cuda", cuda, "PyTorch for CUDA; of macOS too.")
    elsewhere = {name_of(entry) for entry in cuda}
    listed: set[str] = set()
    for part in PARTS:
        # The versions of all, as this part alone would have them: with `before` uv keeps every one that fits.
        found = every if part == "dev" else resolve(requirements(part, pyproject), every)
        found = [entry for entry in found if name_of(entry) not in elsewhere]
        write(part, [entry for entry in found if entry not in listed], TOLD[part])
        listed |= {*found}


def locked(*names: str) -> list[str]:
    """The entries of lock files that are there."""
    files = (FOLDER / f"{name}.txt" for name in names)
    return [entry for file in files if file.exists() for entry in entries(file.read_text())]


def write(
    name: str, found: Iterable[str], told: str, *, by: str = "requirements/install.sh"
) -> None:
    """One lock file."""
    head = f"# Made by `make lock`; {by} installs it. {told}".rstrip() + "\n"
    (FOLDER / f"{name}.txt").write_text(head + "".join(found))


def cpu_build(version: str, torch_index: str) -> list[str]:
    """The entry of PyTorch's CPU builds: of their index, or, without one, that which is there."""
    if torch_index:
        return resolve([f"torch=={version}+cpu"], [], "--no-deps", "--index", torch_index)
    if (before := locked("torch-cpu")) and before[0].startswith(f"torch=={version}+cpu "):
        return before
    raise ValueError(
        f"PyTorch is {version} now: make lock TORCH_INDEX=URL asks for the sums of its CPU builds too"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--upgrade", action="store_true", help="move every version to the newest that fits"
    )
    parser.add_argument(
        "--torch-index", metavar="URL", default="", help="the index of PyTorch's CPU builds"
    )
    given = parser.parse_args()
    try:
        lock(
            (FOLDER.parent / "pyproject.toml").read_text("utf-8"),
            given.torch_index,
            *(["--upgrade"] if given.upgrade else []),
        )
    except ValueError as error:
        sys.exit(f"make lock: {error}")
