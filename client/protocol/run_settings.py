"""What a run's settings mean at both ends: whose they are, and as which number, text or boolean they count."""

import math
from collections.abc import Mapping
from typing import Any

from .methods import METHODS


def methods_of(run: Mapping[str, Any]) -> set[str]:
    """Return a run's method, and the methods that its settings add: where what a setting says is unclear, it adds."""
    adding = {
        declared["adds"]: name for name, declared in METHODS.items() if "adds" in declared
    }
    return {
        str(run.get("strategy")),
        *(name for key, name in adding.items() if to_plain(run.get(key, False)) != "false"),
    }


def of_method(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's common settings, and those of its method and of the methods that it adds."""
    owners = {"", "dp", *methods_of(run)}
    return {key: value for key, value in run.items() if owner(key) in owners}


def is_private(run: Mapping[str, Any]) -> bool:
    """Return whether a run's settings ask for differential privacy."""
    return is_on(run, "dp")


def is_secure(run: Mapping[str, Any]) -> bool:
    """Return whether a run's settings ask for sums under masks only."""
    return is_on(run, "secure-aggregation")


def is_survey(run: Mapping[str, Any]) -> bool:
    """Return whether a run trains nothing and asks for statistics of the data."""
    return run.get("strategy") == "survey"


def is_on(run: Mapping[str, Any], key: str) -> bool:
    """Return whether a setting is true, as the app parses it; other text than true and false the app refuses."""
    return bool(to_plain(run.get(key)) == "true")


def owner(key: str) -> str:
    """Return the method that a setting belongs to; empty for a common one."""
    return key.rpartition(".")[0]


def to_plain(value: Any) -> Any:
    """Return a setting as the app parses it: text that is a number as a number, a list of names without commas.

    A boolean is its text, in small letters.
    """
    if (parsed := number(value)) is not None:
        return parsed
    text = " ".join(str(value).replace(",", " ").split())
    return text.lower() if text.lower() in ("true", "false") else text


def number(value: Any) -> float | None:
    """Return a setting's number as the app parses it, also from text; None if it is none."""
    try:
        parsed = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return parsed if math.isfinite(parsed) else None


def uploads(run: Mapping[str, Any]) -> bool:
    """Return whether anything of a silo's model may leave in a run: by its method, or at its end (keep-models).

    A survey's numbers leave under masks as a model does.
    """
    declared = METHODS.get(str(run.get("strategy")), {})
    summed = is_survey(run) and is_secure(run)
    return not declared.get("silent") or summed or run.get("keep-models") == "reported"
