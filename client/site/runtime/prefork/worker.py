"""The worker, forked for one message: Flower's own `flwr-clientapp` with our wrappers."""

import atexit
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from ...flower import internal
from .persistent import PersistentWorker, PersistentWorkerDied, find_persistent_worker
from .wrappers import wrap_flower

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


def run_worker(report: socket.socket, calls: Connection | None) -> NoReturn:
    """Become the `flwr-clientapp` process of one message; `report` goes to the watchdog, `calls` to the SuperNode."""
    os.setsid()
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no worker outlives its watchdog
    with contextlib.suppress(OSError):  # when memory runs out, the kernel should kill this process, not the SuperNode
        Path("/proc/self/oom_score_adj").write_text("500")
    if "numpy" in sys.modules:  # otherwise every message has the same "random" numbers; `random` reseeds itself
        sys.modules["numpy"].random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))  # libgomp has read the parent's value at its start
        # Keep only the exit handlers of logging and the app: PyTorch's are for its compiler and cost up to 35 ms.
    atexit._clear()
    atexit.register(logging.shutdown)
    code = run_task(report, calls, find_persistent_worker(report, calls))
    # The interpreter's own shutdown takes half a second with PyTorch loaded; these are the steps that matter.
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code)


def run_task(report: socket.socket, calls: Connection | None, persistent: PersistentWorker | None) -> int:
    """Run Flower's clientapp entry on `sys.argv` with our wrappers; return the exit code."""
    try:
        wrap_flower(report, calls, persistent)
        internal("flwr_clientapp")()
    except PersistentWorkerDied as death:
        die_like(death.code)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def die_like(code: int) -> NoReturn:
    """End as the persistent worker did, so that the watchdog reports it like a worker's death."""
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)
