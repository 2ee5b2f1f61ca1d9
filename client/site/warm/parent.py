"""The warm parent: imports what a silo's app needs, then forks a minder for every task; it never runs one itself."""

import contextlib
import fcntl
import gc
import importlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from ..flower import INTERNALS
from .minder import mind

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


def lock_path(socket_path: Path) -> Path:
    """The file that the parent at `socket_path` holds locked for as long as it lives; its content is its pid."""
    return socket_path.with_name(socket_path.name + ".lock")


def parent_pid(socket_path: Path) -> int | None:
    """The process number of the parent at `socket_path`; None where none runs."""
    try:
        with lock_path(socket_path).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return int(lock_path(socket_path).read_text() or 0) or None
    return None


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


def listen(path: Path) -> socket.socket:
    """The socket at which shims call, for this user alone."""
    os.chdir(path.parent)  # a Unix socket's address is at most 107 bytes, a path may be longer
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path.name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    listener.bind(path.name)
    os.umask(mask)
    # Shims that come while the imports run wait in the backlog: no slower than a start of their own.
    listener.listen(1024)
    return listener


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
