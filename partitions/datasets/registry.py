"""Data sets by name: four that are built in, and public ones that are found on disk or downloaded.

Files are searched in data-dir, then in the folder of the environment variable SILOFL_DATA, then in our cache; in each
also in the data set's usual sub-folders. A missing file is downloaded into data-dir, or into the cache without a
data-dir, and its published checksum is checked. The user must download some data sets; the error names the source. An
existing file is checked for its structure only.

``sets.toml`` describes each. Pictures stay uint8, tables float32 in their own units: the code that trains scales them.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import unknown_name
from partitions.datasets.download import Description, Source, cache_dir, named_folder
from partitions.labels import ONE_CLASS
from partitions.splits import Dataset, Split

SIZES = (
    28,
    64,
    128,
    224,
)  # pixels of a side of MedMNIST's pictures; of its volumes the first two


def load_dataset(name: str, data_dir: str = "", task: str = "auto") -> Dataset:
    """Load a data set by name; the last few stay in memory, with read-only arrays.

    ``task``: another one than the data set's own: ``ordinal`` for classes that are grades, ``multiclass`` for several
    findings, as any of them (1) or none (0).

    Raises UserError for an unknown name. Raises DataError for a missing data-dir, a file that cannot be found or
    downloaded, a damaged file, and a task that does not fit the labels.
    """
    if data_dir:
        named_folder(data_dir)  # also for a built-in set, which does not use it
    dataset = _load(name, data_dir, os.environ.get("SILOFL_DATA", ""), str(cache_dir()))
    if task in ("auto", dataset.task):
        return dataset
    if {task, dataset.task} <= set(ONE_CLASS):
        return replace(dataset, task=task)
    if (task, dataset.task) == ("multiclass", "multilabel"):
        train, test = (
            Split(s.x, (s.y == 1).any(axis=1).astype(np.int64))
            for s in (dataset.train, dataset.test)
        )
        return Dataset(name, train, test, 2, dataset.groups)
    raise DataError(
        f"task = {task}: the labels of {name} are for {dataset.task}; leave task = auto"
    )


@lru_cache(maxsize=4)
def _load(name: str, data_dir: str, environment: str, cache: str) -> Dataset:
    # `environment` and `cache` are part of the cache's key only, because they determine where files are found.
    if name not in DATASETS:
        raise unknown_name("data set", name, DATASETS)
    described = DATASETS[name]
    module, function = described.load.split(":")
    load = getattr(import_module(f"partitions.datasets.{module}"), function)
    dataset: Dataset = load(Source(name, data_dir, described))
    for split in (dataset.train, dataset.test):
        split.x.flags.writeable = False
        split.y.flags.writeable = False
    return dataset


def read_descriptions() -> Iterator[tuple[str, Description]]:
    """Yield the names and descriptions in ``sets.toml``; MedMNIST's (``pathmnist``, ``pathmnist-64``) last."""
    path = Path(__file__).with_name("sets.toml")
    content = tomllib.loads(path.read_text("utf-8"))
    medmnist = content.pop("medmnist")
    for name, own in content.items():
        base = content.get(own.pop("like", ""), {})
        own["about"] = base.get("about", {}) | own.get("about", {})
        yield name, Description(**{**base, **own})
    for size in SIZES:
        for flag, (title, classes, *task) in medmnist.items():
            sides = 3 if flag.endswith("3d") else 2
            if sides == 3 and size > 64:
                continue
            shape = "x".join([str(size)] * sides)
            made = Description(
                f"{title}, {shape}",
                classes,
                "medmnist:load_medmnist",
                task[0] if task else "multiclass",
                folders=("medmnist", "MedMNIST"),
            )
            yield (flag if size == SIZES[0] else f"{flag}-{size}"), made


DATASETS = dict(read_descriptions())
