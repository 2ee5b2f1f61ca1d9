"""What we change in Flower in a message's own process, warm or cold: five functions of its `run_clientapp`.

What was pulled and what was pushed is noted for the minder; before the app is unpacked or imported its SHA-256 is
compared with the site's pins and what the message asks for with the site's policy; the app is unpacked under another
name and then renamed; the app runs in the process that stays, where there is one (`resident.py`); and a reply is in the
site's audit log before it leaves.
"""

import contextlib
import hashlib
import json
import os
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..flower import internal
from ..leaving import BY_SITE, let_out, task_of
from ..policy import check_message
from .calls import client_over
from .pins import check_pin
from .resident import Resident
from .unpack import unpack

# What tells to which message a reply belongs: the arguments of Flower's `Metadata`.
METADATA = (
    "run_id",
    "message_id",
    "src_node_id",
    "dst_node_id",
    "reply_to_message_id",
    "group_id",
    "created_at",
    "ttl",
    "message_type",
)


def check_policy(message: Any, context: Any) -> None:
    """Raise ValueError, after its one line is in the silo's log, for a message that the site's policy forbids."""
    try:
        check_message(message, context)
    except ValueError as error:
        print(f"ERROR: {error}", file=sys.stderr, flush=True)
        raise


def wrap_flower(report: socket.socket, calls: Connection | None, resident: Resident | None) -> None:
    """Wrap five functions of Flower's `run_clientapp` (flwr 1.39) in this process.

    Raises AttributeError where Flower has moved them: better no task than one without the pins.
    """
    flower = internal("run_clientapp")
    pull, install = flower.pull_task_input, flower.install_from_fab
    push, push_output = flower.push_message, flower.push_task_output
    find_load = flower.get_load_client_app_fn

    asked: list[tuple[Any, Any]] = []

    def note(**fields: Any) -> None:
        with contextlib.suppress(OSError):
            report.sendall(json.dumps(fields).encode() + b"\n")

    pulled: dict[str, Any] = {}
    os.environ[BY_SITE] = "1"  # the app need not write down what leaves

    def pull_task_input(client: Any) -> Any:
        message, context, run, fab = pull(client)
        task = task_of(message, context, hashlib.sha256(fab.content).hexdigest())
        pulled.update(task=task, message=message)
        metadata = {name: getattr(message.metadata, name) for name in METADATA}
        note(message=metadata, node_id=context.node_id, task=task)
        asked.append((message, context))
        return message, context, run, fab

    def install_from_fab(fab_file: Any, install_dir: Path | None = None, skip_prompt: bool = False) -> Path:
        content: bytes = fab_file if isinstance(fab_file, bytes) else fab_file.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        check_pin(digest, content)
        check_policy(*asked[-1])  # here and not where it is pulled: Flower then answers the message with the reason
        return unpack(content, digest, install)

    def push_message(client: Any, message: Any, context: Any) -> None:
        push(client, let_out(message, **pulled), context)
        note(replied=True)

    def push_task_output(*args: Any, **kwargs: Any) -> None:
        push_output(*args, **kwargs)
        note(finished=True)

    def get_load_client_app_fn(**options: Any) -> Any:
        load = find_load(**options)
        return load if resident is None else lambda *fab: resident.app(load, fab)

    if calls is not None:
        flower.RuntimeHttpClient = client_over(calls)
    flower.pull_task_input = pull_task_input
    flower.install_from_fab = install_from_fab
    flower.get_load_client_app_fn = get_load_client_app_fn
    flower.push_message = push_message
    flower.push_task_output = push_task_output
