"""The lock files: they cover pyproject.toml, every entry has a sum, no index is named, and pip refuses what differs."""

import hashlib
import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from requirements.lock import PARTS, entries, locked, name_of, requirements

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
TORCH = ("torch-cpu", "torch-cuda")
ENTRY = re.compile(
    r"([a-z0-9-]+)==(\S+)(?: ; ([^\\\n]+?))?(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n"
)


def pins(*files):
    """Name to the versions that lock files have for it, on whatever Python."""
    found: dict[str, set[Version]] = {}
    for entry in locked(*files):
        matched = ENTRY.fullmatch(entry)
        assert matched, entry
        found.setdefault(matched[1], set()).add(Version(matched[2]))
    return found


def lacking(part, pyproject, locked_versions):
    """What a part asks for, directly or by way of others, and its lock files do not have in a version that fits.

    Requirements of requirements are those of the installed packages, where a lock file has the installed version: the
    CUDA build of PyTorch needs more than the CPU build. What other Pythons and platforms need is up to uv.
    """
    wanted = [Requirement(one) for one in requirements(part, pyproject)]
    seen = set()
    missing = []
    while wanted:
        one = wanted.pop()
        name = canonicalize_name(one.name)
        versions = locked_versions.get(name, set())
        if not versions or not all(
            one.specifier.contains(version, prereleases=True) for version in versions
        ):
            missing.append(str(one))
        if (name, *one.extras) in seen:
            continue
        seen.add((name, *one.extras))
        try:
            if Version(metadata.version(name)) not in versions:
                continue
            further = [Requirement(text) for text in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:
            continue
        for extra in one.extras or {""}:
            wanted += [
                f for f in further if f.marker is None or f.marker.evaluate({"extra": extra})
            ]
    return missing


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("torch", TORCH)
def test_the_locks_cover_pyproject(part, torch):
    files = PARTS[: PARTS.index(part) + 1]
    assert lacking(part, PYPROJECT, pins(torch, *files)) == [], "make lock"


def test_a_dependency_that_nobody_locked_is_found():
    """And one whose version in the lock file is not wanted any more."""
    more = PYPROJECT.replace('"numpy",', '"numpy", "left-pad>=1",').replace(
        '"scipy"', '"scipy>=99"'
    )
    assert more.count("left-pad") == 1
    found = lacking("dev", more, pins("torch-cpu", *PARTS))
    assert set(found) == {"left-pad>=1", "scipy>=99"}


def test_every_line_of_a_lock_file_is_a_version_with_sums_and_nothing_else():
    for name in (*PARTS, *TORCH):
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        listed = entries(text)
        assert listed and all(ENTRY.fullmatch(entry) for entry in listed)
        comments = [line for line in text.splitlines() if line.startswith("#")]
        assert len("".join(listed).splitlines()) + len(comments) == len(text.splitlines())
        assert "://" not in text and "index" not in text.replace("package index", "")
    # Nothing twice, but where another Python takes another version.
    every = [entry.partition("\n")[0] for entry in locked(*PARTS)]
    assert len(every) == len({*every})


def test_torch_is_one_version_in_both_builds():
    cpu, cuda = locked("torch-cpu"), locked("torch-cuda")
    assert (
        [name_of(entry) for entry in cpu] == ["torch"] == [name_of(entry) for entry in cuda[:1]]
    )
    assert cpu[0].split()[0] == cuda[0].split()[0] + "+cpu"
    assert not {name_of(entry) for entry in cuda} & {name_of(entry) for entry in locked(*PARTS)}


# --- what pip makes of them -------------------------------------------------------------------------------------------


@pytest.fixture
def wheels(tmp_path):
    """A folder with the wheel of a package `probe`."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder / "probe-1.0-py3-none-any.whl", "VALUE = 1\n")
    return folder


def write_wheel(path, code):
    """The same bytes whenever the code is the same."""
    info = "probe-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in (
            ("probe.py", code),
            (f"{info}/METADATA", "Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n"),
            (f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            (f"{info}/RECORD", ""),
        ):
            wheel.writestr(zipfile.ZipInfo(name), text)


def installed(folder, wheels, lock):
    """`requirements/install.sh silo`, with other lock files, into a folder; no index is asked."""
    copy = folder / "requirements"
    copy.mkdir()
    (copy / "install.sh").write_text((ROOT / "requirements/install.sh").read_text())
    for name in (*PARTS, *TORCH):
        (copy / f"{name}.txt").write_text(lock if name == "silo" else "")
    (copy / "torch-cpu.txt").write_text(lock)  # in PyTorch's place
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    alone = {
        "PYTHON": sys.executable,
        "WHEELS": str(wheels),
        "PIP_NO_INDEX": "1",
        "PIP_TARGET": str(folder / "site"),
    }
    command = ["sh", str(copy / "install.sh"), "silo"]
    quiet = {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run(
        command, env=clean | alone | quiet, capture_output=True, text=True, check=False
    )


@pytest.mark.exhaustive
def test_what_has_the_sum_is_installed_and_what_has_not_is_refused(wheels, tmp_path):
    wheel = wheels / "probe-1.0-py3-none-any.whl"
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for folder, lock, code, reason in (
        ("right", f"probe==1.0 --hash=sha256:{right}\n", "VALUE = 1\n", ""),
        ("none", "probe==1.0\n", "VALUE = 1\n", "Hashes are required in --require-hashes mode"),
        # The same name and version, another content.
        (
            "changed",
            f"probe==1.0 --hash=sha256:{right}\n",
            "VALUE = 2\n",
            "DO NOT MATCH THE HASHES",
        ),
    ):
        write_wheel(wheel, code)
        (tmp_path / folder).mkdir()
        done = installed(tmp_path / folder, wheels, lock)
        assert reason in done.stderr and bool(done.returncode) == bool(reason), done.stderr
        assert (tmp_path / folder / "site/probe.py").exists() == (not reason)
        assert "installing 1 packages of silo.txt" in done.stderr  # a sign of life


def test_the_documentations_lock_file_has_what_its_extra_asks_for():
    wanted = tomllib.loads(PYPROJECT)["project"]["optional-dependencies"]["docs"]
    listed = pins("docs")
    for one in map(Requirement, wanted):
        versions = listed.get(canonicalize_name(one.name), set())
        assert versions and all(one.specifier.contains(version) for version in versions), one


def test_nothing_of_ours_installs_packages_another_way():
    """Makefile and images: the lock files' script, and silofl itself without its dependencies."""
    for name in ("Makefile", "docker/Dockerfile"):
        text = re.sub(r"\\\n", " ", (ROOT / name).read_text())
        for line in (
            line
            for line in text.splitlines()
            if re.search(r"\bpip install\b", line) and line[:1] != "#"
        ):
            assert "--no-deps" in line and "--no-build-isolation" in line, f"{name}: {line}"
    script = (ROOT / "requirements/install.sh").read_text()
    assert "--no-deps --only-binary :all:" in script and re.search(
        r'^install\(\) \{.*?\bpip --require-hashes "\$@"\n\}$', script, re.M | re.S
    )
    assert "requirements/install.sh dev" in (ROOT / "Makefile").read_text()


# --- the base image ---------------------------------------------------------------------------------------------------


def test_the_base_is_named_once_and_its_digest_is_one():
    text = (ROOT / "docker/Dockerfile").read_text()
    assert re.findall(r"^ARG SILOFL_BASE=\S+$", text, flags=re.MULTILINE) == [
        line for line in text.splitlines() if "SILOFL_BASE=" in line and line.startswith("ARG")
    ]
    assert re.search(
        r"^ARG SILOFL_BASE=[a-z0-9./:-]+(@sha256:[0-9a-f]{64})?$", text, flags=re.MULTILINE
    )
    outside = [
        line
        for line in text.splitlines()
        if line.startswith("FROM ") and "SILOFL_BASE" not in line
    ]
    stages = set(re.findall(r"^FROM .* AS (\S+)$", text, flags=re.MULTILINE))
    assert all(line.split()[1] in stages | {"scratch"} for line in outside)


@pytest.mark.parametrize(
    "answer, moved", [("sha256:" + "ab" * 32, True), ("latest", False), ("", False)]
)
def test_pinning_the_base_is_one_command(tmp_path, answer, moved):
    """`docker` here is a stand-in for what asks the registry; it notes what it was asked."""
    (tmp_path / "docker").mkdir()
    for name in ("Dockerfile", "pin-base.sh"):
        (tmp_path / "docker" / name).write_text((ROOT / "docker" / name).read_text())
    fake = tmp_path / "bin/docker"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho {answer}\n')
    fake.chmod(0o755)
    before = (tmp_path / "docker/Dockerfile").read_text()
    environment = os.environ | {"PATH": f"{fake.parent}:{os.environ['PATH']}"}
    command = ["sh", str(tmp_path / "docker/pin-base.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    after = (tmp_path / "docker/Dockerfile").read_text()
    tag = re.search(r"^ARG SILOFL_BASE=([^@\s]+)", before, flags=re.MULTILINE)[1]  # type: ignore[index]
    assert (tmp_path / "asked").read_text().split()[-1] == tag
    assert (done.returncode == 0) == moved, done.stderr
    expected = (
        re.sub(r"(?m)^ARG SILOFL_BASE=\S+", f"ARG SILOFL_BASE={tag}@{answer}", before)
        if moved
        else before
    )
    assert after == expected
    assert sorted(path.name for path in (tmp_path / "docker").iterdir()) == [
        "Dockerfile",
        "pin-base.sh",
    ]
    again = subprocess.run(
        [*command, "python:3.12-slim"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        f"python:3.12-slim@{answer}" in (tmp_path / "docker/Dockerfile").read_text()
    ) == moved, again.stderr


def test_make_installs_again_after_a_change_of_what_is_locked_alone(tmp_path):
    """Not after a script there was imported, which makes __pycache__: tests beside it would lose what they run."""
    for path in (
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
        *(ROOT / "requirements").glob("*.*"),
    ):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (tmp_path / "python/bin").mkdir(parents=True)
    for name, seconds in (("python/bin/python", 1), ("python/ready", 2)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() + seconds,) * 2)
    command = ["make", "-n", "install", "VENV=python"]

    def installs():
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return "install.sh" in done.stdout

    assert not installs()
    (tmp_path / "requirements/__pycache__").mkdir()
    os.utime(tmp_path / "requirements/__pycache__", (time.time() + 9,) * 2)
    assert not installs()
    os.utime(tmp_path / "requirements/silo.txt", (time.time() + 9,) * 2)
    assert installs()
