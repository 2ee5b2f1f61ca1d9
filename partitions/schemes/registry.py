"""Partitions of a data set over silos, by name.

Each procedure is in the module of its paper. This module has their table, their settings, the validation share, and
the checks that every silo has samples for training and testing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import silo_name, unknown_name
from partitions.labels import ONE_CLASS
from partitions.patients import most_frequent, rows_of_patients
from partitions.schemes import apple, diversifed, fedala, fedapm, player
from partitions.schemes.pool import Parts, Pool, gather, hold_out, iid
from partitions.splits import Array, Arrays, Dataset, SiloData, take


@dataclass(frozen=True)
class SiloIndices:
    """One silo's samples, as indices into the data set's training samples followed by its test samples.

    ``origin``: the name of a data set's own silo (natural partition), else empty.
    """

    name: str
    train: Array
    val: Array
    test: Array
    origin: str


@dataclass(frozen=True)
class NoSchemeSettings:
    """Settings of a partition without settings."""


@dataclass(frozen=True)
class Partition:
    """One entry of the table: title, source and procedure of a partition."""

    title: str
    source: str
    procedure: Callable[[Pool, Any], list[Parts]]
    settings: type = NoSchemeSettings
    validation: float = 0.15  # share of a silo's training samples
    mend: str = "or "  # settings to change, besides silos and seed, where a silo has no samples
    by_class: bool = True  # whether it uses the samples' classes
    shares: bool = False  # whether several silos may hold the same sample


PARTITIONS: dict[str, Partition] = {
    "iid": Partition("equal silos", "none", iid, by_class=False),
    "apple-pathological": Partition(
        "two random classes per silo, a random share of each",
        "APPLE",
        apple.apple_pathological,
        apple.ApplePathological,
    ),
    "apple-practical": Partition(
        "per class one silo has 80 %, one 10 %, the others share 10 %",
        "APPLE",
        apple.apple_practical,
        apple.ApplePractical,
    ),
    "dirichlet": Partition(
        "each class over the silos by Dir(beta), with a smallest silo",
        "FedALA",
        fedala.dirichlet,
        fedala.Dirichlet,
        mend="a larger dirichlet.beta or ",
    ),
    "pathological": Partition(
        "groups of silos share two classes each",
        "FedALA",
        fedala.pathological,
        fedala.Pathological,
    ),
    "diversifed-pathological": Partition(
        "two random classes per silo, equal sizes",
        "DiversiFed",
        diversifed.diversifed_pathological,
        diversifed.DiversifedPathological,
        shares=True,
    ),
    "diversifed-dirichlet": Partition(
        "each silo's class proportions by Dir(alpha), equal sizes",
        "DiversiFed",
        diversifed.diversifed_dirichlet,
        diversifed.DiversifedDirichlet,
        mend="a larger diversifed-dirichlet.alpha or ",
        shares=True,
    ),
    "diversifed-practical": Partition(
        "three groups of silos with 80 % of their samples from the group's classes",
        "DiversiFed",
        diversifed.diversifed_practical,
        diversifed.DiversifedPractical,
        shares=True,
    ),
    "fedapm-dirichlet": Partition(
        "each class over the silos by Dir(beta), silos may share samples",
        "FedAPM",
        fedapm.fedapm_dirichlet,
        fedapm.FedapmDirichlet,
        mend="a larger fedapm-dirichlet.beta or ",
        shares=True,
    ),
    "fedapm-shards": Partition(
        "two random shards per silo", "FedAPM", fedapm.fedapm_shards, fedapm.FedapmShards
    ),
    "player-dirichlet": Partition(
        "each class over the silos by Dir(beta), no smallest silo",
        "PLayer-FL",
        player.player_dirichlet,
        player.PlayerDirichlet,
        validation=0.2,
        mend="a larger player-dirichlet.beta or ",
    ),
    "natural": Partition(
        "the data set's own silos",
        "PLayer-FL",
        player.natural,
        player.Natural,
        validation=0.2,
        by_class=False,
    ),
}


def partition(
    dataset: Dataset,
    name: str,
    *,
    silos: int,
    seed: int,
    settings: Any = None,
    validation: float = -1.0,
) -> list[SiloIndices]:
    """Divide a data set over ``silos`` silos; the same arguments give the same silos.

    ``settings``: an instance of the partition's own dataclass (``PARTITIONS[name].settings``), None = its defaults;
    ``validation``: share of each silo's training samples held out for validation, 0 = none, -1 = the partition's own.

    Where the data set has patients, these are divided instead of samples, each with its most frequent class. All
    samples of a patient are in one silo, and there in one part. Sizes and shares are then of patients.

    Raises UserError for an unknown partition. Raises DataError for a silo without samples, and where the partition
    would put a patient into several silos.
    """
    if name not in PARTITIONS:
        raise unknown_name("partition", name, PARTITIONS)
    entry = PARTITIONS[name]
    check_fits(dataset, name)
    patients = rows_of_patients(dataset)
    units, rng = units_of(dataset, patients), np.random.default_rng(seed)
    pool = Pool(dataset.name, dataset.classes, silos, rng, *units, dataset.own_test)
    parts = entry.procedure(pool, entry.settings() if settings is None else settings)
    origins = list(dataset.groups) if name == "natural" and dataset.groups else [""] * silos
    share = entry.validation if validation == -1.0 else validation
    result = []
    for i, (train, test) in enumerate(parts):
        if not len(train) or not len(test):
            kind = "test" if len(train) else "training"
            raise DataError(
                f"{origins[i] or silo_name(i)} is left without {kind} samples by {name} over {silos} silos of "
                f"{dataset.name} (seed {seed}); take fewer silos, {entry.mend}another seed"
            )
        # A generator per silo, so that its validation samples do not depend on other silos.
        train, val = hold_out(train, share, np.random.default_rng([seed, i]))
        if patients:
            train, val, test = (
                gather([patients[unit] for unit in units]) for units in (train, val, test)
            )
        result.append(SiloIndices(silo_name(i), train, val, test, origins[i]))
    return result


def check_fits(dataset: Dataset, name: str) -> None:
    """Raise DataError where a partition needs classes that the samples do not have, or would divide patients."""
    entry = PARTITIONS[name]
    if dataset.unlabelled and name != "natural":
        raise DataError(
            f"partition = {name} mixes the hospitals of {dataset.name}, which label different things: take natural"
        )
    if entry.by_class and dataset.task not in ONE_CLASS:
        others = " or ".join(n for n, p in PARTITIONS.items() if not p.by_class)
        raise DataError(
            f"partition = {name} divides samples by their class, and those of {dataset.name} have none "
            f"({dataset.task}): take {others}"
        )
    if entry.shares and dataset.train.patient is not None:
        others = ", ".join(n for n, p in PARTITIONS.items() if not p.shares and n != "natural")
        raise DataError(
            f"partition = {name} may give a sample to several silos, and {dataset.name} names patients: "
            f"take one that keeps each patient in one silo ({others})"
        )


def units_of(
    dataset: Dataset, patients: list[Array] | None
) -> tuple[Array, int, Arrays | None]:
    """Return the class of each sample or patient, int64 (n,), 0 without classes; the number for training; own silos.

    Of the latter each has the indices of its samples or, in a division by patient, of its patients.
    """
    n_train, groups = len(dataset.train), dataset.groups
    labels = np.zeros(n_train + len(dataset.test), np.int64)
    if dataset.task in ONE_CLASS:
        labels = dataset.labels
    if patients is None:
        return labels, n_train, groups
    unit = np.empty(len(labels), np.int64)
    for i, rows in enumerate(patients):
        unit[rows] = i
    groups = groups and {name: np.unique(unit[rows]) for name, rows in groups.items()}
    first = sum(int(rows[0]) < n_train for rows in patients)
    return most_frequent(labels, patients), first, groups


def silo_data(dataset: Dataset, indices: SiloIndices) -> SiloData:
    """Copy one silo's samples out of the data set."""
    unlabelled = dataset.unlabelled.get(indices.origin, dataset.schema.unlabelled)
    return SiloData(
        take(dataset, indices.train),
        take(dataset, indices.val),
        take(dataset, indices.test),
        dataset.classes,
        dataset.task,
        dataset.vocabulary,
        replace(dataset.schema, unlabelled=unlabelled),
        dataset.recipes.get(indices.origin, dataset.recipe),
    )


def partition_settings() -> dict[str, type]:
    """Return for each partition the frozen dataclass of its own settings.

    The field ``min_test`` of ``dirichlet`` is the key ``dirichlet.min-test``. A field's metadata may hold ``symbol``
    (the paper's), ``help``, and the range, which ``partitions/common/settings.py`` checks.
    """
    return {name: entry.settings for name, entry in PARTITIONS.items()}
