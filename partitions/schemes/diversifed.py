"""DiversiFed's three partitions ("The Diversity Bonus", arXiv 2407.15464, experiments; sampling after the
same group's Fling library, since DiversiFed has no public code).

Every silo has the same number of samples: 500 for training (300 for Fashion-MNIST) and 100 for testing, with the same
class proportions in both. Training samples come from the training file, test samples from the test file. A silo draws
without replacement, but **different silos may hold the same sample**. Only a class with too few samples is drawn with
replacement. The share for validation is taken from the 500 (``validation=0`` keeps the paper's 500).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitions.common.errors import DataError
from partitions.common.settings import setting
from partitions.schemes.pool import Parts, Pool, gather
from partitions.splits import Array


@dataclass(frozen=True)
class DiversifedPathological:
    """Settings of ``diversifed-pathological``, and of the other two."""

    train_size: int = setting(
        0, "training samples per silo; 0 = 500, 300 for fashion-mnist", minimum=0, maximum=10**7
    )
    test_size: int = setting(100, "test samples per silo", minimum=1, maximum=10**7)


@dataclass(frozen=True)
class DiversifedDirichlet(DiversifedPathological):
    """Settings of ``diversifed-dirichlet``."""

    alpha: float = setting(0.5, "concentration; small = skewed", symbol="α", above=0)


@dataclass(frozen=True)
class DiversifedPractical(DiversifedPathological):
    """Settings of ``diversifed-practical``."""

    dominant: float = setting(
        0.8, "share of a silo's samples from its group's classes", minimum=0, maximum=1
    )


def diversifed_pathological(pool: Pool, settings: DiversifedPathological) -> list[Parts]:
    """Give each silo two random classes, with the same number of samples of each."""
    silos = []
    for _ in range(pool.silos):
        labels = pool.rng.choice(pool.classes, size=min(2, pool.classes), replace=False)
        proportions = np.zeros(pool.classes)
        proportions[labels] = 1 / len(labels)
        silos.append(draw_silo(pool, settings, proportions))
    return silos


def diversifed_dirichlet(pool: Pool, settings: DiversifedDirichlet) -> list[Parts]:
    """Draw class proportions q ~ Dir(alpha, ..., alpha) over the classes for each silo.

    The paper writes Dir(alpha * p) with p the prior over classes. Fling's sampler has alpha for each class, and only
    that fits the paper's own figures. With p = (1/C, ..., 1/C), a CIFAR-10 silo at alpha = 0.5 would hold little more
    than one class. Training alone could then not end at 55 %, far below the 83 % of two-class silos.
    """
    proportions = pool.rng.dirichlet(np.full(pool.classes, settings.alpha), size=pool.silos)
    return [draw_silo(pool, settings, q) for q in proportions]


def diversifed_practical(pool: Pool, settings: DiversifedPractical) -> list[Parts]:
    """Make three groups of silos (6, 6 and 8 of 20); 80 % of a silo's samples are of its group's classes.

    With the paper's 9 classes the groups' classes are {0,1,2}, {3,4,5} and {6,7,8}; other numbers of classes and of
    silos are divided in the same proportions. Within its 80 % and its 20 % a silo draws uniformly from all samples of
    these classes.
    """
    if pool.silos < 3 or pool.classes < 3:
        raise DataError(
            "diversifed-practical makes three groups: it needs 3 silos and 3 classes or more, "
            f"not {pool.silos} silos and {pool.classes} classes"
        )
    classes = np.array_split(np.arange(pool.classes), 3)
    ends = [max(1, round(0.3 * pool.silos)), max(2, round(0.6 * pool.silos))]  # 6 and 12 of 20
    silos = []
    for silo in range(pool.silos):
        dominant = np.isin(pool.labels, classes[int(np.searchsorted(ends, silo, side="right"))])
        train, test = np.split(np.arange(len(pool.labels)), [pool.n_train])
        parts = []
        for samples, size in ((train, train_size(pool, settings)), (test, settings.test_size)):
            most, chosen = int(size * settings.dominant + 0.5), dominant[samples]
            inside = draw_samples(samples[chosen], most, pool.rng)
            parts.append(
                gather([inside, draw_samples(samples[~chosen], size - most, pool.rng)])
            )
        silos.append((parts[0], parts[1]))
    return silos


def train_size(pool: Pool, settings: DiversifedPathological) -> int:
    """Return the training samples per silo: the setting, or the paper's number for this data set."""
    return settings.train_size or (300 if pool.dataset == "fashion-mnist" else 500)


def draw_silo(pool: Pool, settings: DiversifedPathological, proportions: Array) -> Parts:
    """Draw one silo's training and test samples in these class proportions."""
    train, test = (
        gather(
            [
                draw_samples(of_class(label), count, pool.rng)
                for label, count in enumerate(class_counts(proportions, size))
            ]
        )
        for of_class, size in (
            (pool.train_of_class, train_size(pool, settings)),
            (pool.test_of_class, settings.test_size),
        )
    )
    return train, test


def class_counts(proportions: Array, size: int) -> list[int]:
    """Return whole numbers near ``size * proportions`` that sum to ``size``.

    Each is rounded half up, but not above the rest that is left; the last class with a share takes the remainder.
    """
    counts = [0] * len(proportions)
    last = int(np.flatnonzero(proportions)[-1])
    for label in range(last):
        counts[label] = min(int(size * proportions[label] + 0.5), size - sum(counts))
    counts[last] = size - sum(counts)
    return counts


def draw_samples(samples: Array, count: int, rng: np.random.Generator) -> Array:
    """Draw ``count`` of these indices, with replacement only if there are too few."""
    if count and not len(samples):
        return np.empty(0, np.int64)
    return rng.choice(samples, size=count, replace=count > len(samples))
