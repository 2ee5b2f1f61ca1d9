"""A process that stays: it runs the app for the messages of one run, with data, network and state still in place.

    worker.py (one per message: Flower's protocol, pins, policy, audit)  ~~socket~~  keeper (one per silo)
                                                                                     `- resident (runs the app)

A worker asks the silo's keeper before it runs the app itself. The first worker that finds none forks one, before it has
done anything itself. The resident loads the app with the first message; asked for another run or another app, it says
so and ends, and that worker runs the app in its own process, as it does wherever no keeper answers. So no state of one
run or app is seen by another, and each message is pulled, checked and written down in a process of its own.

The keeper ends the resident when its worker hangs up (a signal, the message's time to live), after idle minutes, when
memory is short, and when the silo's SuperNode or the warm parent is gone. It tells the worker how a resident died, and
the worker dies alike: the minder answers that message, and the next one finds no keeper and forks one. The resident
itself ends after an answer that is an error.

Message and answer, with their models, lie in memory that both processes see (`memfd`); over the socket go its file
descriptors, the worker's standard streams, and single words.
"""

import contextlib
import ctypes
import gc
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..flower import internal
from .handover import adopt, peer
from .shim import request
from .sockets import connect_to, listen, parent_pid

IDLE_MINUTES = 10.0  # without a message; SILOFL_RESIDENT_MINUTES says otherwise, 0: no process stays
AFTER_LAST_SECONDS = 30.0  # without a message after one of a run's last round
LOOK_SECONDS = 2.0  # between two looks at the clock, the memory and the warm parent
SHORT_OF_MEMORY = 0.1  # the share that is still available, of the machine's or of the container's
DONE, LAST, OTHER, DIED = b"D", b"L", b"O", b"X"  # answered; answered, and ended; asked of another run; dead
IDENTITY = ("task_id", "run_id", "node_id")  # of Flower's TaskIdentity
PR_SET_PDEATHSIG = 1

App = Callable[..., Any]
Load = Callable[..., App]


class ResidentDied(BaseException):
    """The process that ran the app has died; `code` is its exit code, or minus the number of its signal."""

    def __init__(self, code: int) -> None:
        self.code = code


# --- the worker's side ------------------------------------------------------------------------------------


def idle_seconds() -> float:
    """How long a process stays without a message; 0 where none is to stay. Raises ValueError for what is no number."""
    text = os.environ.get("SILOFL_RESIDENT_MINUTES") or str(IDLE_MINUTES)
    return 60 * max(0.0, float(text))


def find_resident(*private: Any) -> "Resident | None":
    """This silo's keeper, which is forked where there is none; None where no process is to stay.

    Called before anything of Flower's or the app's has run in this process. A keeper that is forked
    lets go of what is `private`.
    """
    warm = os.environ.get("SILOFL_WARM_SOCKET", "")
    try:
        wanted = idle_seconds() > 0
    except ValueError:
        print("WARNING: SILOFL_RESIDENT_MINUTES is not a number of minutes; no process stays", file=sys.stderr)
        return None
    if not wanted or not warm or parent_pid(Path(warm)) is None or "--runtime-api-address" not in sys.argv[:-1]:
        return None
    # Silos of one machine may share a parent; each has a SuperNode, and a Runtime API, of its own.
    supernode = sys.argv[sys.argv.index("--runtime-api-address") + 1]
    path = Path(f"{warm}.{supernode.rpartition(':')[2]}")
    try:
        connect_to(path).close()
    except OSError:
        try:
            with listen(path) as listener:
                if os.fork() == 0:
                    for other in filter(None, private):
                        other.close()
                    keep(listener, path, Path(warm))
        except OSError:  # no room, no memory, or no process, for one that stays
            return None
    return Resident(path)


class Resident:
    """The worker's way to the keeper that listens at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def app(self, load: Load, fab: Sequence[str]) -> App:
        """What runs the app of this build (`fab`: Flower's arguments of `load`) as Flower does: in the resident, or
        here where that is busy, another run's, or gone."""

        def run(message: Any, context: Any) -> Any:
            answer = self.ask(fab, message, context)
            if answer is None:
                return load(*fab)(message=message, context=context)
            if isinstance(answer, Exception):
                raise answer
            reply, context.state = answer
            return reply

        return run

    def ask(self, fab: Sequence[str], message: Any, context: Any) -> Any:
        """The resident's (reply, state of the context), or the exception that the app raised; None: run it here.

        Raises ResidentDied.
        """
        identity = {name: getattr(internal("TaskIdentity"), name) for name in IDENTITY}
        asked = {"fab": tuple(fab), "identity": identity, "looks": request([]), "message": message, "context": context}
        idle = AFTER_LAST_SECONDS if is_last(message, context) else idle_seconds()
        with shared_memory() as question, shared_memory() as answer:
            pickle.dump(asked, question, protocol=5)
            question.seek(0)
            fds = [question.fileno(), answer.fileno(), 0, 1, 2]
            try:
                with connect_to(self.path) as connection:
                    socket.send_fds(connection, [f"{idle:.3f}".encode()], fds)
                    word = connection.recv(8)
            except OSError:
                word = b""
            if word[:1] == DIED:
                raise ResidentDied(int(word[1:]))
            if word not in (DONE, LAST):
                return None
            answer.seek(0)
            return pickle.load(answer)


def is_last(message: Any, context: Any) -> bool:
    """Whether a message is of its run's last round, as the server's loop says it."""
    try:
        told = message.content.config_records["config"]
        return int(told["round"]) >= int(context.run_config["rounds"])
    except Exception:  # an error has no content, and what is missing may be said in many ways
        return False


@contextlib.contextmanager
def shared_memory() -> Iterator[Any]:
    """A file in memory."""
    with open(os.memfd_create("silofl"), "r+b") as file:
        yield file


# --- the keeper -------------------------------------------------------------------------------------------


def keep(listener: socket.socket, path: Path, warm: Path) -> NoReturn:
    """Fork the resident, and bring workers and it together, until it has ended or is to."""
    with contextlib.suppress(BaseException):
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        silence(null)
        channel, residents = socket.socketpair()
        resident = os.fork()
        if resident == 0:
            listener.close()
            channel.close()
            reside(residents, null)
        residents.close()
        starter = os.pidfd_open(int(os.environ["SILOFL_STARTED_BY"]))
        Keeper(resident, channel, listener, starter, warm).follow()
        path.unlink(missing_ok=True)  # while it still listens: whoever comes next finds it gone, and binds it anew
    os._exit(0)


class Keeper:
    """A resident, and the worker whose question it answers."""

    def __init__(
        self, resident: int, channel: socket.socket, listener: socket.socket, starter: int, warm: Path
    ) -> None:
        self.resident, self.channel, self.listener, self.starter = resident, channel, listener, starter
        self.warm = warm
        self.worker: socket.socket | None = None
        self.patience, self.idle_since = idle_seconds(), time.monotonic()

    def follow(self) -> None:
        """Until the resident has ended, or is to; then end it."""
        goes_on = True
        while goes_on:
            watched: list[Any] = [self.channel, self.listener, self.worker or self.starter]
            ready = select.select(watched, [], [], LOOK_SECONDS)[0]
            if self.channel in ready:
                goes_on = self._pass_on_word()
            elif self.worker in ready or self.starter in ready:
                goes_on = False  # the one has hung up, the other ended
            elif self.listener in ready:
                self._take_question()
            elif self.worker is None:
                goes_on = not self._is_to_end()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.resident, signal.SIGKILL)

    def _pass_on_word(self) -> bool:
        """Give the worker the resident's word, or the way that it died; whether the resident goes on."""
        word = self.channel.recv(1)
        if not word:
            _, status = os.waitpid(self.resident, 0)
            word = DIED + str(os.waitstatus_to_exitcode(status)).encode()
        if self.worker is not None:
            with self.worker, contextlib.suppress(OSError):
                self.worker.sendall(word)
        self.worker, self.idle_since = None, time.monotonic()
        return word == DONE

    def _take_question(self) -> None:
        """From a worker that calls: one question at a time. (A worker that only looks whether we are here has none.)"""
        caller, _ = self.listener.accept()
        caller.settimeout(LOOK_SECONDS)
        fds: list[int] = []
        with contextlib.suppress(OSError, ValueError):
            if peer(caller)[1] == os.geteuid():
                data, fds, _, _ = socket.recv_fds(caller, 16, 5)
            if fds and self.worker is None:
                self.patience = float(data)
                socket.send_fds(self.channel, [b"Q"], fds)
                self.worker = caller
            elif fds:
                caller.sendall(OTHER)
        for fd in fds:
            os.close(fd)
        if self.worker is not caller:
            caller.close()

    def _is_to_end(self) -> bool:
        idle = time.monotonic() - self.idle_since > self.patience
        return idle or parent_pid(self.warm) is None or available_memory() < SHORT_OF_MEMORY


def available_memory() -> float:
    """The share of memory that is still to be had: the machine's, or the container's where that has less."""
    shares = [1.0]
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        shares.append(int(lines["MemAvailable"].split()[0]) / int(lines["MemTotal"].split()[0]))
    with contextlib.suppress(OSError, ValueError, KeyError):  # of a container, by cgroup v2
        folder = Path("/sys/fs/cgroup")
        most = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        lines = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        shares.append(1 - (used - int(lines["inactive_file"])) / most)
    return min(shares)


# --- the resident -----------------------------------------------------------------------------------------


def reside(channel: socket.socket, null: int) -> NoReturn:
    """Run the app for one message after the other, until there is none, or one is the last."""
    try:
        answer_all(channel, null)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def answer_all(channel: socket.socket, null: int) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.unfreeze()
    own: tuple[Any, App] | None = None
    word = DONE
    while word == DONE:
        data, fds, _, _ = socket.recv_fds(channel, 1, 5)
        if not data:
            return
        question, answer, *streams = fds
        with open(question, "rb") as file, open(answer, "wb") as answered:
            asked = pickle.load(file)
            adopt(asked["looks"], streams)
            own, word = serve(own, asked, answered)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        silence(null)
        channel.sendall(word)


def silence(null: int) -> None:
    """Let go of a worker's standard streams: who started it waits for the end of what it reads."""
    for fd in (0, 1, 2):
        os.dup2(null, fd)


def serve(own: tuple[Any, App] | None, asked: dict[str, Any], answered: Any) -> tuple[tuple[Any, App] | None, bytes]:
    """Write the answer to a question; the run and build that this process is for with their app, and the word."""
    message, context = asked["message"], asked["context"]
    key = (context.run_id, context.node_id, asked["fab"])
    if own is not None and own[0] != key:
        return own, OTHER
    for name, value in asked["identity"].items():
        setattr(internal("TaskIdentity"), name, value)
    word = DONE
    try:
        if own is None:
            load = internal("run_clientapp").get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
            own = key, load(*asked["fab"])
        reply = own[1](message=message, context=context)
        result: Any = (reply, context.state)
        if reply.has_error():
            word = LAST
    except Exception as error:
        result, word = portable(error), LAST
    pickle.dump(result, answered, protocol=5)
    answered.flush()
    return own, word


def portable(error: Exception) -> Exception:
    """The exception, as far as it can go to another process."""
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
