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


class AppError(RuntimeError):
    """An exception of the app in its process: its class and text."""


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
    to_proto = internal("serde").recorddict_to_proto
    parts = [to_proto(state).SerializeToString()]
    if reply.has_error():
        _write(file, {"error": {"code": reply.error.code, "reason": reply.error.reason}}, parts)
    else:
        content, arrays = _without_arrays(reply.content)
        _write(file, {}, [*parts, to_proto(content).SerializeToString(), *arrays])


def write_exception(file: Any, error: Exception) -> None:
    """Write an exception of the app, or of loading it."""
    loading = isinstance(error, internal("LoadClientAppError"))
    _write(file, {"raised": f"{type(error).__name__}: {error}", "loading": loading}, [])


def read_answer(file: Any, message: Any) -> tuple[Any, Any]:
    """Return the reply to a message and the context's state.

    Raises AppError, or Flower's LoadClientAppError, if the app raised an exception, and AppError if the answer is not
    valid.
    """
    from flwr.app import Error, Message

    answer: Exception | tuple[Any, Any]
    try:
        head, parts = _read(file)
        if "raised" in head:
            answer = (internal("LoadClientAppError") if head["loading"] else AppError)(str(head["raised"]))
        elif "error" in head:
            failed = Error(int(head["error"]["code"]), str(head["error"]["reason"]))
            answer = Message(failed, reply_to=message), _records(parts[0])
        else:
            content = _records(parts[1])
            _put_back(content, parts[2:])
            answer = Message(content, reply_to=message), _records(parts[0])
    except Exception as error:  # a malicious app may have written anything
        raise AppError(f"{NO_ANSWER} ({type(error).__name__})") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _records(part: Any) -> Any:
    return internal("serde").recorddict_from_proto(internal("recorddict_pb2").RecordDict.FromString(part))


def _without_arrays(records: Any) -> tuple[Any, list[Any]]:
    """Return a copy whose arrays have no bytes, and the bytes in their order."""
    from flwr.app import Array, ArrayRecord, RecordDict

    bare, found = RecordDict(), []
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            found += [array.data for array in record.values()]
            record = ArrayRecord({key: Array(a.dtype, a.shape, a.stype, b"") for key, a in record.items()})
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
