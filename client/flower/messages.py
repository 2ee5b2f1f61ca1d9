"""Flower's messages: what one carries, its id, the number of its error, and messages as bytes.

Flower is imported in the functions: a silo that waits has not imported it (`internals.py`).
"""

import hashlib
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .internals import internal

# The arguments of Flower's `Metadata`, which identify the message that a reply belongs to.
METADATA = (
    *("run_id", "message_id", "src_node_id", "dst_node_id", "reply_to_message_id", "group_id"),
    *("created_at", "ttl", "message_type"),
)
IDENTITY = ("task_id", "run_id", "node_id")  # of this process, as Flower's messages want it
# Kinds of error: the app's exception; the end of its process, while the silo is online; a silo that is gone
FAILED, NOT_LOADED = "CLIENT_APP_RAISED_EXCEPTION", "LOAD_CLIENT_APP_EXCEPTION"
CRASHED, GONE = "CLIENT_APP_CRASHED", "NODE_UNAVAILABLE"
LOST = "MESSAGE_UNAVAILABLE"  # the rest of a message, or of a reply
UNREACHABLE = (GONE, LOST, "REPLY_MESSAGE_UNAVAILABLE")


# --- what a message carries -------------------------------------------------------------------------------


def records_of(content: Any, kind: str) -> dict[str, Any]:
    """Return the records of a type (Array, Metric, Config), by name.

    Flower's views of them (``content.array_records``) refer to themselves: they keep a message's memory until Python
    collects garbage.
    """
    from flwr import app

    of = getattr(app, f"{kind}Record")
    return {name: record for name, record in content.items() if isinstance(record, of)}


def config_of(message: Any) -> dict[str, Any]:
    """Return the config in a message's payload; empty if there is none."""
    if not message.has_content():
        return {}
    return dict(records_of(message.content, "Config").get("config", {}))


class ArraySum(NamedTuple):
    """One array of a message: its place, type, shape, form, SHA-256 and bytes."""

    record: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    stype: str
    sha256: str
    bytes: int


def array_sums(content: Any) -> list[ArraySum]:
    """Return the sum of every array of a message's content (RecordDict), in its order."""
    return [
        ArraySum(
            *(name, key, str(array.dtype), tuple(array.shape), str(array.stype)),
            *(hashlib.sha256(array.data).hexdigest(), len(array.data)),
        )
        for name, arrays in records_of(content, "Array").items()
        for key, array in arrays.items()
    ]


# --- errors, and who a message is of ----------------------------------------------------------------------


def error_code(name: str) -> int:
    """Return Flower's number of a kind of error."""
    return int(getattr(internal("ErrorCode"), name))


def is_error(reply: Any, *kinds: str) -> bool:
    """Return whether a reply is an error of one of these kinds."""
    return bool(reply.has_error()) and reply.error.code in map(error_code, kinds)


def refuse(message: Any, reason: str, kind: str = FAILED) -> Any:
    """Return the reply to a message with the reason why it has no answer.

    Flower makes no reply to a message whose time is over, but a silo's loop waits for one. The server drops it.
    """
    from flwr.app import Error, Message, Metadata, RecordDict

    sent = message.metadata
    if time.time() > sent.created_at + sent.ttl - 1.0:
        fields = {key: getattr(sent, key) for key in METADATA}
        fields |= {"created_at": time.time(), "ttl": 60.0}
        message = Message(metadata=Metadata(**fields), content=RecordDict())  # type: ignore[call-overload]
    return Message(Error(error_code(kind), reason), reply_to=message)


def name_message(message: Any, name: str = "") -> str:
    """Set a message's id, by default the sum of its content, and return it."""
    name = name or str(message.object_id)
    message.metadata.__dict__["_message_id"] = name
    return name


def set_sender(reply: Any, question: Any) -> Any:
    """Return a reply with the silo that its message was sent to as its source: an error may have the SuperLink's id."""
    sent = question.metadata
    reply.metadata.__dict__ |= {
        "_src_node_id": sent.dst_node_id,
        "_message_type": sent.message_type,
    }
    return reply


def with_content(message: Any, content: Any = None, error: Any = None) -> Any:
    """Return a message with other content, none by default, or with an error in its place."""
    from flwr.app import RecordDict

    parts = {"error": error} if error else {"content": content or RecordDict()}
    return internal("make_message")(metadata=message.metadata, **parts)


def set_identity(**numbers: int | None) -> dict[str, int | None]:
    """Set who this process is in a run (:data:`IDENTITY`), which each message of its asks for; return who it was."""
    identity = internal("TaskIdentity")
    before = {name: getattr(identity, f"_{name}") for name in IDENTITY}
    for name in IDENTITY:
        setattr(identity, f"_{name}", numbers[name])
    return before


@contextmanager
def flower_identity() -> Iterator[None]:
    """Have an identity in this process outside of any Flower run."""
    before = set_identity(**dict.fromkeys(IDENTITY, 1))
    try:
        yield
    finally:
        set_identity(**before)


# --- as bytes ---------------------------------------------------------------------------------------------


def pack(part: Any) -> bytes:
    """Return a Message, Context or RecordDict as bytes."""
    convert = getattr(internal("serde"), f"{type(part).__name__.lower()}_to_proto")
    return bytes(convert(part).SerializeToString())


def unpack(kind: str, content: bytes) -> Any:
    """Return the part of a kind (Message, Context, RecordDict) that :func:`pack` has packed."""
    records, messages = internal("recorddict_pb2"), internal("message_pb2")
    parsed = getattr(records if kind == "RecordDict" else messages, kind).FromString(content)
    return getattr(internal("serde"), f"{kind.lower()}_from_proto")(parsed)


def pack_messages(messages: Iterable[Any]) -> bytes:
    """Return messages as bytes."""
    listed = map(internal("serde").message_to_proto, messages)
    packed = internal("fleet_pb2").PushMessagesRequest(messages_list=listed)
    return bytes(packed.SerializeToString())


def unpack_messages(content: bytes) -> list[Any]:
    """Return the messages that :func:`pack_messages` has packed."""
    listed = internal("fleet_pb2").PushMessagesRequest.FromString(content).messages_list
    return [*map(internal("serde").message_from_proto, listed)]
