"""From a text to values, one way for all files: pydantic checks them, and one function makes the one-line error."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from partitions.common.errors import DataError
from partitions.common.names import nearest


class Frozen(BaseModel):
    """Base of all parsed values: strict types, finite numbers, no unknown keys, never changed."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


Parsed = TypeVar("Parsed", bound=Frozen)


def parse_json(kind: type[Parsed], text: bytes, file: Path, mend: str) -> Parsed:
    """Return a JSON file's content as values. ``mend``: the next step. Raises DataError, one line."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise DataError(f"{file}: {first_fault(error, kind)}; {mend}") from None


def first_fault(error: ValidationError, kind: type[Frozen]) -> str:
    """Return the first fault in one line: ``temperature.T = -1.0: must be greater than 0``."""
    fault = error.errors(include_url=False)[0]
    key, value = ".".join(map(str, fault["loc"])), fault["input"]
    if fault["type"] == "json_invalid":
        return f"it is no JSON ({fault['msg'].removeprefix('Invalid JSON: ')})"
    if fault["type"] == "extra_forbidden":
        return f"{key[:80]!r} is no key of it{nearest(key, kind.model_fields)}"
    if fault["type"] == "missing":
        return f"the key {key} is missing"
    allowed = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f"{key} = {shown(value)}: {' '.join(allowed.split())}"


def shown(value: Any) -> str:
    """Return the beginning of a value's text."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
