"""`flower-supernode` with three changes: it polls often during a run, starts each message's process, and answers each.

Polling. Flower's SuperNode (1.39) sleeps 3 s after it has found no message, and checks every 0.5 s for its ClientApp's
reply. If silos train for seconds, that is most of a round: the silo that replies last finds no message yet, so every
round takes 3 s more. Here it polls every quarter of a second for a minute after the last message, then as rarely as
Flower. It polls again at once if the server held its answer back, as ours does (``server/deploy/superlink.py``). It
checks for a reply when the process has reported the end of its task.

Processes. Flower's SuperNode leaves starting processes to a SuperExec. That is one more process (120 MB), which polls
for work, and would run any kind of app from the server. Here a message's process starts when the message is whole, and
always checks pins and policy.

Answers: see `replying.py`.

Heartbeats are more frequent, so that a run that waits for a lost silo reports it within half a minute.

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
BUSY_SECONDS = 60.0  # how long after a silo's last message a run counts as on
HEARTBEAT_SECONDS = 12  # the SuperLink marks the silo offline after two; with Flower's 30 s, after a minute
CLIENT_APP = "flwr-clientapp"  # Flower's name for a message's task, and the command that is started for it
WAITED_SECONDS = 1.0  # for an answer: a server that held an answer back for so long will do so again
IDLE_SECONDS = 1.0  # Flower's sleeps of at least this length mean that there was no message


class Executor:
    """Replacement of the module `subprocess` in Flower's loop: it starts what the SuperExec would start."""

    def __init__(self) -> None:
        self._options: Sequence[str] = ()
        self._request: dict[str, object] = {}  # of each task, without its arguments
        self._tasks: list[subprocess.Popen[bytes] | socket.socket] = []  # processes, or connections to watchdogs
        self._done = threading.Event()  # set by a process behind such a connection

    def Popen(self, command: Sequence[str]) -> None:
        """Store the options: Flower calls this to start its SuperExec, which would pass them on to its processes."""
        self._options = command[1:]
        self._request = shim.request([], SILOFL_STARTED_BY=str(os.getpid()))

    def start(self, state: Any) -> None:
        """Start a process for each pending task; ``state`` is the SuperNode's NodeState.

        A task whose process cannot start is ended, and its message is answered with the reason.
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
        """Release processes that have ended."""
        self._tasks = [task for task in self._tasks if not has_ended(task)]

    def rest(self, seconds: float) -> None:
        """Wait until a process has done its task: `seconds` at most, less if one cannot signal that."""
        notifies = all(isinstance(task, socket.socket) for task in self._tasks)
        self._done.wait(seconds if notifies else min(seconds, REPLY_SECONDS))
        self._done.clear()


def prefork_task(request: dict[str, object], state: Any, token: str, done: threading.Event) -> socket.socket | None:
    """Return the connection to the watchdog of a task that the template process has taken over; the task ends with it.

    None if there is no template process: the caller then starts `shim.py`, which starts the task from scratch, and a
    template process.
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
    """Return whether a task's process has ended, and release its connection."""
    if isinstance(task, subprocess.Popen):
        return task.poll() is not None
    if not select.select([task], [], [], 0)[0]:
        return False
    with task, contextlib.suppress(OSError):
        if not task.recv(4):
            print(shim.WATCHDOG_DIED, file=sys.stderr, flush=True)
    return True


class Clock:
    """The module `time` for Flower's loop: shorter sleeps; `rest` waits for a reply, `each` runs before every sleep."""

    def __init__(
        self,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
        rest: Callable[[float], None] = time.sleep,
        each: Callable[[], None] = lambda: None,
    ) -> None:
        self._sleep, self._now, self._rest, self._each = sleep, now, rest, each
        self._last_message = -BUSY_SECONDS
        self._asked = now()  # the time at which the loop continued after the last sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Replace Flower's sleep for a message (3 s), or for the reply to one (0.5 s)."""
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
    """Run a SuperNode in this process, to its end."""
    run_and_leave(run_supernode)


def run_supernode() -> None:
    """Run Flower's own entry with our clock, heartbeat, processes, replies and long transfers."""
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
    """Call ``entry``, and end the process when it returns or raises.

    Flower's SuperNode can raise on its way out if a restarted server has dropped it. The interpreter's own shutdown
    then waits for threads of Flower and gRPC, sometimes forever, and the silo would not come back.
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
