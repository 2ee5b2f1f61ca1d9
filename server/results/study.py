"""Study: several methods and seeds as runs, checked before anything is written.

A setting of a single run has the run's name as a prefix, as for tuned methods: ``run.fedavg-1.learning-rate``.

Results of ``silofl tune``, and the study from them: each method with its best settings on validation data.

``silofl simulate --tuned DIR`` reads one search's directory, or one per seed. Settings that differ between runs have
one key per run in the study's ``config.toml`` (server/results/study.py). The study's ``tuning.json`` records the
searches and their cost for the report::

    {"searches": [{"directory", "seed", "asked", "cost", "best", "privacy"}]}

``asked``, ``cost`` and ``privacy`` are copied from the search (server/tuning/trials.py). ``best``: by method ``trial``,
``score`` and the chosen ``values``. ``cost`` also has the numbers of ``complete``, ``pruned`` and ``failed`` trials.
"""

from __future__ import annotations

import csv
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from torch import Tensor

from client.local_data import device_of
from models.flat import FlatModel
from models.initialisation import flat_model
from models.optimizers import block_shares
from models.privacy.records import check_unmixed
from models.shapes import Shape
from models.tasks import task_of
from partitions.common.errors import UserError
from partitions.common.names import nearest, split_names
from partitions.simulated import divide
from server.results.run_directory import FREE_ON_RESUME, read_toml
from strategies.base.plan import OFFLINE, RoundPlan, SiloInfo
from strategies.base.run_settings import RunSettings, defaults, parse_settings
from strategies.base.settings import Value
from strategies.base.settings.training import seen_shape
from strategies.base.strategy import PersonalizedStrategy

RUN = "run."
# These define data, length and measurement of a run: runs that differ in them cannot be compared.
SAME = (
    *(
        "strategy",
        "seed",
        "rounds",
        "dataset",
        "data-dir",
        "partition",
        "silos",
        "task",
        "validation",
    ),
    *(
        "evaluate-every",
        "min-metric-samples",
        "agreed",
        "study",
        "resume",
        "out",
        "device",
        "threads",
    ),
    *("checkpoint-every", "hold-out", "dp", "dp.delta", "dp.unit"),
)


def study_runs(values: Mapping[str, object]) -> list[RunSettings]:
    """Return the runs of a study: every strategy with every seed. Raises UserError before anything is written."""
    names, seeds = (
        split_names(values.get(key, defaults()[key])) for key in ("strategy", "seed")
    )
    if not names or not seeds:
        raise UserError("a study needs at least one strategy and one seed")
    for kind, names_of_kind in (("strategy", names), ("seed", seeds)):
        if len(set(names_of_kind)) < len(names_of_kind):
            raise UserError(f"{kind} = {','.join(names_of_kind)} names one of them twice")
    runs = list(itertools.product(seeds, names))
    common, by_name = split_by_run(values, [f"{n}-{s}" for s, n in runs])
    return [
        parse_settings({**common, **by_name.get(f"{n}-{s}", {}), "strategy": n, "seed": s})
        for s, n in runs
    ]


def by_run(strategy: str, seed: object, key: str) -> str:
    """Return the key of a setting of a single run."""
    return f"{RUN}{strategy}-{seed}.{key}"


def split_by_run(
    values: Mapping[str, object], names: Sequence[str]
) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    """Return the common settings, and each run's own settings by run. Raises UserError for an unknown run."""
    common = {key: value for key, value in values.items() if not key.startswith(RUN)}
    by_name: dict[str, dict[str, object]] = {}
    for key in values.keys() - common.keys():
        name, _, setting = key.removeprefix(RUN).partition(".")
        if name not in names:
            raise UserError(
                f"{key[:80]}: the study has no run {name[:40]!r}; it has {', '.join(names)}"
            )
        if setting in SAME:
            raise UserError(f"{key[:80]}: {setting} is the same for all runs of a study")
        by_name.setdefault(name, {})[setting] = values[key]
    return common, by_name


def study_config(runs: list[RunSettings]) -> dict[str, Value]:
    """Return all settings of the study as one flat mapping; settings that differ have one key per run."""
    values: dict[str, Value] = {}
    differ: set[str] = set()
    for run in runs:
        flat = run.flat()
        differ |= {key for key in flat if key in values and values[key] != flat[key]}
        values |= flat
    for run in runs:
        values |= {
            by_run(*run.common.which, key): value
            for key, value in run.flat().items()
            if key in differ and key not in ("strategy", "seed")
        }
    values = {key: value for key, value in values.items() if key not in differ}
    values["strategy"] = ",".join(dict.fromkeys(r.common.strategy for r in runs))
    seeds = list(dict.fromkeys(r.common.seed for r in runs))
    values["seed"] = seeds[0] if len(seeds) == 1 else ",".join(map(str, seeds))
    return dict(sorted(values.items(), key=lambda setting: "." in setting[0]))


def check_run(run: RunSettings) -> None:
    """Split the data, build the network and start the method, so that errors are raised before anything is written."""
    device_of(run, server_context(run))
    whole, parts = divide(run.division)
    task = task_of(whole.task)
    run.check_task(task, whole.classes)
    shape = seen_shape(run.common, whole.input_shape, whole.task)
    run.augmentation_for(shape)
    model = run_network(run, shape, whole.classes, whole.task)
    silos = [SiloInfo(p.name, OFFLINE, len(p.train), len(p.val), len(p.test)) for p in parts]
    # The run itself logs its warnings
    logging.disable(logging.WARNING)
    try:
        start_strategy(run, model, silos, lambda purpose: model.vector)
    finally:
        logging.disable(logging.NOTSET)


def run_network(run: RunSettings, shape: Shape, classes: int, task: str) -> FlatModel:
    """Return the network of a run for these samples. Raises UserError where it does not fit them."""
    name, options = run.model_for(shape, task)
    return flat_model(name, shape, classes, options, "cpu", run.head, run.part())


def start_strategy(
    run: RunSettings,
    model: FlatModel,
    silos: Iterable[SiloInfo],
    initial: Callable[[str], Tensor],
) -> PersonalizedStrategy:
    """Return the strategy in its state before round 1. Raises UserError where the method does not fit the network."""
    c, info = run.common, run.strategy.info
    block_shares(c.block_rates, model.layout.blocks)
    if run.privacy is not None and info.training.dp == "gradient":
        check_unmixed(model.module)
    if c.buffers == "shared" and not info.training.buffers and model.layout.buffer_size:
        raise UserError(
            f"buffers = shared: {c.strategy} does not declare what it does with BatchNorm statistics "
            "(MethodInfo.buffers); buffers = local keeps them in the silos"
        )
    strategy = run.strategy(c, run.method, model.layout)
    strategy.initialise(RoundPlan(last=c.rounds).with_silos(silos, c), initial)
    return strategy


def server_context(run: RunSettings) -> Context:
    """Return a context like the one that Flower passes to the ServerApp."""
    return Context(
        run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(run.flat())
    )


TUNING = "tuning.json"
STATES = ("complete", "pruned", "failed")
# May be set beside --tuned; the search fixes all others
ALLOWED = ("strategy", "seed", "study", *FREE_ON_RESUME)


def read_search(path: Path) -> dict[str, Any]:
    """Return the record of a finished search. Raises UserError if it is missing, unfinished or unreadable."""
    file = path / TUNING
    try:
        record = json.loads(file.read_text())
        request, cost = record["asked"], record["cost"]
        with (path / "trials.csv").open(encoding="utf-8", newline="") as reading:
            rows = list(csv.DictReader(reading))
        best = {}
        for strategy in request["strategies"]:
            trials = [row for row in rows if row["strategy"] == strategy]
            settings = path / f"best-{strategy}.toml"
            if len(trials) < int(request["trials"]) or not settings.is_file():
                raise UserError(
                    f"{path}: the search is not finished; the same silofl tune goes on with it"
                )
            cost[strategy] |= {
                state: sum(row["state"] == state for row in trials) for state in STATES
            }
            best[strategy] = best_of(trials, read_toml(settings), request["space"])
        seed = int(request["settings"]["seed"])
    except FileNotFoundError:
        raise UserError(f"{path} holds no search: silofl tune --out makes one") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: the search cannot be read ({error!r})") from None
    kept = {"asked": request, "cost": cost, "best": best, "privacy": record.get("privacy", {})}
    return {"directory": str(path), "seed": seed, **kept}


def best_of(
    rows: Sequence[Mapping[str, str]], settings: Mapping[str, Any], space: Mapping[str, str]
) -> dict[str, Any]:
    """Return the number, validation score and searched values of a method's best trial."""
    whole = [row for row in rows if row["state"] == "complete" and row["score"]]
    trial = max(whole, key=lambda row: (float(row["score"]), -int(row["trial"])))
    values = {key: settings[key] for key in space if trial[key] != ""}
    return {"trial": int(trial["trial"]), "score": float(trial["score"]), "values": values}


def tuned_study(
    paths: Sequence[Path], given_values: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, Any]]:
    """Return the settings of the study for one search, or for one search per seed, and its record.

    ``given_values``: of the command line (:data:`ALLOWED`). Raises UserError if the searches differ in more than
    their seed (budgets would not be equal), or if the search fixes a given setting.
    """
    searches = [read_search(path) for path in paths]
    first = searches[0]
    for other in searches[1:]:
        check_alike(first, other)
    if fixed := sorted(key for key in given_values if key not in ALLOWED):
        raise UserError(
            f"--tuned: {', '.join(fixed)} is the search's; leave it out, or tune with it"
        )
    known = first["asked"]["strategies"]
    names = split_names(given_values.get("strategy") or ",".join(known))
    for name in names:
        if name not in known:
            raise UserError(
                f"--tuned: {name} was not tuned in {first['directory']}{nearest(name, known)}"
            )
    by_seed = seeds_of(searches, str(given_values.get("seed", "")))
    values: dict[str, object] = {}
    for seed, search in by_seed.items():
        for name in names:
            settings = read_toml(Path(search["directory"]) / f"best-{name}.toml")
            best = search["best"][name]["values"]
            values |= {
                key: value
                for key, value in settings.items()
                if key not in first["asked"]["space"]
            }
            values |= {by_run(name, seed, key): value for key, value in best.items()}
    values |= {**given_values, "strategy": ",".join(names), "seed": ",".join(map(str, by_seed))}
    return values, {"searches": searches}


def check_alike(first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise UserError if two searches differ in more than their seed, or have the same seed."""
    a, b = (
        {**search["asked"], "settings": {**search["asked"]["settings"], "seed": ""}}
        for search in (first, other)
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
