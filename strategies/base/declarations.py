"""The methods' declarations (MethodInfo), written to tables of two pages and to those of a hospital's policy.

That of docs/attacks.md lists, per method, what the server and the other hospitals see of a hospital; tests compare it
with captured messages. docs/compare.md lists what a newcomer gets. ``client/protocol/methods.json`` is for the site's
own process, which imports no method. ``make settings`` writes all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import Field
from pathlib import Path
from typing import Any, cast

from models.evidence.measure import EVIDENCE
from models.metrics import LOSSES
from models.networks.registry import BUILT_IN, model_settings
from models.tasks import all_metrics
from partitions.common.settings import MOST, keys_of, toml_text
from partitions.schemes.registry import partition_settings
from strategies.base.aggregation.secure import sums_setting
from strategies.base.info import MethodInfo
from strategies.base.privacy import Privacy
from strategies.base.run_settings import DP, defaults, runnable, strategies
from strategies.base.settings import Common, Value
from strategies.base.strategy import PersonalizedStrategy

BEGIN = "<!-- made by `make settings`: begin -->"
END = "<!-- made by `make settings`: end -->"
PEER_MODEL = "which hands a silo's model to others"
PEER_DANGER = "hands your model to the other hospitals by name: each of them can attack it"
OWN = {"sent": "**is what is sent**", "layers": "some layers are sent", "kept": "stays"}
PEERS = {
    "mean": "a mean over silos",
    "mixture": "a mixture made for it",
    "models": "**other silos' models, by name**",
    "nothing": "nothing",
}


def seen_and_inferred(info: MethodInfo) -> tuple[str, str]:
    """Return the words for what the server sees of a silo ("": nothing), and for what this allows to infer."""
    kinds = [*info.uploads.values(), *info.sends_numbers.values()]
    inferred = dict.fromkeys(word for kind in kinds for word in kind.infers)
    return "; ".join(kind.words for kind in kinds), ", ".join(inferred) or "nothing"


def row(method: type[PersonalizedStrategy]) -> list[str]:
    """Return a method's row of the table."""
    info = method.info
    seen, inferred = seen_and_inferred(info)
    return [
        f"`{info.name}`",
        seen or "nothing",
        inferred,
        "; ".join(filter(None, [OWN[info.own_model], info.note])),
        PEERS[info.receives],
        ", ".join(info.keeps),
    ]


def methods_table() -> str:
    """Return the table of what is seen; methods that differ in nothing share a row."""
    header = ["method", "the server sees", "it can infer, in principle", "the silo's own model"]
    header += ["a silo receives", "stays besides"]
    alike = dict[tuple[str, ...], list[str]]()
    for method in strategies().values():
        name, *rest = row(method)
        alike.setdefault(tuple(rest), []).append(name)
    return as_table(header, ([", ".join(names), *rest] for rest, names in alike.items()))


def newcomers_table() -> str:
    """Return the table of what a newcomer gets, with the methods of each kind."""
    kinds = dict[str, list[str]]()
    for name, method in strategies().items():
        kinds.setdefault(method.info.newcomer or "nothing", []).append(f"`{name}`")
    rows = ([f"**{kind}**", ", ".join(names)] for kind, names in sorted(kinds.items()))
    return as_table(["gets", "methods"], rows)


def as_table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


PAGES = {"attacks.md": methods_table, "compare.md": newcomers_table}


def with_table(page: str, table: str) -> str:
    """Return the page with this table in place of the one before."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def method_table() -> dict[str, dict[str, Any]]:
    """Return the declarations of each method that a hospital's policy needs, from its class."""
    table: dict[str, dict[str, Any]] = {}
    for name, s in sorted(runnable().items()):
        whole = s.info.whole if isinstance(s.info.whole, bool) else dict(s.info.whole)
        kinds = [*s.info.uploads.values()]
        every: dict[str, Any] = {"silent": not s.info.uploads}
        rules, dangers = dict[str, str](), [kind.danger for kind in kinds if kind.danger]
        if s.info.receives == "models":
            rules["peers"], dangers = PEER_MODEL, [PEER_DANGER]
        for kind in kinds:
            rules |= kind.rules
        training = s.info.training
        trainings = [
            {key: value for key, value in vars(noised).items() if value}
            for noised in training.dp_epochs
        ]
        private = trainings if training.dp == "gradient" else training.dp
        every |= {
            "rules": rules,
            "dangers": list(dict.fromkeys(dangers)),
            "adds": s.info.role.adds,
            "dp": private,
            "listed": s.info.role.listed,
            "sums": sum_weighting(s),
        }
        exceptions = {} if whole is True else {"whole": whole}
        table[name] = exceptions | {key: value for key, value in every.items() if value}
    return table


def sum_weighting(method: type[PersonalizedStrategy]) -> str:
    """Return how a method's secure sums weigh silos: samples, silos, or the setting that says it."""
    setting, sums = sums_setting(method), method.info.aggregation.sums
    return f"{method.info.name}.{setting}" if setting else getattr(sums, "weights", "")


def bounded_settings() -> dict[str, str]:
    """Return the kinds, by key, of all settings that a hospital's policy limits."""
    every = dict(keys_of(Common))
    for name, s in sorted(runnable().items()):
        every |= keys_of(s.Settings, name)
    return {key: f.metadata["kind"] for key, f in every.items() if f.metadata["kind"]}


def method_table_text() -> str:
    """Return the text of ``methods.json`` beside ``client/protocol/methods.py``, which explains it."""
    tables = {
        "methods": method_table(),
        "networks": [*BUILT_IN],
        "settings": bounded_settings(),
        "defaults": defaults(),
        "metrics": [*all_metrics()],
        "losses": [*LOSSES],
        "evidence": [*EVIDENCE],
    }
    return json.dumps(tables, indent=1, ensure_ascii=False) + "\n"


def allowed_values(f: Field[Any]) -> str:
    """Return a setting's choices, or its kind and range, without an upper limit that all of its kind have."""
    limits = f.metadata
    if type(f.default) is bool:
        return ", ".join(["true", "false", *limits.get("choices", ())])
    if limits.get("choices"):
        return ", ".join(limits["choices"])
    kind = {int: "whole", float: "number", str: "text"}[type(f.default)]
    low, high = (
        next((f"{sign}{limits[name]:g}" for name, sign in signs if name in limits), "")
        for signs in ((("minimum", ""), ("above", ">")), (("maximum", ""), ("below", "<")))
    )
    return f"{kind} {low}..{high}" if low or high else kind


def settings_page() -> str:
    """Return the text of ``docs/settings.md``: every key with its default, range and meaning."""
    groups: list[tuple[str, list[tuple[str, type[Any]]]]] = [
        ("Common", [("", Common)]),
        ("Differential privacy", [(DP, Privacy)]),
        ("Methods", [(name, s.Settings) for name, s in strategies().items()]),
        ("Partitions", list(partition_settings().items())),
        ("Models", list(model_settings().items())),
    ]
    lines = [
        "# Settings",
        "",
        "Every key, for `--set KEY=VALUE`, a `--config` file and `flwr run --run-config`. "
        "This page is made by `make settings`.",
        "",
        "`0..1` is from 0 to 1, `>0..<1` without both ends. Without an end above, whole numbers end at "
        f"{MOST[int]:g}, other numbers at {MOST[float]:g}. In brackets: the paper's symbol.",
    ]
    for title, members in groups:
        lines += [
            "",
            f"## {title}",
            "",
            "| key and default | values | meaning |",
            "|---|---|---|",
        ]
        rows = dict[str, list[str]]()  # keys of one meaning share a row
        for owner, cls in members:
            for key, f in keys_of(cls, owner).items():
                _, _, text = toml_text({"": cast(Value, f.default)}).strip().partition(" = ")
                default = f.default if isinstance(f.default, str) else text
                symbol = f" ({f.metadata['symbol']})" if f.metadata.get("symbol") else ""
                meaning = (f.metadata.get("help", "") + symbol).replace("|", "\\|")
                row = f"{allowed_values(f)} | {meaning} |"
                rows.setdefault(row, []).append(f"`{key}={default}`")
        lines += [f"| {', '.join(keys)} | {row}" for row, keys in rows.items()]
    return "\n".join(lines) + "\n"


TABLE = "tool.flwr.app.config"


def write_down(root: Path) -> None:
    """Write all settings and declarations into the files below ``root`` that list them."""
    file = root / "pyproject.toml"
    before, rest = file.read_text("utf-8").split(f"[{TABLE}]\n", 1)
    after = re.split(rf"^(?=\[(?!{re.escape(TABLE)}\.))", rest, maxsplit=1, flags=re.MULTILINE)[
        1
    ]
    file.write_text(f"{before}{toml_text(defaults(), TABLE)}\n{after}", "utf-8")
    (root / "docs" / "settings.md").write_text(settings_page(), "utf-8")
    for name, make in PAGES.items():
        page = root / "docs" / name
        page.write_text(with_table(page.read_text("utf-8"), make()), "utf-8")
    table = root / "client" / "protocol" / "methods.json"
    table.write_text(method_table_text(), "utf-8")


if __name__ == "__main__":
    write_down(Path(__file__).parents[2])
