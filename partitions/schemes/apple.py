"""APPLE's two partitions (Luo and Wu, IJCAI 2022, section 5; procedures as in the authors' public code).

Both fix a matrix of class fractions, silos x classes, and apply it to the training file and to the test file: silo i
gets floor(fraction * n_class) samples of each; the remainder of the rounding is dropped. No sample is shared. The paper
has 12 silos; any other number is our generalisation, equal to the paper's at 12.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitions.common.settings import setting
from partitions.schemes.pool import Parts, Pool, gather
from partitions.splits import Array

RESPLIT = (
    "pool train and test and split them 80 / 20 per class, as APPLE did with its MedMNIST sets"
)


@dataclass(frozen=True)
class ApplePathological:
    """Settings of ``apple-pathological``."""

    classes_per_silo: int = setting(2, "classes that each silo holds", minimum=1)
    resplit: bool = setting(False, RESPLIT)


@dataclass(frozen=True)
class ApplePractical:
    """Settings of ``apple-practical``."""

    resplit: bool = setting(False, RESPLIT)


def apple_pathological(pool: Pool, settings: ApplePathological) -> list[Parts]:
    """Give each silo two random classes, and a random share of each.

    Random permutations of the classes are concatenated and cut to 2 entries per silo; silo k has entries 2k and 2k+1.
    Where a pair spans two permutations, both entries may be the same class, and that silo has one class. Every owned
    class is distributed completely: each owner draws u ~ U(0, 1), normalised to sum 1.
    """
    entries = settings.classes_per_silo * pool.silos
    permutations = [
        pool.rng.permutation(pool.classes) for _ in range(entries // pool.classes + 1)
    ]
    owned = np.concatenate(permutations)[:entries].reshape(
        pool.silos, settings.classes_per_silo
    )
    fractions = np.zeros((pool.silos, pool.classes))
    for label in range(pool.classes):
        owners = np.flatnonzero((owned == label).any(axis=1))
        draws = pool.rng.random(len(owners))
        fractions[owners, label] = draws / draws.sum()
    return deal(pool, fractions, settings.resplit)


def apple_practical(pool: Pool, settings: ApplePractical) -> list[Parts]:
    """Give each silo every class; per class, one random silo has 80 %, another 10 %, each other one 1 %.

    For N silos the other N - 2 share the remaining 10 % equally, which is 1 % each at the paper's N = 12.
    Two silos share a class 1 : 8 (10 % and 80 %, scaled to sum 1); one silo has all.
    """
    fractions = np.stack(
        [pool.rng.permutation(practical_shares(pool.silos)) for _ in range(pool.classes)],
        axis=1,
    )
    return deal(pool, fractions, settings.resplit)


def practical_shares(silos: int) -> Array:
    """Return the shares of one class over the silos, before they are permuted; they sum to 1."""
    small = [0.1 / max(silos - 2, 1)] * (silos - 2)
    shares = np.array([*small, 0.1, 0.8][-silos:])
    return np.asarray(shares / shares.sum())


def deal(pool: Pool, fractions: Array, resplit: bool) -> list[Parts]:
    """Give silo i floor(fractions[i, c] * n_c) training and test samples of class c."""
    silos: list[tuple[list[Array], list[Array]]] = [([], []) for _ in range(pool.silos)]
    for label in range(pool.classes):
        of_class = [pool.train_of_class(label), pool.test_of_class(label)]
        if resplit:
            both = pool.rng.permutation(np.concatenate(of_class))
            of_class = np.split(both, [round(0.8 * len(both))])
        for part, samples in enumerate(of_class):
            # Without the small term, floor(0.29 * 100) is 28 in floating point.
            counts = np.floor(fractions[:, label] * len(samples) + 1e-9).astype(int)
            for silo, end in enumerate(np.cumsum(counts)):
                silos[silo][part].append(samples[end - counts[silo] : end])
    return [(gather(train), gather(test)) for train, test in silos]
