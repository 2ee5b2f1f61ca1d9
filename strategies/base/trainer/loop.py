"""The training of a silo in a round, which most methods' local updates are made of: mini-batches, gradients, steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from models.flat import FlatModel
from models.networks.boosting import boost
from models.optimizers import Optimizer, Sgd, make_optimizer, rate_groups
from models.samples import Samples
from models.training import Loss, MeanLoss, count_batches
from strategies.base.info import MethodInfo
from strategies.base.privacy import PrivateTraining, private_batches
from strategies.base.settings import Common
from strategies.base.silo import (
    Silo,
    epochs_of,
    least_samples,
    shuffled_batches,
    smallest_batch,
)
from strategies.base.state import ClientState, Entries
from strategies.base.trainer.task import Batch, Correction, SplitBatches, Trainer, TrainingTask

MOST_EPOCHS = 2**31  # a trainer may take its loader as often as it likes


class TrainingLoop:
    """What a silo's half trains with; a base of :class:`~strategies.base.client.SiloClient`."""

    silo: Silo
    common: Common
    info: MethodInfo
    state: ClientState
    model: FlatModel
    loss: Loss
    round: int
    train_loss: float
    privacy: PrivateTraining | None
    trainer: Trainer | None  # the hospital's own, in place of the loop
    batch: Batch | None = None  # of the present step

    @abstractmethod
    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """Write the gradient of one batch at ``self.model.vector`` to ``self.model.gradient``; return the loss."""

    def learning_rate(self, first: float | None = None) -> float:
        """Return η of this round, or a method's own rate: ``first``, times lr-decay per round since the first."""
        return self.common.decay(
            self.common.learning_rate if first is None else first, self.round
        )

    def tell_loss(self, losses: MeanLoss) -> None:
        """Set the training loss that the round reports, if there was a step."""
        if losses.steps:
            self.train_loss = float(losses.total) / losses.steps

    def optimizer(self, key: str = "") -> Optimizer:
        """Return the silo's optimiser for this round; ``key`` distinguishes several optimisers of one method.

        Its moments are reset (``optimizer-state = "reset"``) or those that :meth:`keep_optimizer` stored.
        """
        c = self.common
        optimizer = make_optimizer(
            c.optimizer, self.learning_rate(), c.momentum, c.weight_decay, c.amsgrad
        )
        optimizer.warm_up(c.warmup_batches)
        if c.optimizer_state == "keep":
            kept = Entries(self.state.arrays, f"optimizer.{key}.")
            optimizer.state = {k: v.clone() for k, v in kept.items()}
        return optimizer

    def keep_optimizer(self, optimizer: Optimizer, key: str = "") -> None:
        if self.common.optimizer_state == "keep":
            kept = Entries(self.state.arrays, f"optimizer.{key}.")
            kept.update({k: v.clone() for k, v in optimizer.state.items()})

    def train(
        self,
        *,
        correction: Correction | None = None,
        after: Callable[[], object] | None = None,
        epochs: int | None = None,
        purpose: str = "train",
        parts: Sequence[slice] | None = None,
        until: Callable[[], bool] | None = None,
        optimizer_key: str = "",
        rate: float | None = None,
        repeats: int = 1,
    ) -> None:
        """Train ``self.model`` for ``epochs`` (default local-epochs), by the run's ``trainer`` where it has one.

        If ``until()`` is true after an epoch, it ends. ``correction(vector, gradient)`` may add to each step's gradient
        (a proximal term, a control variate), with its batch in ``self.batch``; ``after()`` follows each step. ``parts``
        are trained, the rest is frozen. ``rate``: plain steps, without the optimiser, ``repeats`` times on each batch.
        """
        count = self.common.local_epochs if epochs is None else epochs
        trained = [slice(0, len(self.model.vector))] if parts is None else list(parts)
        self.model.freeze(*self.model.layout.outside(trained))
        try:
            if self.trainer is not None:
                task = self.training_task(correction, after, count, purpose, rate, repeats)
                if until is not None:
                    raise task.error(f"{self.info.name} ends a training by a rule of its own")
                self.train_loss = task.run(self.trainer)
                return
            groups = rate_groups(self.common.block_rates, self.model.layout.blocks, trained)
            keys = [f"{optimizer_key}{i}" for i in range(len(groups))]
            optimizers = [self.optimizer(key) if rate is None else Sgd(rate) for key in keys]
            for optimizer, (_, share) in zip(optimizers, groups, strict=True):
                optimizer.lr *= share
            losses = MeanLoss()
            for batch in self.batches(epochs, purpose, until):
                for _ in range(repeats):
                    self.batch = batch
                    losses.add(self.gradient(*batch))
                    if correction is not None:
                        correction(self.model.vector, self.model.gradient)
                    self._step(optimizers, groups)
                    if after is not None:
                        after()
        finally:  # the silos of a process share the network
            self.model.freeze()
            self.batch = None
        for key, optimizer in zip(keys, optimizers, strict=True):
            self.keep_optimizer(optimizer, key)
        self.tell_loss(losses)

    def _step(
        self, optimizers: Sequence[Optimizer], groups: Sequence[tuple[slice, float]]
    ) -> None:
        for (part, _), optimizer in zip(groups, optimizers, strict=True):
            if (
                part.stop - part.start == len(self.model.vector)
                and optimizer.only_where_gradient
            ):
                self.model.step(optimizer.step)
            else:
                optimizer.step(self.model.vector[part], self.model.gradient[part])

    def training_task(
        self,
        correction: Correction | None,
        after: Callable[[], object] | None,
        epochs: int,
        purpose: str,
        rate: float | None,
        repeats: int,
    ) -> TrainingTask:
        """Return what a trainer gets for a training."""
        silo, common = self.silo, self.common
        endless = epochs_of(silo, common, self.round, MOST_EPOCHS, purpose, silo.augment)
        count = count_batches(len(silo.train), common.batch_size, smallest_batch(silo, common))
        passes = silo.patches.passes if silo.patches else 1
        loaders = {"train": SplitBatches(endless, count * passes, repeats)}
        for split in ("val", "test"):
            samples: Samples = getattr(silo, split)
            order = samples.in_order()
            loaders[split] = SplitBatches(
                (samples.batches(order) for _ in range(MOST_EPOCHS)), len(order)
            )

        return TrainingTask(
            model=self.model,
            loaders=loaders,
            loss=self.loss,
            settings=common,
            learning_rate=self.learning_rate() if rate is None else rate,
            epochs=epochs,
            round=self.round,
            correction=correction,
            after=after,
            note=partial(setattr, self, "batch"),
            plain=rate is not None,
        )

    def batches(
        self,
        epochs: int | None = None,
        purpose: str = "train",
        until: Callable[[], bool] | None = None,
        *,
        as_they_are: bool = False,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield mini-batches (x, y) of the training split: shuffled, or Poisson samples if gradients are private.

        Images are augmented by the setting ``augment``, unless ``as_they_are``. If ``until()`` is true after an epoch,
        the iteration ends; ``epochs`` defaults to local-epochs, or to as many as local-steps mini-batches need.
        """
        augment = None if as_they_are else self.silo.augment
        if epochs is None and (steps := self.common.local_steps):
            every = shuffled_batches(
                self.silo, self.common, self.round, steps, purpose, augment, until
            )
            return islice(every, steps)
        epochs = self.common.local_epochs if epochs is None else epochs
        if self.privacy is not None and self.privacy.on:
            return private_batches(self.privacy, self.silo, epochs, augment, until)
        # Where each sample is asked for, none is drawn twice.
        common = replace(self.common, sampler="shuffled") if as_they_are else self.common
        return shuffled_batches(self.silo, common, self.round, epochs, purpose, augment, until)


def full_gradient(client: TrainingLoop, purpose: str) -> Tensor:
    """Return ∇f_i (Σ,) at the model: the mean over all training samples, unaugmented, in ``purpose``'s batches."""
    model = client.model
    silo = client.silo
    private = client.privacy
    n = len(silo.train) * (silo.patches.passes if silo.patches else 1)
    total = torch.zeros_like(model.gradient)
    steps = private.sampling.steps(1) if private is not None and private.on else 0
    with model.kept_buffers():
        for x, y in client.batches(1, purpose, as_they_are=True):
            client.gradient(x, y)
            total.add_(model.gradient, alpha=1 / steps if steps else len(y) / n)
    return total


class Boosting(TrainingLoop):
    """What a silo's half trains with if ``model = trees``."""

    def train(self, *, epochs: int | None = None, **_: Any) -> None:
        """Append ``epochs`` (default local-epochs) iterations of trees to ``self.model``, an ensemble."""
        iterations = self.common.local_epochs if epochs is None else epochs
        least = least_samples(self.silo, self.common, len(self.silo.train))
        boost(self.model, self.silo.train, iterations, self.learning_rate(), least)


@cache
def with_boosting(client: type[Any]) -> type[Any]:
    """Return a method's silo half that boosts."""
    if issubclass(client, Boosting):
        return client
    return type(client.__name__, (Boosting, client), {})
