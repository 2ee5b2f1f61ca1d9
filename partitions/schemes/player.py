"""PLayer-FL's partitions (MLSys 2026, arXiv 2502.08829; procedures as in the authors' public code).

Each silo's samples are split at random: 20 % for testing, and 20 % of the rest for validation (64 / 16 / 20).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitions.common.errors import DataError
from partitions.common.settings import setting
from partitions.schemes.pool import Parts, Pool, gather, hold_out
from partitions.splits import Array

TEST_SHARE = 0.2
SHOWN = 6  # silos of a data set that an error names
# Per silo, five silos
PAPER_SAMPLES = {"fashion-mnist": 2000, "emnist": 3000, "cifar10": 10_000}


@dataclass(frozen=True)
class PlayerDirichlet:
    """Settings of ``player-dirichlet``."""

    beta: float = setting(0.5, "concentration; small = skewed", symbol="β", above=0)
    samples_per_silo: int = setting(
        0,
        "mean samples of a silo; 0 = as in the paper, elsewhere all there are",
        minimum=0,
        maximum=10**7,
    )


def player_dirichlet(pool: Pool, settings: PlayerDirichlet) -> list[Parts]:
    """Divide the first N * samples_per_silo training samples: each class goes to the silos by Dir(beta, ..., beta).

    Counts are rounded down and the last silo takes the remainder of each class; no silo has a minimum size,
    and no sample is shared. The data set's test file is not used.
    """
    most = pool.n_train // pool.silos
    size = settings.samples_per_silo or min(PAPER_SAMPLES.get(pool.dataset, most), most)
    if size > most:
        raise DataError(
            f"player-dirichlet.samples-per-silo is {size}, but {pool.dataset} has {pool.n_train} training "
            f"samples: at most {most} for each of {pool.silos} silos"
        )
    silos: list[list[Array]] = [[] for _ in range(pool.silos)]
    first = pool.labels[: size * pool.silos]
    for label in range(pool.classes):
        samples = pool.rng.permutation(np.flatnonzero(first == label))
        shares = pool.rng.dirichlet(np.full(pool.silos, settings.beta))
        counts = (shares * len(samples)).astype(int)
        for silo, piece in enumerate(np.split(samples, np.cumsum(counts)[:-1])):
            silos[silo].append(piece)
    return [hold_out(gather(pieces), TEST_SHARE, pool.rng) for pieces in silos]


@dataclass(frozen=True)
class Natural:
    """Settings of ``natural``."""

    folds: int = setting(
        0,
        "cross-validation: parts of each silo, one of which is its test part; 0: a fifth, or the data set's own",
        minimum=0,
        maximum=1000,
    )
    fold: int = setting(0, "which of the folds is the test part, from 0", minimum=0)
    most: int = setting(
        0, "most training samples, or patients, of a silo, with validation; 0: all", minimum=0
    )


def natural(pool: Pool, settings: Natural) -> list[Parts]:
    """Return the data set's own silos (heart-disease: four hospitals), each split 64 / 16 / 20.

    A data set with own test parts (tcga-brca) keeps them. With ``folds`` the seed orders each silo's samples; the parts
    of one seed hold each sample once. ``most`` takes the first of the others, so that few are a part of many.

    Raises DataError for a data set without silos, or with another number of silos than requested, and for a fold that
    there is not.
    """
    if pool.groups is None:
        raise DataError(
            f"natural: {pool.dataset} does not come with silos of its own (heart-disease does); "
            "take another partition, for example dirichlet"
        )
    if pool.silos != len(pool.groups):
        names = (
            [*pool.groups] if len(pool.groups) <= SHOWN else [*[*pool.groups][:SHOWN], "..."]
        )
        raise DataError(
            f"natural: {pool.dataset} comes with {len(pool.groups)} silos ({', '.join(names)}), not "
            f"{pool.silos}; set silos={len(pool.groups)}"
        )
    if settings.folds:
        if settings.folds < 2 or settings.fold >= settings.folds:
            raise DataError(
                f"natural.fold = {settings.fold}: natural.folds = {settings.folds} needs at least 2 parts, and has the "
                "parts from 0 to one less"
            )
        return [fold_of(samples, settings, pool.rng) for samples in pool.groups.values()]
    if settings.fold or settings.most:
        raise DataError("natural.fold and natural.most need natural.folds")
    if pool.own_test:
        return [
            (rows[rows < pool.n_train], rows[rows >= pool.n_train])
            for rows in pool.groups.values()
        ]
    return [hold_out(samples, TEST_SHARE, pool.rng) for samples in pool.groups.values()]


def fold_of(samples: Array, settings: Natural, rng: np.random.Generator) -> Parts:
    """Return a silo's training samples and its fold."""
    parts = np.array_split(rng.permutation(samples), settings.folds)
    test = parts.pop(settings.fold)
    train = gather(parts)
    return np.sort(train[: settings.most or len(train)]), np.sort(test)
