"""What ``silofl tune`` has found, and the study of it: each method with the settings that were best on validation data.

``silofl simulate --tuned DIR`` reads a search's directory, or one search for each seed. Settings that differ between
runs of a study stand in its ``config.toml`` by run (server/results/study.py), and ``tuning.json`` of the study holds
what was searched and what that has cost, for the report::

    {"searches": [{"directory", "seed", "asked", "cost", "best", "privacy"}]}

``asked``, ``cost`` and ``privacy`` are the search's own (server/tuning/trials.py). ``best``: by method ``trial``,
``score`` and the ``values`` that the search chose. ``cost`` also has how many trials were ``complete``, ``pruned``,
``failed``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError
from partitions.common.names import nearest
from server.results.run_directory import FREE_ON_RESUME, read_toml
from server.results.study import by_run

TUNING = "tuning.json"
STATES = ("complete", "pruned", "failed")
ALLOWED = ("strategy", "seed", *FREE_ON_RESUME)  # what may be set beside --tuned; all else is the search's


def read_search(path: Path) -> dict[str, Any]:
    """Return the record of a finished search. Raises UserError where it is none, not finished, or cannot be read."""
    file = path / TUNING
    try:
        found = json.loads(file.read_text())
        asked, cost = found["asked"], found["cost"]
        with (path / "trials.csv").open(encoding="utf-8", newline="") as reading:
            rows = list(csv.DictReader(reading))
        best = {}
        for strategy in asked["strategies"]:
            own = [row for row in rows if row["strategy"] == strategy]
            if len(own) < int(asked["trials"]) or not (path / f"best-{strategy}.toml").is_file():
                raise UserError(f"{path}: the search is not finished; the same silofl tune goes on with it")
            cost[strategy] |= {state: sum(row["state"] == state for row in own) for state in STATES}
            best[strategy] = best_of(own, read_toml(path / f"best-{strategy}.toml"), asked["space"])
        seed = int(asked["settings"]["seed"])
    except FileNotFoundError:
        raise UserError(f"{path} holds no search: silofl tune --out makes one") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: the search cannot be read ({error!r})") from None
    kept = {"asked": asked, "cost": cost, "best": best, "privacy": found.get("privacy", {})}
    return {"directory": str(path), "seed": seed, **kept}


def best_of(rows: Sequence[Mapping[str, str]], settings: Mapping[str, Any], space: Mapping[str, str]) -> dict[str, Any]:
    """Return a method's best trial, its validation score and the values that were searched."""
    whole = [row for row in rows if row["state"] == "complete" and row["score"]]
    found = max(whole, key=lambda row: (float(row["score"]), -int(row["trial"])))
    values = {key: settings[key] for key in space if found[key] != ""}
    return {"trial": int(found["trial"]), "score": float(found["score"]), "values": values}


def tuned_study(paths: Sequence[Path], given: Mapping[str, object]) -> tuple[dict[str, object], dict[str, Any]]:
    """Return the settings of the study of one search, or of one search for each seed, and its record.

    ``given``: strategies, seeds and what may differ, of the command line. Raises UserError where the searches were not
    alike, so that budgets would not be equal, or where a setting is the search's.
    """
    searches = [read_search(path) for path in paths]
    first = searches[0]
    for other in searches[1:]:
        check_alike(first, other)
    if fixed := sorted(key for key in given if key not in ALLOWED):
        raise UserError(f"--tuned: {', '.join(fixed)} is the search's; leave it out, or tune with it")
    known = first["asked"]["strategies"]
    names = [name.strip() for name in str(given.get("strategy") or ",".join(known)).split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UserError(f"--tuned: {name} was not tuned in {first['directory']}{nearest(name, known)}")
    by_seed = seeds_of(searches, str(given.get("seed", "")))
    values: dict[str, object] = {}
    for seed, search in by_seed.items():
        for name in names:
            settings = read_toml(Path(search["directory"]) / f"best-{name}.toml")
            own = search["best"][name]["values"]
            values |= {key: value for key, value in settings.items() if key not in first["asked"]["space"]}
            values |= {by_run(name, seed, key): value for key, value in own.items()}
    free = {key: value for key, value in given.items() if key not in ("strategy", "seed")}
    values |= {**free, "strategy": ",".join(names), "seed": ",".join(map(str, by_seed))}
    return values, {"searches": searches}


def check_alike(first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise UserError where two searches differ in more than their seed."""
    a, b = ({**one["asked"], "settings": {**one["asked"]["settings"], "seed": ""}} for one in (first, other))
    if differ := sorted(key for key in {*a, *b} if a.get(key) != b.get(key)):
        raise UserError(
            f"--tuned: {first['directory']} and {other['directory']} differ in {', '.join(differ)}; searches that are "
            "compared differ in their seed alone"
        )
    if first["seed"] == other["seed"]:
        raise UserError(f"--tuned: {first['directory']} and {other['directory']} have the same seed {first['seed']}")


def seeds_of(searches: Sequence[dict[str, Any]], seeds: str) -> dict[str, dict[str, Any]]:
    """Return by seed the search whose settings it gets: its own, or the only one."""
    if not seeds:
        return {str(search["seed"]): search for search in searches}
    if len(searches) > 1:
        raise UserError(f"--seed {seeds}: several searches bring their own seeds; leave --seed out")
    return {seed.strip(): searches[0] for seed in seeds.split(",") if seed.strip()}
