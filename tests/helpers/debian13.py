"""Debian 13 with Podman, systemd and Charliecloud in a folder, entered as a machine of its own.

It has its own mounts, processes and part of the cgroups, and this machine's network. Nothing is installed here. The
folder stays for the next time, with the image that was built in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("/var/cache/silofl-tests/debian13")
ENGINE = ROOT / "tests/server/deploy/docker-engine.sh"
IMAGE = f"silofl-silo:{metadata.version('silofl')}"
USER, UID = "hospital", 1500
PACKAGES = (
    *("podman", "crun", "catatonit", "uidmap", "passt"),
    *("systemd", "dbus-user-session", "charliecloud", "ca-certificates"),
)
CGROUP = Path("sys/fs/cgroup/silofl-test")
ENTER = f"""
set -e
cd "$0"
mount --make-rprivate /
mount --bind . .
cd "$0"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs tmpfs run
mount --rbind /dev dev
# As udev makes it: Podman's network opens it as a user
mknod -m 0666 run/tun c 10 200
mount --bind run/tun dev/net/tun
mount --bind "$1" srv
mkdir -p run/systemd/system run/user/{UID} {CGROUP} old
chown -R {UID}:{UID} run/user/{UID} {CGROUP}
chmod 0700 run/user/{UID}
echo 0 > {CGROUP}/cgroup.procs
cp /etc/resolv.conf /etc/hosts etc/
pivot_root . old
umount --lazy /old
mount --make-rshared /
echo entered
exec sleep infinity
"""


class Machine:
    """The folder as a machine; `srv` is a folder of this one, at /srv there."""

    def __init__(self, srv: Path) -> None:
        self.srv = srv
        self.home = FOLDER / "root/home" / USER
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        command += ["sh", "-c", ENTER, str(FOLDER / "root"), str(srv)]
        self.outer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.outer.stdout and self.outer.stdout.readline() == "entered\n"
        children = Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children")
        self.pid = int(children.read_text())

    def end(self) -> None:
        self.outer.kill()
        self.outer.wait(30)

    def words(self, command: str) -> list[str]:
        variables = f"export XDG_RUNTIME_DIR=/run/user/{UID} PATH=/usr/bin:/bin:/usr/libexec/podman; cd;"
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--root", "--wdns=/"]
        join = f'echo 0 > /{CGROUP}/cgroup.procs; exec su - {USER} -c "$0"'
        return [*enter, "sh", "-c", join, f"{variables} {command}"]

    def start(self, command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.words(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def run(self, command: str, check: bool = True) -> str:
        """A shell command of the hospital's user; its output, errors too."""
        done = subprocess.run(
            self.words(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if check and done.returncode:
            pytest.fail(f"{command}: exit code {done.returncode}\n{done.stdout[-3000:]}")
        return done.stdout

    def own(self, path: Path) -> None:
        """The hospital's user becomes the owner of a file or folder."""
        subprocess.run(["chown", "-R", f"{UID}:{UID}", path], check=True)


@contextlib.contextmanager
def debian13(srv: Path) -> Iterator[Machine]:
    """The machine; skips the test, with a reason, where it cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if not shutil.which("mmdebstrap"):
        pytest.skip("needs mmdebstrap")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        lock = os.open(FOLDER, os.O_RDONLY)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        _make_root()
        machine = Machine(srv)
        stack.callback(machine.end)
        yield machine


def _make_root() -> None:
    done, root = FOLDER / "done", FOLDER / "root"
    if done.exists() and done.read_text() == str(PACKAGES):
        return
    shutil.rmtree(root, ignore_errors=True)
    command = [
        "mmdebstrap",
        "--mode=root",
        "--variant=minbase",
        f"--include={','.join(PACKAGES)}",
    ]
    command += [f"--customize-hook=chroot $1 useradd --uid {UID} --create-home {USER}"]
    made = subprocess.run([*command, "trixie", root], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"Debian 13 cannot be made here: {made.stderr.splitlines()[-1]}")
    done.write_text(str(PACKAGES))


def build_image(machine: Machine) -> None:
    """The silo's image of this checkout, by rootless Podman from the Dockerfile; needs no registry."""
    home = machine.home
    for name in ("source", "wheels"):
        shutil.rmtree(home / name, ignore_errors=True)
    copy_checkout(home / "source")
    torch_wheel(home / "wheels")
    if "python" not in machine.run("podman images --format '{{.Repository}}'"):
        base = FOLDER / "base"
        (base / "tmp").mkdir(parents=True, exist_ok=True)
        subprocess.run(["bash", ENGINE, "base_tar", base], check=True)
        shutil.move(base / "base.tar", home / "base.tar")
        machine.own(home / "base.tar")
        machine.run(
            "podman import --change 'ENV LANG=C.UTF-8' base.tar python:3.11-slim; rm base.tar"
        )
    machine.own(home / "source")
    machine.run(
        "podman build --quiet --network host --isolation chroot --build-context wheels=wheels"
        f" --file source/docker/Dockerfile --target silo --tag {IMAGE} source 2>&1"
        " && podman image prune --force"  # the stages' images, gigabytes
    )


def copy_checkout(target: Path) -> None:
    """The files that an image is built from: its app is built again and again, and must stay the same build."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("docs/", "experiments/")):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def torch_wheel(folder: Path) -> None:
    """A build context with the image's CPU build of PyTorch, where pip here finds it; else its index has one."""
    folder.mkdir()
    listed = (ROOT / "requirements/torch-cpu.txt").read_text()
    torch = next(line.split()[0] for line in listed.splitlines() if line.startswith("torch=="))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
    subprocess.run(
        [*command, "--no-deps", "--only-binary=:all:", "--python-version=3.11", torch],
        capture_output=True,
    )
