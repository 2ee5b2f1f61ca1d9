"""The name, device and data that a silo has before a server agrees on anything.

Two sources of data give one :class:`SiloData`. A deployed silo reads its own file (node config ``data``); in a
simulation silo ``partition-id`` takes its part of a public data set or of one .npz file. Data, and samples on a device,
are cached across messages while the process lives.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from flwr.app import Context
from torch import Tensor

from client.protocol.launch import GROUP
from client.protocol.node import devices_in
from models.features import accept_embeddings, embedded, embeds
from models.flat import FlatModel, Passes
from models.parallel.group import Group, join_group
from models.samples import Samples
from models.standardisation import Columns
from models.tasks import TASKS
from models.tasks.patches import Window
from partitions.common.errors import DataError, UserError
from partitions.common.names import silo_name as simulated_name
from partitions.inputs import reorder_data
from partitions.labels import ONE_CLASS
from partitions.own.dataset import OwnSamples
from partitions.schema import Schema, read_schema
from partitions.silo_file import map_silo_file, read_silo_file
from partitions.simulated import names_of, part_of, pool_of
from partitions.site_split import select_rows
from partitions.splits import Array, SiloData, inputs_of, tables_of
from strategies.base.run_settings import RunSettings
from strategies.base.transport.reporting import SCHEMA

Splits = tuple[Samples, Samples, Samples]
OnDevice = tuple[Splits, dict[Any, Any]]
MOST_CLASSES = 10_000  # the last layer has a row for each: a number from the server must not exhaust the memory


def silo_name(context: Context) -> str:
    """Return ``name`` of the node config; in a simulation the name of the hospital's file, or ``hospital-01`` etc."""
    config = context.node_config
    run = context.run_config
    if "name" in config:
        return str(config["name"])
    if "partition-id" in config:
        index = int(config["partition-id"])
        parts = int(config["num-partitions"])
        names = names_of(str(run.get("dataset", "")), str(run.get("partition", "")), parts)
        # `open_data` refuses a surplus silo
        return names[index] if index < len(names) else simulated_name(index)
    raise UserError(
        'this silo has no name: give its SuperNode --node-config \'name="hospital-01" data="FILE.npz"\''
    )


def device_of(settings: RunSettings, context: Context) -> torch.device:
    """Return this process's device in the node config, else the run's; ``auto`` is a GPU if there is one."""
    names = devices_in(context.node_config)
    name = names[place_in_group()[0]] if len(names) > 1 else names[0]
    if name == "auto":
        name = settings.common.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device(name)
    # PyTorch has more, and some of them store no numbers
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"device '{name}' is unknown: auto, cpu, cuda or cuda:N is needed here")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if share := gpu_share(os.environ):
            # By its number: `cuda` alone has none, and PyTorch refuses it here
            torch.cuda.set_per_process_memory_fraction(share, device.index)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device '{name}' cannot be used here: {str(error).splitlines()[0]}"
        ) from error
    return device


def place_in_group() -> tuple[int, str]:
    """Return which of the silo's processes this is, and the folder where they meet. Raises UserError."""
    rank, _, folder = os.environ.get(GROUP, "").partition(" ")
    if not rank:
        raise UserError(
            "several devices need the processes of silofl's SuperNode: start it by silofl join, or give the silo one "
            "device"
        )
    return int(rank), folder


def group_of(context: Context) -> Group | None:
    """Return this process's group, which waits for the silo's other ones; None if there are none."""
    names = devices_in(context.node_config)
    return join_group(*place_in_group(), names) if len(names) > 1 else None


def check_devices(settings: RunSettings, task: str, names: Sequence[str]) -> None:
    """Raise UserError if a batch of the run cannot be divided over these devices."""
    if len(names) == 1:
        return
    common, info = settings.common, settings.strategy.info
    reasons = {
        f"{task}, whose loss compares the samples of a batch": not TASKS[task].of_each,
        f"{info.name}, whose loss depends on features or a whole batch": info.trains
        and not info.training.plain_loss,
        "dp = true, which shortens each patient's gradient by itself": common.dp,
        f"trainer = {common.trainer}, which makes the steps": bool(common.trainer),
    }
    for reason in (text for text, applies in reasons.items() if applies):
        raise UserError(
            f"device = {','.join(names)}: not for {reason}; give the silo one device"
        )


def gpu_share(environment: Mapping[str, str]) -> float:
    """Return the silo's share of its GPU's memory, SILOFL_GPU_SHARE; 0: no limit. Raises UserError."""
    text = environment.get("SILOFL_GPU_SHARE", "")
    try:
        share = float(text or 0)
    except ValueError:
        share = math.nan
    if text and not 0 < share <= 1:
        raise UserError(f"SILOFL_GPU_SHARE = {text[:40]}: above 0 and at most 1, such as 0.25")
    return share


# ---------------------------------------------------------------------------------------------------------------------
# Data


def is_own_file(context: Context) -> bool:
    return "data" in context.node_config


def open_data(settings: RunSettings, context: Context, *, whole: bool = False) -> SiloData:
    """Return this silo's data. Raises UserError or DataError, one line, if they cannot be used.

    ``whole``: of a silo's own file all parts, whatever the run leaves unused.
    """
    c = settings.common
    if is_own_file(context):
        path = Path(str(context.node_config["data"]))
        stamp = path.stat().st_mtime_ns if path.exists() else 0
        return _own_file(path, stamp, whole or c.validation != 0, c.task)
    parts = int(context.node_config["num-partitions"])
    if parts != c.silos:
        raise UserError(
            f"silos = {c.silos}, but the simulation runs {parts}: "
            f"use --federation-config 'num-supernodes={c.silos}' or --run-config 'silos={parts}'"
        )
    return part_of(settings.division, int(context.node_config["partition-id"]))


@lru_cache(maxsize=4)
def _own_file(path: Path, stamp: int, validation: bool, task: str) -> SiloData:
    """Read the silo's own file; the run's settings may change little of its use.

    A run may leave the validation part unused. It may neither train on it nor take a share of it: results for n and
    n - 1 samples would reveal one. It may not treat classes as measurements: their sums would reveal the class counts.
    """
    if task not in ("auto", *ONE_CLASS) and (of_file := map_silo_file(path).task) != task:
        raise UserError(
            f"task = {task}: this silo's data file is for {of_file}, and only the file can say otherwise"
        )
    data = read_silo_file(path, task)
    return data if validation else replace(data, val=select_rows(data.val, np.arange(0)))


# The last result for a silo's data, with the key that it was made for: kept while the data are.
_REORDERED: WeakKeyDictionary[SiloData, tuple[str, SiloData]] = WeakKeyDictionary()
EMBEDDINGS = ".embeddings"  # in the state directory; a backup leaves out what begins so, as it leaves out the data
_EMBEDDED: WeakKeyDictionary[Samples, tuple[Any, Samples | None]] = WeakKeyDictionary()
_ON_DEVICE: WeakKeyDictionary[SiloData, tuple[tuple[Any, ...], OnDevice]] = WeakKeyDictionary()


def agreed_schema(config: Mapping[str, Any]) -> Schema:
    """Return the schema that the server sends for all silos; an empty one if it sends none. Raises UserError."""
    try:
        return read_schema(str(config.get(SCHEMA, "")))
    except DataError as error:
        raise UserError(f"the schema that the server sends cannot be used: {error}") from None


def agreed_data(data: SiloData, context: Context, config: Mapping[str, Any]) -> SiloData:
    """Return the data with columns and labels in the agreed order. Raises UserError if that is not possible."""
    agreed = agreed_schema(config)
    kept = _REORDERED.get(data)
    if kept is not None and kept[0] == agreed.text:
        return kept[1]
    try:
        reordered = reorder_data(data, agreed)
    except (DataError, UserError) as error:
        raise UserError(f"{silo_name(context)} cannot take the run's schema: {error}") from None
    if reordered is not data:  # an entry with the data themselves would keep them alive
        _REORDERED[data] = agreed.text, reordered
    return reordered


def pool_silos(data: SiloData, settings: RunSettings, context: Context) -> SiloData:
    """Return a simulated silo's data; for the first silo that trains, with the training samples of all that do.

    Raises UserError outside a simulation.
    """
    if is_own_file(context):
        raise UserError(
            f"{settings.common.strategy} needs all silos' data in one place: it runs in simulations only"
        )
    c = settings.common
    names = names_of(c.dataset, c.partition, c.silos)
    trains = tuple(i for i, name in enumerate(names) if name not in c.held_out)
    return (
        pool_of(settings.division, trains)
        if int(context.node_config["partition-id"]) == trains[0]
        else data
    )


def columns_in(data: SiloData) -> Array | None:
    """Return the training columns to standardise (n, columns): of tables, then a regression's measurements."""
    parts = [*tables_of(data.train.x).values()]
    parts += [data.train.y] if data.task == "regression" else []
    return np.hstack(parts) if parts else None


def agreed_classes(config: Mapping[str, Any], data: SiloData) -> int:
    """Return the number of classes that the server sends for all silos. Raises UserError if it is not possible."""
    classes = int(config["classes"])
    if config.get("task", data.task) != data.task:
        raise UserError(
            f"the server says that the task is {config['task']}: this silo's labels are for {data.task}"
        )
    if not data.classes <= classes <= MOST_CLASSES:
        raise UserError(
            f"the server says that there are {classes} classes: this silo has {data.classes}, and takes at most "
            f"{MOST_CLASSES}"
        )
    return classes


def weights_file(settings: RunSettings, context: Context) -> Path | None:
    """Return the file of the run's initial weights at this site; None in a simulation, which uses the run's path."""
    named = settings.common.init_weights
    if not named or not is_own_file(context):
        return None
    folder = str(context.node_config.get("weights") or os.environ.get("SILOFL_WEIGHTS", ""))
    name = Path(named).name
    if not folder or not (Path(folder) / name).is_file():
        where = (
            f"not in SILOFL_WEIGHTS={folder}"
            if folder
            else "and no SILOFL_WEIGHTS, the folder to put it into"
        )
        raise UserError(
            f"{silo_name(context)} lacks the weights that the run starts from: no {name[:80]}, {where}"
        )
    return Path(folder) / name


def tensors(columns: tuple[Columns, Columns]) -> tuple[Tensor | None, Tensor | None]:
    """Return mean and standard deviation as tensors; None for empty ones."""
    return (torch.tensor(columns[0]), torch.tensor(columns[1])) if columns[0] else (None, None)


def samples_on(
    data: SiloData,
    device: torch.device,
    inputs: tuple[Columns, Columns],
    labels: tuple[Columns, Columns],
    window: Window | None = None,
) -> OnDevice:
    """Return the three splits on the device, and a cache for models on them (see :class:`Silo`)."""
    wanted, kept = (device, inputs, labels, window), _ON_DEVICE.get(data)
    if kept is not None and kept[0] == wanted:
        return kept[1]
    (mean, std), of_labels = (tensors(columns) for columns in (inputs, labels))
    train, val, test = (
        Samples(s.x, s.y, device, mean, std, of_labels, window)
        for s in (data.train, data.val, data.test)
    )
    on_device: OnDevice = (train, val, test), {}
    _ON_DEVICE[data] = wanted, on_device
    return on_device


def embedded_on(model: FlatModel, which: Any, splits: Splits, session: Any) -> Splits:
    """Return the splits with the embeddings of a frozen network for inputs, where they are always the same.

    ``which``: the network, as it is built; in this process each split is embedded once for it. A deployed silo keeps
    them in its state directory. Not embedded: a hospital's own data set, which may draw a sample anew each time;
    samples for its own trainer; half precision.
    """
    common, inputs = session.settings.common, inputs_of(session.used_data.train.x).values()
    drawn_anew = any(isinstance(part, OwnSamples) for part in inputs)
    if drawn_anew or common.trainer or common.precision != "float32":
        return splits
    if any(_EMBEDDED.get(samples, (None,))[0] != which for samples in splits):
        model.compute(Passes())  # the run before may have had another precision
        state = session.state_dir
        folder = Path(state) / EMBEDDINGS if state else None
        usable = embeds(model, splits[0])
        for samples in splits:  # the next message asks the network nothing
            _EMBEDDED[samples] = which, embedded(model, samples, folder) if usable else None
    train, val, test = (_EMBEDDED[samples][1] for samples in splits)
    if train is None or val is None or test is None:
        return splits
    accept_embeddings(model)
    return train, val, test
