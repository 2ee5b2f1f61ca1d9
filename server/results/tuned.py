"""Results of ``silofl tune``, and the study from them: each method with its best settings on validation data.

``silofl simulate --tuned DIR`` reads one search's directory, or one per seed. Settings that differ between runs have
one key per run in the study's ``config.toml`` (server/results/study.py). The study's ``tuning.json`` records the
searches and their cost for the report::

    {"searches": [{"directory", "seed", "asked", "cost", "best", "privacy"}]}

``asked``, ``cost`` and ``privacy`` are copied from the search (server/tuning/trials.py). ``best``: by method ``trial``,
``score`` and the chosen ``values``. ``cost`` also has the numbers of ``complete``, ``pruned`` and ``failed`` trials.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError
from partitions.common.names import nearest, split_names
from server.results.run_directory import FREE_ON_RESUME, read_toml
from server.results.study import by_run

TUNING = "tuning.json"
STATES = ("complete", "pruned", "failed")
# May be set beside --tuned; the search fixes all others
ALLOWED = ("strategy", "seed", *FREE_ON_RESUME)


def read_search(path: Path) -> dict[str, Any]:
    """Return the record of a finished search. Raises UserError if it is missing, unfinished or unreadable."""
    file = path / TUNING
    try:
        found = json.loads(file.read_text())
        asked, cost = found["asked"], found["cost"]
        with (path / "trials.csv").open(encoding="utf-8", newline="") as reading:
            rows = list(csv.DictReader(reading))
        best = {}
        for strategy in asked["strategies"]:
            own = [row for row in rows if row["strategy"] == strategy]
            if (
                len(own) < int(asked["trials"])
                or not (path / f"best-{strategy}.toml").is_file()
            ):
                raise UserError(
                    f"{path}: the search is not finished; the same silofl tune goes on with it"
                )
            cost[strategy] |= {
                state: sum(row["state"] == state for row in own) for state in STATES
            }
            best[strategy] = best_of(
                own, read_toml(path / f"best-{strategy}.toml"), asked["space"]
            )
        seed = int(asked["settings"]["seed"])
    except FileNotFoundError:
        raise UserError(f"{path} holds no search: silofl tune --out makes one") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: the search cannot be read ({error!r})") from None
    kept = {"asked": asked, "cost": cost, "best": best, "privacy": found.get("privacy", {})}
    return {"directory": str(path), "seed": seed, **kept}


def best_of(
    rows: Sequence[Mapping[str, str]], settings: Mapping[str, Any], space: Mapping[str, str]
) -> dict[str, Any]:
    """Return the number, validation score and searched values of a method's best trial."""
    whole = [row for row in rows if row["state"] == "complete" and row["score"]]
    found = max(whole, key=lambda row: (float(row["score"]), -int(row["trial"])))
    values = {key: settings[key] for key in space if found[key] != ""}
    return {"trial": int(found["trial"]), "score": float(found["score"]), "values": values}


def tuned_study(
    paths: Sequence[Path], given: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, Any]]:
    """Return the settings of the study for one search, or for one search per seed, and its record.

    ``given``: settings of the command line (:data:`ALLOWED`). Raises UserError if the searches differ in more than
    their seed (budgets would not be equal), or if the search fixes a given setting.
    """
    searches = [read_search(path) for path in paths]
    first = searches[0]
    for other in searches[1:]:
        check_alike(first, other)
    if fixed := sorted(key for key in given if key not in ALLOWED):
        raise UserError(
            f"--tuned: {', '.join(fixed)} is the search's; leave it out, or tune with it"
        )
    known = first["asked"]["strategies"]
    names = split_names(given.get("strategy") or ",".join(known))
    for name in names:
        if name not in known:
            raise UserError(
                f"--tuned: {name} was not tuned in {first['directory']}{nearest(name, known)}"
            )
    by_seed = seeds_of(searches, str(given.get("seed", "")))
    values: dict[str, object] = {}
    for seed, search in by_seed.items():
        for name in names:
            settings = read_toml(Path(search["directory"]) / f"best-{name}.toml")
            own = search["best"][name]["values"]
            values |= {
                key: value
                for key, value in settings.items()
                if key not in first["asked"]["space"]
            }
            values |= {by_run(name, seed, key): value for key, value in own.items()}
    free = {key: value for key, value in given.items() if key not in ("strategy", "seed")}
    values |= {**free, "strategy": ",".join(names), "seed": ",".join(map(str, by_seed))}
    return values, {"searches": searches}


def check_alike(first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise UserError if two searches differ in more than their seed, or have the same seed."""
    a, b = (
        {**one["asked"], "settings": {**one["asked"]["settings"], "seed": ""}}
        for one in (first, other)
    )
    if differ := sorted(key for key in {*a, *b} if a.get(key) != b.get(key)):
        raise UserError(
            f"--tuned: {first['directory']} and {other['directory']} differ in {', '.join(differ)}; searches that are "
            "compared differ in their seed alone"
        )
    if first["seed"] == other["seed"]:
        raise UserError(
            f"--tuned: {first['directory']} and {other['directory']} have the same seed {first['seed']}"
        )


def seeds_of(searches: Sequence[dict[str, Any]], seeds: str) -> dict[str, dict[str, Any]]:
    """Return by seed the search whose settings it uses: its own, or the only one."""
    if not seeds:
        return {str(search["seed"]): search for search in searches}
    if len(searches) > 1:
        raise UserError(
            f"--seed {seeds}: several searches bring their own seeds; leave --seed out"
        )
    return dict.fromkeys(split_names(seeds), searches[0])
