"""Programs of Debian packages, unpacked into a folder: nothing is installed on this machine."""

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from trio import text_of, wait_for

from client.protocol.launch import LOOPBACK
from server.deploy import processes

# Readable for the users that these programs become
FOLDER = Path("/var/cache/silofl-tests/debian")
PACKAGES = {
    "apache": (
        *("apache2-bin", "libapache2-mod-auth-openidc", "libapr1", "libaprutil1", "libcjose0"),
        "libhiredis0.14",
    ),
    "nginx": ("nginx", "libnginx-mod-stream"),
    "haproxy": ("haproxy", "liblua5.3-0", "libopentracing-c-wrapper0", "libopentracing1"),
    "slurm": (
        *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins"),
        *("munge", "libmunge2", "libhwloc15", "liblua5.1-0"),
    ),
    "squid": (
        *("squid-openssl", "squid-common", "squid-langpack", "libecap3", "libltdl7"),
        *("libnetfilter-conntrack3", "libnfnetlink0"),
    ),
}


def unpacked() -> Path:
    """Return the root of the unpacked packages; skips the test, with a reason, where apt cannot fetch them."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        pytest.skip("needs Debian's packages: no apt-get here")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:  # pytest's workers share it
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _unpacked(sorted(name for group in PACKAGES.values() for name in group))


def _unpacked(names: list[str]) -> Path:
    done = FOLDER / "done"
    if done.exists() and done.read_text() == str(names):
        return FOLDER / "root"
    if not _fetched(names):
        subprocess.run(["apt-get", "update", "-qq"], capture_output=True)
        if not _fetched(names):
            pytest.skip("Debian's packages cannot be fetched here")
    for package in FOLDER.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, FOLDER / "root"], check=True)
        package.unlink()
    done.write_text(str(names))
    return FOLDER / "root"


def _fetched(names: list[str]) -> bool:
    command = ["apt-get", "download", *names]
    return subprocess.run(command, cwd=FOLDER, capture_output=True).returncode == 0


def libraries(root: Path) -> dict[str, str]:
    """The environment in which an unpacked program finds its libraries."""
    (folder,) = (root / "usr/lib").glob("*-linux-gnu")
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


def start(command: list[str], port: int, log: Path) -> processes.Process:
    """Start an unpacked program, and return it once it listens; what it printed is the failure's reason."""
    environment = libraries(FOLDER / "root")
    with log.open("ab") as printed:
        program = processes.spawn(
            command, environment, stdout=printed, stderr=subprocess.STDOUT
        )
    with contextlib.suppress(AssertionError):
        wait_for(lambda: _listens(port) or not program.runs(), 60)
    if not _listens(port):
        processes.end([program], grace=1.0)
        pytest.fail(f"{command[0]} does not start: {text_of(log)}")
    return program


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0
