"""Limits of the size of a silo's reply: a larger one is refused before it is read.

Each message carries its limit in its group id; `server/deploy/superlink.py` reads it there and counts the bytes. That
module imports this one, so PyTorch is not imported here. After a reply has arrived, :func:`check_reply` checks its
records before anything is decoded.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection
from pathlib import Path

from flwr.app import Array, ConfigRecord, MetricRecord, RecordDict

from client.flower.transfers import held_bytes
from partitions.common.errors import DataError
from partitions.common.sizes import check_room

SUMMARY_BYTES = 1 << 24  # for a data summary, whose sums grow with a table's columns
# For a reply's numbers, metrics and Flower's own fields, without its vectors
OTHER_BYTES = 1 << 20
NUMBER_BYTES = 8  # maximum per number of a vector: topk sends it with its index
SMALLER = "take a smaller network (--set model=...), or fewer silos"
GROUP = re.compile(r"[0-9a-f]{32}-([0-9]{1,15})")


def check_server(size: int, silos: int, folder: Path) -> str:
    """Return what a run takes at the server, for networks of ``size`` parameters. Raises UserError if it does not fit.

    SuperLink and server app hold each silo's reply (docs/tables/bench-held.csv); two checkpoints are kept, one is new.
    """
    return check_room(4 * size, 2 * silos + 3, 3, folder, SMALLER)


def group_id(most: int) -> str:
    """Return a group id: a random part, and the maximum size of the reply in bytes."""
    return f"{secrets.token_hex(16)}-{most}"


def most_bytes(group: str) -> int | None:
    """Return the maximum size in bytes of the reply to a message of this group; None if the group sets none."""
    match = GROUP.fullmatch(group)
    return int(match[1]) if match else None


def too_large(most: int) -> str:
    """Return the reason why a reply is refused."""
    return f"its reply has more than {most} bytes, the most that it may have, and was not read"


def check_reply(content: RecordDict, records: Collection[str], most: int) -> None:
    """Raise DataError if a reply holds records that were not requested, or more than ``most`` bytes."""
    if strange := sorted(set(content) - set(records)):
        raise DataError(
            f"the reply holds {', '.join(strange)[:200]}, which the server did not ask for"
        )
    if sum(size_of(content[name]) for name in content) > most:
        raise DataError(too_large(most))


def size_of(record: object) -> int:
    """Return the approximate size of a record in bytes, without decoding it."""
    if isinstance(record, ConfigRecord | MetricRecord):
        return sum(len(key) + value_bytes(value) for key, value in record.items())
    return sum(array_bytes(array) for array in getattr(record, "values", list)())


def array_bytes(array: Array) -> int:
    # From a silo in this process; `data` would serialise it
    tensor = getattr(array, "tensor", None)
    return held_bytes(array) if tensor is None else int(tensor.nbytes)


def value_bytes(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return 8 + sum(map(value_bytes, value)) if isinstance(value, list) else 8
