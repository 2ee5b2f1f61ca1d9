"""All settings of a run, from one flat mapping of keys (``--set``, ``--run-config``, a TOML file) to typed records."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import Field, dataclass
from typing import Any, cast

from models.architectures import MODELS, model_settings, resolve
from partitions.datasets import DATASETS
from partitions.partition import PARTITIONS, partition_settings
from strategies import PersonalizedStrategy, strategies
from strategies.base import SiloClient
from strategies.fedala import Ala, with_ala
from strategies.settings import (
    Common,
    UserError,
    Value,
    build_settings,
    choose,
    defaults_of,
    keys_of,
    nearest,
)

Options = tuple[tuple[str, Value], ...]


@dataclass(frozen=True)
class RunSettings:
    """One run: the common settings, the method's own, and those of the partition, without prefixes.

    ``models`` holds the settings of the chosen model; where ``model = "auto"``, of each that may come to be chosen.
    """

    common: Common
    method: Any
    partition: Mapping[str, Value]
    models: Mapping[str, Mapping[str, Value]]
    ala: Ala | None = None

    @property
    def strategy(self) -> type[PersonalizedStrategy]:
        return strategies()[self.common.strategy]

    @property
    def client(self) -> type[SiloClient]:
        """The method's silo half."""
        own = self.strategy.client
        return own if self.ala is None else with_ala(own, self.ala)

    @property
    def run_key(self) -> str:
        """What tells this run from others of the same study: ``apple-42``."""
        return f"{self.common.strategy}-{self.common.seed}"

    def flat(self) -> dict[str, Value]:
        """Every key that matters to this run, with its value."""
        c = self.common
        values = {key: getattr(c, f.name) for key, f in keys_of(Common).items()}
        values |= {
            key: getattr(self.method, f.name) for key, f in keys_of(type(self.method), c.strategy).items()
        }
        if self.ala is not None:
            values |= {key: getattr(self.ala, f.name) for key, f in keys_of(Ala, "fedala").items()}
        values |= {f"{c.partition}.{key}": value for key, value in self.partition.items()}
        return values | {f"{name}.{key}": v for name, own in self.models.items() for key, v in own.items()}

    def model_for(self, shape: tuple[int, ...]) -> tuple[str, Options]:
        """The architecture for inputs of this shape, and its settings in the form that ``build`` takes."""
        name = resolve(self.common.model, shape)
        own = self.models.get(name, {})
        return name, tuple(sorted((key.replace("-", "_"), value) for key, value in own.items()))


def owners() -> dict[str, type[Any]]:
    """Settings dataclasses by the name that stands before their keys: methods, partitions, models."""
    found: dict[str, type[Any]] = {name: s.Settings for name, s in strategies().items()}
    return {**found, **partition_settings(), **model_settings()}


def defaults() -> dict[str, Value]:
    """Every key there is, with its default: the content of ``[tool.flwr.app.config]``."""
    values = defaults_of(Common)
    for owner, cls in sorted(owners().items()):
        values |= defaults_of(cls, owner)
    return values


def parse_settings(values: Mapping[str, object]) -> RunSettings:
    """Typed and checked settings. Raises UserError for an unknown key or name, a wrong type, a value out of range."""
    known = defaults()
    for key in values:
        if key not in known:
            raise UserError(f"unknown setting '{key}'{nearest(key, known)}; docs/settings.md lists them all")
    common = build_settings(Common, values)
    choose("strategy", common.strategy, strategies())
    if not common.dataset.endswith(".npz"):
        choose("data set", common.dataset, DATASETS)
    choose("partition", common.partition, PARTITIONS)
    choose("model", common.model, ["auto", *MODELS])
    every = {owner: build_settings(cls, values, owner) for owner, cls in owners().items()}
    models = {name: _own(every.get(name)) for name in ([common.model] if common.model != "auto" else MODELS)}
    if common.ala and not strategies()[common.strategy].takes_ala:
        raise UserError(f"ala = true: {common.strategy} has no received model to mix, or mixes it already")
    if common.ala and getattr(every[common.strategy], "start", "received") == "own":
        raise UserError(f"ala = true mixes a received model: it needs {common.strategy}.start = received")
    ala = every["fedala"] if common.ala else None
    return RunSettings(common, every[common.strategy], _own(every.get(common.partition)), models, ala)


def _own(settings: Any) -> dict[str, Value]:
    if settings is None:
        return {}
    return {key: getattr(settings, f.name) for key, f in keys_of(type(settings)).items()}


# ---------------------------------------------------------------------------------------------------------------------
# Written down: `python -m client.settings` prints the table for pyproject.toml, with --markdown docs/settings.md


def toml_text(values: Mapping[str, Value], table: str = "") -> str:
    """Flat keys as TOML, below ``table`` if one is named; a key with a dot becomes a table's own."""
    above = f"{table}." if table else ""
    head = [f"[{table}]"] if table else []
    plain = [f"{k} = {_toml(v)}" for k, v in values.items() if "." not in k]
    tables: dict[str, list[str]] = {}
    for key, value in values.items():
        if "." in key:
            owner, _, short = key.partition(".")
            tables.setdefault(owner, []).append(f"{short} = {_toml(value)}")
    return (
        "\n".join(
            head + plain + [f"\n[{above}{owner}]\n" + "\n".join(lines) for owner, lines in tables.items()]
        )
        + "\n"
    )


def _toml(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def markdown() -> str:
    """``docs/settings.md``: every key with its default, range and meaning."""
    groups = [
        ("Common", [("", Common)]),
        ("Methods", [(name, s.Settings) for name, s in strategies().items()]),
        ("Partitions", list(partition_settings().items())),
        ("Models", list(model_settings().items())),
    ]
    lines = [
        "# Settings",
        "",
        "Every key, for `--set KEY=VALUE`, a `--config` file and `flwr run --run-config`. "
        "This page is made by `python -m client.settings --markdown > docs/settings.md`.",
    ]
    for title, members in groups:
        lines += [
            "",
            f"## {title}",
            "",
            "| key | default | values | symbol | meaning |",
            "|---|---|---|---|---|",
        ]
        for owner, cls in members:
            for key, f in keys_of(cls, owner).items():
                default = f"`{_toml(cast(Value, f.default))}`"
                symbol, meaning = f.metadata.get("symbol", ""), f.metadata.get("help", "").replace("|", "\\|")
                lines.append(
                    f"| `{key}` | {default} | {_allowed(f)} | {symbol} | {meaning} |".replace("|  |", "| |")
                )
    return "\n".join(lines) + "\n"


def _allowed(f: Field[Any]) -> str:
    limits = f.metadata
    if limits.get("choices"):
        return ", ".join(limits["choices"])
    kind = {bool: "true, false", int: "whole", float: "number", str: "text"}[type(f.default)]
    signs = (("minimum", "≥"), ("above", ">"), ("maximum", "≤"))
    return ", ".join([kind, *(f"{sign} {limits[name]:g}" for name, sign in signs if name in limits)])


if __name__ == "__main__":
    if sys.argv[1:] == ["--markdown"]:
        print(markdown(), end="")
    else:
        print(toml_text(defaults(), "tool.flwr.app.config"), end="")
