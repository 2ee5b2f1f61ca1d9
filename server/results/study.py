"""A study: several methods and seeds as runs, checked before anything is written."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from flwr.app import Context, RecordDict

from client.local_data import device_of
from models.initialisation import flat_model
from models.tasks import task_of
from partitions.common.errors import UserError
from partitions.simulated import divide
from strategies.base.run_settings import RunSettings, defaults, parse_settings
from strategies.base.settings import Value
from strategies.base.strategy import check_task


def study_runs(values: Mapping[str, object]) -> list[RunSettings]:
    """Return the runs of a study: every strategy with every seed. Raises UserError before anything is written."""
    names = [n.strip() for n in str(values.get("strategy", defaults()["strategy"])).split(",") if n.strip()]
    seeds = [s.strip() for s in str(values.get("seed", defaults()["seed"])).split(",") if s.strip()]
    if not names or not seeds:
        raise UserError("a study needs at least one strategy and one seed")
    for kind, given in (("strategy", names), ("seed", seeds)):
        if len(set(given)) < len(given):
            raise UserError(f"{kind} = {','.join(given)} names one of them twice")
    return [parse_settings({**values, "strategy": n, "seed": s}) for s, n in itertools.product(seeds, names)]


def study_config(runs: list[RunSettings]) -> dict[str, Value]:
    """Return all settings of the study as one flat mapping."""
    values: dict[str, Value] = {}
    for run in runs:
        values |= run.flat()
    values["strategy"] = ",".join(dict.fromkeys(r.common.strategy for r in runs))
    seeds = list(dict.fromkeys(r.common.seed for r in runs))
    values["seed"] = seeds[0] if len(seeds) == 1 else ",".join(map(str, seeds))
    plain = {k: v for k, v in values.items() if "." not in k}
    return plain | {k: v for k, v in values.items() if "." in k}


def check_run(run: RunSettings) -> None:
    """Load and split the data, and build the network, so that errors show before anything is written."""
    device_of(run, server_context(run))
    whole, _ = divide(run.division)
    task = task_of(whole.task)
    check_task(run.strategy, task, whole.classes, run.common)
    run.augmentation_for(whole.input_shape)
    name, options = run.model_for(whole.input_shape, whole.task)
    flat_model(name, whole.input_shape, whole.classes, options, "cpu", run.head, run.part())


def server_context(run: RunSettings) -> Context:
    """Return the context that Flower would give the ServerApp."""
    return Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(run.flat()))
