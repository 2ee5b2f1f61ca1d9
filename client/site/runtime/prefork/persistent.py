"""The persistent worker: runs the app for all messages of one run, keeping data, network and state in memory.

    worker.py (one per message: Flower's protocol, pins, policy, audit)  ~~socket~~  dispatcher (one per silo)
                                                                              `- persistent worker (runs the app)

A worker sends its message to the silo's dispatcher before it runs the app itself. The first worker that finds no
dispatcher forks one, before it does anything else. The persistent worker loads the app with the first message. At a
message of another run or app it reports that and ends; the message's worker then runs the app in its own process. A
worker also does so whenever no dispatcher answers. Thus no state of one run or app is visible to another, and each
message is pulled, checked and logged in a process of its own.

The dispatcher ends the persistent worker in these cases:

* the message's worker closes the connection (a signal, the message's time to live);
* idle minutes have passed, or memory is short;
* the silo's SuperNode or the template process is gone.

If the persistent worker dies, the dispatcher sends its exit status to the message's worker, which ends the same way.
The watchdog then answers the message, and the next message forks a new dispatcher. The persistent worker itself ends
after an error reply.

Message and answer, with their models, are in memory shared by both processes (`memfd`; `records.py` writes them). Over
the socket go the file descriptors, the worker's standard streams, and status bytes.
"""

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ...audit_gate import BY_SITE, BY_SITE_VALUE
from ...flower import internal
from ...memory import available_share
from .handover import adopt, peer
from .records import read_answer, read_question, write_answer, write_exception, write_question
from .shim import request
from .sockets import connect_to, listen, template_pid

IDLE_MINUTES = 10.0  # without a message; SILOFL_RESIDENT_MINUTES overrides it, 0: no process is kept
AFTER_LAST_SECONDS = 30.0  # without a message after one of a run's last round
LOOK_SECONDS = 2.0  # between two checks of the clock, the memory and the template process
SHORT_OF_MEMORY = 0.1  # available share of the machine's or the container's memory
DONE, LAST, OTHER, DIED = b"D", b"L", b"O", b"X"  # answered; answered, and ended; asked for another run; dead
IDENTITY = ("task_id", "run_id", "node_id")  # of Flower's TaskIdentity
PR_SET_PDEATHSIG = 1

App = Callable[..., Any]
Load = Callable[..., App]


class PersistentWorkerDied(BaseException):
    """The process that ran the app has died; `code` is its exit code, or minus the number of its signal."""

    def __init__(self, code: int) -> None:
        self.code = code


# --- the worker's side ------------------------------------------------------------------------------------


def idle_seconds() -> float:
    """Return the seconds a process is kept without a message; 0: none is kept. Raises ValueError for no number."""
    text = os.environ.get("SILOFL_RESIDENT_MINUTES") or str(IDLE_MINUTES)
    return 60 * max(0.0, float(text))


def find_persistent_worker(*private: Any) -> "PersistentWorker | None":
    """Return the client of this silo's dispatcher, forking one if there is none; None if no process is to be kept.

    Called before any code of Flower or the app has run in this process. A forked dispatcher closes the sockets in
    `private`.
    """
    template = os.environ.get("SILOFL_WARM_SOCKET", "")
    try:
        wanted = idle_seconds() > 0
    except ValueError:
        print("WARNING: SILOFL_RESIDENT_MINUTES is not a number of minutes; no process stays", file=sys.stderr)
        return None
    if (
        not wanted
        or not template
        or template_pid(Path(template)) is None
        or "--runtime-api-address" not in sys.argv[:-1]
    ):
        return None
    # Silos of one machine may share a template process; each has a SuperNode, and a Runtime API, of its own.
    supernode = sys.argv[sys.argv.index("--runtime-api-address") + 1]
    path = Path(f"{template}.{supernode.rpartition(':')[2]}")
    try:
        connect_to(path).close()
    except OSError:
        try:
            with listen(path) as listener:
                if os.fork() == 0:
                    os.environ[BY_SITE] = BY_SITE_VALUE  # the app's messages come from a worker, which counts and logs
                    for other in filter(None, private):
                        other.close()
                    keep(listener, path, Path(template))
        except OSError:  # no disk space, memory or process for a persistent one
            return None
    return PersistentWorker(path)


class PersistentWorker:
    """The client of the dispatcher that listens at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def app(self, load: Load, fab: Sequence[str]) -> App:
        """Return the app of this build (`fab`: Flower's arguments of `load`), with Flower's call signature.

        It runs in the persistent worker, or in this process if that one is busy, belongs to another run, or is gone.
        """

        def run(message: Any, context: Any) -> Any:
            answer = self.ask(fab, message, context)
            if answer is None:
                return load(*fab)(message=message, context=context)
            reply, context.state = answer
            return reply

        return run

    def ask(self, fab: Sequence[str], message: Any, context: Any) -> tuple[Any, Any] | None:
        """Return the persistent worker's reply and the context's state; None: run the app here.

        Raises PersistentWorkerDied, and what `read_answer` raises.
        """
        identity = {name: getattr(internal("TaskIdentity"), name) for name in IDENTITY}
        asked = {"fab": list(fab), "identity": identity, "looks": request([])}
        idle = AFTER_LAST_SECONDS if is_last(message, context) else idle_seconds()
        with shared_memory() as question, shared_memory() as answer:
            write_question(question, asked, message, context)
            fds = [question.fileno(), answer.fileno(), 0, 1, 2]
            try:
                with connect_to(self.path) as connection:
                    socket.send_fds(connection, [f"{idle:.3f}".encode()], fds)
                    sign = connection.recv(8)
            except OSError:
                sign = b""
            if sign[:1] == DIED:
                raise PersistentWorkerDied(int(sign[1:]))
            if sign not in (DONE, LAST):
                return None
            return read_answer(answer, message)


def is_last(message: Any, context: Any) -> bool:
    """Return whether a message is of its run's last round, by the numbers that the server's loop sends."""
    try:
        config = message.content.config_records["config"]
        return int(config["round"]) >= int(context.run_config["rounds"])
    except Exception:  # an error has no content, and a missing value may raise many types
        return False


@contextlib.contextmanager
def shared_memory() -> Iterator[Any]:
    """Yield a file in memory."""
    with open(os.memfd_create("silofl"), "r+b") as file:
        yield file


# --- the dispatcher ---------------------------------------------------------------------------------------


def keep(listener: socket.socket, path: Path, template: Path) -> NoReturn:
    """Fork the persistent worker, and forward the questions of the messages' workers to it until it ends."""
    with contextlib.suppress(BaseException):
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        silence(null)
        channel, their_end = socket.socketpair()
        persistent = os.fork()
        if persistent == 0:
            listener.close()
            channel.close()
            reside(their_end, null)
        their_end.close()
        starter = os.pidfd_open(int(os.environ["SILOFL_STARTED_BY"]))
        Dispatcher(persistent, channel, listener, starter, template).follow()
        path.unlink(missing_ok=True)  # before it stops listening: the next process finds no socket, and binds a new one
    os._exit(0)


class Dispatcher:
    """The persistent worker, and the message's worker whose question it answers."""

    def __init__(
        self, persistent: int, channel: socket.socket, listener: socket.socket, starter: int, template: Path
    ) -> None:
        self.persistent, self.channel, self.listener, self.starter = persistent, channel, listener, starter
        self.template = template
        self.worker: socket.socket | None = None
        self.idle_limit, self.idle_since = idle_seconds(), time.monotonic()

    def follow(self) -> None:
        """Forward questions and answers until the persistent worker has ended, or must end; then kill it."""
        goes_on = True
        while goes_on:
            watched: list[Any] = [self.channel, self.listener, self.worker or self.starter]
            ready = select.select(watched, [], [], LOOK_SECONDS)[0]
            if self.channel in ready:
                goes_on = self._forward_sign()
            elif self.worker in ready or self.starter in ready:
                goes_on = False  # the worker closed the connection, or the SuperNode ended
            elif self.listener in ready:
                self._take_question()
            elif self.worker is None:
                goes_on = not self._is_to_end()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.persistent, signal.SIGKILL)

    def _forward_sign(self) -> bool:
        """Forward the persistent worker's status byte, or its exit status, to the worker; return whether it goes on."""
        sign = self.channel.recv(1)
        if not sign:
            _, status = os.waitpid(self.persistent, 0)
            sign = DIED + str(os.waitstatus_to_exitcode(status)).encode()
        if self.worker is not None:
            with self.worker, contextlib.suppress(OSError):
                self.worker.sendall(sign)
        self.worker, self.idle_since = None, time.monotonic()
        return sign == DONE

    def _take_question(self) -> None:
        """Accept a question from a worker, one at a time. (A worker that only probes for a dispatcher sends none.)"""
        caller, _ = self.listener.accept()
        caller.settimeout(LOOK_SECONDS)
        fds: list[int] = []
        with contextlib.suppress(OSError, ValueError):
            if peer(caller)[1] == os.geteuid():
                data, fds, _, _ = socket.recv_fds(caller, 16, 5)
            if fds and self.worker is None:
                self.idle_limit = float(data)
                socket.send_fds(self.channel, [b"Q"], fds)
                self.worker = caller
            elif fds:
                caller.sendall(OTHER)
        for fd in fds:
            os.close(fd)
        if self.worker is not caller:
            caller.close()

    def _is_to_end(self) -> bool:
        idle = time.monotonic() - self.idle_since > self.idle_limit
        return idle or template_pid(self.template) is None or available_share() < SHORT_OF_MEMORY


# --- the persistent worker --------------------------------------------------------------------------------


def reside(channel: socket.socket, null: int) -> NoReturn:
    """Run the app for one message after the other, until the dispatcher is gone or a message is the last."""
    try:
        answer_all(channel, null)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def answer_all(channel: socket.socket, null: int) -> None:
    """Answer each question that the dispatcher forwards, and send it the status byte."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.unfreeze()
    app, sign = OneApp(), DONE
    while sign == DONE:
        data, fds, _, _ = socket.recv_fds(channel, 1, 5)
        if not data:
            return
        question, answer, *streams = fds
        with open(question, "rb") as file, open(answer, "wb") as answered:
            asked, message, context = read_question(file)
            adopt(asked["looks"], streams)
            sign = app.answer(asked, message, context, answered)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        silence(null)
        channel.sendall(sign)


def silence(null: int) -> None:
    """Redirect the worker's standard streams to `null`: their reader waits until every copy is closed."""
    for fd in (0, 1, 2):
        os.dup2(null, fd)


class OneApp:
    """The app of the first question's run and build; this process runs no other."""

    def __init__(self) -> None:
        self.key: Any = None  # run, node and build
        self.app: App | None = None

    def answer(self, asked: dict[str, Any], message: Any, context: Any, answered: Any) -> bytes:
        """Write the answer to a question; return the status byte for the dispatcher."""
        key = (context.run_id, context.node_id, asked["fab"])
        if self.app is not None and key != self.key:
            return OTHER
        for name, value in asked["identity"].items():
            setattr(internal("TaskIdentity"), name, value)
        try:
            if self.app is None:
                flower = internal("run_clientapp")
                load = flower.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
                self.key, self.app = key, load(*asked["fab"])
            reply = self.app(message=message, context=context)
            write_answer(answered, reply, context.state)
            return LAST if reply.has_error() else DONE
        except Exception as error:
            traceback.print_exc()
            write_exception(answered, error)
            return LAST
