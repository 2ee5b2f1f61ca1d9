"""The process that runs the app for all messages of one run, and keeps data, network and state in memory.

It is forked from the template process (`template.py`), which has run no app, and loads one build of one app. Its
SuperNode (`worker.py`) asks it over a socket, one message at a time, and ends it when another run or build comes, when
a message's time to live is over, after an error, or without a message for some minutes. If the SuperNode ends, so does
this process.

Message and answer, with their models, are in memory that both processes share (`memfd`; `records.py` writes them). Over
the socket go file descriptors and status bytes. The app is the consortium's code: nothing that this process sends is
trusted (`records.read_answer`), and what it was told to keep to is checked again where the reply leaves.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..audit_gate import BY_SITE, BY_SITE_VALUE
from ..flower import internal
from ..terms import GIVEN
from .records import read_question, write_answer, write_error
from .transfers import return_memory

# Takes questions (and its process number); has answered; how it ended
READY, DONE, DIED = b"R", b"D", b"X"
IDENTITY = ("task_id", "run_id", "node_id")  # of Flower's TaskIdentity


def run_app_process(connection: socket.socket) -> NoReturn:
    """Take the place of a process that a SuperNode would start, and answer its questions. Does not return."""
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        adopt_request(connection)
        threading.Thread(target=end_with_peer, args=(connection,), daemon=True).start()
        prepare_process()
        connection.sendall(READY + str(os.getpid()).encode())
        answer_all(connection)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def adopt_request(connection: socket.socket) -> None:
    """Take over the SuperNode's environment, directory, umask and standard streams."""
    connection.settimeout(30.0)
    check_peer(connection)
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 4)
    connection.settimeout(None)
    given, *streams = descriptors
    with open(given, "rb") as file:
        file.seek(0)
        request = json.load(file)
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    os.environ.clear()
    # The SuperNode counts and logs what leaves.
    os.environ.update({**request["env"], BY_SITE: BY_SITE_VALUE})
    sys.argv = ["flwr-clientapp"]


def check_peer(connection: socket.socket) -> None:
    """Raise PermissionError if another user's process is at the other end, which would get, or send, what is ours."""
    _, uid, _ = memoryview(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    ).cast("i")
    if uid != os.geteuid():
        raise PermissionError(f"a process of user {uid} is at the template process's socket")


def end_with_peer(connection: socket.socket) -> None:
    """Wait until the SuperNode's end of the connection is closed; then end this process and its children."""
    poll = select.poll()
    poll.register(connection, 0)  # nothing but the end
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def prepare_process() -> None:
    """Set what a process of its own would set as it starts."""
    # When memory runs out, the kernel should kill this process, not the SuperNode
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    # Otherwise every run has the same "random" numbers; `random` reseeds itself
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and "torch" in sys.modules:
        # libgomp has read the template's value at its start
        sys.modules["torch"].set_num_threads(int(threads))


def answer_all(connection: socket.socket) -> None:
    """Answer one question after the other, until the SuperNode closes the connection."""
    app: Callable[..., Any] | None = None
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
        if not data:
            return
        question, answer = descriptors
        with open(question, "rb") as asked, open(answer, "wb") as answered:
            app = answer_question(app, asked, answered)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        connection.sendall(DONE)
        return_memory()


def answer_question(
    app: Callable[..., Any] | None, asked: Any, answered: Any
) -> Callable[..., Any] | None:
    """Write the answer to a question; return the app, which is loaded for the first one."""
    head, message, context = read_question(asked)
    for name in IDENTITY:
        setattr(internal("TaskIdentity"), name, head["identity"][name])
    context.node_config[GIVEN] = head["terms"]
    try:
        if app is None:
            app = internal("load_client_app")(
                default_app_ref="", app_path=None, multi_app=True
            )(*head["fab"])
        reply = app(message=message, context=context)
        write_answer(answered, reply, context.state)
    except Exception as error:
        traceback.print_exc()
        codes = internal("ErrorCode")
        code = (
            codes.LOAD_CLIENT_APP_EXCEPTION
            if app is None
            else codes.CLIENT_APP_RAISED_EXCEPTION
        )
        write_error(answered, code, f"{type(error).__name__}: {error}")
    return app
