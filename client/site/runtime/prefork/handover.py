"""Handover from a shim or a SuperNode: arguments, environment, directory, umask, streams, and `calls.py`'s socket."""

import json
import os
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any


def receive_request(connection: socket.socket) -> tuple[dict[str, Any], list[int], Connection | None]:
    """Return the request, its three standard streams, and, from a SuperNode, the socket for calls (`calls.py`)."""
    connection.settimeout(30.0)
    _, uid, _ = peer(connection)
    if uid != os.geteuid():
        raise PermissionError(f"a process of user {uid} asked for a task")
    data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 4)
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionError("the shim hung up in its request")
        data += part
    request: dict[str, Any] = json.loads(data[4:])
    return request, list(fds[:3]), Connection(fds[3]) if fds[3:] else None


def peer(connection: socket.socket) -> tuple[int, int, int]:
    """Return (pid, uid, gid) of the process at the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    values = memoryview(data).cast("i")
    return values[0], values[1], values[2]


def adopt(request: dict[str, Any], fds: list[int]) -> None:
    """Take over the requesting process's streams, directory, environment and argv."""
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["flwr-clientapp", *request["argv"]]
