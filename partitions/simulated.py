"""The silos of a simulation: a data set divided over them once, the same in every process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from partitions.common.names import silo_name
from partitions.datasets.registry import load_dataset
from partitions.own_files import hospitals_of, parse_source, read_hospitals, subsampled
from partitions.schemes.registry import SiloIndices, partition, silo_data
from partitions.silo_file import read_dataset_file
from partitions.splits import Dataset, SiloData, take


@dataclass(frozen=True)
class Division:
    """Which data set, and how it is divided over how many silos; ``settings`` are the partition's own."""

    dataset: str  # as own_files.py has it: a name, or a path
    data_dir: str
    partition: str
    silos: int
    seed: int
    validation: float
    settings: Any = None
    task: str = "auto"


def open_dataset(dataset: str, data_dir: str, seed: int, task: str = "auto") -> Dataset:
    """A data set by its name, of an .npz file, whose parts the seed draws where it has none, or of hospitals' files."""
    source = parse_source(dataset)
    if source.name.endswith(".npz"):
        made = read_dataset_file(Path(source.name), seed=seed, task=task)
    elif source.is_path:
        made = read_hospitals(source, seed, task)
    else:
        made = load_dataset(source.name, data_dir, task)
    return subsampled(made, source.subsample, seed)


@lru_cache(maxsize=8)
def names_of(dataset: str, partition: str, silos: int) -> tuple[str, ...]:
    """The names of a simulation's silos: those of a researcher's own hospitals, else ``hospital-01`` and so on."""
    own = hospitals_of(parse_source(dataset)) if partition == "natural" else []
    return tuple(own or map(silo_name, range(silos)))


@lru_cache(maxsize=2)
def divide(division: Division) -> tuple[Dataset, list[SiloIndices]]:
    """The data set, and every silo's share of it. Raises ValueError where it cannot be divided so."""
    d = division
    whole = open_dataset(d.dataset, d.data_dir, d.seed, d.task)
    return whole, partition(
        whole, d.partition, silos=d.silos, seed=d.seed, settings=d.settings, validation=d.validation
    )


@lru_cache(maxsize=256)
def part_of(division: Division, index: int) -> SiloData:
    """The data of the silo with this index, from 0."""
    whole, silos = divide(division)
    return silo_data(whole, silos[index])


@lru_cache(maxsize=1)
def pool_of(division: Division, silos: tuple[int, ...]) -> SiloData:
    """The data of the first of these silos, with the training samples of all of them in place of its own."""
    whole, parts = divide(division)
    return replace(part_of(division, silos[0]), train=take(whole, np.concatenate([parts[i].train for i in silos])))
