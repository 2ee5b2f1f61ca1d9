"""The SuperNode's side of the process that runs the app (`app_process.py`): starts it, asks it, and ends it.

Environment:
    SILOFL_WARM_SOCKET       the template process's socket; default: in Flower's folder
    SILOFL_RESIDENT_MINUTES  how long an app's process is kept without a message (10); 0: none is kept
"""

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from ...flower.messages import config_of
from ...protocol.launch import GROUP, LOOPBACK_ONLY, flower_home, template_command, template_pid
from ...protocol.node import devices_in
from ...protocol.private import available_share
from .app_process import DIED, DONE, READY, read_answer, write_question
from .template import connect_to

IDLE_MINUTES = 10.0  # without a message; SILOFL_RESIDENT_MINUTES overrides it
TEMPLATE_MINUTES = (
    30.0  # without a message, until this silo's template process ends, which holds 200 MB
)
AFTER_LAST_SECONDS = 30.0  # without a message after one of a run's last round
READY_SECONDS = 120.0  # for a template process to start, and for its fork
MOST_KEPT = 4  # runs whose process stays
SHORT_OF_MEMORY = 0.1  # available share of the machine's or the container's memory
SETTLE_SECONDS = 5.0  # to notice which other process has ended, once the first has failed
TOO_LATE = "ClientApp was still running at the end of the message's time to live"


class WorkerEndedError(RuntimeError):
    """The process that ran the app ended without an answer, or took too long; the text says how."""


class Worker:
    """A process that runs one app, and the connection to it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection, self.pid, self.pidfd = connection, pid, os.pidfd_open(pid)

    def has_ended(self) -> bool:
        """Return whether the process has ended, for example because memory ran out."""
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def end(self) -> None:
        """End the process and its children (data loaders), whatever it does."""
        if not self.has_ended():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.connection.close()
        os.close(self.pidfd)

    def ask(self, question: Any, answer: Any) -> None:
        """Send a question. A process that has ended is noticed by :meth:`take`."""
        with contextlib.suppress(OSError):
            socket.send_fds(self.connection, [b"Q"], [question.fileno(), answer.fileno()])

    def take(self) -> None:
        """Take the sign that a question is answered. Raises WorkerEndedError if the process has ended instead."""
        try:
            sign = self.connection.recv(16)
        except OSError:
            sign = b""
        if sign[:1] != DONE:
            raise WorkerEndedError(how_it_ended(sign))


class Team:
    """The processes that run one app: one, or one for each of the silo's devices. The first one's answer counts."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = devices
        self.workers: list[Worker] = []
        # Where the others meet the first, by the app
        self.folder = tempfile.mkdtemp(prefix="silofl-") if len(devices) > 1 else ""

    def has_ended(self) -> bool:
        return any(worker.has_ended() for worker in self.workers)

    def end(self) -> None:
        for worker in self.workers:
            worker.end()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def exchange(
        self,
        question: Any,
        answers: Sequence[Any],
        seconds: float,
        failed: Callable[[int], bool],
    ) -> int:
        """Have a question answered, by as many processes as there are answers. Return the place of the one that counts.

        It is the first, or another that ``failed``: the first cannot end without it. Raises WorkerEndedError if one has
        ended, or does not answer within these seconds.
        """
        waiting = {
            worker.connection: k for k, worker in enumerate(self.workers[: len(answers)])
        }
        for worker, answer in zip(self.workers, answers, strict=False):
            worker.ask(question, answer)
        until, lost = time.monotonic() + seconds, False
        while waiting:
            ready = select.select([*waiting], [], [], max(0.0, until - time.monotonic()))[0]
            if not ready and lost:
                break  # an error, for which the others may wait in vain
            if not ready:
                print(
                    "ERROR: the message's time to live is over; ending the ClientApp process",
                    file=sys.stderr,
                )
                raise WorkerEndedError(TOO_LATE)
            for connection in ready:
                place = waiting.pop(connection)
                try:
                    self.workers[place].take()
                except WorkerEndedError as error:
                    where = f"device {self.devices[place]}: " if self.folder else ""
                    raise WorkerEndedError(f"{where}{error}") from None
                if failed(place):
                    if place:
                        return place
                    until, lost = min(until, time.monotonic() + SETTLE_SECONDS), True
        return 0


class Kept(NamedTuple):
    """A run's processes between two messages, since when they wait, and for how many seconds at most."""

    team: Team
    since: float
    limit: float


class Workers:
    """This silo's app's processes: one of each run and build, the one that answered last at the end."""

    def __init__(self) -> None:
        self.kept: dict[object, Kept] = {}  # by run, node and build
        self.idle_since = time.monotonic()  # of the messages
        self.template: subprocess.Popen[bytes] | None = None

    def ask(self, head: dict[str, Any], message: Any, context: Any) -> Any:
        """Return the app's reply to a message, and set the context's state.

        ``head``: the app's build (`fab`), Flower's `identity` of the task, and the `terms` of the message. Raises
        WorkerEndedError, OSError for no process, and what `read_answer` raises.
        """
        # From here: the server's clock may differ, never too early
        ends = time.monotonic() + message.metadata.ttl
        key = (context.run_id, context.node_id, *head["fab"])
        devices = devices_in(context.node_config)
        team, limit = self._take(key) or self._start(devices), 0.0
        self.kept[key] = Kept(team, time.monotonic(), limit)
        # Only a training is divided
        count = len(devices) if message.metadata.message_type == "train" else 1
        try:
            with contextlib.ExitStack() as stack:
                answers = [stack.enter_context(shared_memory()) for _ in range(count)]

                @functools.cache
                def reply_of(place: int) -> Any:
                    known = SimpleNamespace() if place else context
                    return read_answer(answers[place], message, known)

                with shared_memory() as question:
                    write_question(question, head, message, context)
                    left = max(0.0, ends - time.monotonic())
                    place = team.exchange(
                        question, answers, left, lambda place: reply_of(place).has_error()
                    )
                reply = reply_of(place)
            if not reply.has_error():
                last = AFTER_LAST_SECONDS if is_last(message, context) else 1e9
                limit = min(last, idle_seconds())
            return reply
        finally:
            self.idle_since = time.monotonic()
            self.kept[key] = Kept(team, self.idle_since, limit)
            if not limit:
                self.kept.pop(key).team.end()

    def _take(self, key: object) -> Team | None:
        """Return the processes of a run; None if there are none. For new ones others make room in memory."""
        if (kept := self.kept.pop(key, None)) and not kept.team.has_ended():
            return kept.team
        if kept:
            kept.team.end()
        self._make_room(MOST_KEPT - 1)
        return None

    def _make_room(self, most: int) -> None:
        """End processes, the longest unused first, while there are more than these, or memory is short."""
        for key in [*self.kept]:
            if len(self.kept) > most or available_share() < SHORT_OF_MEMORY:
                self.kept.pop(key).team.end()

    def end(self) -> None:
        """End all processes."""
        self._make_room(0)

    def tidy(self) -> None:
        """End processes that have had no message for long, or where memory is short; start the first template.

        The template of this silo ends later, and starts again with the next message.
        """
        now = time.monotonic()
        for key, kept in [*self.kept.items()]:
            if now - kept.since > kept.limit:
                self.kept.pop(key).team.end()
        self._make_room(MOST_KEPT)
        if self.template is not None:
            idle = now - self.idle_since
            if self.template.poll() is None and idle > 60 * TEMPLATE_MINUTES:
                self.template.terminate()
                self.template.wait()
        elif template_pid(socket_path()) is None:
            self._start_template()

    def _start(self, devices: Sequence[str]) -> Team:
        """Start an app's processes, again if the template process dies meanwhile. Raises OSError if there is none."""
        team = Team(devices)
        try:
            for rank in range(len(devices)):
                place = {GROUP: f"{rank} {team.folder}", **LOOPBACK_ONLY} if team.folder else {}
                try:
                    team.workers.append(self._fork(place))
                except ConnectionError:
                    team.workers.append(self._fork(place))
        except OSError as error:
            team.end()
            raise OSError(f"no process for the ClientApp: {error}") from None
        return team

    def _fork(self, place: Mapping[str, str]) -> Worker:
        with contextlib.ExitStack() as failed:
            connection = failed.enter_context(self._connect())
            with shared_memory() as request:
                umask = os.umask(0)
                os.umask(umask)
                text = json.dumps(
                    {"env": {**os.environ, **place}, "cwd": os.getcwd(), "umask": umask}
                )
                request.write(text.encode())
                request.flush()
                socket.send_fds(connection, [b"W"], [request.fileno(), 0, 1, 2])
            connection.settimeout(READY_SECONDS)
            sign = connection.recv(16)
            connection.settimeout(None)
            if sign[:1] != READY:
                raise (OSError if sign else ConnectionError)(how_it_ended(sign))
            failed.pop_all()
            return Worker(connection, int(sign[1:]))

    def _connect(self) -> socket.socket:
        """Return a connection to the template process, which is started where there is none."""
        until = time.monotonic() + READY_SECONDS
        while True:
            starting = self.template is not None and self.template.poll() is None
            if not starting and template_pid(socket_path()) is None:
                self._start_template()
            try:
                return connect_to(socket_path())
            except OSError as error:
                if isinstance(error, PermissionError) or time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def _start_template(self) -> None:
        path = socket_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [*template_command(path), "--parent", str(os.getpid())]
        self.template = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True
        )


def socket_path() -> Path:
    """Return the template process's socket."""
    named = os.environ.get("SILOFL_WARM_SOCKET")
    return Path(named) if named else flower_home() / "warm.sock"


def idle_seconds() -> float:
    """Return the seconds a process is kept without a message; 0: none is kept."""
    text = os.environ.get("SILOFL_RESIDENT_MINUTES") or str(IDLE_MINUTES)
    try:
        return 60 * max(0.0, float(text))
    except ValueError:
        print(
            "WARNING: SILOFL_RESIDENT_MINUTES is not a number of minutes; no process stays",
            file=sys.stderr,
        )
        return 0.0


def is_last(message: Any, context: Any) -> bool:
    """Return whether a message is of its run's last round, by the numbers that the server's loop sends."""
    try:
        return int(config_of(message)["round"]) >= int(context.run_config["rounds"])
    except Exception:  # an error has no content, and a missing value may raise many types
        return False


def how_it_ended(sign: bytes) -> str:
    """Return the reason of a dead process in words, from its exit code, or minus its signal."""
    try:
        code = int(sign.removeprefix(DIED))
        if code >= 0:
            return f"ClientApp process left with exit code {code} and without a reply"
        cause = (
            " (out of memory: lower batch-size; or killed by hand)"
            if code == -signal.SIGKILL
            else ""
        )
        reason = f"ClientApp process was ended by {signal.Signals(-code).name}{cause}"
    # The template process is gone, or a malicious app has written something else
    except ValueError:
        return "ClientApp process ended without a reply"
    print(f"ERROR: {reason}", file=sys.stderr)
    return reason


@contextlib.contextmanager
def shared_memory() -> Iterator[Any]:
    """Yield a file in memory."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    with open(os.memfd_create("silofl", flags), "r+b") as file:
        yield file
