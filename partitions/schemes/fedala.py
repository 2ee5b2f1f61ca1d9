"""FedALA's two partitions (Zhang et al., AAAI 2023, section 5.1; procedures as in the authors' public code).

Both pool the data set's training and test file, and give every silo its own samples (none is shared). Each silo's
samples are then split at random into 75 % for training and 25 % for testing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitions.common.errors import DataError
from partitions.common.settings import setting
from partitions.schemes.pool import Parts, Pool, gather, hold_out
from partitions.splits import Array

TEST_SHARE = 0.25
BATCH = 10  # the paper's batch size, from which its smallest silo follows
DRAWS = 10_000  # draws before `dirichlet` gives up


@dataclass(frozen=True)
class Dirichlet:
    """Settings of ``dirichlet``."""

    beta: float = setting(0.5, "concentration; small = skewed", symbol="β", above=0)
    least: int = setting(
        0,
        "samples of the smallest silo, train and test; 0 = min(40, n / silos / 2)",
        minimum=0,
        maximum=10**7,
    )
    min_test: int = setting(
        0, "test samples that each silo has at least", minimum=0, maximum=10**7
    )


@dataclass(frozen=True)
class Pathological:
    """Settings of ``pathological``."""

    classes_per_silo: int = setting(2, "classes that each silo may hold", minimum=1)
    balanced: bool = setting(False, "silos share a class equally instead of at random")


def paper_minimum(samples: int, silos: int) -> int:
    """Return the samples of the smallest silo in the paper's code: min(B / (1 - 0.75), n / N / 2), rounded down."""
    return int(min(BATCH / TEST_SHARE, samples / silos / 2))


def dirichlet(pool: Pool, settings: Dirichlet) -> list[Parts]:
    """Draw per class proportions over the silos from Dir(beta, ..., beta), until the smallest silo is large enough.

    A silo that already holds n / N samples gets nothing of the next class, and the others' proportions are scaled up.

    Raises DataError where no draw gives every silo enough samples.
    """
    least = settings.least or paper_minimum(len(pool.labels), pool.silos)
    # A quarter of this, rounded up, is min_test
    least = max(least, (settings.min_test - 1) * 4 + 1)
    by_class = [pool.of_class(label) for label in range(pool.classes)]
    for _ in range(DRAWS):
        cuts = draw_cuts(
            [len(samples) for samples in by_class], pool.silos, settings.beta, pool.rng
        )
        if cuts is not None and np.diff(cuts, axis=1).sum(axis=0).min() >= least:
            break
    else:
        raise DataError(
            f"dirichlet: no draw in {DRAWS} gives each of {pool.silos} silos {least} samples of "
            f"{pool.dataset}; take fewer silos, a larger dirichlet.beta than {settings.beta:g}, "
            "or a smaller dirichlet.least"
        )
    silos = [
        gather([by_class[c][cut[i] : cut[i + 1]] for c, cut in enumerate(cuts)])
        for i in range(pool.silos)
    ]
    return [hold_out(samples, TEST_SHARE, pool.rng) for samples in silos]


def draw_cuts(
    class_sizes: list[int], silos: int, beta: float, rng: np.random.Generator
) -> Array | None:
    """Make one draw: return the cuts of each class, int (classes, silos + 1); None if no silo may take a class."""
    cuts = np.zeros((len(class_sizes), silos + 1), int)
    held = np.zeros(silos, int)
    for c, size in enumerate(class_sizes):
        proportions = rng.dirichlet(np.full(silos, beta)) * (held < sum(class_sizes) / silos)
        if not proportions.sum() > 0:
            return None
        cuts[c, 1:] = np.cumsum(proportions / proportions.sum()) * size
        cuts[c, -1] = size
        held += np.diff(cuts[c])
    return cuts


def pathological(pool: Pool, settings: Pathological) -> list[Parts]:
    """Give each silo a few classes: class by class, the first silos with room for one more class share that class.

    With N silos, C classes and a budget of b classes per silo, a class goes to N * b / C silos (20 silos, 10 classes,
    b = 2: silos 0-3 share classes 0 and 1, silos 4-7 classes 2 and 3, ...). Where that is no whole number, the paper's
    code rounds up, and no silo is left for the last classes. Here the N * b places are divided as evenly as possible.

    Sizes are random whole numbers from [max(m / 10, least / C), m) with m = n_class / silos of that class; the last
    silo takes the rest. With ``balanced`` they are equal.

    Raises DataError if the silos together have room for fewer classes than there are.
    """
    budget, places = settings.classes_per_silo, settings.classes_per_silo * pool.silos
    if budget > pool.classes:
        raise DataError(
            f"pathological.classes-per-silo is {budget}, but {pool.dataset} has only {pool.classes} classes"
        )
    if places < pool.classes:
        raise DataError(
            f"pathological: {pool.silos} silos with {budget} classes each cannot hold the {pool.classes} "
            f"classes of {pool.dataset}; take {-(-pool.classes // budget)} silos or more, or "
            f"pathological.classes-per-silo={-(-pool.classes // pool.silos)}"
        )
    room = np.full(pool.silos, budget)
    silos: list[list[Array]] = [[] for _ in range(pool.silos)]
    for label in range(pool.classes):
        wanted = (label + 1) * places // pool.classes - label * places // pool.classes
        owners = np.flatnonzero(room)[:wanted]
        room[owners] -= 1
        samples = pool.of_class(label)
        mean = len(samples) / len(owners)
        low = max(mean / 10, paper_minimum(len(pool.labels), pool.silos) / pool.classes)
        if settings.balanced or int(low) >= int(mean):
            sizes = np.full(len(owners) - 1, int(mean))
        else:
            sizes = pool.rng.integers(int(low), int(mean), len(owners) - 1)
        for silo, piece in zip(owners, np.split(samples, np.cumsum(sizes)), strict=True):
            silos[silo].append(piece)
    return [hold_out(gather(pieces), TEST_SHARE, pool.rng) for pieces in silos]
