"""Wrappers of five functions of Flower's `run_clientapp`, in a message's own process.

* What was pulled and pushed is noted for the watchdog.
* Before the app is unpacked or imported, its SHA-256 is compared with the site's pins, and the message with the policy.
* The app is unpacked under another name and then renamed. Flower loads it from a folder that the server names
  (publisher, name, version, digest): any other folder than the unpacked one is refused.
* The app runs in the persistent worker, if there is one (`persistent.py`).
* A reply is in the site's audit log before it leaves.
"""

import contextlib
import hashlib
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ...audit_gate import BY_SITE, BY_SITE_VALUE, MessageInfo, describe_message, in_study, release_reply, take_receipt
from ...flower import internal
from ...messages import charge_message, check_message
from ...terms import Terms, read_terms
from ...trust.pins import check_pin, content_sum, sums_of
from .calls import client_over
from .persistent import PersistentWorker
from .unpack import check_folder, unpack

# The arguments of Flower's `Metadata`, which identify the message that a reply belongs to.
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


def allowed(info: MessageInfo, message: Any, context: Any, terms: Terms, app: Iterable[str]) -> MessageInfo:
    """Return the info of a message with its study, the server's receipt, and its charge to the budget.

    Raises ValueError, after logging its one line, for a message that policy, study or budget forbid.
    """
    try:
        check_message(message, context, terms, app=app)
        receipt = take_receipt(message, context, terms)
        charged = charge_message(message, context, terms)
        return replace(in_study(info, terms), receipt=receipt, charged=charged)
    except ValueError as error:
        print(f"ERROR: {error}", file=sys.stderr, flush=True)
        raise


class RefusalFilter(logging.Filter):
    """Log filter that lowers a refusal's traceback and exit-code text to DEBUG; its one line is logged already."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_line = f"Exit Code: {exit_code}\n"
        self.refusal: Exception | None = None

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.refusal = error
            raise

    def filter(self, record: logging.LogRecord) -> bool:
        raised = record.exc_info[1] if record.exc_info else None
        if self.refusal is None or (raised is not self.refusal and not record.getMessage().startswith(self.exit_line)):
            return True
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


def send_note(report: socket.socket, **fields: Any) -> None:
    """Send the watchdog a note on the message's progress."""
    with contextlib.suppress(OSError):
        report.sendall(json.dumps(fields).encode() + b"\n")


def wrap_flower(report: socket.socket, calls: Connection | None, persistent: PersistentWorker | None) -> None:
    """Wrap five functions of Flower's `run_clientapp` (flwr 1.39) in this process.

    Raises AttributeError if Flower has moved them: running no task is better than running one without pins.
    """
    flower = internal("run_clientapp")
    pull, install, find_load = flower.pull_task_input, flower.install_from_fab, flower.get_load_client_app_fn

    asked: list[tuple[Any, Any, Terms]] = []
    refusals = RefusalFilter(flower.ExitCode.TASK_PROC_EXCEPTION)
    logging.getLogger("flwr").addFilter(refusals)

    note = partial(send_note, report)
    pulled: dict[str, Any] = {}
    named: dict[str, str] = {}  # the folder of the app, by the server's word
    os.environ[BY_SITE] = BY_SITE_VALUE  # the app need not log what leaves

    def pull_task_input(client: Any) -> Any:
        message, context, run, fab = pull(client)
        terms = read_terms(context.node_config, context.run_config)
        app = content_sum(fab.content) or hashlib.sha256(fab.content).hexdigest()
        info = describe_message(message, context, app, terms)
        pulled.update(info=info, message=message)
        named.update(fab_id=run.fab_id, fab_version=run.fab_version, fab_hash=fab.hash_str)
        metadata = {name: getattr(message.metadata, name) for name in METADATA}
        note(message=metadata, node_id=context.node_id, info=vars(info))
        asked.append((message, context, terms))
        refusals.refusal = None
        return message, context, run, fab

    def install_from_fab(fab_file: Any, install_dir: Path | None = None, skip_prompt: bool = False) -> Path:
        content: bytes = fab_file if isinstance(fab_file, bytes) else fab_file.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        with refusals.noting():
            check_pin(digest, content)
            # Here, and not at the pull: only here does Flower answer the message with the reason.
            pulled["info"] = allowed(pulled["info"], *asked[-1], sums_of(digest, content))
            return check_folder(unpack(content, digest, install), **named)

    def get_load_client_app_fn(**options: Any) -> Any:
        load = find_load(**options)
        return load if persistent is None else lambda *fab: persistent.app(load, fab)

    if calls is not None:
        flower.RuntimeHttpClient = client_over(calls)
    flower.pull_task_input = pull_task_input
    flower.install_from_fab = install_from_fab
    flower.get_load_client_app_fn = get_load_client_app_fn
    wrap_pushes(flower, pulled, note)


def wrap_pushes(flower: Any, pulled: dict[str, Any], note: Callable[..., None]) -> None:
    """Wrap the functions that send the reply: it is logged before it leaves, and its message is noted as answered."""
    push, push_output = flower.push_message, flower.push_task_output

    def push_message(client: Any, message: Any, context: Any) -> None:
        push(client, release_reply(message, **pulled), context)
        note(replied=True)

    def push_task_output(*args: Any, **kwargs: Any) -> None:
        push_output(*args, **kwargs)
        note(finished=True)

    flower.push_message = push_message
    flower.push_task_output = push_task_output
