"""A release: the sdist holds what the wheel needs, and the wheel runs in an environment without this checkout.

The environment has the libraries of this one and no silofl: `.pth` files are not followed from a `.pth` file, so the
editable installation of the checkout is not seen.
"""

import json
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from archives import untar

ROOT = Path(__file__).resolve().parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind, source, out):
    """Build an `sdist` or a `wheel` of a source tree."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(out)]
    made = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    return out / made.stdout.split()[-1]


@pytest.mark.exhaustive
def test_silofl_is_imported_and_run_above_a_clone(tmp_path):
    """A clone's folder has the module's name, and Python looks into the folder that it is started in first."""
    (tmp_path / "silofl").mkdir()
    source = tmp_path / "silofl"
    for name in ("pyproject.toml", "silofl.py", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for name in ("models", "strategies", "partitions", "client", "server"):
        (source / name).symlink_to(ROOT / name)
    with zipfile.ZipFile(build("editable", source, tmp_path)) as wheel:
        paths = [
            wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".pth")
        ]
    # A path, and no import of a finder, which is asked after all paths
    assert paths == [f"{source}\n"]
    site = f"import site, sys; site.addsitedir({str(tmp_path / 'site')!r}); import silofl; print(silofl.__file__)"
    (tmp_path / "site").mkdir()
    (tmp_path / "site/silofl.pth").write_text(paths[0])
    found = subprocess.run(
        [sys.executable, "-c", site], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert found.stdout.strip().endswith("silofl.py")
    command = [sys.executable, "-m", "silofl", "--version"]
    assert (
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        == f"silofl {VERSION}\n"
    )


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A new environment with the wheel that is built from the sdist; the sdist is built from what git tracks."""
    folder = tmp_path_factory.mktemp("release")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    for name in filter(None, tracked.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "tree" / name).write_bytes((ROOT / name).read_bytes())
    sdist = build("sdist", folder / "tree", folder)
    untar(sdist, folder)
    wheel = build("wheel", folder / f"silofl-{VERSION}", folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    site = next((folder / "venv").glob("lib/python*/site-packages"))
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = str(folder / "venv/bin/python")
    pip = f"-m pip --python {python} install --quiet --no-deps --no-index --ignore-installed"
    subprocess.run([sys.executable, *pip.split(), wheel], check=True)
    return folder / "venv"


def run(environment, command, folder):
    """Run an installed program in an empty folder with an empty HOME; what it prints."""
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
    program = [str(environment / "bin" / command[0]), *command[1:]]
    return subprocess.run(
        program, cwd=folder, env=clean, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture(scope="module")
def directory(environment, tmp_path_factory):
    """The run directory that the installed command prints."""
    folder = tmp_path_factory.mktemp("runs")
    command = "silofl simulate --strategy fedavg --rounds 1 --silos 2"
    return folder / run(environment, command.split(), folder).splitlines()[-1]


def test_the_wheel_is_this_version_and_holds_the_code(environment, tmp_path):
    code = "import server, importlib.metadata as m; print(server.__file__, m.version('silofl'))"
    place, version = run(environment, ["python", "-c", code], tmp_path).split()
    assert Path(place).is_relative_to(environment) and version == VERSION
    packages = ("client", "models", "partitions", "server", "strategies")
    tables = [
        path.relative_to(ROOT)
        for package in packages
        for path in (ROOT / package).rglob("*.*")
        if path.suffix in (".json", ".toml", ".html", ".txt", ".j2")
    ]
    site = Path(place).parents[1]
    assert (
        len(tables) > 30 and [str(name) for name in tables if not (site / name).is_file()] == []
    )


# `make release` runs it, too
@pytest.mark.exhaustive
def test_the_wheel_simulates_and_reports(environment, directory, tmp_path):
    """`silofl simulate`, with the report and every method's file."""
    summary = json.loads((directory / "summary.json").read_text())
    assert (
        summary["runs"][0]["final"]["accuracy_mean"] > 0.1
        and (directory / "report.html").exists()
    )
    methods = json.loads(run(environment, ["silofl", "strategies", "--json"], tmp_path))
    files = [path for path in (ROOT / "strategies").glob("*.py") if path.name != "__init__.py"]
    assert len(methods) >= len(files)


NOTEBOOK = """
import sys, silofl
run = silofl.load_run(sys.argv[1])
print(silofl.__file__, run.runs.loc[0, "strategy"], len(run.silos), run.model("hospital-01").card["silo"])
"""


@pytest.mark.exhaustive
def test_the_wheel_reads_a_run_in_a_script(environment, directory, tmp_path):
    """`import silofl` is the installed module, and reads the run that the installed command has made."""
    place, *found = run(
        environment, ["python", "-c", NOTEBOOK, str(directory)], tmp_path
    ).split()
    assert Path(place).is_relative_to(environment) and found == ["fedavg", "2", "hospital-01"]


def test_the_changelog_and_the_images_have_this_version():
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"silofl-silo:{VERSION}" in (ROOT / "docker-compose.yml").read_text("utf-8")
