"""A line of the audit log."""

from typing import Any

from client.protocol.chain import digest


def entry(number: int, **changes: Any) -> dict[str, Any]:
    """Return the fields of a training reply's line, as `release.py` writes it."""
    sent = [
        {
            "name": "model.model/vector",
            "dtype": "float32",
            "shape": [12],
            "bytes": 48,
            "sha256": f"{number:064x}",
        },
        {
            "name": "metrics",
            "keys": ["personal.test.accuracy"],
            "bytes": 30,
            "sha256": digest(b"m%d" % number),
        },
    ]
    fields: dict[str, Any] = {
        "time": "2026-11-22T00:00:00Z",
        "silo": "clinic",
        "asked-by": "fl.example.org:9092",
    }
    fields |= {
        "run-id": "7",
        "run": "today",
        "round": number,
        "asked": "train",
        "method": "apple",
        "app": "a" * 64,
    }
    fields |= {
        "settings": "b" * 64,
        "rule": "allowed-apps: this build is listed",
        "bytes": 78,
        "sent": sent,
    }
    return fields | changes
