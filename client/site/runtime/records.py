"""Serialised records between a worker and the app's process: JSON, Flower's own protobuf messages, arrays.

    file := parts, head (JSON, with the place of each part), length of the head (8 bytes)

Nothing is pickled. The worker writes the audit log, while the app runs the consortium's code. So the app's answer is
parsed, never executed, and the worker builds the reply itself, from content or error only. The arrays' bytes are parts
of their own, which protobuf would copy several times: they are written piece by piece, and read as views of the file.
"""

import fcntl
import json
import mmap
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..errors import SiteError
from ..flower import internal
from .transfers import return_memory

NO_ANSWER = "the process that ran the ClientApp wrote no valid answer"
ALIGNED = 64  # bytes: a part begins at a multiple, as torch's own memory does
# Of a file: no process can change it any more
FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class InvalidAnswerError(RuntimeError):
    """What the app's process has written is no answer."""


def write_question(file: Any, head: dict[str, Any], message: Any, context: Any) -> None:
    """Write a message for the app, and its context. Arrays in pieces (`transfers.py`) lose them."""
    serde = internal("serde")
    arrays: list[Any] = []
    if message.has_content():
        content, arrays = _without_arrays(message.content)
        message = internal("make_message")(metadata=message.metadata, content=content)
    parts = [serde.message_to_proto(message), serde.context_to_proto(context)]
    _write(file, head, parts, arrays)


def read_question(file: Any) -> tuple[dict[str, Any], Any, Any]:
    """Return head, message and context; writing to an array changes a copy of the page."""
    serde, formats = internal("serde"), internal("message_pb2")
    head, (sent, known, *arrays) = _read(
        file, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
    )
    message = serde.message_from_proto(formats.Message.FromString(bytes(sent)))
    if message.has_content():
        _put_back(message.content, arrays)
    return head, message, serde.context_from_proto(formats.Context.FromString(bytes(known)))


def write_answer(file: Any, reply: Any, state: Any) -> None:
    """Write the app's reply and its context's state."""
    if reply.has_error():
        return write_error(file, reply.error.code, reply.error.reason)
    to_proto = internal("serde").recorddict_to_proto
    content, arrays = _without_arrays(reply.content)
    return _write(file, {}, [to_proto(state), to_proto(content)], arrays)


def write_error(file: Any, code: int, reason: str) -> None:
    """Write why there is no reply."""
    _write(file, {"error": {"code": code, "reason": reason}})


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
        state, content = map(_records, parts[:2])
        _put_back(content, parts[2:])
        reply = Message(content, reply_to=message)
    except Exception as error:
        raise InvalidAnswerError(f"{NO_ANSWER} ({type(error).__name__})") from None
    context.state = state
    return reply


def _records(part: Any) -> Any:
    return internal("serde").recorddict_from_proto(
        internal("recorddict_pb2").RecordDict.FromString(bytes(part))
    )


def _without_arrays(records: Any) -> tuple[Any, list[Any]]:
    """Return a copy whose arrays have no bytes, and the arrays in their order."""
    from flwr.app import Array, ArrayRecord, RecordDict

    bare, found = RecordDict(), list[Any]()
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            found += record.values()
            record = ArrayRecord(
                {key: Array(a.dtype, a.shape, a.stype, b"") for key, a in record.items()}
            )
        bare[name] = record
    return bare, found


def _put_back(records: Any, found: list[Any]) -> None:
    """Put the bytes back into the arrays. Raises SiteError if there are more arrays, or fewer, than bytes."""
    arrays = [array for record in records.array_records.values() for array in record.values()]
    for array, data in zip(arrays, found, strict=True):
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
        write([part.SerializeToString()])
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
