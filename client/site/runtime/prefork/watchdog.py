"""The watchdog, one per message: takes over a task, and runs it in a forked worker until that ends."""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from .handover import adopt, receive_request
from .reply import answer, finish
from .worker import run_worker

GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL; Flower's own limit for its exit handlers is 5 s too
FATAL = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)  # signals at which Flower's entry exits


def mind(connection: socket.socket) -> NoReturn:
    """Take over one task from a shim, and run it in a forked worker until that ends."""
    try:
        os.setsid()
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        request, streams, calls = receive_request(connection)
        adopt(request, streams)
        connection.sendall(b"R")
        if connection.recv(1) != b"G":
            os._exit(0)  # the shim gave up waiting and starts the task itself
        code = start_worker(connection, calls).follow()
        with contextlib.suppress(OSError):  # the shim may be gone
            connection.sendall(code.to_bytes(4, "big", signed=True))
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def start_worker(shim: socket.socket, calls: Connection | None) -> "Watch":
    """Fork the worker, which gets `calls`; return its watch. A pipe wakes the watch when the worker ends."""
    report, worker_report = socket.socketpair()
    sys.stderr.flush()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (wake_read, wake_write):
            os.close(fd)
        shim.close()
        report.close()
        run_worker(worker_report, calls)
    worker_report.close()
    if calls is not None:
        calls.close()
    return Watch(worker, shim, report, wake_read)


class Watch:
    """A worker and the causes that can end it: its shim, its message's time to live, and its own notes."""

    def __init__(self, worker: int, shim: socket.socket, report: socket.socket, wake: int) -> None:
        self.worker, self.shim, self.report, self.wake = worker, shim, report, wake
        self.watched: list[Any] = [shim, report, wake]
        self.note: dict[str, Any] = {}  # the worker's notes on its message
        self.unread = b""  # the beginning of an unfinished line
        self.ends: float | None = None  # when the message's time to live is over
        self.kill_at: float | None = None

    def follow(self) -> int:
        """Wait for the worker; return its exit code, or minus the number of the signal that ended it."""
        self.report.setblocking(False)
        while True:
            pid, status = os.waitpid(self.worker, os.WNOHANG)
            if pid == self.worker:
                break
            readable = select.select(self.watched, [], [], self._patience())[0]
            if self.wake in readable:
                os.read(self.wake, 512)
            if self.report in readable:
                self._read_notes()
            if self.shim in readable:
                self._forward_signals()
            self._check_clock()
        kill_group(self.worker)
        self._read_last_notes()
        code, reason = how_it_ended(status)
        answer(self.note, reason)
        finish(self.note, reason)
        return code

    def _patience(self) -> float | None:
        limits = [limit for limit in (self.ends, self.kill_at) if limit is not None]
        return max(0.0, min(min(limits) - time.monotonic(), 3600.0)) if limits else None

    def _read_notes(self) -> None:
        data = self.report.recv(1 << 16)
        if not data:
            self.watched.remove(self.report)
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            self.note.update(json.loads(line))
            if self.ends is None and "message" in self.note and not self.note.get("replied"):
                # Counted from here, since the server's clock may differ from ours: never too early.
                self.ends = time.monotonic() + self.note["message"]["ttl"]

    def _read_last_notes(self) -> None:
        """Read what the worker noted just before its death."""
        with contextlib.suppress(OSError):
            while data := self.report.recv(1 << 16, socket.MSG_DONTWAIT):
                self.unread += data
        with contextlib.suppress(json.JSONDecodeError):
            for line in self.unread.splitlines():
                self.note.update(json.loads(line))

    def _forward_signals(self) -> None:
        """Forward signals: a byte from the shim is a signal number; its end means that the SuperNode has ended."""
        try:
            data = self.shim.recv(64)
        except OSError:
            data = b""
        for number in data:
            if number in FATAL:
                answer(self.note, f"ClientApp process ended by {signal.Signals(number).name}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.worker, number)
        if not data:
            self.watched.remove(self.shim)
            self._end("ClientApp process ended with its SuperNode")

    def _check_clock(self) -> None:
        if self.ends is not None and time.monotonic() >= self.ends:
            self.ends = float("inf")
            print("ERROR: the message's time to live is over; ending the ClientApp process", file=sys.stderr)
            self._end("ClientApp was still running at the end of the message's time to live")
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            self.kill_at = None
            kill_group(self.worker)

    def _end(self, reason: str) -> None:
        # The error reply is sent first: Flower's own exit handler finishes the task without one, and the SuperNode
        # would wait for it forever.
        if self.kill_at is None:
            answer(self.note, reason)
            self.kill_at = time.monotonic() + GRACE_SECONDS
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.worker, signal.SIGTERM)


def how_it_ended(status: int) -> tuple[int, str]:
    """Return a dead worker's exit code, or minus its signal, and the reason in words."""
    if not os.WIFSIGNALED(status):
        code = os.WEXITSTATUS(status)
        return code, f"ClientApp process left with exit code {code} and without a reply"
    number = os.WTERMSIG(status)
    cause = " (out of memory: lower batch-size; or killed by hand)" if number == signal.SIGKILL else ""
    reason = f"ClientApp process was ended by {signal.Signals(number).name}{cause}"
    print(f"ERROR: {reason}", file=sys.stderr)
    return -number, reason


def kill_group(worker: int) -> None:
    """Send SIGKILL to the worker and its children (data loaders) in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
