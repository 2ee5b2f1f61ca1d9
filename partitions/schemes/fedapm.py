"""FedAPM's two label-skewed partitions (KDD 2025, arXiv 2506.04672; procedures as in the authors' public
code).

Both pool the data set's training and test file; each silo's samples are split at random 80 / 20 into train
and test.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitions.common.settings import setting
from partitions.schemes.pool import Parts, Pool, gather, hold_out
from partitions.splits import Array

TEST_SHARE = 0.2


@dataclass(frozen=True)
class FedapmDirichlet:
    """Settings of ``fedapm-dirichlet``."""

    beta: float = setting(0.5, "concentration; small = skewed", symbol="β", above=0)


@dataclass(frozen=True)
class FedapmShards:
    """Settings of ``fedapm-shards``."""

    shards_per_silo: int = setting(2, "shards that each silo draws", symbol="q", minimum=1)


def fedapm_dirichlet(pool: Pool, settings: FedapmDirichlet) -> list[Parts]:
    """Draw per class proportions over the silos from Dir(beta, ..., beta); each silo then draws independently.

    A silo draws without replacement, but from the whole class. So **silos may share samples**, and a test sample of one
    silo may be a training sample of another. That is the published procedure; `dirichlet` has no such overlap.
    """
    silos: list[list[Array]] = [[] for _ in range(pool.silos)]
    for label in range(pool.classes):
        samples = pool.of_class(label)
        proportions = pool.rng.dirichlet(np.full(pool.silos, settings.beta))
        for silo, count in enumerate((proportions * len(samples)).astype(int)):
            silos[silo].append(pool.rng.choice(samples, size=count, replace=False))
    return [hold_out(gather(pieces), TEST_SHARE, pool.rng) for pieces in silos]


def fedapm_shards(pool: Pool, settings: FedapmShards) -> list[Parts]:
    """Cut every class into ceil(q N / C) equal shards (4 for q = 2, 20 silos, 10 classes); each silo draws q.

    No sample is shared. Shards that no silo draws are left out.
    """
    q = settings.shards_per_silo
    per_class = -(-q * pool.silos // pool.classes)
    shards = [
        shard
        for label in range(pool.classes)
        for shard in np.array_split(pool.of_class(label), per_class)
    ]
    drawn = pool.rng.permutation(len(shards))[: q * pool.silos].reshape(pool.silos, q)
    return [hold_out(gather([shards[i] for i in row]), TEST_SHARE, pool.rng) for row in drawn]
