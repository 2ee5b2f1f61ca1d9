"""What a method may use of its silo: data, network, batches; and the check of what the silo received.

A silo's shuffled mini-batches; those with differential privacy are in ``privacy.py``.

The check of a received model in a silo that limits its server's steps.

A model crafted to read records (a layer that imprints them, an oracle for one patient's label) is far from every model
of the run. So the first received model must be the seed's, and each later one near the silo's own last one. With
differential privacy the own one may have no noise, and a refusal would reveal its distance: each later model must be
near the last *received* one, which the server has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from models.augmentation import Augmentation
from models.flat import FlatModel, gather
from models.samples import Samples
from models.tasks import MULTICLASS, Task
from models.tasks.patches import Patches
from models.training import batches, generator, seed_torch
from partitions.common.errors import UserError
from strategies.base.settings import Common


@dataclass(frozen=True)
class Silo:
    """The part of a silo that a method may use: its data on its device, one working model, seeded initial models."""

    name: str
    train: Samples
    val: Samples
    test: Samples
    model: FlatModel
    # Purpose -> initial vector (Σ,), the same in every process
    initial: Callable[[str], Tensor]
    task: Task = MULTICLASS
    classes: int = 0  # the network's outputs; 0: as its last layer has
    # Metrics of the personal model that this process evaluated last on these data, by run, round and splits.
    known: dict[Hashable, dict[str, float]] = field(default_factory=dict)
    augment: Augmentation | None = None  # augmentation of its training images
    patches: Patches | None = None  # the patches of them that it trains on
    min_batch_size: int = 1  # the site's rule: the fewest samples of a training batch
    # The site's rule: the largest share of a model that one step may replace
    max_decay: float = math.inf
    # The site's rule: largest distance of a received model from its last, in lengths of it
    max_step: float = math.inf
    # The site's rule: the fewest patients behind the mean of a class; the patient of each training sample (n,)
    min_cell: int = 1
    units: Any = None
    # Returns mean and deviation of each channel (2, C) as this silo releases them; None: as they are
    moments: Callable[[], Tensor] | None = None
    group: Any = None  # of its processes, if it trains on several devices (models/parallel)
    inputs: str = ""  # in an evaluation: the digest of the statistics and of the order of columns and labels


def epochs_of(
    silo: Silo,
    common: Common,
    server_round: int,
    epochs: int,
    purpose: str,
    augment: Augmentation | None,
) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
    """Yield the mini-batches (x, y) of each epoch, in an order set by seed, silo, round and purpose only."""
    rng = generator(common.seed, silo.name, server_round, purpose)
    seed_torch(rng)
    patches = silo.patches
    passes = patches.passes if patches else 1

    def draw_pass(number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of one pass over the samples."""
        of = (silo.name, server_round, purpose, number)
        draws = generator(common.seed, "draws", *of)
        order = shuffle_batches(silo, common, len(silo.train), rng, draw_weights(silo, common))
        if patches is None:
            taken = silo.train.batches(order, draws.initial_seed())
        else:
            place = partial(patches.place, rng=generator(common.seed, "patch", *of))
            taken = silo.train.cuts(order, place, draws.initial_seed())
        if augment is None:
            return taken
        return augment.change_batches(
            taken, len(silo.train), generator(common.seed, "augment", *of)
        )

    for epoch in range(epochs):
        numbers = range(epoch * passes, (epoch + 1) * passes)
        yield chain.from_iterable(map(draw_pass, numbers))


def shuffled_batches(
    silo: Silo,
    common: Common,
    server_round: int,
    epochs: int,
    purpose: str,
    augment: Augmentation | None,
    until: Callable[[], bool] | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield mini-batches (x, y) of the training split. If ``until()`` is true after an epoch, the iteration ends."""
    for epoch in epochs_of(silo, common, server_round, epochs, purpose, augment):
        yield from epoch
        if until is not None and until():
            return


def class_weights(silo: Silo) -> Tensor:
    """Return n / (C n_c) of each class (C,), on the device.

    A class of fewer samples than the site's min-batch-size counts as so many. Else the loss, or a batch, could be
    little more than one patient's.
    """
    classes = silo.classes or silo.model.layout.classes
    counts = torch.bincount(silo.train.y, minlength=classes)
    return len(silo.train) / (classes * counts.clamp(min=silo.min_batch_size))


def draw_weights(silo: Silo, common: Common) -> Tensor | None:
    """Return the weight (n,) with which a sample is drawn; None: each comes once in an epoch."""
    if common.sampler == "shuffled":
        return None
    return class_weights(silo)[silo.train.y].double().cpu()


def smallest_batch(silo: Silo, common: Common) -> int:
    """Return the fewest samples of a batch, for run, site and batch normalisation, which cannot train on one."""
    return max(common.min_batch_size, silo.min_batch_size, 1 + silo.model.has_batch_norm)


def least_samples(silo: Silo, common: Common, n: int) -> int:
    """Return the fewest samples of what leaves, for run and site. Raises UserError if ``n``, all of them, are fewer."""
    least = max(common.min_batch_size, silo.min_batch_size)
    if n < least:
        raise UserError(
            f"{silo.name}: min-batch-size = {least}, and there are {n} samples to train with"
        )
    return least


def shuffle_batches(
    silo: Silo, common: Common, n: int, rng: torch.Generator, weights: Tensor | None = None
) -> Iterator[Tensor]:
    """Yield one epoch's batches of ``n`` training samples, as indices; all batches of all methods are drawn here.

    A last batch with fewer samples than run and silo allow (``min-batch-size``) joins the one before. Raises UserError
    if ``n`` itself is smaller.
    """
    least_samples(silo, common, n)
    least = smallest_batch(silo, common)
    if silo.model.has_batch_norm and min(n, common.batch_size) < 2:
        what = "batch-size = 1" if n > 1 else "there is 1 sample to train with"
        raise UserError(
            f"{silo.name}: {what}, and this network's batch normalisation needs 2 in a batch"
        )
    return batches(
        n,
        common.batch_size,
        1,
        rng,
        least=least,
        device=silo.train.index_device,
        weights=weights,
    )


# The entry of a silo's state with the last received model, with dp and a step
RECEIVED = "received"


def check_step(client: Any, received: Tensor) -> None:
    """Raise UserError for a model (Σ,) beyond the ``step`` of the study that a silo trains under.

    ``client``: its :class:`SiloClient`, which has the message. In an evaluation, the study fixes the models.
    """
    most = client.silo.max_step
    last = client.state.personal
    first = client.state.personal is None
    if not (math.isfinite(most) and client.info.trains):
        return
    if first:
        last = client.first_model()
    exact = first and client.round <= 1
    parts = [slice(None)] if exact else client.bounded_parts()
    if client.privacy is not None and not first:
        parts = client.model.layout.parts(client.received_blocks())
        last = client.state.arrays.get(RECEIVED)
    if not parts or last is None:
        return  # nothing is trained from; a state of an earlier version
    if parts != [slice(None)]:
        received, last = gather(received, parts), gather(last, parts)
    check_received(client.silo.name, client.round, received, last, most, first=exact)


def check_received(
    silo: str, this: int, received: Tensor, last: Tensor, most: float, *, first: bool
) -> None:
    """Raise UserError for a model that no honest server sends in round ``this``.

    ``received`` (Σ,): the model; ``last`` (Σ,): the last one, before the silo's first training the seed's.
    ``first``: it must equal that one bit for bit. Else ||received - last|| may be at most ``most`` times ||last||.
    """
    if first:
        if not torch.equal(received, last):
            raise UserError(
                f"{silo} refuses: the first model is not the one that the run's seed gives"
            )
        return
    # Without the length: the server would read from it where the silo's own model is
    if not float((received - last).norm() / last.norm()) <= most:
        raise UserError(
            f"{silo} refuses: the model of round {this} is further from its last one than the study's step = {most:g}"
        )
