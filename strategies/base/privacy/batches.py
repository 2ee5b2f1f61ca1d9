"""What a silo's gradients are computed of: its batches, shuffled ones, or with ``dp = true`` Poisson samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from models.flat import FlatModel
from models.privacy.noise import derived
from models.training import Loss, batches, generator, loss_gradient, seed_dropout
from partitions.common.errors import UserError
from strategies.base.info import MethodInfo
from strategies.base.privacy.plan import Sampling, plan_of
from strategies.base.privacy.settings import Privacy
from strategies.base.privacy.training import PrivateTraining, Units, private_batches, round_digest
from strategies.base.settings import Common, values_of
from strategies.base.state import State
from strategies.base.transport.payload import Model, Number

# Settings that change no number of a round, or other ones than the data do; the rest is part of a round's digest.
ELSEWHERE = {
    *("out", "resume", "data-dir", "device", "threads", "dataset", "partition", "silos", "agreed", "study"),
    *("min-metric-samples", "checkpoint-every", "round-timeout", "straggler-factor", "straggler-floor", "lost-silo"),
    *("min-silos", "evaluate-every", "validation"),
}
# Of a silo's state, what evaluation leaves, or the run is called: no training depends on it.
EVALUATED = ("run_id", "model", "metrics", "best", "reported", "candidate")


class BatchedClient:
    """Part of :class:`SiloClient`."""

    silo: Any  # strategies.base.client.Silo
    common: Common
    settings: Any
    info: MethodInfo
    model: FlatModel
    loss: Loss
    round: int
    state: State
    privacy: PrivateTraining | None = None  # how this round's gradients are kept private

    # -- differential privacy -------------------------------------------------------------------------------------

    def noised_passes(self) -> tuple[int, ...]:
        """The epochs of each training of :meth:`local_update` with private gradients, of this round."""
        return (self.common.local_epochs,)

    @property
    def gradients_per_batch(self) -> int:
        """How many gradients :meth:`local_update` takes of one batch."""
        return 1

    def keep_private(self, s: Privacy, units: Units, key: bytes, config: Mapping[str, Any]) -> None:
        """Make the gradients of the next round private. ``key``: the silo's own of this run. UserError: they cannot."""
        self.round = config["round"]
        sampling = Sampling(units.records, units.count, self.common.batch_size)
        models: Mapping[str, Model] = config["models"]
        numbers: Mapping[str, Number] = config["numbers"]
        train = self.silo.train
        inputs = (train.x,) if isinstance(train.x, Tensor) else tuple(train.x)
        given = {f"model {name}": m.vector for name, m in models.items()}
        given |= {f"state {k}": array for k, array in self.state.arrays.items() if not k.startswith(EVALUATED)}
        given |= {f"x {i}": part for i, part in enumerate(inputs)} | {"y": train.y}
        if units.patient is not None:
            given["patient"] = torch.from_numpy(units.patient)
        kept = {k: v for k, v in self.state.numbers.items() if not k.startswith(EVALUATED)}
        settings = values_of(self.common) | values_of(self.settings, self.common.strategy) | values_of(s, "dp")
        used = {k: v for k, v in settings.items() if k not in ELSEWHERE}
        digest = round_digest(given, [self.silo.name, self.round, sorted(numbers.items()), sorted(kept.items()), used])
        plan = plan_of(s, self.common, sampling, self.noised_passes(), digest.hex())
        from_here = derived(key, "round", self.round, digest)
        self.privacy = PrivateTraining(plan, sampling, units, from_here, self.model, self.gradients_per_batch)

    def steps_of(self, epochs: int) -> int:
        """How many private steps so many epochs have."""
        assert self.privacy is not None
        return self.privacy.sampling.steps(epochs)

    @contextmanager
    def private_gradients(self, on: bool = True) -> Iterator[None]:
        """Context in which gradients are private, where they have to be; ``on = False``: in which they are not.

        What is trained then must not enter anything that leaves the silo.
        """
        training = self.privacy
        if training is None:
            yield
            return
        before = training.on, self.model.private
        training.on, self.model.private = on, training if on else None
        try:
            yield
        finally:  # the silos of a process share the network
            training.on, self.model.private = before

    # -- batches and gradients -----------------------------------------------------------------------------------

    def batches(
        self,
        epochs: int | None = None,
        purpose: str = "train",
        until: Callable[[], bool] | None = None,
        *,
        as_they_are: bool = False,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled mini-batches (x, y) of the training part; the order depends on seed, silo, round and purpose only.

        Pictures are changed as ``augment`` says, but where they are asked for ``as_they_are``. ``until`` is asked after
        every epoch, and ends them.
        """
        c = self.common
        epochs = c.local_epochs if epochs is None else epochs
        train = self.silo.train
        augment = None if as_they_are else self.silo.augment
        if self.privacy is not None and self.privacy.on:
            yield from private_batches(self.privacy, self.silo, epochs, augment, until)
            return
        rng = generator(c.seed, self.silo.name, self.round, purpose)
        seed_dropout(rng)
        for epoch in range(epochs):
            taken = (train.take(index) for index in self.drawn(len(train), rng))
            if augment is None:
                yield from taken
            else:
                own = generator(c.seed, "augment", self.silo.name, self.round, purpose, epoch)
                yield from augment.changed(taken, len(train), own)
            if until is not None and until():
                return

    def drawn(self, n: int, rng: torch.Generator) -> Iterator[Tensor]:
        """One epoch's batches of ``n`` training samples, as indices; all that a method trains with are drawn here.

        A last batch of fewer samples than run and silo allow (``min-batch-size``) joins the one before. Raises
        UserError where there are fewer samples at all.
        """
        least = max(self.common.min_batch_size, self.silo.min_batch_size)
        if n < least:
            raise UserError(f"{self.silo.name}: min-batch-size = {least}, and there are {n} samples to train with")
        least = max(least, 2) if self.model.has_batch_norm else least  # BatchNorm cannot train on one sample
        return batches(n, self.common.batch_size, 1, rng, least=least, device=self.silo.train.y.device)

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """Fill ``self.model.gradient`` by one batch at ``self.model.vector``; returns the loss."""
        return loss_gradient(self.model, x, y, self.loss)

    def full_gradient(self, purpose: str) -> Tensor:
        """∇f_i (Σ,) at the model as it stands: the mean over all training samples as they are, in ``purpose``'s
        batches.
        """
        model, n = self.model, len(self.silo.train)
        total, buffers = torch.zeros_like(model.gradient), model.buffers.clone()
        private = self.privacy is not None and self.privacy.on
        for x, y in self.batches(1, purpose, as_they_are=True):
            self.gradient(x, y)
            total.add_(model.gradient, alpha=1 / self.steps_of(1) if private else len(y) / n)
        model.buffers.copy_(buffers)  # a measurement: running statistics stay as they were
        return total
