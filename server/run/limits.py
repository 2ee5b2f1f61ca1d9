"""Limits of the size of a silo's reply: a larger one is refused before it is read.

A message says so in its group id, which the SuperLink sees: `server/deploy/superlink.py` counts what comes. It loads
this file, so no PyTorch is loaded here. Where the reply has come, :func:`check_reply` looks at what it holds before
anything is decoded.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection

from flwr.app import Array, ConfigRecord, MetricRecord, RecordDict

from partitions.common.errors import UserError

SUMMARY_BYTES = 1 << 24  # of a data summary, whose sums grow with a table's columns
OTHER_BYTES = 1 << 20  # of a reply's numbers, metrics and Flower's own words, beside its vectors
NUMBER_BYTES = 8  # that a number of a vector takes at most, as topk sends it with its place
GROUP = re.compile(r"[0-9a-f]{32}-([0-9]{1,15})")


def group_id(most: int) -> str:
    """Return a group id: a random part, and the largest size of the reply in bytes."""
    return f"{secrets.token_hex(16)}-{most}"


def most_bytes(group: str) -> int | None:
    """Return the largest size of the reply to a message of this group; None where the group has none."""
    match = GROUP.fullmatch(group)
    return int(match[1]) if match else None


def too_large(most: int) -> str:
    """Return the reason why a reply is refused."""
    return f"its reply has more than {most} bytes, the most that it may have, and was not read"


def check_reply(content: RecordDict, records: Collection[str], most: int) -> None:
    """Raise UserError where a reply holds records that the server did not ask for, or more bytes than it may."""
    if strange := sorted(set(content) - set(records)):
        raise UserError(f"the reply holds {', '.join(strange)[:200]}, which the server did not ask for")
    if sum(size_of(content[name]) for name in content) > most:
        raise UserError(too_large(most))


def size_of(record: object) -> int:
    """Return about how many bytes a record holds, without decoding it."""
    if isinstance(record, ConfigRecord | MetricRecord):
        return sum(len(key) + value_bytes(value) for key, value in record.items())
    return sum(array_bytes(array) for array in getattr(record, "values", list)())


def array_bytes(array: Array) -> int:
    tensor = getattr(array, "tensor", None)  # of a silo in this process: its bytes are not made for this
    return len(array.data) if tensor is None else int(tensor.nbytes)


def value_bytes(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return 8 + sum(map(value_bytes, value)) if isinstance(value, list) else 8
