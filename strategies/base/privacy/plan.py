"""The releases of one round of one silo, computed before it trains, for the ledger to charge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.privacy.accountant import OutOfRangeError, Releases, noise_multiplier_for
from partitions.common.errors import UserError
from strategies.base.privacy.settings import Privacy
from strategies.base.settings import Common


@dataclass(frozen=True)
class Plan:
    """The noised steps of one message.

    ``units`` is the number of records or patients to train with; each is in a step with probability ``sample_rate``.
    ``steps`` is exact: training that takes more steps fails. ``digest`` is a digest of everything that the reply is
    computed from. The noise depends on it: the same digest sends the same bits, which costs nothing again; a different
    digest is a new release.
    """

    unit: str
    units: int
    sample_rate: float
    noise_multiplier: float
    clip_norm: float
    steps: int
    delta: float
    digest: str

    @property
    def releases(self) -> Releases:
        return Releases(self.noise_multiplier, self.sample_rate, self.steps)


@dataclass(frozen=True)
class Sampling:
    """Poisson sampling in place of batches of B of n records: rate B / n, round(E n / B) steps for E epochs.

    Both are the same for patients: a patient is drawn with the rate of a record, so that a batch has B records on
    average. ``divisor`` is the average number of units in a batch; every batch's sum is divided by it.
    """

    records: int
    units: int
    batch_size: int

    @property
    def size(self) -> int:
        return min(self.batch_size, self.records)

    @property
    def rate(self) -> float:
        return self.size / self.records

    @property
    def divisor(self) -> float:
        return self.rate * self.units

    def steps(self, epochs: int) -> int:
        """Return the steps of this number of epochs; at least one unless it is 0."""
        return max(round(epochs * self.records / self.size), 1) if epochs else 0

    def steps_of_epoch(self, epoch: int) -> int:
        """Return the steps of one epoch, counted from 0, so that all epochs together have :meth:`steps`."""
        return self.steps(epoch + 1) - self.steps(epoch)


def plan_of(s: Privacy, common: Common, sampling: Sampling, passes: Sequence[int], digest: str) -> Plan:
    """Return the plan of a round with these passes (epochs each); raise UserError if δ or ε cannot be reached."""
    steps, delta, noise = sum(map(sampling.steps, passes)), s.delta_for(sampling.units), s.noise_multiplier
    if delta > 1 / sampling.units:
        raise UserError(f"dp.delta = {delta:g} is more than 1 / {sampling.units}, one of the {s.unit}s: take less")
    if s.target_epsilon:
        try:
            noise = noise_multiplier_for(s.target_epsilon, sampling.rate, steps * common.rounds, delta)
        except OutOfRangeError as error:
            raise UserError(f"dp.target-epsilon: {error}") from None
    return Plan(
        unit=s.unit,
        units=sampling.units,
        sample_rate=sampling.rate,
        noise_multiplier=noise,
        clip_norm=s.clip_norm,
        steps=steps,
        delta=delta,
        digest=digest,
    )
