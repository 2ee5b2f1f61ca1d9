"""From a text to values, one way for all files: bounded before it is parsed, then pydantic checks the values.

A hospital's own process loads this file, too (`client/protocol/parsed.py`): its imports are relative.
"""

from __future__ import annotations

import json
import re
import reprlib
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from .errors import DataError
from .names import nearest


class Frozen(BaseModel):
    """Base of all parsed values: strict types, finite numbers, no unknown keys, never changed."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


Parsed = TypeVar("Parsed", bound=Frozen)


# Named first: for a key that is missing, another is misspelt
NO_KEY = ("extra_forbidden", "invalid_key")
SHORT = reprlib.Repr()  # whatever the size of a value, which YAML's aliases can make unlimited
SHORT.maxlevel, SHORT.maxstring, SHORT.maxother = 2, 80, 80


# --- texts ---


MOST_TEXT = 1 << 20  # bytes of a file; real ones have a few thousand
DEEPEST = 20  # levels of tables and lists, and parts of a key
# Of TOML and JSON: a text, a comment, or a sign between keys and values. One that is not closed ends with the file.
TOKENS = re.compile(
    r"""\"{3}[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*(?:"{3,5}|\Z)|'{3}.*?(?:'{3,5}|\Z)"""
    r"""|"(?:\\.|[^"\\\n])*"?|'[^'\n]*'?|\#[^\n]*|[].,={}[\n]""",
    re.DOTALL,
)


def read_bounded(path: Path, most: int = MOST_TEXT) -> bytes:
    """Return a file's content. Raises DataError, one line, where it has more than ``most`` bytes; OSError."""
    with path.open("rb") as file:
        return bounded(file.read(most + 1), path, most)


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """Return a file's text. Raises DataError, one line, where it is too long or not in UTF-8; OSError."""
    return text_in(read_bounded(path, most), path, most)


def text_in(content: bytes, path: Path, most: int = MOST_TEXT) -> str:
    """Return the text of a file's content. Raises DataError, one line, where it is too long or not in UTF-8."""
    try:
        return bounded(content, path, most).decode()
    except UnicodeDecodeError:
        raise DataError(f"{path} is not in UTF-8: save it as a plain text file") from None


def bounded(content: bytes, path: Path, most: int) -> bytes:
    """Return a file's content. Raises DataError, one line, where it has more than ``most`` bytes."""
    if len(content) > most:
        raise DataError(f"{path} has more than {most} bytes, which no such file has")
    return content


def parse_toml(text: str) -> dict[str, Any]:
    """Return the content of a text in TOML. Raises ValueError, the reason alone, in one line."""
    content: dict[str, Any] = _parse(tomllib.loads, text)
    return content


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Return the content of a text in JSON; ``options``: of json.loads. Raises ValueError, the reason alone."""
    return _parse(
        partial(json.loads, **options), text if isinstance(text, str) else text.decode()
    )


def _parse(parse: Callable[[str], Any], text: str) -> Any:
    """Return what can be written again: numbers of digits, texts of whole characters, few levels."""
    check_levels(text)
    try:
        content = parse(text)
        json.dumps(content, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise DataError("a text in it has half a character, a lone surrogate") from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, DataError):
        raise
    except ValueError:
        raise DataError("a number in it has too many digits") from None
    return content


def check_levels(text: str) -> None:
    """Raise DataError for a text that nests more, or has longer keys, than parsers take: they need squares of time."""
    level = parts = 0
    for match in TOKENS.finditer(text):
        token = match[0]
        level += (token in "[{") - (token in "]}")
        parts = parts + 1 if token == "." else parts if token[0] in "\"'" else 0
        if max(level, parts) > DEEPEST:
            raise DataError(f"it is nested deeper than {DEEPEST} levels")


# --- values ---


def parse_values(
    kind: type[Parsed], content: object, file: Path | str, mend: str, context: object = None
) -> Parsed:
    """Return a file's content, JSON if it is bytes, as values. ``mend``: the next step. Raises DataError, one line."""
    try:
        if isinstance(content, bytes):
            return kind.model_validate_json(content)
        return kind.model_validate(content, context=context, by_alias=True, by_name=False)
    except ValidationError as error:
        raise DataError(f"{file}: {first_fault(error, kind)}; {mend}") from None


def parse_content(
    kind: type[Parsed],
    content: object,
    mend: str,
    check: Callable[[Parsed], object] = lambda parsed: None,
) -> Parsed:
    """Return the content of a TOML or JSON file as values, whose lists are tuples. Raises DataError, one line.

    ``check``: raises DataError where values do not fit together.
    """
    try:
        text = json.dumps(content, allow_nan=False)
        parsed = kind.model_validate_json(text, by_alias=True, by_name=False)
        check(parsed)
        return parsed
    except ValidationError as error:
        raise DataError(f"{first_fault(error, kind)}; {mend}") from None
    except DataError as error:
        raise DataError(f"{error}; {mend}") from None
    # Such as a date without quotation marks, or nan
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"a value is no text, number, list or table ({str(error)[:80]}); {mend}"
        ) from None


def match_pattern(pattern: str, allowed: str) -> AfterValidator:
    """Return the validator of a text that matches a pattern from its first to its last character."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise DataError(allowed)
        return text

    return AfterValidator(check)


def first_fault(error: ValidationError, kind: type[Frozen]) -> str:
    """Return the first fault in one line: ``temperature.T = -1.0: must be greater than 0``. Lists count from 1."""
    faults = error.errors(include_url=False)
    fault = next((detail for detail in faults if detail["type"] in NO_KEY), faults[0])
    first = fault["type"] != "invalid_key"  # of a list
    key = ".".join(
        str(part + first) if isinstance(part, int) else part for part in fault["loc"]
    )
    if fault["type"] == "json_invalid":
        return f"it is no JSON ({fault['msg'].removeprefix('Invalid JSON: ')})"
    if fault["type"] in NO_KEY:
        last = key.rpartition(".")[2]
        return f"{key[:80]!r} is no key of it{nearest(last, keys_of_model(kind) - {last})}"
    if fault["type"] == "missing":
        return f"the key {key} is missing"
    allowed = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    allowed = (
        allowed.replace("a valid boolean", "true or false")
        .replace("a valid array", "a list")
        .replace("a valid tuple", "a list")
        .replace("Tuple", "List")
    )
    allowed = re.sub(
        r"an object|a valid dictionary( or instance of \w+)?",
        "keys and values",
        " ".join(allowed.split()),
    )
    return f"{key} = {shorten(fault['input'])}: {allowed}" if key else allowed


def keys_of_model(kind: type[BaseModel]) -> set[str]:
    """Return the keys of a model and of the models in it."""
    schema = kind.model_json_schema()
    return {
        key
        for part in (schema, *schema.get("$defs", {}).values())
        for key in part.get("properties", ())
    }


def shorten(value: object) -> str:
    """Return the beginning of a value's text."""
    try:
        text = SHORT.repr(value)
    except ValueError:  # a number of thousands of digits
        return "..."
    return text if len(text) <= 80 else f"{text[:77]}..."
