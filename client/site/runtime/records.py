"""Serialised records between a worker and the app's process: JSON, Flower's own protobuf messages, arrays.

    file := length of the head (8 bytes), head (JSON, with the length of each part), parts

Nothing is pickled. The worker writes the audit log, while the app runs the consortium's code. So the app's answer is
parsed, never executed, and the worker builds the reply itself, from content or error only. The arrays' bytes are parts
of their own, after the message that they belong to: protobuf would copy them several times.
"""

import json
import os
from typing import Any

from ..errors import SiteError
from ..flower import internal

NO_ANSWER = "the process that ran the ClientApp wrote no valid answer"


class InvalidAnswerError(RuntimeError):
    """What the app's process has written is no answer."""


def write_question(file: Any, head: dict[str, Any], message: Any, context: Any) -> None:
    """Write a message for the app, and its context."""
    serde = internal("serde")
    arrays: list[bytes] = []
    if message.has_content():
        content, arrays = _without_arrays(message.content)
        message = internal("make_message")(metadata=message.metadata, content=content)
    parts = [serde.message_to_proto(message), serde.context_to_proto(context)]
    _write(file, head, [part.SerializeToString() for part in parts] + arrays)


def read_question(file: Any) -> tuple[dict[str, Any], Any, Any]:
    """Return head, message and context."""
    serde, formats = internal("serde"), internal("message_pb2")
    head, (sent, known, *arrays) = _read(file)
    message = serde.message_from_proto(formats.Message.FromString(sent))
    if message.has_content():
        _put_back(message.content, arrays)
    return head, message, serde.context_from_proto(formats.Context.FromString(known))


def write_answer(file: Any, reply: Any, state: Any) -> None:
    """Write the app's reply and its context's state."""
    if reply.has_error():
        return write_error(file, reply.error.code, reply.error.reason)
    to_proto = internal("serde").recorddict_to_proto
    content, arrays = _without_arrays(reply.content)
    return _write(
        file, {}, [*(to_proto(part).SerializeToString() for part in (state, content)), *arrays]
    )


def write_error(file: Any, code: int, reason: str) -> None:
    """Write why there is no reply."""
    _write(file, {"error": {"code": code, "reason": reason}}, [])


def read_answer(file: Any, message: Any, context: Any) -> Any:
    """Return the reply to a message, and set the context's state if there is no error.

    Raises InvalidAnswerError: a malicious app may have written anything.
    """
    from flwr.app import Error, Message

    try:
        head, parts = _read(file)
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
        internal("recorddict_pb2").RecordDict.FromString(part)
    )


def _without_arrays(records: Any) -> tuple[Any, list[Any]]:
    """Return a copy whose arrays have no bytes, and the bytes in their order."""
    from flwr.app import Array, ArrayRecord, RecordDict

    bare, found = RecordDict(), []
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            found += [array.data for array in record.values()]
            record = ArrayRecord(
                {key: Array(a.dtype, a.shape, a.stype, b"") for key, a in record.items()}
            )
        bare[name] = record
    return bare, found


def _put_back(records: Any, found: list[Any]) -> None:
    """Put the bytes back into the arrays. Raises SiteError if there are more arrays, or fewer, than bytes."""
    from flwr.app import Array

    places = [(record, key) for record in records.array_records.values() for key in record]
    for (record, key), data in zip(places, found, strict=True):
        bare = record[key]
        record[key] = Array(bare.dtype, bare.shape, bare.stype, data)


def _write(file: Any, head: dict[str, Any], parts: list[Any]) -> None:
    text = json.dumps({**head, "sizes": [len(part) for part in parts]}).encode()
    file.write(len(text).to_bytes(8, "big") + text)
    for part in parts:
        file.write(part)
    file.flush()


def _read(file: Any) -> tuple[dict[str, Any], list[bytes]]:
    """Return the head and the parts. Raises SiteError or KeyError if the file is not valid."""
    left = file.seek(0, os.SEEK_END)
    file.seek(0)

    def take(size: int) -> bytes:
        nonlocal left
        left -= size
        if size < 0 or left < 0:
            raise SiteError("a part is cut off")
        return bytes(file.read(size))

    head = json.loads(take(int.from_bytes(take(8), "big")))
    return head, [take(size) for size in head["sizes"]]
