"""The settings of a run as its messages carry them: which of them its method reads, and what a value means.

Standard library only, as in policy.py.
"""

import math
from collections.abc import Mapping
from typing import Any

from .methods import METHODS


def of_method(run: Mapping[str, Any]) -> dict[str, Any]:
    """The common settings of a run, and those of its method and of the methods that it adds."""
    adding = {declared["adds"]: name for name, declared in METHODS.items() if "adds" in declared}
    added = [name for key, name in adding.items() if str(run.get(key, False)).lower() != "false"]
    owners = {"", "dp", str(run.get("strategy")), *added}
    return {key: value for key, value in run.items() if owner(key) in owners}


def is_private(run: Mapping[str, Any]) -> bool:
    """Return whether a run's settings ask for differential privacy."""
    return str(run.get("dp", False)).lower() == "true"


def owner(key: str) -> str:
    """The method that a setting belongs to; empty: it is a common one."""
    return key.rpartition(".")[0]


def plain(value: Any) -> Any:
    """A setting as the app takes it: a number also where it is text, a list of names without its commas."""
    found = number(value)
    return " ".join(str(value).replace(",", " ").split()) if found is None else found


def number(value: Any) -> float | None:
    """A setting that is a number, as the app reads it, text too; None: it is none."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None
