"""Processes of ours: start, find and end them, without touching any other process.

Every process of a local federation has `SILOFL_PART=DIRECTORY:PART` in its initial environment, and so have all its
descendants, in any group, session or under any parent. `/proc/PID/environ` shows the initial environment, so `find`
returns them all, also after a crash of any part. A process is identified by its number and its start time, since
numbers are reused. Linux only, but for `spawn` and `exit_code`.

Flower's SuperExec hides its environment from all users but root (`prctl(PR_SET_DUMPABLE, 0)`: it holds a secret). So a
hidden process of this user is assigned to the part of the process in its `--parent-pid`.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partitions.common.errors import RunFailedError

PART = "SILOFL_PART"


@dataclass(frozen=True)
class Process:
    """A process: its number, start time (clock ticks since boot), part and command line."""

    pid: int
    started: int
    part: str = ""
    command: str = ""

    def runs(self) -> bool:
        """Return whether this process still runs, with the same start time; a zombie does not."""
        return _start_time(self.pid) == self.started


def start_process(
    part: str,
    command: Sequence[str],
    *,
    directory: Path,
    log: Path,
    environment: Mapping[str, str],
) -> Process:
    """Start `command` as a part of the federation in `directory`; output goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        marked = {**environment, PART: f"{directory}:{part}"}
        return spawn(
            command, marked, part=part, cwd=directory, stdout=output, stderr=subprocess.STDOUT
        )


def spawn(
    command: Sequence[str], environment: Mapping[str, str], *, part: str = "", **streams: Any
) -> Process:
    """Start a child in a session of its own, which Ctrl-C does not reach. `end` ends it, `exit_code` has its code."""
    streams = {"stdin": subprocess.DEVNULL, **streams}
    child = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    # Otherwise `subprocess` could reap it, and `exit_code` would not get its exit code
    child.returncode = 0
    return Process(child.pid, _start_time(child.pid) or 0, part)


def find(directory: Path) -> list[Process]:
    """Return all running processes of the federation in `directory`, oldest first."""
    wanted = f"{PART}={directory}:".encode()
    processes, hidden = [], []
    for folder in Path("/proc").glob("[0-9]*"):
        if (pid := int(folder.name)) == os.getpid():
            continue
        command = ""
        try:
            command = (
                (folder / "cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
                .strip()
            )
            environment = (folder / "environ").read_bytes()
        except PermissionError:
            hidden.append((pid, command))
            continue
        except OSError:  # just ended
            continue
        for variable in environment.split(b"\0"):
            if variable.startswith(wanted) and (started := _start_time(pid)) is not None:
                part = variable.removeprefix(wanted).decode()
                processes.append(Process(pid, started, part, command))
    parts = {str(process.pid): process.part for process in processes}
    for pid, command in hidden:
        parent = command.partition("--parent-pid ")[2].split(" ")[0]
        if parent in parts and _is_own(pid) and (started := _start_time(pid)) is not None:
            processes.append(Process(pid, started, parts[parent], command))
    return sorted(processes, key=lambda process: (process.started, process.pid))


def end(processes: Sequence[Process], *, grace: float) -> None:
    """Send SIGTERM, and SIGKILL after `grace` seconds (0: at once); return when all processes have ended.

    Raises RunFailedError if one does not end.
    """
    left = list(processes)
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
        if not seconds:
            continue
        for process in left:
            if process.runs():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)
        deadline = time.monotonic() + seconds
        while left and time.monotonic() < deadline:
            left = [process for process in left if process.runs()]
            if left:
                time.sleep(0.05)
    for process in processes:
        exit_code(process)  # reaps children of this process
    if left:
        raise RunFailedError(f"process {left[0].pid} ({left[0].part}) does not end")


def exit_code(process: Process) -> int | None:
    """Return the exit code of a child of this process; None while it runs, or for another process's child."""
    with contextlib.suppress(ChildProcessError):
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        if pid == process.pid:
            return os.waitstatus_to_exitcode(status)
    return None


def _is_own(pid: int) -> bool:
    """Return whether a process runs as this user. (The owner of a hidden process's folder in /proc is root.)"""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[1]) == os.getuid()
    return False


def _start_time(pid: int) -> int | None:
    """Return the start time of a running process (field 22 of its stat); None for a zombie or no process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
