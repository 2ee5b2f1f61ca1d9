"""The process that runs the app for all messages of one run, and keeps data, network and state in memory.

It is forked from the template process (`template.py`), which has run no app, and loads one build of one app. Its
SuperNode (`worker.py`) asks it over a socket, one message at a time, and ends it where memory is short, when a
message's time to live is over, after an error, or without a message for some minutes. If the SuperNode ends, so does
this process. Another run or build has a process of its own.

Message and answer, with their models, are in memory that both processes share (`memfd`). Over the socket go file
descriptors and status bytes. The app is the consortium's code: nothing that this process sends is trusted
(`read_answer`), and what it was told to keep to is checked again where the reply leaves.
"""

import contextlib
import fcntl
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ...flower.apps import load_app
from ...flower.messages import (
    FAILED,
    NOT_LOADED,
    error_code,
    pack,
    records_of,
    set_identity,
    unpack,
    with_content,
)
from ...protocol.launch import BY_SITE, BY_SITE_VALUE, TERMS
from ...protocol.parsed import SiteError
from ...protocol.private import return_memory

# Takes questions (and its process number); has answered; how it ended
READY, DONE, DIED = b"R", b"D", b"X"


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
    descriptor_of_request, *streams = descriptors
    with open(descriptor_of_request, "rb") as file:
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
        with open(question, "rb") as source, open(answer, "wb") as answered:
            app = answer_question(app, source, answered)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        connection.sendall(DONE)
        return_memory()


def answer_question(
    app: Callable[..., Any] | None, source: Any, answered: Any
) -> Callable[..., Any] | None:
    """Write the answer to a question; return the app, which is loaded for the first one."""
    head, message, context = read_question(source)
    set_identity(**head["identity"])
    context.node_config[TERMS] = head["terms"]
    try:
        if app is None:
            app = load_app(*head["fab"])
        write_answer(answered, app(message=message, context=context), context.state)
    except Exception as error:
        traceback.print_exc()
        code = error_code(NOT_LOADED if app is None else FAILED)
        write_error(answered, code, f"{type(error).__name__}: {error}")
    return app


# --- questions and answers in shared memory ---
# JSON, Flower's own protobuf messages, arrays:
#
#     file := parts, head (JSON, with the place of each part), length of the head (8 bytes)
#
# Nothing is pickled. The worker writes the audit log, while the app runs the consortium's code. So the app's answer is
# parsed, never executed, and the worker builds the reply itself, from content or error only. The arrays' bytes are
# parts of their own, which protobuf would copy several times: they are written piece by piece, and read as views of
# the file.


NO_ANSWER = "the process that ran the ClientApp wrote no valid answer"
ALIGNED = 64  # bytes: a part begins at a multiple, as torch's own memory does
# Of a file: no process can change it any more
FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class InvalidAnswerError(RuntimeError):
    """What the app's process has written is no answer."""


def write_question(file: Any, head: dict[str, Any], message: Any, context: Any) -> None:
    """Write a message for the app, and its context. Arrays in pieces (`transfers.py`) lose them."""
    arrays: list[Any] = []
    if message.has_content():
        content, arrays = _without_arrays(message.content)
        message = with_content(message, content)
    _write(file, head, [pack(message), pack(context)], arrays)


def read_question(file: Any) -> tuple[dict[str, Any], Any, Any]:
    """Return head, message and context; writing to an array changes a copy of the page."""
    head, (sent, known, *arrays) = _read(
        file, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
    )
    message = unpack("Message", bytes(sent))
    if message.has_content():
        _put_back(message.content, arrays)
    return head, message, unpack("Context", bytes(known))


def write_answer(file: Any, reply: Any, state: Any) -> None:
    """Write the app's reply and its context's state."""
    if reply.has_error():
        return write_error(file, reply.error.code, reply.error.reason)
    content, arrays = _without_arrays(reply.content)
    return _write(file, {}, [pack(state), pack(content)], arrays)


def write_error(file: Any, code: int, reason: str) -> None:
    """Write why there is no reply."""
    _write(file, {"error": {"code": code, "reason": reason}})


def wrote_error(file: Any) -> bool:
    """Return whether an answer that this process has written says why there is no reply."""
    return "error" in _read(file, prot=mmap.PROT_READ)[0]


def read_answer(file: Any, message: Any, context: Any) -> Any:
    """Return the reply to a message, and set the context's state if there is no error.

    Raises InvalidAnswerError: a malicious app may have written anything, and may still hold the file.
    """
    from flwr.app import Error, Message

    try:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, FIXED)
        head, parts = _read(file, prot=mmap.PROT_READ)
        if "error" in head:
            return Message(
                Error(int(head["error"]["code"]), str(head["error"]["reason"])),
                reply_to=message,
            )
        state, content = (unpack("RecordDict", bytes(part)) for part in parts[:2])
        _put_back(content, parts[2:])
        reply = Message(content, reply_to=message)
    except Exception as error:
        raise InvalidAnswerError(f"{NO_ANSWER} ({type(error).__name__})") from None
    context.state = state
    return reply


def _without_arrays(records: Any) -> tuple[Any, list[Any]]:
    """Return a copy whose arrays have no bytes, and the arrays in their order."""
    from flwr.app import Array, ArrayRecord, RecordDict

    bare, arrays = RecordDict(), list[Any]()
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            arrays += record.values()
            record = ArrayRecord(
                {key: Array(a.dtype, a.shape, a.stype, b"") for key, a in record.items()}
            )
        bare[name] = record
    return bare, arrays


def _put_back(records: Any, detached: list[Any]) -> None:
    """Put the bytes back into the arrays. Raises SiteError if there are more arrays, or fewer, than bytes."""
    arrays = [
        array for record in records_of(records, "Array").values() for array in record.values()
    ]
    for array, data in zip(arrays, detached, strict=True):
        array.data = data


def _write(
    file: Any, head: dict[str, Any], parts: Sequence[Any] = (), arrays: Sequence[Any] = ()
) -> None:
    places = []

    def write(pieces: list[Any]) -> None:
        file.write(bytes(-file.tell() % ALIGNED))
        start = file.tell()
        while pieces:
            file.write(pieces.pop(0))
        places.append([start, file.tell() - start])

    for part in parts:
        write([part])
    # Equal arrays of a message are one object
    uses = Counter(map(id, arrays))
    for array in arrays:
        uses[id(array)] -= 1
        pieces = array.pieces if hasattr(array, "pieces") else [array.data]
        write([*pieces] if uses[id(array)] else pieces)
        return_memory()
    text = json.dumps({**head, "places": places}).encode()
    file.write(text + len(text).to_bytes(8, "big"))
    file.flush()


def _read(file: Any, **access: int) -> tuple[dict[str, Any], list[memoryview]]:
    """Return the head and the parts, which are views. Raises SiteError or KeyError if the file is not valid."""
    whole = memoryview(mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size, **access))

    def part(start: int, size: int) -> memoryview:
        if not 0 <= start <= start + size <= len(whole):
            raise SiteError("a part is cut off")
        return whole[start : start + size]

    end = len(whole) - 8
    size = int.from_bytes(part(end, 8), "big")
    head = json.loads(bytes(part(end - size, size)))
    return head, [part(start, size) for start, size in head["places"]]
