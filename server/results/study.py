"""Study: several methods and seeds as runs, checked before anything is written.

A setting of a single run has the run's name as a prefix, as for tuned methods: ``run.fedavg-1.learning-rate``.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from flwr.app import Context, RecordDict
from torch import Tensor

from client.local_data import device_of
from models.flat import FlatModel
from models.initialisation import flat_model
from models.optimizers import block_shares
from models.privacy.records import check_network
from models.tasks import task_of
from partitions.common.errors import UserError
from partitions.common.names import split_names
from partitions.simulated import divide
from strategies.base.info import OFFLINE, RoundPlan, SiloInfo
from strategies.base.run_settings import RunSettings, defaults, parse_settings
from strategies.base.settings import Value
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.training.patches import seen_shape

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
    for kind, given in (("strategy", names), ("seed", seeds)):
        if len(set(given)) < len(given):
            raise UserError(f"{kind} = {','.join(given)} names one of them twice")
    runs = list(itertools.product(seeds, names))
    common, own = split_by_run(values, [f"{n}-{s}" for s, n in runs])
    return [
        parse_settings({**common, **own.get(f"{n}-{s}", {}), "strategy": n, "seed": s})
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
    own: dict[str, dict[str, object]] = {}
    for key in values.keys() - common.keys():
        name, _, setting = key.removeprefix(RUN).partition(".")
        if name not in names:
            raise UserError(
                f"{key[:80]}: the study has no run {name[:40]!r}; it has {', '.join(names)}"
            )
        if setting in SAME:
            raise UserError(f"{key[:80]}: {setting} is the same for all runs of a study")
        own.setdefault(name, {})[setting] = values[key]
    return common, own


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
    plain = {k: v for k, v in values.items() if "." not in k}
    return plain | {k: v for k, v in values.items() if "." in k}


def check_run(run: RunSettings) -> None:
    """Split the data, build the network and start the method, so that errors are raised before anything is written."""
    device_of(run, server_context(run))
    whole, parts = divide(run.division)
    task = task_of(whole.task)
    run.check_task(task, whole.classes)
    shape = seen_shape(run.common, whole.input_shape, whole.task)
    run.augmentation_for(shape)
    name, options = run.model_for(shape, whole.task)
    model = flat_model(name, shape, whole.classes, options, "cpu", run.head, run.part())
    silos = [SiloInfo(p.name, OFFLINE, len(p.train), len(p.val), len(p.test)) for p in parts]
    # The run itself logs its warnings
    logging.disable(logging.WARNING)
    try:
        start_strategy(run, model, silos, lambda purpose: model.vector)
    finally:
        logging.disable(logging.NOTSET)


def start_strategy(
    run: RunSettings,
    model: FlatModel,
    silos: Iterable[SiloInfo],
    initial: Callable[[str], Tensor],
) -> PersonalizedStrategy:
    """Return the strategy in its state before round 1. Raises UserError where the method does not fit the network."""
    c, info = run.common, run.strategy.info
    block_shares(c.block_rates, model.layout.blocks)
    if run.privacy is not None and info.dp == "gradient":
        check_network(model.module)
    if c.buffers == "shared" and not info.buffers and model.layout.buffer_size:
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
