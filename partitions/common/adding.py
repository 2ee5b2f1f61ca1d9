"""A sum of floats with the same last bits everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add


def added(values: Iterable[float]) -> float:
    """Return the sum, added one by one, as published figures were; ``sum`` rounds otherwise from Python 3.12 on."""
    return reduce(add, values, 0.0)
