"""A `flwr-clientapp`, first on PATH, that hands the task to the template process (`template.py`), called parent below.

Run as a script by ``python -I -S`` (no site-packages, a few milliseconds). It sends its arguments, environment,
working directory, umask and standard streams to the parent over a Unix socket and stays in the foreground while the
task runs. It forwards signals, and ends as the task ended: with its exit code, or by its signal. If the parent cannot
be reached, it warns and starts a new parent; the task itself then runs in a fresh process that does its own imports
(`commands.py once`).

Our SuperNode (`../supernode.py`) hands over without this process, and starts it only if there is no parent.
"""

import array
import contextlib
import json
import os
import select
import signal
import socket
import sys

READY_SECONDS = 30.0  # a parent that is still importing answers within this time; imports take about 5 s
LOOK_SECONDS = 1.0  # between two checks that the SuperNode that started us is still there
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
WATCHDOG_DIED = "ERROR: the template process's watchdog of this task died, and the task with it"
HERE = os.path.dirname(os.path.abspath(__file__))
COMMAND = [
    sys.executable,
    "-P",
    os.path.join(os.path.dirname(os.path.dirname(HERE)), "private.py"),
    "runtime.prefork.commands",
]


def main() -> None:
    """Hand one task to the template process; if that fails, run it in a fresh process."""
    asked = request(sys.argv[1:], SILOFL_STARTED_BY=str(os.getppid()))  # a persistent worker ends with that process
    path = os.environ.get("SILOFL_WARM_SOCKET", "")
    connection = None
    if path:
        try:
            connection = hand_over(asked, connect(path), READY_SECONDS)
        except OSError as error:
            reason = str(error) or type(error).__name__
            print(f"WARNING: no template process, {path}: {reason}; using Flower's own start", file=sys.stderr)
            respawn(path)
    if connection is None:
        connection = hand_over(asked, start_once(), None)
    follow(connection)


def request(arguments: "list[str]", **environment: str) -> "dict[str, object]":
    """Return what another process needs to replace this one (`handover.adopt`), with more environment variables."""
    mask = os.umask(0)
    os.umask(mask)
    return {"argv": arguments, "env": {**os.environ, **environment}, "cwd": os.getcwd(), "umask": mask}


def connect(path: str) -> socket.socket:
    """Return a connection to the parent."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    here = os.getcwd()
    os.chdir(os.path.dirname(path))  # a Unix socket's address has at most 107 bytes, a path may be longer
    try:
        connection.connect(os.path.basename(path))
    finally:
        os.chdir(here)
    return connection


def start_once() -> socket.socket:
    """Return a connection to a new process that runs this one task."""
    connection, other = socket.socketpair()
    if os.fork() == 0:
        other.set_inheritable(True)
        os.execv(sys.executable, [*COMMAND, "once", str(other.fileno())])
    other.close()
    return connection


def hand_over(
    asked: "dict[str, object]", connection: socket.socket, seconds: "float | None", *more: int
) -> socket.socket:
    """Send the request, our standard streams and `more` descriptors; OSError unless accepted within `seconds`."""
    text = json.dumps(asked).encode()
    data = len(text).to_bytes(4, "big") + text
    try:
        connection.settimeout(seconds)
        sent = connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2, *more]))])
        connection.sendall(data[sent:])
        if connection.recv(1) != b"R":
            raise OSError("it hung up")
        connection.sendall(b"G")  # from here on the task is the other process's: it is never started twice
    except OSError:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def follow(connection: socket.socket) -> None:
    """Forward signals until the task has ended, then end in the same way. Does not return."""

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(bytes([number]))

    for number in FORWARDED:
        signal.signal(number, forward)
    started_by = os.getppid()
    data = b""
    while len(data) < 4:
        if os.getppid() != started_by:
            os._exit(1)  # the SuperNode is gone; closing the connection makes the parent end the task
        if select.select([connection], [], [], LOOK_SECONDS)[0]:
            part = connection.recv(4)
            if not part:
                print(WATCHDOG_DIED, file=sys.stderr)
                os._exit(1)
            data += part
    code = int.from_bytes(data, "big", signed=True)
    if code >= 0:
        os._exit(code)
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def respawn(path: str) -> None:
    """Start a new parent for later tasks; it exits at once if another one holds the socket's lock."""
    if os.environ.get("SILOFL_WARM_RESPAWN", "1") != "1" or not os.path.isdir(os.path.dirname(path)):
        return
    if os.fork():
        return
    os.setsid()
    name = os.environ.get("SILOFL_WARM_LOG") or path + ".log"
    log = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.execv(sys.executable, [*COMMAND, "serve", path])


if __name__ == "__main__":
    main()
