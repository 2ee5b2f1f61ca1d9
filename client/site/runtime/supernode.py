"""`flower-supernode`, except that it asks for messages often while a run is on, starts the process of each itself, and
answers each (`replying.py`).

Flower's SuperNode (1.39) sleeps 3 s after it has found no message, and looks every 0.5 s for its ClientApp's reply.
Where silos train for seconds that is most of a round: the silo that answers last finds no message yet, so every round
takes 3 s more. Here it looks every quarter of a second for a minute after the last message, then as rarely as Flower;
and again at once where the server took its time over the answer, as ours does (``server/deploy/superlink.py``). For a
reply it looks when the process says that it has done its task.

Flower's SuperNode leaves starting processes to a SuperExec: one more process (120 MB), which asks it for work again and
again, and would run whatever kind of app the server has sent. Here a message's process starts when the message is
whole, and only one that asks pins and policy.

It also sends heartbeats more often, so that a run that waits for a silo that is gone reports it within half a minute.

Run by `private.py`, with the arguments of `flower-supernode`; `prefork/install.py` puts it first on a silo's PATH.
"""

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NoReturn

from ..flower import internal
from . import replying, transfers
from .prefork import shim
from .prefork.calls import answer_calls
from .prefork.sockets import connect_to

POLL_SECONDS = 0.25  # for a message from the SuperLink, while a run is on
REPLY_SECONDS = 0.1  # for the reply of a process that calls by HTTP
BUSY_SECONDS = 60.0  # a run is on for so long after a silo's last message
HEARTBEAT_SECONDS = 12  # after two of them the SuperLink takes the silo for gone; Flower's 30 s are a minute's silence
CLIENT_APP = "flwr-clientapp"  # what Flower calls a message's task, and the command that is started for it
WAITED_SECONDS = 1.0  # for an answer: a server that has kept a silo waiting for so long will do so again
IDLE_SECONDS = 1.0  # Flower's sleeps of at least this length mean that there was no message


class Executor:
    """Executor in the place of the module `subprocess` in Flower's loop: it starts what the SuperExec would start."""

    def __init__(self) -> None:
        self._options: Sequence[str] = ()
        self._request: dict[str, object] = {}  # of each task, but for its arguments
        self._tasks: list[subprocess.Popen[bytes] | socket.socket] = []  # processes, or lines to watchdogs
        self._done = threading.Event()  # set by a process that a line leads to

    def Popen(self, command: Sequence[str]) -> None:
        """Flower starts its SuperExec, whose options are those of the processes that it would start."""
        self._options = command[1:]
        self._request = shim.request([], SILOFL_STARTED_BY=str(os.getpid()))

    def start(self, state: Any) -> None:
        """Start a process for each task that has none; ``state`` is the SuperNode's NodeState.

        A task without one ends: its message is answered with the reason.
        """
        failed = internal("SubStatus").FAILED
        for task in state.get_tasks(statuses=[internal("Status").PENDING]):
            if task.type != CLIENT_APP:
                state.finish_task(task.task_id, failed, f"this silo runs no {task.type}")
                continue
            try:
                token = str(state.claim_task(task.task_id))
                options = [*self._options, "--token", token]
                forked = prefork_task(self._request | {"argv": options}, state, token, self._done)
                self._tasks.append(forked or subprocess.Popen([CLIENT_APP, *options]))
            except OSError as error:
                state.finish_task(task.task_id, failed, f"no process for the ClientApp: {error}")

    def poll(self) -> None:
        """Let go of processes that have ended."""
        self._tasks = [task for task in self._tasks if not has_ended(task)]

    def rest(self, seconds: float) -> None:
        """Wait for a process that has done its task: `seconds` at most, and less for one that cannot say so."""
        notifies = all(isinstance(task, socket.socket) for task in self._tasks)
        self._done.wait(seconds if notifies else min(seconds, REPLY_SECONDS))
        self._done.clear()


def prefork_task(request: dict[str, object], state: Any, token: str, done: threading.Event) -> socket.socket | None:
    """The line to the watchdog of a task that the template process has taken over, which ends with this process.

    None where there is no template process: `shim.py`, which is then started, starts the task afresh, and a template
    process.
    """
    path = os.environ.get("SILOFL_WARM_SOCKET", "")
    if not path:
        return None
    calls, its_calls = Pipe()
    try:
        with its_calls:
            task = shim.hand_over(request, connect_to(Path(path)), shim.READY_SECONDS, its_calls.fileno())
    except OSError:
        calls.close()
        return None
    threading.Thread(target=answer_calls, args=(calls, state, token, done), daemon=True).start()
    return task


def has_ended(task: subprocess.Popen[bytes] | socket.socket) -> bool:
    """Return whether a task's process has; what is left of it is let go."""
    if isinstance(task, subprocess.Popen):
        return task.poll() is not None
    if not select.select([task], [], [], 0)[0]:
        return False
    with task, contextlib.suppress(OSError):
        if not task.recv(4):
            print(shim.WATCHDOG_DIED, file=sys.stderr, flush=True)
    return True


class Clock:
    """The module `time` for Flower's loop: sleeps are shorter, `rest` is that for a reply, `each` comes before all."""

    def __init__(
        self,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
        rest: Callable[[float], None] = time.sleep,
        each: Callable[[], None] = lambda: None,
    ) -> None:
        self._sleep, self._now, self._rest, self._each = sleep, now, rest, each
        self._last_message = -BUSY_SECONDS
        self._asked = now()  # when it went on to ask, or to do what the message asks for

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Flower waits for a message (3 s) or for the reply to one (0.5 s)."""
        self._each()
        if seconds < IDLE_SECONDS:
            self._last_message = self._now()
            self._rest(seconds)
        elif self._now() - self._asked >= WAITED_SECONDS:
            pass
        elif self._now() - self._last_message < BUSY_SECONDS:
            self._sleep(min(seconds, POLL_SECONDS))
        else:
            self._sleep(seconds)
        self._asked = self._now()


def main() -> NoReturn:
    """A SuperNode of this process, to its end."""
    run_and_leave(run_supernode)


def run_supernode() -> None:
    """Flower's own entry, with our clock, our heartbeat, and our ways with processes, replies and long transfers."""
    entry, loop = internal("flower_supernode"), internal("supernode_loop")
    loop.subprocess = executor = Executor()
    loop.time = Clock(rest=executor.rest, each=executor.poll)
    for module in (internal("heartbeat"), internal("fleet_connection")):
        module.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT_SECONDS
    replying.install(executor.start)
    transfers.install()
    sys.argv[0] = "flower-supernode"
    entry()


def run_and_leave(entry: Callable[[], None]) -> NoReturn:
    """Run it, and end the process when it returns or raises.

    Flower's SuperNode that is thrown out by a server that has restarted can raise on its way out; the interpreter's
    own shutdown then waits for threads of Flower and gRPC, sometimes for ever, and the silo never comes back.
    """
    code = 1
    try:
        entry()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):  # Flower's reason, which the interpreter would print
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
