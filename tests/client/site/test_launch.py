"""One launcher: nobody else writes Flower's options and variables down, and the images agree with it."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path

import pytest

from client.site.launch import DEFAULTS, FLOWER, environment, silo_environment, threads

ROOT = Path(__file__).parents[3]
LAUNCHER = "client/site/launch.py"
# Plain Flower, which the benchmark compares ours with, has a command line of its own.
EXCEPT = {"benchmarks/round_trip.py"}
OPTION = re.compile(r"--(ssl-|superlink$|root-certificates$|auth-supernode|enable-supernode|node-config$|fleet-api)")


def code() -> list[Path]:
    """Every Python file that is no test."""
    rooms = ("models", "partitions", "strategies", "client", "server", "docker", "benchmarks")
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


def test_options_and_variables_of_flower_stand_in_the_launcher_alone() -> None:
    found: dict[str, set[str]] = {}
    for path in code():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                if re.fullmatch(r"FLWR_[A-Z_]+", text) or OPTION.match(text):
                    found.setdefault(path.relative_to(ROOT).as_posix(), set()).add(text)
    assert {"FLWR_HOME", "--superlink", "--ssl-keyfile", "--node-config"} <= found.pop(LAUNCHER)
    assert found.keys() <= EXCEPT, found


def test_the_images_have_the_same_environment() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    pairs = dict(
        pair.split("=", 1) for line in re.findall(r"^ENV (.*)$", text, flags=re.MULTILINE) for pair in line.split()
    )
    flower = {key: value for key, value in pairs.items() if key.startswith("FLWR_") and key != "FLWR_HOME"}
    assert flower == FLOWER | DEFAULTS


def test_what_a_process_of_flowers_inherits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Telemetry and installing stay off whatever the shell says; how often a SuperExec asks is the shell's."""
    for key, value in {**FLOWER, "NO_PROXY": "intranet", "PATH": "/own", "FLWR_TELEMETRY_ENABLED": "1"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "2")
    made = environment(tmp_path)
    assert {key: made[key] for key in FLOWER} == FLOWER
    assert made["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] == "2"
    assert made["FLWR_HOME"] == str(tmp_path)
    assert made["NO_PROXY"] == "intranet,localhost,127.0.0.1" and made["no_proxy"] == "localhost,127.0.0.1"
    assert made["PATH"] == os.pathsep.join([str(Path(sys.executable).parent), "/own"])
    monkeypatch.delenv("FLWR_SUPEREXEC_TASK_POLL_INTERVAL")
    assert environment()["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] == DEFAULTS["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"]


def test_what_a_silo_inherits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shim first on its PATH, warm starts unless they are switched off, its share of the cores."""
    monkeypatch.delenv("SILOFL_WARM_SOCKET", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)

    def made() -> dict[str, str]:
        return silo_environment(tmp_path, scripts=tmp_path / "bin", warm_socket=tmp_path / "warm.sock", sharing=3)

    assert made()["PATH"].startswith(str(tmp_path / "bin") + os.pathsep + str(Path(sys.executable).parent))
    assert made()["SILOFL_WARM_SOCKET"] == str(tmp_path / "warm.sock")
    assert made()["OMP_NUM_THREADS"] == "2" and threads(20) == "1"
    monkeypatch.setenv("SILOFL_WARM_SOCKET", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert made()["SILOFL_WARM_SOCKET"] == "" and made()["OMP_NUM_THREADS"] == "5"
