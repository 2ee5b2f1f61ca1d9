"""What a message carries, by Flower's public names: its records, its config, the sums of its arrays."""

import hashlib
from typing import Any, NamedTuple


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
