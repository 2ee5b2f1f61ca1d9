"""A silo as this process sees it: its name, its data on its device, and the network it works with.

Three kinds of data, one :class:`SiloData`: a deployed silo reads its own file (node config ``data``); in a simulation
silo ``partition-id`` takes its part of a public data set or of one .npz file.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any

import flwr
import numpy as np
import torch
from flwr.app import Context
from torch import Tensor

from client.settings import Options, RunSettings
from models.architectures import build
from models.flat import FlatModel
from models.training import BYTE_MEAN, BYTE_STD, Samples, generator
from partitions.datasets import load_dataset
from partitions.partition import SiloIndices, partition, silo_data
from partitions.silo_file import read_dataset_file, read_silo_file
from partitions.splits import Dataset, SiloData
from strategies.base import Silo
from strategies.payload import Number
from strategies.settings import UserError, Value

Shape = tuple[int, ...]

# The network that a silo works with, given the one that the silos of a process share as long as they take turns.
network_of: ContextVar[Callable[[FlatModel], FlatModel]] = ContextVar(
    "network_of", default=lambda shared: shared
)


def silo_name(context: Context) -> str:
    """``name`` of the node config, in a simulation ``hospital-01`` and so on."""
    config = context.node_config
    if "name" in config:
        return str(config["name"])
    if "partition-id" in config:
        return f"hospital-{int(config['partition-id']) + 1:02d}"
    raise UserError(
        'this silo has no name: give its SuperNode --node-config \'name="hospital-01" data="FILE.npz"\''
    )


def use_threads(threads: int) -> None:
    """The run's number of threads (sums depend on it), or with 0 what OMP_NUM_THREADS says, or all cores.

    Silos that share a machine set OMP_NUM_THREADS to their share of it: twelve silos with all cores each would mostly
    wait for one another.
    """
    torch.set_num_threads(threads or int(os.environ.get("OMP_NUM_THREADS") or 0) or os.cpu_count() or 1)


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
        return _own_file(path, stamp, max(c.validation, 0.0) if c.validation >= 0 else 0.15, c.seed)
    parts = int(context.node_config["num-partitions"])
    if parts != c.silos:
        raise UserError(
            f"silos = {c.silos}, but the simulation runs {parts}: "
            f"use --federation-config 'num-supernodes={c.silos}' or --run-config 'silos={parts}'"
        )
    return _simulated(_split_key(settings), int(context.node_config["partition-id"]))


@lru_cache(maxsize=4)
def _own_file(path: Path, stamp: int, validation: float, seed: int) -> SiloData:
    return read_silo_file(path, validation=validation, seed=seed)


SplitKey = tuple[str, str, str, int, int, float, tuple[tuple[str, Value], ...]]


def _split_key(settings: RunSettings) -> SplitKey:
    c = settings.common
    own = tuple(sorted(settings.partition.items()))
    return c.dataset, c.data_dir, c.partition, c.silos, c.seed, c.validation, own


def split(settings: RunSettings) -> tuple[Dataset, list[SiloIndices]]:
    """The data set and every silo's share of it; the same in every process."""
    return _split(_split_key(settings))


@lru_cache(maxsize=2)
def _split(key: SplitKey) -> tuple[Dataset, list[SiloIndices]]:
    dataset, data_dir, name, silos, seed, validation, own = key
    whole = (
        read_dataset_file(Path(dataset), seed=seed)
        if dataset.endswith(".npz")
        else load_dataset(dataset, data_dir)
    )
    return whole, partition(whole, name, silos=silos, seed=seed, settings=dict(own), validation=validation)


@lru_cache(maxsize=256)
def _simulated(key: SplitKey, index: int) -> SiloData:
    whole, silos = _split(key)
    return silo_data(whole, silos[index])


# ---------------------------------------------------------------------------------------------------------------------
# The data card, and the silo itself


def data_card(settings: RunSettings, context: Context) -> dict[str, Number]:
    """What the server is told of this silo before round 1: counts, shape, classes, versions; never a label count.

    Tables add the sums by which all silos agree on the standardisation (``normalization = "agreed"``).
    """
    data = open_data(settings, context)
    card: dict[str, Number] = {
        "name": silo_name(context),
        "n_train": len(data.train),
        "n_val": len(data.val),
        "n_test": len(data.test),
        "shape": list(data.input_shape),
        "classes": data.classes,
        "own_file": is_own_file(context),
        "simulated": not is_own_file(context),
        "device": str(device_of(settings, context)),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, flwr {flwr.__version__}",
    }
    if len(data.input_shape) == 1 and settings.common.normalization == "agreed":
        x = np.ascontiguousarray(data.train.x.T, "float64")  # numpy adds up rows pairwise, columns one by one
        card["sum"], card["square_sum"] = x.sum(1).tolist(), (x * x).sum(1).tolist()
    return card


def open_silo(settings: RunSettings, context: Context, config: Mapping[str, Any]) -> Silo:
    """The silo with its data on its device; ``config`` carries what the server agreed on (classes, statistics)."""
    data, device = open_data(settings, context), device_of(settings, context)
    c = settings.common
    classes = int(config["classes"])
    splits = _samples(data, device, *standardisation(data, config, c.normalization))
    name, options = settings.model_for(data.input_shape)
    model = network_of.get()(flat_model(name, data.input_shape, classes, options, str(device)))
    initial = initial_model(name, data.input_shape, classes, options, c.seed)
    return Silo(silo_name(context), *splits, model, lambda purpose: initial(purpose).to(device))


def model_card(settings: RunSettings, context: Context, config: Mapping[str, Any]) -> dict[str, Any]:
    """What it takes to use this silo's model: kept with it, so that the site can export it without the server.

    ``normalisation`` is the mean and std that inputs are standardised with, (x - mean) / std; None: taken as they are.
    """
    data, c = open_data(settings, context), settings.common
    name, options = settings.model_for(data.input_shape)
    mean, std = standardisation(data, config, c.normalization)
    scale: dict[str, Any] | None = {"mean": mean, "std": std} if mean else None
    if data.train.x.dtype == np.uint8:
        scale = {"mean": BYTE_MEAN, "std": BYTE_STD}
    return {
        "silo": silo_name(context),
        "method": c.strategy,
        "paper": settings.strategy.paper,
        "seed": c.seed,
        "samples": {"train": len(data.train), "val": len(data.val), "test": len(data.test)},
        "model": {"name": name, "settings": dict(options)},
        "input": {"shape": list(data.input_shape), "dtype": str(data.train.x.dtype)},
        "classes": int(config["classes"]),
        "normalisation": scale,
    }


_ON_DEVICE: dict[tuple[Any, ...], tuple[SiloData, tuple[Samples, Samples, Samples]]] = {}


def standardisation(
    data: SiloData, config: Mapping[str, Any], normalization: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each column by which this silo's table is standardised; empty: it is not."""
    if len(data.input_shape) == 1 and normalization == "silo":
        x = torch.from_numpy(data.train.x.copy())
        return tuple(x.mean(0).tolist()), tuple(_spread(x.var(0, correction=0), x.square().mean(0)).tolist())
    return tuple(config.get("mean", ())), tuple(config.get("std", ()))


def _samples(
    data: SiloData, device: torch.device, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[Samples, Samples, Samples]:
    """The three splits on the device, kept for the next round as long as their data are."""
    key = (id(data), device, mean, std)
    if key not in _ON_DEVICE:
        for old in [k for k, (held, _) in _ON_DEVICE.items() if held is data]:
            del _ON_DEVICE[old]
        mu, sigma = (torch.tensor(mean), torch.tensor(std)) if mean else (None, None)
        parts = [Samples(s.x, s.y, device, mu, sigma) for s in (data.train, data.val, data.test)]
        _ON_DEVICE[key] = data, (parts[0], parts[1], parts[2])
        while len(_ON_DEVICE) > 256:
            del _ON_DEVICE[next(iter(_ON_DEVICE))]
    return _ON_DEVICE[key][1]


def _spread(variance: Tensor, square: Tensor) -> Tensor:
    """Standard deviation; 1 for a column that never changes, whose variance is rounding of its mean ``square``."""
    changes = variance > 1e-13 * square
    return torch.where(changes, variance, torch.ones_like(variance)).sqrt()


def agreed_statistics(cards: list[dict[str, Any]]) -> dict[str, Number]:
    """Mean and standard deviation of each column over all silos' training parts, from the sums in their cards."""
    if any("sum" not in card for card in cards):
        return {}
    n = sum(card["n_train"] for card in cards)
    total = torch.tensor([card["sum"] for card in cards], dtype=torch.float64).sum(0) / n
    square = torch.tensor([card["square_sum"] for card in cards], dtype=torch.float64).sum(0) / n
    std = _spread(square - total * total, square)
    return {"mean": total.tolist(), "std": std.tolist()}


@lru_cache(maxsize=4)
def flat_model(name: str, shape: Shape, classes: int, options: Options, device: str) -> FlatModel:
    """The network all silos of this process work with, one after the other."""
    return FlatModel(_seeded(name, shape, classes, options, 0, ""), device)


@lru_cache(maxsize=4)
def initial_model(
    name: str, shape: Shape, classes: int, options: Options, seed: int
) -> Callable[[str], Tensor]:
    """``initial(purpose)``: the initial vector (Σ,) that every process makes from (seed, purpose)."""

    @lru_cache(maxsize=2)
    def initial(purpose: str) -> Tensor:
        return FlatModel(_seeded(name, shape, classes, options, seed, purpose)).vector

    return initial


def _seeded(
    name: str, shape: Shape, classes: int, options: Options, seed: int, purpose: str
) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "model", purpose).initial_seed())
        return build(name, shape, classes, dict(options))
