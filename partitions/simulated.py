"""The silos of a simulation: one division of a data set, the same in every process; and a researcher's own hospitals.

The latter are one data set: a file for each, or a csv with a column of hospitals. A data set's name in a run's settings
may have options after ``#``:

    /data/centres                                                 a folder with an .npz file for each hospital
    /data/all.csv#recipe=/data/ours.recipe.toml&by=centre         a csv, a hospital for each value of a column
    digits#subsample=500                                          at most so many samples of any data set

Hospitals keep their own test parts; training and validation samples are divided anew. Gaps of a csv are filled from
each hospital's own training part. The partition ``natural`` uses the hospitals as silos.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import Names, silo_name, silo_names
from partitions.datasets.registry import load_dataset
from partitions.inputs import reorder_data
from partitions.labels import ONE_CLASS
from partitions.own.dataset import resolve_name as own_named
from partitions.schema import difference, majority
from partitions.schemes.registry import SiloIndices, partition, silo_data
from partitions.silo_file import map_silo_file, read_dataset_file
from partitions.site_split import select_rows
from partitions.splits import (
    Array,
    Dataset,
    Shape,
    SiloData,
    Split,
    both,
    dtype_of,
    join_splits,
    load_splits,
    take,
    unread,
)


@dataclass(frozen=True)
class Division:
    """A data set, and its partition over a number of silos; ``settings`` are the partition's own."""

    dataset: str  # a name or a path, with options
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
        opened = read_dataset_file(Path(source.name), seed=seed, task=task)
    elif source.is_path:
        opened = read_hospitals(source, seed, task)
    else:
        opened = unread(load_dataset(source.name, data_dir, task))
    return subsample_dataset(opened, source.subsample, seed)


@lru_cache(maxsize=8)
def names_of(dataset: str, partition: str, silos: int) -> Names:
    """Return the names of a simulation's silos: of a researcher's own hospitals, else ``hospital-01`` and so on."""
    hospitals = hospitals_of(parse_source(dataset)) if partition == "natural" else []
    return tuple(hospitals or map(silo_name, range(silos)))


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
    if whole.unlabelled:
        raise DataError(
            f"the hospitals of {whole.name} label different things: pooled, one's unlabelled would be others' absent"
        )
    return replace(
        part_of(division, silos[0]),
        train=take(whole, np.concatenate([parts[i].train for i in silos])),
    )


# The files of a data set, each with the time of its last change
_READ: dict[str, list[tuple[Path, int]]] = {}


def forget_changed(dataset: str) -> None:
    """Forget what this process has read of files that have changed since; between runs, for a run has one state."""
    source = parse_source(dataset)
    path = Path(source.name)
    files = [path, Path(source.recipe), *sorted(path.glob("*.npz"))]
    state = [(file, file.stat().st_mtime_ns) for file in files if file.is_file()]
    if _READ.setdefault(dataset, state) != state:
        _READ[dataset] = state
        for kept in (names_of, divide, part_of, pool_of):
            kept.cache_clear()


# A researcher's own hospitals

OPTIONS = ("recipe", "by", "subsample")
MOST_HOSPITALS = 10_000


@dataclass(frozen=True)
class DatasetSource:
    """A data set's name in settings, parsed."""

    name: str  # of a data set, or a path
    recipe: str = ""
    by: str = ""
    subsample: int = 0

    @property
    def is_path(self) -> bool:
        """Return whether it is a file or a folder, not a data set's name."""
        return self.name.endswith((".npz", ".csv")) or "/" in self.name

    def __str__(self) -> str:
        """Return the source as text, as in settings."""
        options = {key: getattr(self, key) for key in OPTIONS if getattr(self, key)}
        return f"{self.name}#{urlencode(options)}" if options else self.name


def parse_source(text: str) -> DatasetSource:
    """Parse the source that a setting names. Raises DataError."""
    name, sign, rest = text.rpartition("#")
    pairs = parse_qsl(rest, keep_blank_values=True) if sign else []
    if not pairs or any(key not in OPTIONS for key, _ in pairs):  # a path may contain a "#"
        return DatasetSource(text)
    options = dict(pairs)
    count = options.get("subsample", "0")
    if not (count.isascii() and count.isdigit()) or int(count) < ("subsample" in options):
        raise DataError(f"subsample is {count[:20]!r}; it is a number of samples, 1 or more")
    parsed = DatasetSource(name, options.get("recipe", ""), options.get("by", ""), int(count))
    if bool(parsed.by) != name.endswith(".csv") or bool(parsed.by) != bool(parsed.recipe):
        raise DataError(f"{name}: a csv needs --recipe and --by, and nothing else takes them")
    return parsed


def hospitals_of(source: DatasetSource) -> list[str]:
    """Return the silo names of a source's hospitals; [] for a source without hospitals. Raises DataError."""
    if not source.is_path or source.name.endswith(".npz"):
        return []
    return silo_names(
        [*rows_by(source)]
        if source.by
        else [path.stem for path in data_files(Path(source.name))]
    )


def read_hospitals(source: DatasetSource, seed: int, task: str = "auto") -> Dataset:
    """Read a folder of files, or a csv by a column, as one data set. Raises DataError, naming the hospital."""
    path = Path(source.name)
    if source.by:
        return join(path.stem, import_by(source, seed))
    return join(path.name, {file.stem: map_silo_file(file, task) for file in data_files(path)})


def data_files(folder: Path) -> list[Path]:
    """Return the data files in a folder, in the order of their names. Raises DataError where there are none."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    files = sorted(
        path
        for path in folder.iterdir()
        if path.suffix == ".npz" and not path.name.startswith(".")
    )
    if not files:
        raise DataError(f"{folder} has no .npz file; silofl import makes one for each hospital")
    return files


def join(name: str, silos: Mapping[str, SiloData]) -> Dataset:
    """Join hospitals to one data set, with columns and labels in the majority's order. Raises DataError."""
    agreed = majority([data.schema for data in silos.values()])
    first = next(iter(silos.values()))
    joined: dict[str, SiloData] = {}
    for hospital, data in silos.items():
        subset = data.task in ONE_CLASS
        if reason := difference(data.schema, agreed, "most hospitals have", subset=subset):
            raise DataError(f"{hospital}: {reason}")
        data = reorder_data(data, agreed)
        for what, here, there in (
            ("labels for", data.task, first.task),
            ("samples of shape", data.input_shape, first.input_shape),
            ("samples of", dtype_of(data.train.x), dtype_of(first.train.x)),
        ):
            if here != there:
                raise DataError(
                    f"{hospital} has {what} {here}, and {next(iter(silos))} {there}: hospitals need the same"
                )
        joined[hospital] = data
    trains = [join_splits([data.train, data.val]) for data in joined.values()]
    tests = [data.test for data in joined.values()]
    whose = np.repeat([*range(len(joined))] * 2, [len(part) for part in (*trains, *tests)])
    rows = np.split(np.argsort(whose, kind="stable"), np.cumsum(np.bincount(whose))[:-1])
    groups = dict(zip(joined, rows, strict=True))
    train, test = load_splits(*with_patients(trains, tests))
    return Dataset(
        name,
        train,
        test,
        max(data.classes for data in joined.values()),
        groups,
        first.task,
        own_test=True,
        vocabulary=first.vocabulary,
        schema=replace(next(iter(joined.values())).schema, unlabelled=()),
        unlabelled={hospital: data.schema.unlabelled for hospital, data in joined.items()}
        if any(data.schema.unlabelled for data in joined.values())
        else {},
        recipes={hospital: data.recipe for hospital, data in joined.items() if data.recipe},
    )


def with_patients(trains: list[Split], tests: list[Split]) -> tuple[Split, Split]:
    """Return all training and all test samples; patients, if any part has them, are numbered over all hospitals."""
    if all(part.patient is None for part in trains):
        return join_splits(trains), join_splits(tests)
    start, numbered = 0, list[Split]()
    for train, test in zip(trains, tests, strict=True):
        units = both(train.patient, test.patient)
        units = np.arange(len(train) + len(test)) if units is None else units
        whose = np.split(units + start, [len(train)])
        numbered += [replace(train, patient=whose[0]), replace(test, patient=whose[1])]
        start += int(units.max()) + 1
    return join_splits(numbered[::2]), join_splits(numbered[1::2])


# A csv by a column


def rows_by(source: DatasetSource) -> dict[str, list[int]]:
    """Return the row indices of each hospital of a csv, in the order of their names. Raises DataError."""
    from partitions.importing.table_labels import list_columns
    from partitions.importing.tables import read_lines
    from partitions.recipes.recipe import load_recipe

    path, recipe = Path(source.name), load_recipe(Path(source.recipe))
    try:
        lines = read_lines(path, recipe.file, or_utf8=True)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from None
    if source.by not in lines.columns:
        raise DataError(
            f"--by {source.by}: {path} has the columns {list_columns(lines.header)}"
        )
    rows: dict[str, list[int]] = {}
    for i, cell in enumerate(lines.columns[source.by]):
        if cell in recipe.file.gaps:
            raise DataError(
                f"{lines.where(i)} has no {source.by}, which says whose the row is; fill or drop such rows"
            )
        rows.setdefault(cell, []).append(i)
    if len(rows) > MOST_HOSPITALS or source.by in (*recipe.label, recipe.patient):
        raise DataError(
            f"--by {source.by}: name the column of hospitals; this one has {len(rows)} values"
        )
    return dict(sorted(rows.items()))


def import_by(source: DatasetSource, seed: int) -> dict[str, SiloData]:
    """Read the data of each hospital of a csv. Gaps are filled anew, from each hospital's own training part."""
    from partitions.importing.options import ImportOptions
    from partitions.importing.source import read_rows
    from partitions.recipes.recipe import load_recipe, without_fit

    recipe = without_fit(load_recipe(Path(source.recipe)), source.by)
    imported = {}
    for hospital, rows in rows_by(source).items():
        try:
            imported[hospital] = read_rows(
                Path(source.name),
                ImportOptions(recipe=recipe.model_copy(update={"seed": seed})),
                rows,
            )
        except DataError as error:
            raise DataError(f"{source.by} = {hospital}: {error}") from None
    return imported


# Fewer samples


def subsample_dataset(dataset: Dataset, count: int, seed: int) -> Dataset:
    """Draw about ``count`` samples by seed: the same share of each hospital, and of training and test.

    A patient's samples stay together, so there may be some more. At least one sample, or patient, of each remains.
    """
    n_train, total = len(dataset.train), len(dataset.train) + len(dataset.test)
    if not count or count >= total:
        return dataset
    rng = np.random.default_rng([seed, count])
    whole = dataset.groups or {"": np.arange(total)}
    patients = both(dataset.train.patient, dataset.test.patient)
    keep = np.zeros(total, bool)
    for rows in whole.values():
        for part in (rows[rows < n_train], rows[rows >= n_train]):
            keep[draw_share(part, count / total, patients, rng)] = True
    place = np.cumsum(keep) - 1
    groups = dataset.groups and {
        name: place[rows[keep[rows]]] for name, rows in dataset.groups.items()
    }
    train = select_rows(dataset.train, keep[:n_train])
    test = select_rows(dataset.test, keep[n_train:])
    return replace(dataset, train=train, test=test, groups=groups)


def draw_share(
    rows: Array, share: float, patients: Array | None, rng: np.random.Generator
) -> Array:
    """Draw a share of the rows, by whole patients."""
    if not len(rows):
        return rows
    whose = rows if patients is None else patients[rows]
    unit = np.unique(whose, return_inverse=True)[1]
    count = max(1, round(share * (unit.max() + 1)))
    return rows[np.isin(unit, rng.permutation(unit.max() + 1)[:count])]
