"""IID partition: every silo draws from the same distribution."""

from __future__ import annotations

import numpy as np

from partitions.schemes.pool import Parts, Pool


def iid(pool: Pool, settings: object) -> list[Parts]:
    """Shuffle the training and the test samples, and divide each evenly (sizes differ by one at most)."""
    train = pool.rng.permutation(pool.n_train)
    test = pool.rng.permutation(np.arange(pool.n_train, len(pool.labels)))
    return list(zip(np.array_split(train, pool.silos), np.array_split(test, pool.silos), strict=True))
