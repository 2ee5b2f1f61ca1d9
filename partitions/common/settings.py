"""Settings as frozen dataclasses: a field with its range and help, and the one way from a text to its value.

A field's key on the command line is its name with hyphens, after its owner's name: ``local-epochs``,
``apple.max-downloads``, ``dirichlet.beta``. Every number has an upper limit (its own, or the one in :data:`MOST`),
because a silo follows the settings that a server sends. A setting that a hospital's policy limits declares its
``kind``, one of :data:`KINDS` (client/protocol/policy.py has the limits).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar, cast

import tomli_w

from partitions.common.errors import UserError
from partitions.common.names import nearest
from partitions.common.parsed import shorten

# Upper limits of numbers without one of their own: int for epochs, steps, layers, sizes; float as float32.
MOST: dict[type[Any], float] = {int: 10_000, float: 3e38}
Value = bool | int | float | str
KINDS: Mapping[str, str] = {  # of settings that a hospital's policy limits
    "epochs": "passes over the training part per round",
    "local-steps": "mini-batches per round, in place of passes",
    "mixing-epochs": "passes that learn only how models are mixed",
    "steps": "inner steps, and batches, of a method",
    "rounds": "rounds of a run",
    "learning-rate": "what a silo's gradients are multiplied by",
    "decay": "times the learning rate: the share of the model that a step replaces by zeros or by a received model",
    "decay-divisor": "what a decay is divided by",
}
T = TypeVar("T")


def setting(
    default: Value,
    help: str,
    *,
    symbol: str = "",
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    choices: Sequence[str] = (),
    kind: str = "",
) -> Any:
    """Return a dataclass field with its range; ``symbol`` is the paper's, ``kind`` one of :data:`KINDS` or empty."""
    if kind and kind not in KINDS:
        raise UserError(f"kind = {kind!r}: one of {', '.join(KINDS)} is needed here")
    limits = {"minimum": minimum, "above": above, "maximum": maximum, "below": below}
    metadata = {"help": help, "symbol": symbol, "choices": tuple(choices), "kind": kind}
    return field(
        default=default, metadata=metadata | {k: v for k, v in limits.items() if v is not None}
    )


def key_of(f: Field[Any], owner: str = "") -> str:
    # lambda_ is lambda
    return (f"{owner}." if owner else "") + f.name.rstrip("_").replace("_", "-")


def keys_of(cls: type[Any], owner: str = "") -> Mapping[str, Field[Any]]:
    """Return the fields by command-line key, built once per class and owner."""
    if (cls, owner) not in _KEYS:
        _KEYS[cls, owner] = {key_of(f, owner): f for f in fields(cls)}
    return _KEYS[cls, owner]


_KEYS: dict[tuple[type[Any], str], Mapping[str, Field[Any]]] = {}


def convert(key: str, value: object, f: Field[Any]) -> Value:
    """Return the value in the field's type, checked against its range; raise a UserError that names the key."""
    kind: type[Any] = type(f.default)
    others = limits_of(f).get("choices", ())
    wanted = {
        bool: ", ".join(["true", "false", *others]) if others else "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
    }[kind]
    result: Value
    try:
        if kind is bool:
            if isinstance(value, str) and value.lower() in ("true", "false"):
                value = value.lower() == "true"
            if not isinstance(value, bool) and value not in others:
                raise ValueError
            result = cast(bool | str, value)
        elif kind is str:
            if not isinstance(value, str):
                raise ValueError
            result = value
        else:
            if isinstance(value, bool):
                raise ValueError
            result = _whole(value) if kind is int else float(value)  # type: ignore[arg-type]
            if not math.isfinite(result):
                raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{key} = {shorten(value)}: {wanted} is needed here") from None
    return _within(key, result, f)


def _whole(value: object) -> int:
    """Return a whole number, also from 1e3 or 20.0; through a float only if necessary, because that loses digits."""
    if isinstance(value, int):
        return value
    if isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
        return int(value)
    number = float(value)  # type: ignore[arg-type]
    if number != int(number):
        raise ValueError
    return int(number)


def limits_of(f: Field[Any]) -> dict[str, Any]:
    """Return a field's metadata, with the upper limit of :data:`MOST` for a number that has none of its own."""
    limits = dict(f.metadata)
    if type(f.default) in MOST and not limits.keys() & {"maximum", "below"}:
        limits["maximum"] = MOST[type(f.default)]
    return limits


def _within(key: str, value: Value, f: Field[Any]) -> Value:
    limits = limits_of(f)
    choices = limits.get("choices")
    if choices and not isinstance(value, bool) and value not in choices:
        raise UserError(
            f"{key} = {value!r:.200}{nearest(str(value), choices)}: one of {', '.join(choices)} is needed here"
        )
    if isinstance(value, str):
        return value
    for name, breaks, text in (
        ("minimum", operator.lt, "at least"),
        ("above", operator.le, "more than"),
        ("maximum", operator.gt, "at most"),
        ("below", operator.ge, "less than"),
    ):
        if name in limits and breaks(value, limits[name]):
            raise UserError(
                f"{key} = {value} is out of range: {text} {limits[name]} is needed here"
            )
    return value


def build_settings(cls: type[T], values: Mapping[str, object], owner: str = "") -> T:
    """Return ``cls`` with the values of its keys; missing keys get their defaults."""
    converted = {
        f.name: convert(key, values[key], f)
        for key, f in keys_of(cls, owner).items()
        if key in values
    }
    return cls(**converted)


def values_of(settings: Any, owner: str = "") -> dict[str, Value]:
    """Return the values by command-line key; empty for None."""
    return (
        {}
        if settings is None
        else {k: getattr(settings, f.name) for k, f in keys_of(type(settings), owner).items()}
    )


def defaults_of(cls: type[Any], owner: str = "") -> dict[str, Value]:
    """Return the default values by key."""
    return {
        key: f.default for key, f in keys_of(cls, owner).items() if f.default is not MISSING
    }


def find_changed(settings: Any, keys: Container[str]) -> Iterator[tuple[str, Value]]:
    """Yield those of these keys whose values are not the defaults."""
    values, known = values_of(settings), defaults_of(type(settings))
    return ((k, v) for k, v in values.items() if k in keys and v != known[k])


def toml_text(values: Mapping[str, Value], table: str = "") -> str:
    """Return flat keys as TOML, below ``table`` if it is given; a key with a dot goes into its owner's table."""
    content: dict[str, Any] = {}
    for key, value in values.items():
        owner, dot, short = key.partition(".")
        # `dp` is a value, so `dp.clip-norm` cannot be in a table of that name.
        if dot and owner not in values:
            content.setdefault(owner, {})[short] = value
        else:
            content[key] = value
    for name in reversed(table.split(".") if table else []):
        content = {name: content}
    return tomli_w.dumps(content)
