"""The template process: imports what a silo's app needs, then forks a watchdog per task; it never runs one itself."""

import contextlib
import fcntl
import gc
import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from ...egress_record import versions
from ...flower import INTERNALS
from .sockets import listen, lock_path
from .watchdog import mind

# Third-party modules that a silo's ClientApp imports; one that is not installed is skipped.
PRELOAD = (
    INTERNALS["flwr_clientapp"].module,
    "flwr.client",
    "flwr.clientapp",
    "flwr.serverapp",
    "flwr.serverapp.strategy",
    "httpcore",
    "numpy",
    "numpy.random",  # numpy imports it at its first use: otherwise for each message
    "safetensors.torch",
    "statistics",
    "torch",
    "torch.func",
    "tqdm",
)


def serve(path: Path, modules: tuple[str, ...]) -> None:
    """Import `modules`, then fork a watchdog for every connection; ends at SIGTERM or SIGINT.

    One template process per socket: if another one holds the lock, this one exits with code 0.
    """
    lock = take_lock(path)
    if lock is None:
        log("another template process serves this socket")
        return
    listener = listen(path)
    started = time.monotonic()
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    versions()  # read from the disk once, and shared with all children
    gc.collect()
    gc.freeze()  # the children share these objects: their garbage collector must not touch the pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # watchdogs are reaped by the kernel
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    log(f"ready in {time.monotonic() - started:.1f} s")
    while True:
        connection, _ = listener.accept()
        if fork() == 0:
            listener.close()
            os.close(lock)
            mind(connection)
        connection.close()


def take_lock(path: Path) -> int | None:
    """Return the socket's lock, held by this process from now on; None if another process holds it."""
    lock = os.open(lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(10):  # `template_pid` may hold it for a moment
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
            return lock
        time.sleep(0.05)
    os.close(lock)
    return None


def fork() -> int | None:
    """Fork; return None without memory or processes for it: the shim then starts its task by itself."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        return os.fork()
    except OSError as error:
        log(f"cannot fork: {error}")
        return None


def leave(number: int, _: object) -> NoReturn:
    """End the template process; watchdogs and their workers go on."""
    os._exit(0)


def log(text: str) -> None:
    """Write one line to the template process's log."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} template process {os.getpid()}: {text}", file=sys.stderr, flush=True)
