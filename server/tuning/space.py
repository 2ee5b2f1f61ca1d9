"""Search space: settings and the distributions of their values, from the command line or a TOML file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from partitions.common.errors import UserError
from partitions.common.names import nearest
from partitions.common.settings import convert, key_of, keys_of
from server.results.run_directory import read_toml
from server.results.study import SAME
from strategies.base.run_settings import defaults, owners
from strategies.base.run_settings import strategies as methods
from strategies.base.settings import Common, Value

RANGE = re.compile(r"(log|uniform|int|logint)\(([^,()]+),([^,()]+)\)")
LIST = re.compile(r"\[(.*)\]", re.DOTALL)
FORMS = "log(LO,HI), uniform(LO,HI), int(LO,HI), logint(LO,HI) or [A,B,...]"


@dataclass(frozen=True)
class Space:
    """Settings and their distributions, in the order in which they were given."""

    distributions: Mapping[str, BaseDistribution]

    def of(self, strategy: str, strategies: Sequence[str]) -> dict[str, BaseDistribution]:
        """Return the distributions for this method: its own settings, and settings of no method."""
        others = {name for name in strategies if name != strategy}
        return {
            key: distribution
            for key, distribution in self.distributions.items()
            if key.partition(".")[0] not in others
        }


def read_space(entries: Sequence[str], strategies: Sequence[str]) -> Space:
    """Return the space of ``KEY=FORM`` entries and of TOML files.

    Raises UserError before anything is run: for an unknown setting, a setting that must not vary, a setting of a method
    that is not tuned, an invalid form, or a value that the setting refuses.
    """
    distributions: dict[str, BaseDistribution] = {}
    for entry in entries:
        key, sign, form = entry.partition("=")
        if sign:
            pairs: Mapping[str, Any] = {key.strip(): form.strip()}
        elif entry.endswith(".toml"):
            pairs = read_toml(Path(entry))
        else:
            raise UserError(
                f"--space {entry}: KEY=FORM or a .toml file is needed here; forms are {FORMS}"
            )
        for name, value in pairs.items():
            if name in distributions:
                raise UserError(f"--space names {name} twice")
            distributions[name] = distribution(name, value, strategies)
    if not distributions:
        raise UserError(f"--space: at least one KEY=FORM is needed here; forms are {FORMS}")
    return Space(distributions)


def distribution(key: str, form: object, strategies: Sequence[str]) -> BaseDistribution:
    """Return the distribution of one setting. Raises UserError as :func:`read_space`."""
    field = field_of(key, strategies)
    kind = type(field.default)
    if isinstance(form, list):
        values: list[object] = form
    elif listed := LIST.fullmatch(str(form)):
        values = [part.strip().strip("\"'") for part in listed[1].split(",") if part.strip()]
    else:
        return range_of(key, str(form), kind, field)
    choices = [convert(key, value, field) for value in values]
    if len(choices) < 2 or len(set(choices)) < len(choices):
        raise UserError(f"--space {key}={form}: two or more different values are needed here")
    return CategoricalDistribution(choices)


def range_of(key: str, form: str, kind: type[Any], field: Any) -> BaseDistribution:
    if (match := RANGE.fullmatch(form.replace(" ", ""))) is None:
        raise UserError(f"--space {key}={form}: one of {FORMS} is needed here")
    name = match[1]
    ends = [convert(key, text, field) for text in match.group(2, 3)]
    whole = name in ("int", "logint")
    logarithmic = name in ("log", "logint")
    if kind is bool or kind is str or whole is not (kind is int):
        fitting = {
            int: "int(LO,HI), logint(LO,HI) or a list",
            float: "log(LO,HI), uniform(LO,HI) or a list",
        }
        raise UserError(f"--space {key}={form}: {fitting.get(kind, 'a list')} is needed here")
    low, high = ends
    if not low < high or (logarithmic and not low > 0):  # type: ignore[operator]
        needs = "0 < LO < HI" if logarithmic else "LO < HI"
        raise UserError(f"--space {key}={form}: {needs} is needed here")
    if whole:
        return IntDistribution(int(low), int(high), log=logarithmic)
    return FloatDistribution(float(low), float(high), log=logarithmic)


def field_of(key: str, strategies: Sequence[str]) -> Any:
    """Return the setting's field. Raises UserError if it is unknown or cannot be tuned."""
    known = defaults()
    if key not in known:
        raise UserError(
            f"--space: unknown setting {key[:80]!r}{nearest(key, known)}; docs/settings.md lists them all"
        )
    if key in SAME:
        raise UserError(
            f"--space {key}: it decides what trials are measured by, or on, so it is the same for all"
        )
    owner, dot, _ = key.partition(".")
    if not dot:
        return keys_of(Common)[key]
    if owner in methods() and owner not in strategies:
        raise UserError(f"--space {key}: {owner} is not tuned here; add it to --strategy")
    return next(f for f in keys_of(owners()[owner], owner).values() if key_of(f, owner) == key)


def text_of(value: Value) -> str:
    """Return a value as text for ``trials.csv``: floats by ``repr``, booleans as in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value)
    return str(value)
