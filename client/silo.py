"""A silo as this process sees it: its name, its data on its device, and the network it works with.

Three kinds of data, one :class:`SiloData`: a deployed silo reads its own file (node config ``data``); in a simulation
silo ``partition-id`` takes its part of a public data set or of one .npz file.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import flwr
import numpy as np
import torch
from flwr.app import Context
from torch import Tensor

from client.site.policy import PUBLIC, Policy, policy_of, read_policy
from client.sums import released_sums
from models.initial import flat_model, initial_model, network_of
from models.shapes import columns as table_columns
from models.shapes import written
from models.standardisation import Columns, standardisation
from models.tasks import task_of
from models.trainable import WHOLE, Part
from models.training import BYTE_MEAN, BYTE_STD, Samples
from partitions.labels import ONE_CLASS
from partitions.names import silo_name as simulated_name
from partitions.silo_file import read_silo_file
from partitions.simulated import part_of, pool_of
from partitions.splits import Array, SiloData, Split, dtype_of, inputs_of
from strategies.base.metrics_and_cards import WITHHELD
from strategies.base.payload import Number
from strategies.base.run_settings import RunSettings
from strategies.base.settings import UserError
from strategies.base.silo import Silo

MOST_CLASSES = 10_000  # the last layer has a row for each: what the server says must not fill the memory


def silo_name(context: Context) -> str:
    """``name`` of the node config, in a simulation ``hospital-01`` and so on."""
    config = context.node_config
    if "name" in config:
        return str(config["name"])
    if "partition-id" in config:
        return simulated_name(int(config["partition-id"]))
    raise UserError('this silo has no name: give its SuperNode --node-config \'name="hospital-01" data="FILE.npz"\'')


def device_of(settings: RunSettings, context: Context) -> torch.device:
    """The silo's own device if its node config names one, else the run's; ``auto`` takes a GPU if there is one."""
    name = str(context.node_config.get("device", "auto"))
    if name == "auto":
        name = settings.common.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):  # PyTorch knows more, and some of them hold no numbers
        raise UserError(f"device '{name}' is unknown: auto, cpu, cuda or cuda:N is wanted here")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device '{name}' cannot be used here: {str(error).splitlines()[0]}") from error
    return device


# ---------------------------------------------------------------------------------------------------------------------
# Data


def is_own_file(context: Context) -> bool:
    return "data" in context.node_config


def open_data(settings: RunSettings, context: Context) -> SiloData:
    """This silo's data. Raises ValueError with one clear line where they cannot be used."""
    c = settings.common
    if is_own_file(context):
        path = Path(str(context.node_config["data"]))
        stamp = path.stat().st_mtime_ns if path.exists() else 0
        return _own_file(path, stamp, c.validation != 0, c.task)
    parts = int(context.node_config["num-partitions"])
    if parts != c.silos:
        raise UserError(
            f"silos = {c.silos}, but the simulation runs {parts}: "
            f"use --federation-config 'num-supernodes={c.silos}' or --run-config 'silos={parts}'"
        )
    return part_of(settings.division, int(context.node_config["partition-id"]))


@lru_cache(maxsize=4)
def _own_file(path: Path, stamp: int, validation: bool, task: str) -> SiloData:
    """A run may leave the part for validation unused; it cannot train on it, nor take less: n or n - 1 tells of one.

    Nor can it say that classes are measurements, whose sums would tell how many samples each has.
    """
    if task not in ("auto", *ONE_CLASS) and (own := read_silo_file(path).task) != task:
        raise UserError(f"task = {task}: this silo's data file is for {own}, and only the file can say otherwise")
    data = read_silo_file(path, task)
    return data if validation else replace(data, val=Split(data.val.x[:0], data.val.y[:0]))


# ---------------------------------------------------------------------------------------------------------------------
# The data card, and the silo itself


def data_card(settings: RunSettings, context: Context) -> dict[str, Number]:
    """What the server is told of this silo before round 1: counts, shape, classes, versions; never a label count.

    Tables, and measurements that are to be learned, add the sums by which all silos agree on the standardisation
    (``normalization = "agreed"``).
    """
    data = open_data(settings, context)
    settings.part(weights_file(settings, context))  # a silo that lacks them is left out before the first round
    card: dict[str, Number] = {
        "name": silo_name(context),
        "n_train": len(data.train),
        "n_val": len(data.val),
        "n_test": len(data.test),
        "task": data.task,
        "shape": written(data.input_shape),
        "classes": data.classes,
        "own_file": is_own_file(context),
        "simulated": not is_own_file(context),
        "device": str(device_of(settings, context)),
        "threads": torch.get_num_threads(),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, flwr {flwr.__version__}",
    }
    columns = columns_in(data)
    if columns is not None and settings.common.normalization == "agreed":
        sums, reason = released_sums(columns, silo_policy(context), str(context.node_config.get("state-dir", "")))
        if sums is None:
            card[WITHHELD] = reason
        else:
            card["sum"], card["square_sum"] = sums
    return card


def pooled(data: SiloData, settings: RunSettings, context: Context) -> SiloData:
    """A simulated silo's data, the first one's with everybody's training samples. Raises UserError elsewhere."""
    if is_own_file(context):
        raise UserError(f"{settings.common.strategy} needs all silos' data in one place: it runs in simulations only")
    return pool_of(settings.division) if int(context.node_config["partition-id"]) == 0 else data


def silo_policy(context: Context) -> Policy:
    """What this silo allows; a simulation's silos hold public data, or those of whoever simulates."""
    return policy_of(context.node_config) if is_own_file(context) else read_policy(PUBLIC)


def columns_in(data: SiloData) -> Array | None:
    """What is standardised of the training part (n, columns): tables', behind them a regression's measurements."""
    parts = [x for x in inputs_of(data.train.x).values() if x.ndim == 2 and x.dtype == np.float32]
    parts += [data.train.y] if data.task == "regression" else []
    return np.hstack(parts) if parts else None


def statistics(
    settings: RunSettings, context: Context, config: Mapping[str, Any]
) -> tuple[tuple[Columns, Columns], tuple[Columns, Columns]]:
    """(Mean, standard deviation) for this silo's inputs, and for its labels where they are measurements: those agreed
    on, but its own where it gave no sums. Empty ones: they are not standardised.
    """
    data, c = open_data(settings, context), settings.common
    columns = columns_in(data)
    if columns is None:
        return ((), ()), ((), ())
    alone = silo_name(context) in config.get("own_statistics", ())
    mean, std = standardisation(columns, "silo" if alone else c.normalization, config)
    d = table_columns(data.input_shape)
    return (mean[:d], std[:d]), (mean[d:], std[d:])


def agreed_classes(config: Mapping[str, Any], data: SiloData) -> int:
    """How many classes the server says that all silos have together. Raises UserError where that cannot be."""
    classes = int(config["classes"])
    if config.get("task", data.task) != data.task:
        raise UserError(f"the server says that the task is {config['task']}: this silo's labels are for {data.task}")
    if not data.classes <= classes <= MOST_CLASSES:
        raise UserError(
            f"the server says that there are {classes} classes: this silo has {data.classes}, and takes at most "
            f"{MOST_CLASSES}"
        )
    return classes


def open_silo(settings: RunSettings, context: Context, config: Mapping[str, Any]) -> Silo:
    """The silo with its data on its device; ``config`` carries what the server agreed on (classes, statistics)."""
    data, device = open_data(settings, context), device_of(settings, context)
    if settings.strategy.pooled:
        data = pooled(data, settings, context)
    c = settings.common
    classes = agreed_classes(config, data)
    inputs, labels = statistics(settings, context, config)
    splits, known = _samples(data, device, inputs, labels)
    task = task_of(data.task, *labels)
    name, options = settings.model_for(data.input_shape, data.task)
    head, part = settings.strategy.head, trained_part(settings, context, config)
    model = network_of.get()(flat_model(name, data.input_shape, classes, options, str(device), head, part))
    initial = initial_model(name, data.input_shape, classes, options, c.seed, head, part)
    augment = settings.augmentation_for(data.input_shape)
    return Silo(silo_name(context), *splits, model, lambda purpose: initial(purpose).to(device), task, known, augment)


def model_card(settings: RunSettings, context: Context, config: Mapping[str, Any]) -> dict[str, Any]:
    """What it takes to use this silo's model: kept with it, so that the site can export it without the server.

    ``normalisation`` is the mean and std that inputs are standardised with, (x - mean) / std; None: taken as they are.
    """
    data, c = open_data(settings, context), settings.common
    name, options = settings.model_for(data.input_shape, data.task)
    (mean, std), (label_mean, label_std) = statistics(settings, context, config)
    scale: dict[str, Any] | None = {"mean": mean, "std": std} if mean else None
    if data.train.x.dtype == np.uint8:
        scale = {"mean": BYTE_MEAN, "std": BYTE_STD}
    more: dict[str, Any] = {"head": c.strategy} if settings.strategy.head else {}
    part = trained_part(settings, context, config)
    more |= {} if part == WHOLE else {"part": asdict(part)}
    return {
        "silo": silo_name(context),
        "method": c.strategy,
        "paper": settings.strategy.paper,
        "seed": c.seed,
        "samples": {"train": len(data.train), "val": len(data.val), "test": len(data.test)},
        "model": {"name": name, "settings": {} if options is None else asdict(options), **more},
        "input": {"shape": written(data.input_shape), "dtype": dtype_of(data.train.x)},
        "task": data.task,
        "classes": agreed_classes(config, data),
        "normalisation": scale,
        "labels": {"mean": label_mean, "std": label_std} if label_mean else None,
    }


def tensors(given: tuple[Columns, Columns]) -> tuple[Tensor | None, Tensor | None]:
    """Mean and standard deviation as tensors; None for empty ones."""
    return (torch.tensor(given[0]), torch.tensor(given[1])) if given[0] else (None, None)


def trained_part(settings: RunSettings, context: Context, config: Mapping[str, Any]) -> Part:
    """The part of the network that is trained. Raises UserError where this silo lacks the weights that the run means.

    A deployed silo reads no file that a server names: it has one of that name where the site says, with the SHA-256
    that the server's has.
    """
    part = settings.part(weights_file(settings, context))
    if part.weights is not None and part.weights.sha256 != config.get("weights"):
        raise UserError(
            f"{silo_name(context)} has other weights than the server in {part.weights.file}: SHA-256 "
            f"{part.weights.sha256[:16]}..., not {str(config.get('weights'))[:16]}..."
        )
    return part


def weights_file(settings: RunSettings, context: Context) -> Path | None:
    """Where the weights lie that a run starts from; None: where the run says, in a simulation."""
    named = settings.common.init_weights
    if not named or not is_own_file(context):
        return None
    folder, name = str(context.node_config.get("weights") or os.environ.get("SILOFL_WEIGHTS", "")), Path(named).name
    if not folder or not (Path(folder) / name).is_file():
        where = f"not in SILOFL_WEIGHTS={folder}" if folder else "and no SILOFL_WEIGHTS, the folder to put it into"
        raise UserError(f"{silo_name(context)} lacks the weights that the run starts from: no {name[:80]}, {where}")
    return Path(folder) / name


OnDevice = tuple[tuple[Samples, Samples, Samples], dict[Any, Any]]
_ON_DEVICE: dict[tuple[Any, ...], tuple[SiloData, OnDevice]] = {}


def _samples(
    data: SiloData, device: torch.device, inputs: tuple[Columns, Columns], labels: tuple[Columns, Columns]
) -> OnDevice:
    """The three splits on the device, and what is known of models on them (see :class:`Silo`).

    They are kept for the next round as long as their data are.
    """
    key = (id(data), device, inputs, labels)
    if key not in _ON_DEVICE:
        for old in [k for k, (held, _) in _ON_DEVICE.items() if held is data]:
            del _ON_DEVICE[old]
        (mean, std), of_labels = (tensors(given) for given in (inputs, labels))
        parts = [Samples(s.x, s.y, device, mean, std, of_labels) for s in (data.train, data.val, data.test)]
        _ON_DEVICE[key] = data, ((parts[0], parts[1], parts[2]), {})
        while len(_ON_DEVICE) > 256:
            del _ON_DEVICE[next(iter(_ON_DEVICE))]
    return _ON_DEVICE[key][1]
