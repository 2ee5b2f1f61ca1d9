"""`flower-supernode` with three changes: it polls often during a run, answers messages itself, and resends replies.

Polling. Flower's SuperNode (1.39) sleeps 3 s after it has found no message. If silos train for seconds, that is most of
a round: the silo that replies last finds no message yet, so every round takes 3 s more. Here it polls every quarter of
a second for a minute after the last message, then as rarely as Flower. It polls again at once if the server held its
answer back, as ours does (``server/deploy/superlink.py``).

Messages. Flower's SuperNode starts a SuperExec (120 MB), which starts a process for each message, of any kind of app
that the server names. Here the SuperNode checks, counts and logs each message itself (`answering.py`), and the app runs
in a process of its run (`worker.py`).

Heartbeats are more frequent, so that a run that waits for a lost silo reports it within half a minute.

Run by `private.py`, with the arguments of `flower-supernode`.
"""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

from ..flower import internal
from ..record import close_records
from ..secure.gate import KEY
from . import answering, transfers
from .slurm import OPTIONS, SlurmJobs
from .worker import Workers

KEY_OPTION = "--auth-supernode-private-key"
POLL_SECONDS = 0.25  # for a message from the SuperLink, while a run is on
BUSY_SECONDS = 60.0  # how long after a silo's last message a run counts as on
# The SuperLink marks the silo offline after two; with Flower's 30 s, after a minute
HEARTBEAT_SECONDS = 12
# For an answer: a server that held an answer back for so long will do so again
WAITED_SECONDS = 1.0


class Clock:
    """The module `time` for Flower's loop: shorter sleeps without a message; `each` runs before every sleep."""

    def __init__(self, each: Callable[[], None]) -> None:
        self._each, self._last_message = each, -BUSY_SECONDS
        self._asked = (
            time.monotonic()
        )  # the time at which the loop continued after the last sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Replace Flower's sleep of 3 s after it has found no message."""
        self._each()
        busy = time.monotonic() - self._last_message < BUSY_SECONDS
        if not busy:
            close_records()  # between runs the record is one file, as a backup of it wants
        if time.monotonic() - self._asked >= WAITED_SECONDS:
            pass
        elif busy:
            time.sleep(min(seconds, POLL_SECONDS))
        else:
            time.sleep(seconds)
        self._asked = time.monotonic()

    def note_message(self) -> None:
        """Note that a message has been answered just now."""
        self._last_message = self._asked = time.monotonic()


def main() -> NoReturn:
    """Run a SuperNode in this process, to its end."""
    run_and_leave(run_supernode)


def run_supernode() -> None:
    """Run Flower's own entry with our clock, heartbeat, answers and long transfers."""
    entry, loop = internal("flower_supernode"), internal("supernode_loop")
    options = os.environ.get(OPTIONS)
    workers = SlurmJobs(options) if options else Workers()
    # No SuperExec: this process answers the messages
    loop.subprocess = SimpleNamespace(Popen=lambda _: None)
    loop.time = clock = Clock(workers.tidy)
    for module in (internal("heartbeat"), internal("fleet_connection")):
        module.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT_SECONDS

    def answer(state: Any, store: Any) -> None:
        answering.answer_messages(workers, state, store)
        clock.note_message()

    answering.install(answer)
    transfers.install()
    # The gate signs with the silo's key (`../secure/gate.py`)
    os.environ[KEY] = sys.argv[sys.argv.index(KEY_OPTION) + 1] if KEY_OPTION in sys.argv else ""
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
    with contextlib.suppress(Exception):
        close_records()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
