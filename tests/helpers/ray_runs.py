"""A run under Flower's own simulation, which runs on Ray."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from client.flower.apps import build
from client.protocol.launch import free_ports, program

ROOT = Path(__file__).resolve().parents[2]
START = """
from flwr.cli import local_superlink
local_superlink.LOCAL_SUPERLINK_STARTUP_TIMEOUT = 240
local_superlink._start_local_superlink()
"""


@contextlib.contextmanager
def local_superlink() -> Iterator[dict[str, str]]:
    """Environment of `flwr run . local`: its SuperLink, a daemon, is there already, and ends with this.

    `flwr` waits 15 s for it, which beside other work are too few, and leaves half a database.
    """
    port, control = map(str, free_ports(2))
    ports = {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": port, "FLWR_LOCAL_CONTROL_API_PORT": control}
    try:
        environment = {**os.environ, **ports}
        subprocess.run([sys.executable, "-c", START], env=environment, check=True, timeout=300)
        yield ports
    finally:
        for pid in superlinks(port):
            os.kill(pid, signal.SIGTERM)


def run_under_ray(
    settings: dict[str, Any], out: Path, ports: Mapping[str, str], made: str = "summary.json"
) -> None:
    """`flwr run . local` of three silos, in the folder of an app that is nothing else: Flower looks at each file."""
    values = {**settings, "out": str(out)}
    app = out.parent / "app"
    with zipfile.ZipFile(io.BytesIO(build(ROOT))) as fab:
        fab.extractall(app)
    text = " ".join(
        f"{key}='{value}'" if isinstance(value, str) else f"{key}={json.dumps(value)}"
        for key, value in values.items()
    )
    done = subprocess.run(
        [
            *(
                program("flwr"),
                "run",
                str(out.parent / "app"),
                "local",
                "--stream",
                "--federation-config",
                "num-supernodes=3",
            ),
            *("--run-config", text),
        ],
        env={**os.environ, **ports},
        capture_output=True,
        text=True,
        timeout=480,  # 20 s on a quiet machine, 280 were seen beside other work
        check=False,
    )
    assert (out / made).exists(), done.stdout[-3000:] + done.stderr[-3000:]


def superlinks(port: str) -> list[int]:
    """Processes of the simulation SuperLink at a port."""
    every = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    commands = {pid: command_of(pid) for pid in every}
    wanted = ("flower-superlink", "--simulation", f"--port {port} ")
    return [pid for pid, command in commands.items() if all(word in command for word in wanted)]


def command_of(pid: int) -> str:
    """How a process was started; empty where it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
