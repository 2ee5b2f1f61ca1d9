"""The silos of a simulation: one division of a data set, the same in every process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from partitions.common.names import Names, silo_name
from partitions.datasets.registry import load_dataset
from partitions.own.dataset import resolve_name as own_named
from partitions.own_files import hospitals_of, parse_source, read_hospitals, subsample_dataset
from partitions.schemes.registry import SiloIndices, partition, silo_data
from partitions.silo_file import read_dataset_file
from partitions.splits import Dataset, Shape, SiloData, take, unread


@dataclass(frozen=True)
class Division:
    """A data set, and its partition over a number of silos; ``settings`` are the partition's own."""

    dataset: str  # a name or a path, with options (own_files.py)
    data_dir: str
    partition: str
    silos: int
    seed: int
    validation: float
    settings: Any = None
    task: str = "auto"


def open_dataset(dataset: str, data_dir: str, seed: int, task: str = "auto") -> Dataset:
    """Open a data set by its name, from an .npz file, or from hospitals' files.

    An .npz file without parts is split by the seed.
    """
    source = parse_source(dataset)
    if source.name.endswith(".npz") or own_named(source.name):
        made = read_dataset_file(Path(source.name), seed=seed, task=task)
    elif source.is_path:
        made = read_hospitals(source, seed, task)
    else:
        made = unread(load_dataset(source.name, data_dir, task))
    return subsample_dataset(made, source.subsample, seed)


@lru_cache(maxsize=8)
def names_of(dataset: str, partition: str, silos: int) -> Names:
    """Return the names of a simulation's silos: of a researcher's own hospitals, else ``hospital-01`` and so on."""
    own = hospitals_of(parse_source(dataset)) if partition == "natural" else []
    return tuple(own or map(silo_name, range(silos)))


@lru_cache(maxsize=2)
def divide(division: Division) -> tuple[Dataset, list[SiloIndices]]:
    """Return the data set and every silo's indices. Raises DataError or UserError where it cannot be divided so."""
    d = division
    whole = open_dataset(d.dataset, d.data_dir, d.seed, d.task)
    return whole, partition(
        whole,
        d.partition,
        silos=d.silos,
        seed=d.seed,
        settings=d.settings,
        validation=d.validation,
    )


@lru_cache(maxsize=256)
def part_of(division: Division, index: int) -> SiloData:
    """Return the data of the silo with this index, from 0."""
    whole, silos = divide(division)
    return silo_data(whole, silos[index])


@lru_cache(maxsize=1)
def pool_of(division: Division, silos: Shape) -> SiloData:
    """Return the first silo's data, with the training samples of all these silos in place of its own."""
    whole, parts = divide(division)
    return replace(
        part_of(division, silos[0]),
        train=take(whole, np.concatenate([parts[i].train for i in silos])),
    )
