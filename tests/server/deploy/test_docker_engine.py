"""The script that starts an engine for the container tests: what it leaves behind can always be taken away."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "docker-engine.sh"


@pytest.mark.parametrize("written", [(), ("links",), ("links", "iptables")])
def test_stop_succeeds_wherever_start_failed(tmp_path, written):
    """Without `iptables-save`, for one, `start` ends after it wrote the network links and an empty file of rules.

    This machine's links and rules stay as they are: `ip` and `iptables-restore` are stand-ins.
    """
    folder, programs = tmp_path / "engine", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    for name in ("ip", "iptables-restore"):
        (programs / name).write_text("#!/bin/sh\ncat >/dev/null\n")
        (programs / name).chmod(0o755)
    for name in written:
        (folder / name).write_text("")
    script = SCRIPT.read_text().replace(
        "CGROUP=silofl-docker-test", "CGROUP=silofl-no-such-group"
    )
    command = ["bash", "-c", script, "docker-engine.sh", "stop", str(folder)]
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not folder.exists()
