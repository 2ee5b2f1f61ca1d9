"""Partitions: how a data set is divided over silos, by name.

Each procedure lives in the file of the paper it comes from; here are the table of them, the settings they
take, the validation share, and the checks that every silo can train and be tested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from partitions import apple, diversifed, fedala, fedapm, iid, player
from partitions.labels import ONE_CLASS
from partitions.names import silo_name, unknown_name
from partitions.pool import Parts, Pool, hold_out
from partitions.splits import Array, Dataset, SiloData, take


@dataclass(frozen=True)
class SiloIndices:
    """One silo's samples, as indices into the data set's training samples followed by its test samples.

    ``origin`` is the name under which a data set's own silo is known (natural partition), else empty.
    """

    name: str
    train: Array
    val: Array
    test: Array
    origin: str = ""


@dataclass(frozen=True)
class NoSettings:
    """Settings of a partition that has none."""


@dataclass(frozen=True)
class Partition:
    """One entry of the table: what it is, where it comes from, and the procedure."""

    title: str
    source: str
    procedure: Callable[[Pool, Any], list[Parts]]
    settings: type = NoSettings
    validation: float = 0.15  # share of a silo's training samples
    mend: str = "or "  # what may be changed, besides silos and seed, when a silo is left with nothing
    by_class: bool = True  # whether it looks at the samples' classes


PARTITIONS: dict[str, Partition] = {
    "iid": Partition("equal silos", "none", iid.iid, by_class=False),
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
        "groups of silos share two classes each", "FedALA", fedala.pathological, fedala.Pathological
    ),
    "diversifed-pathological": Partition(
        "two random classes per silo, equal sizes",
        "DiversiFed",
        diversifed.diversifed_pathological,
        diversifed.DiversifedPathological,
    ),
    "diversifed-dirichlet": Partition(
        "each silo's class proportions by Dir(alpha), equal sizes",
        "DiversiFed",
        diversifed.diversifed_dirichlet,
        diversifed.DiversifedDirichlet,
        mend="a larger diversifed-dirichlet.alpha or ",
    ),
    "diversifed-practical": Partition(
        "three groups of silos with 80 % of their samples from the group's classes",
        "DiversiFed",
        diversifed.diversifed_practical,
        diversifed.DiversifedPractical,
    ),
    "fedapm-dirichlet": Partition(
        "each class over the silos by Dir(beta), silos may share samples",
        "FedAPM",
        fedapm.fedapm_dirichlet,
        fedapm.FedapmDirichlet,
        mend="a larger fedapm-dirichlet.beta or ",
    ),
    "fedapm-shards": Partition("two random shards per silo", "FedAPM", fedapm.fedapm_shards, fedapm.FedapmShards),
    "player-dirichlet": Partition(
        "each class over the silos by Dir(beta), no smallest silo",
        "PLayer-FL",
        player.player_dirichlet,
        player.PlayerDirichlet,
        validation=0.2,
        mend="a larger player-dirichlet.beta or ",
    ),
    "natural": Partition("the data set's own silos", "PLayer-FL", player.natural, validation=0.2, by_class=False),
}


def partition(
    dataset: Dataset, name: str, *, silos: int, seed: int, settings: Any = None, validation: float = -1.0
) -> list[SiloIndices]:
    """Divide a data set over ``silos`` silos; the same arguments give the same silos.

    ``settings``: an instance of the partition's own dataclass (``PARTITIONS[name].settings``), None = its defaults;
    ``validation``: share of each silo's training samples held out for validation, 0 = none, -1 = the partition's own.

    Raises ValueError for an unknown partition, or a silo left without samples.
    """
    if name not in PARTITIONS:
        raise unknown_name("partition", name, PARTITIONS)
    entry = PARTITIONS[name]
    classes = dataset.task in ONE_CLASS
    if entry.by_class and not classes:
        others = " or ".join(n for n, p in PARTITIONS.items() if not p.by_class)
        raise ValueError(
            f"partition = {name} divides samples by their class, and those of {dataset.name} have none "
            f"({dataset.task}): take {others}"
        )
    pool = Pool(
        dataset=dataset.name,
        labels=dataset.labels if classes else np.zeros(len(dataset.train) + len(dataset.test), np.int64),
        n_train=len(dataset.train),
        classes=dataset.classes,
        silos=silos,
        rng=np.random.default_rng(seed),
        groups=dataset.groups,
        own_test=dataset.own_test,
    )
    parts = entry.procedure(pool, entry.settings() if settings is None else settings)
    origins = list(dataset.groups) if name == "natural" and dataset.groups else [""] * silos
    share = entry.validation if validation == -1.0 else validation
    result = []
    for i, (train, test) in enumerate(parts):
        for samples, kind in ((train, "training"), (test, "test")):
            if not len(samples):
                raise ValueError(
                    f"{silo_name(i)} is left without {kind} samples by {name} over {silos} silos of "
                    f"{dataset.name} (seed {seed}); take fewer silos, {entry.mend}another seed"
                )
        # A generator per silo: its validation samples do not depend on the silos before it.
        train, val = hold_out(train, share, np.random.default_rng([seed, i]))
        result.append(SiloIndices(silo_name(i), train, val, test, origins[i]))
    return result


def silo_data(dataset: Dataset, indices: SiloIndices) -> SiloData:
    """Copy one silo's samples out of the data set."""
    return SiloData(
        train=take(dataset, indices.train),
        val=take(dataset, indices.val),
        test=take(dataset, indices.test),
        classes=dataset.classes,
        task=dataset.task,
        vocabulary=dataset.vocabulary,
    )


def partition_settings() -> dict[str, type]:
    """Per partition, the frozen dataclass of its own settings.

    A field ``min_test`` of ``dirichlet`` is the key ``dirichlet.min-test``; its metadata may hold ``symbol`` (the
    paper's), ``help``, and the range, which whoever fills it checks (``strategies/base/settings.py``).
    """
    return {name: entry.settings for name, entry in PARTITIONS.items()}
