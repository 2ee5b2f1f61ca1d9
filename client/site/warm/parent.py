"""The warm parent: imports what a silo's app needs, then forks a minder for every task; it never runs one itself."""

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

from ..flower import INTERNALS
from .minder import mind
from .sockets import listen, lock_path

# What a silo's ClientApp imports, third-party only; a name that is not installed is passed over.
PRELOAD = (
    INTERNALS["flwr_clientapp"].module,
    "flwr.client",
    "flwr.clientapp",
    "flwr.serverapp",
    "flwr.serverapp.strategy",
    "httpcore",
    "numpy",
    "safetensors.torch",
    "statistics",
    "torch",
    "torch.func",
    "tqdm",
)


def serve(path: Path, modules: tuple[str, ...]) -> None:
    """Import `modules`, then fork a minder for every connection; ends at SIGTERM or SIGINT.

    One parent per socket: where another one holds the lock this one leaves with exit code 0.
    """
    lock = take_lock(path)
    if lock is None:
        say("another parent serves this socket")
        return
    listener = listen(path)
    started = time.monotonic()
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what lives now is shared with the children: keep their collector off its pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # minders are reaped by the kernel
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    say(f"ready in {time.monotonic() - started:.1f} s")
    while True:
        connection, _ = listener.accept()
        if fork() == 0:
            listener.close()
            os.close(lock)
            mind(connection)
        connection.close()


def take_lock(path: Path) -> int | None:
    """The socket's lock, held by this process from now on; None where another process holds it."""
    lock = os.open(lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(10):  # `parent_pid` may hold it for a moment
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
            return lock
        time.sleep(0.05)
    os.close(lock)
    return None


def fork() -> int | None:
    """As `os.fork`; None where it fails for want of memory or processes: the shim sees the hang-up, and starts cold."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        return os.fork()
    except OSError as error:
        say(f"cannot fork: {error}")
        return None


def leave(number: int, _: object) -> NoReturn:
    """End the parent; minders and their workers go on."""
    os._exit(0)


def say(text: str) -> None:
    """One line in the parent's log."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} warm parent {os.getpid()}: {text}", file=sys.stderr, flush=True)
