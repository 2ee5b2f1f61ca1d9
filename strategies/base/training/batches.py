"""A silo's shuffled mini-batches; those with differential privacy are in ``strategies/base/privacy/training.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from models.augmentation import Augmentation
from models.training import batches, generator, seed_torch
from partitions.common.errors import UserError
from strategies.base.settings import Common
from strategies.base.training.silo import Silo


def shuffled_batches(
    silo: Silo,
    common: Common,
    server_round: int,
    epochs: int,
    purpose: str,
    augment: Augmentation | None,
    until: Callable[[], bool] | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield mini-batches (x, y) of the training split, in an order set by seed, silo, round and purpose only.

    If ``until()`` is true after an epoch, the iteration ends.
    """
    rng = generator(common.seed, silo.name, server_round, purpose)
    seed_torch(rng)
    for epoch in range(epochs):
        taken = (silo.train.take(index) for index in shuffled(silo, common, len(silo.train), rng))
        if augment is None:
            yield from taken
        else:
            own = generator(common.seed, "augment", silo.name, server_round, purpose, epoch)
            yield from augment.changed(taken, len(silo.train), own)
        if until is not None and until():
            return


def shuffled(silo: Silo, common: Common, n: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield one epoch's batches of ``n`` training samples, as indices; all batches of all methods are drawn here.

    A last batch with fewer samples than run and silo allow (``min-batch-size``) joins the one before. Raises UserError
    if ``n`` itself is smaller.
    """
    least = max(common.min_batch_size, silo.min_batch_size)
    if n < least:
        raise UserError(f"{silo.name}: min-batch-size = {least}, and there are {n} samples to train with")
    least = max(least, 2) if silo.model.has_batch_norm else least  # BatchNorm cannot train on one sample
    return batches(n, common.batch_size, 1, rng, least=least, device=silo.train.y.device)
