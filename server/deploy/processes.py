"""The processes of a local federation: started, found again, and ended, and never anyone else's.

Every process carries `SILOFL_PART=DIRECTORY:PART` in the environment it was started with, and so do all
its descendants, whatever group, session or parent they end up with. `/proc/PID/environ` shows that
environment as it was at the start, so `find` sees them all, also after a crash of any part. A process is
known by its number together with its start time, since numbers are used again. Linux only.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PART = "SILOFL_PART"


@dataclass(frozen=True)
class Process:
    """A process: its number and its start time (clock ticks since boot), the part it serves, its command line."""

    pid: int
    started: int
    part: str = ""
    command: str = ""

    def runs(self) -> bool:
        """Whether this very process still runs; a zombie does not."""
        return _started(self.pid) == self.started


def start(part: str, command: Sequence[str], *, directory: Path, log: Path, environment: Mapping[str, str]) -> Process:
    """Start `command` as a part of the federation in `directory`, in a session of its own; output to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            cwd=directory,
            env={**environment, PART: f"{directory}:{part}"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    child.returncode = 0  # or `subprocess` would wait for it some day, and its exit code would be lost to us
    return Process(child.pid, _started(child.pid) or 0, part)


def find(directory: Path) -> list[Process]:
    """All running processes of the federation in `directory`, oldest first."""
    wanted = f"{PART}={directory}:".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = Path("/proc", entry, "environ").read_bytes()
            command = Path("/proc", entry, "cmdline").read_bytes()
        except OSError:  # another user's, or just ended
            continue
        for variable in environment.split(b"\0"):
            if variable.startswith(wanted) and (started := _started(int(entry))) is not None:
                part = variable[len(wanted) :].decode()
                found.append(Process(int(entry), started, part, command.replace(b"\0", b" ").decode().strip()))
    return sorted(found, key=lambda process: (process.started, process.pid))


def end(processes: Sequence[Process], *, grace: float) -> None:
    """SIGTERM, and SIGKILL for those that still run after `grace` seconds (0: at once); returns when all are gone."""
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
        exit_code(process)  # takes the children of this very process off the table
    if left:
        raise RuntimeError(f"process {left[0].pid} ({left[0].part}) does not end")


def exit_code(process: Process) -> int | None:
    """How a child of this very process ended; None while it runs, or where another process started it."""
    with contextlib.suppress(ChildProcessError):
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        if pid == process.pid:
            return os.waitstatus_to_exitcode(status)
    return None


def _started(pid: int) -> int | None:
    """Start time of a running process (field 22 of its stat); None if there is none, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
