"""What a run's settings mean at both ends: whose they are, and as which number, text or boolean they count."""

import math
from collections.abc import Mapping
from typing import Any

from .methods import METHODS


def methods_of(run: Mapping[str, Any]) -> set[str]:
    """Return a run's method, and the methods that its settings add."""
    adding = {
        declared["adds"]: name for name, declared in METHODS.items() if "adds" in declared
    }
    added = [
        name for key, name in adding.items() if str(run.get(key, False)).lower() != "false"
    ]
    return {str(run.get("strategy")), *added}


def of_method(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's common settings, and those of its method and of the methods that it adds."""
    owners = {"", "dp", *methods_of(run)}
    return {key: value for key, value in run.items() if owner(key) in owners}


def is_private(run: Mapping[str, Any]) -> bool:
    """Return whether a run's settings ask for differential privacy."""
    return str(run.get("dp", False)).lower() == "true"


def is_secure(run: Mapping[str, Any]) -> bool:
    """Return whether a run's settings ask for sums under masks only."""
    return str(run.get("secure-aggregation", False)).lower() == "true"


def owner(key: str) -> str:
    """Return the method that a setting belongs to; empty for a common one."""
    return key.rpartition(".")[0]


def to_plain(value: Any) -> Any:
    """Return a setting as the app parses it: text that is a number as a number, a list of names without commas."""
    found = number(value)
    return " ".join(str(value).replace(",", " ").split()) if found is None else found


def number(value: Any) -> float | None:
    """Return a setting's number as the app parses it, also from text; None if it is none."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def uploads(run: Mapping[str, Any]) -> bool:
    """Return whether anything of a silo's model may leave in a run: by its method, or at its end (keep-models)."""
    declared = METHODS.get(str(run.get("strategy")), {})
    return not declared.get("silent") or run.get("keep-models") == "reported"
