"""A silo's SuperNode, in place of `flower-supernode`: Flower's protocol by a loop of ours (``client/flower/loop.py``).

Flower's own starts a SuperExec (120 MB), which starts a process for each message, of any kind of app that the server
names. Here the SuperNode checks, counts and logs each message itself (`answering.py`), and the app runs in a process of
its run (`worker.py`).

Run by `private.py`, with the arguments of `flower-supernode` that silofl writes (`launch.py`).
"""

import argparse
import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from ...flower.fleet import REGISTERED, Fleet
from ...flower.loop import MessageLoop
from ...protocol.envelope import load_node_key
from ...protocol.launch import NODE_KEY
from ...protocol.node import read_node_config
from ...protocol.parsed import SiteError
from .slurm import OPTIONS, SlurmJobs
from .worker import Workers


def main() -> NoReturn:
    """Run a SuperNode in this process, to its end."""
    run_and_leave(run_supernode)


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of a SuperNode's arguments."""
    parser = argparse.ArgumentParser("flower-supernode", description="Start a silo's SuperNode")
    parser.add_argument("--superlink", metavar="HOST:PORT", required=True)
    parser.add_argument("--root-certificates", metavar="FILE", type=Path, required=True)
    parser.add_argument(
        "--auth-supernode-private-key", metavar="FILE", type=Path, required=True
    )
    parser.add_argument("--node-config", metavar="PAIRS", default="", help="KEY='VALUE' ...")
    # A bundle of silofl 0.3 names them; Flower's SuperNode opened a port there
    for option in ("--host", "--port"):
        parser.add_argument(option, dest="port", help=argparse.SUPPRESS)
    return parser


def run_supernode() -> None:
    """Answer messages until SIGTERM or SIGINT. Raises SystemExit, with a line where the server refuses this silo."""
    arguments = argument_parser().parse_args()
    if arguments.port:
        print("--host and --port have no effect: a silo opens no port", file=sys.stderr)
    try:
        node_config = read_node_config(arguments.node_config)
        key = load_node_key(arguments.auth_supernode_private_key)
        certificates = arguments.root_certificates.read_bytes()
    except (SiteError, ValueError, OSError) as error:
        sys.exit(str(error))
    os.environ[NODE_KEY] = str(arguments.auth_supernode_private_key)
    options = os.environ.get(OPTIONS)
    workers = SlurmJobs(options) if options else Workers()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)

    def rest(busy: bool) -> None:
        workers.tidy()
        if not busy:
            leave_records()  # between runs the record is one file, as a backup of it wants

    def answer(message: Any, take: Any) -> Any:
        return gate().answer_message(workers, message, take)

    with Fleet(arguments.superlink, certificates, key) as fleet:
        print(f"{REGISTERED}{fleet.node}", flush=True)
        MessageLoop(fleet, node_config, answer, rest).serve()


@cache
def gate() -> Any:
    """Return the module that answers messages, with all of the gate: loaded for the first message."""
    from . import answering

    return answering


def leave_records() -> None:
    """Close the site's records, if a message has opened them."""
    if gate.cache_info().currsize:
        from ..record import close_records

        close_records()


def leave(number: int, _: Any) -> NoReturn:
    """End the process, once."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(0)


def run_and_leave(entry: Callable[[], None]) -> NoReturn:
    """Call ``entry``, and end the process when it returns or raises.

    The interpreter's own shutdown waits for threads, which may wait for the server, and the silo would not come back.
    """
    code = 1
    try:
        entry()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):  # which the interpreter would print
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        leave_records()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
