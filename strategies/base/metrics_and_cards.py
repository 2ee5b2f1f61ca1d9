"""What a silo reports beside its vectors: metrics from a list, and the data card; and how the server takes them.

A silo sends nothing that is not on these lists (``client/outgoing.py``), and the server takes nothing that is not, or
that is out of range: one silo's nonsense must not stop the others or spoil the history.
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

from flwr.app import ConfigRecord, MetricRecord

from models.metrics import METRICS
from partitions.silo_file import MOST_CLASSES

SNAPSHOTS = ("received", "personal")
SPLITS = ("train", "val", "test")
SECONDS = ("seconds.train", "seconds.evaluate")

COUNTS = {"n_train": 1, "n_val": 0, "n_test": 0, "threads": 1}  # whole numbers, and the least of each
SUMS = ("sum", "square_sum")  # per column of a table
FACTS = ("own_file", "simulated", "device", "versions")
WITHHELD = "sums_withheld"  # why a silo gives no sums
OPTIONAL = (*SUMS, WITHHELD)
CARD = ("name", *COUNTS, "shape", "classes", *FACTS, *OPTIONAL)
LONGEST = 300  # characters of a reason
MOST = 2**31  # samples of a silo, size of an input's dimension


@cache
def allowed_metrics() -> frozenset[str]:
    """Names of the scalars that may leave a silo."""
    return frozenset({f"{s}.{p}.{m}" for s in SNAPSHOTS for p in SPLITS for m in METRICS} | set(SECONDS))


def read_metrics(record: object) -> dict[str, float]:
    """The metrics of a reply. Raises ValueError, with one line, for one that is not on the list or out of range."""
    if not isinstance(record, MetricRecord):
        raise ValueError("the reply carries no metrics")
    allowed = allowed_metrics()
    for name, value in record.items():
        if name not in allowed:
            raise ValueError(f"'{name[:80]}' is no metric that is known here")
        if isinstance(value, list) or not _in_range(name, value):
            raise ValueError(f"the metric '{name}' is {value!r}")
    return {name: float(value) for name, value in record.items() if not isinstance(value, list)}


def _in_range(name: str, value: float) -> bool:
    if name in SECONDS:
        return 0 <= value < math.inf
    return math.isnan(value) or name.endswith("loss") or 0 <= value <= 1


def read_card(record: object) -> dict[str, Any]:
    """A silo's data card. Raises ValueError, with one line, where it is not what a card must be."""
    if not isinstance(record, ConfigRecord):
        raise ValueError("the reply carries no data card")
    card: dict[str, Any] = dict(record)
    missing = [key for key in CARD if key not in card and key not in OPTIONAL]
    if missing:
        raise ValueError(f"its data card lacks {', '.join(missing)}")
    name = card["name"]
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 100 or "/" in name:
        raise ValueError(f"its name is {name!r}: a line of at most 100 characters without / is wanted")
    for key, least in COUNTS.items():
        if not _whole(card[key], least):
            raise ValueError(f"{name}'s data card says {key} = {card[key]!r}")
    shape = card["shape"]
    if not isinstance(shape, list) or not 1 <= len(shape) <= 3 or not all(_whole(n, 1) for n in shape):
        raise ValueError(f"{name}'s data card says shape = {shape!r}")
    if not _whole(card["classes"], 1) or card["classes"] > MOST_CLASSES:
        raise ValueError(f"{name}'s data card says classes = {card['classes']!r}")
    reason = card.get(WITHHELD, "")
    if not isinstance(reason, str) or not reason.isprintable() or len(reason) > LONGEST:
        raise ValueError(f"{name}'s data card has no line of at most {LONGEST} characters as {WITHHELD}")
    for key in SUMS:
        sums = card.get(key)
        right = isinstance(sums, list) and len(sums) == shape[0] and all(map(math.isfinite, sums))
        if not right and any(k in card for k in SUMS):
            raise ValueError(f"{name}'s data card has no {key} of {shape[0]} finite numbers")
    return card


def reason_of(text: str | None) -> str:
    """Why a silo failed, in its own words: Flower wraps what is raised before the app runs in its class."""
    return re.sub(r"^<class '[^']*'>:<'(.*)'>$", r"\1", text or "failed without a reason", flags=re.DOTALL)


def is_refusal(reason: str) -> bool:
    """Whether a silo's own policy is the reason (client/site/policy.py)."""
    return " refuses: its policy " in reason


def _whole(value: object, lowest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= MOST
