"""DP-SGD (Abadi et al., CCS 2016) in one silo and one round: Poisson batches, clipped sums, Gaussian noise.

Neighbouring data sets differ by one unit, a record or a patient, that is added or removed. A step draws every unit
independently with probability q = B / n. It sums their gradients, each clipped to C, adds noise of standard deviation
σ C, and divides the sum by B, however many units were drawn: an empty batch gives noise alone.

**Noise.** It is a function of the silo's key, the run, the round, the step, and of what the step computes: the model
that it starts from and the clipped sum. So a round that is repeated after a crash sends the same bits. If a server
makes a silo repeat a round with any other change, it gets other noise: the difference of two messages with the same
noise would have none. The samples depend in the same way on the whole input of the round. Neither depends on the run's
seed, because the server has it.

K gradients of one batch have noise of σ √K each. Together they release as much as one gradient with noise σ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from logging import WARNING
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.common import log
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from models.flat import FlatModel, is_finite
from models.privacy.accountant import OutOfRangeError, Releases, noise_multiplier_for
from models.privacy.chunks import by_chunk, chunk_size
from models.privacy.clipping import ROUNDED, Clipping, length
from models.privacy.layers import is_trained
from models.privacy.noise import add_noise, derive_key, digest_of, poisson_sample, seed
from models.training import Loss, OnFeatures, seed_torch
from partitions.common.errors import UserError
from strategies.base.info import MethodInfo
from strategies.base.settings import Common, setting
from strategies.base.state import State


@dataclass(frozen=True)
class Privacy:
    """The settings of ``dp = true``."""

    clip_norm: float = setting(
        1.0,
        "longest gradient of one unit, or features of one record; longer ones are shortened",
        symbol="C",
        minimum=1e-6,  # far above lengths at which float32 rounding lengthens a gradient
        maximum=1e6,
    )
    noise_multiplier: float = setting(
        1.0,
        "standard deviation of the noise on a sum, in the most that a unit adds (of gradients: the clip norm)",
        symbol="σ",
        minimum=0.1,
        maximum=1e5,
    )
    target_epsilon: float = setting(
        0.0,
        "each silo computes the noise with which all rounds together cost it this much, 0: dp.noise-multiplier holds",
        symbol="ε",
        minimum=0,
    )
    delta: float = setting(
        0.0,
        "probability with which epsilon need not hold, 0: 1e-5, and with n units at most 1 / (10 n)",
        symbol="δ",
        minimum=0,
        below=1,
    )
    unit: str = setting(
        "record",
        "what is protected: a record, or a patient with all of their records, where the data file names patients",
        choices=("record", "patient"),
    )

    def delta_for(self, units: int) -> float:
        """Return δ of a silo with this number of units."""
        return self.delta or min(1e-5, 1 / (10 * max(units, 1)))


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


def plan_of(
    s: Privacy, common: Common, sampling: Sampling, passes: Sequence[int], digest: str
) -> Plan:
    """Return the plan of a round with these passes (epochs each); raise UserError if δ or ε cannot be reached."""
    steps = sum(map(sampling.steps, passes))
    delta = s.delta_for(sampling.units)
    noise = s.noise_multiplier
    if delta > 1 / sampling.units:
        raise UserError(
            f"dp.delta = {delta:g} is more than 1 / {sampling.units}, one of the {s.unit}s: take less"
        )
    if s.target_epsilon:
        try:
            noise = noise_multiplier_for(
                s.target_epsilon, sampling.rate, steps * common.rounds, delta
            )
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


T = TypeVar("T")


@dataclass
class Batch:
    """Units that were drawn together: the rows of each patient (None: units are records), and gradients left."""

    groups: list[Tensor] | None
    uses: int


@dataclass(frozen=True)
class Units:
    """The records of a silo's training split, and the patient of each; None: each record is a unit."""

    records: int
    patient: np.ndarray | None = None

    @property
    def count(self) -> int:
        return self.records if self.patient is None else len(np.unique(self.patient))


class PrivateTraining:
    """One round's private gradients; ``key`` is the round's, ``uses`` the number of gradients per batch."""

    def __init__(
        self,
        plan: Plan,
        sampling: Sampling,
        units: Units,
        key: bytes,
        model: FlatModel,
        uses: int,
    ) -> None:
        self.plan = plan
        self.sampling = sampling
        self.units = units
        self.key = key
        self.model = model
        self.uses = uses
        self.on = False  # whether gradients are private now
        self.steps = self.gradients = self.calls = 0
        self.batches = WeakIdKeyDictionary()  # a batch's labels -> Batch

    @cached_property
    def clipping(self) -> Clipping:
        return Clipping(self.model, self.plan.clip_norm, batch=self.sampling.batch_size)

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Return a random generator with a seed that only the silo can compute."""
        return torch.Generator().manual_seed(seed(derive_key(self.key, "generator", *purpose)))

    def draw_batches(
        self, call: int, epoch: int, device: torch.device
    ) -> list[tuple[Tensor, list[Tensor] | None]]:
        """Return an epoch's batches: the records of each, and its rows by patient."""
        batches = []
        for step in range(self.sampling.steps_of_epoch(epoch)):
            key = derive_key(self.key, "sample", call, epoch, step)
            chosen = poisson_sample(key, self.units.count, self.sampling.rate)
            batches.append(self._records(chosen, device))
        return batches

    def _records(
        self, chosen: np.ndarray, device: torch.device
    ) -> tuple[Tensor, list[Tensor] | None]:
        patient = self.units.patient
        if patient is None:
            return torch.from_numpy(chosen).to(device), None
        rows = [
            _rows_of(patient.tobytes(), str(patient.dtype))[unit] for unit in chosen.tolist()
        ]
        ends = np.cumsum([0, *(len(records) for records in rows)])
        groups = [torch.arange(a, b, device=device) for a, b in pairwise(ends.tolist())]
        index = np.concatenate(rows) if rows else np.empty(0, np.int64)
        return torch.from_numpy(index).to(device), groups

    def note(self, y: Tensor, groups: list[Tensor] | None) -> None:
        """Record that the batch with these labels was drawn, as one of the plan's steps."""
        self._count_step()
        self.batches[y] = Batch(groups, self.uses)

    def _count_step(self) -> None:
        self.steps += 1
        if self.steps > self.plan.steps:
            raise AssertionError(
                f"a training of more than the planned {self.plan.steps} private steps"
            )

    def unit_shares(self) -> Tensor:
        """Return each record's share of its unit (n,), float64: of a patient with k records 1 / k."""
        if self.units.patient is None:
            return torch.ones(self.units.records, dtype=torch.float64)
        _, numbers, records = np.unique(
            self.units.patient, return_inverse=True, return_counts=True
        )
        return torch.from_numpy(1 / records[numbers])

    def noised(self, total: Tensor, most: float) -> Tensor:
        """Return a sum (d,) over all units with noise; ``most``: the largest norm of what a unit adds to it."""
        self._count_step()
        if not bool(length(total) <= self.units.count * most * ROUNDED):
            raise AssertionError("a sum of more than its units can add")
        key = derive_key(self.key, "sums", self.steps, digest_of([total]))
        return add_noise(total, self.plan.noise_multiplier * most, key)

    def by_chunk(self, of: Callable[..., Any], *batch: Any) -> tuple[Any, ...]:
        """Return what ``of`` makes of a batch's tensors, row by row: each row's depends on it alone."""
        return by_chunk(of, batch, chunk_size(batch[0], self.sampling.batch_size))

    def gradient(
        self, x: Any, y: Tensor, loss: Loss | OnFeatures, network: nn.Module | None
    ) -> Tensor:
        """Write the noised mean to the model's gradient; return the mean loss of the drawn units."""
        batch: Batch | None = self.batches.get(y)  # type: ignore[no-untyped-call]
        if batch is None or not batch.uses:
            raise AssertionError("a gradient of records that were not drawn for it")
        batch.uses -= 1
        self.gradients += 1
        total, value = self.clipping.total(x, y, loss, network, batch.groups)
        key = derive_key(
            self.key, "noise", self.gradients, digest_of([self.model.vector, total])
        )
        deviation = self.plan.noise_multiplier * self.plan.clip_norm * self.uses**0.5
        self.model.gradient.copy_(add_noise(total, deviation, key).div_(self.sampling.divisor))
        for entry, parameter in zip(
            self.model.layout.parameters, self.model.parameters, strict=True
        ):
            if not is_trained(parameter):
                self.model.gradient[entry.start : entry.stop] = 0.0
        return value / max(len(y) if batch.groups is None else len(batch.groups), 1)


@lru_cache(maxsize=16)
def _rows_of(patient: bytes, dtype: str) -> list[np.ndarray]:
    """Return the rows of each patient, in the order of their numbers."""
    numbers = np.frombuffer(patient, dtype)
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)


@contextmanager
def private_gradients(privacy: PrivateTraining | None, on: bool = True) -> Iterator[None]:
    """Return a context in which gradients are private, if the run requires it; with ``on = False`` they are not.

    Vectors trained with ``on = False`` must not enter anything that leaves the silo.
    """
    if privacy is None:
        yield
        return
    before = privacy.on, privacy.model.private
    privacy.on, privacy.model.private = on, privacy if on else None
    try:
        yield
    finally:  # the silos of a process share the network
        privacy.on, privacy.model.private = before


def kept_finite(state: State, personal: Tensor, received: Tensor, name: str) -> Tensor:
    """Return the personal model, or the received one if it diverged; remove what is not finite from the state.

    Divergence of a model trained without noise depends on the records, and an error would reveal it to the server.
    """
    for key, number in list(state.numbers.items()):
        if isinstance(number, float) and not math.isfinite(number):
            del state.numbers[key]
    for key, array in state.arrays.items():
        if array.is_floating_point() and not is_finite(array):
            state.arrays[key] = array.nan_to_num(0.0, 0.0, 0.0)
    if is_finite(personal):
        return personal
    log(WARNING, "%s: its own model diverged; it starts again from the received one", name)
    return received.clone()


def round_digest(tensors: Mapping[str, Tensor], values: Sequence[object]) -> bytes:
    """Return a digest (32 bytes) of all inputs of a round: arrays by name, and everything else as text."""
    names = sorted(tensors)
    return derive_key(
        digest_of(tensors[name] for name in names), *names, *(repr(value) for value in values)
    )


def private_batches(
    training: PrivateTraining, silo: Any, epochs: int, augment: Any, until: Any
) -> Iterator[tuple[Any, Tensor]]:
    """Yield Poisson batches (x, y) of a silo's training split, until ``until()`` is true after an epoch."""
    training.calls += 1
    call, device = training.calls, silo.train.device
    seed_torch(training.generator("dropout", call))
    for epoch in range(epochs):
        drawn = training.draw_batches(call, epoch, device)
        taken: Iterator[tuple[Any, Tensor]] = silo.train.batches(
            index for index, _ in drawn if len(index)
        )
        rng = training.generator("augment", call, epoch)

        def change(x: Any, y: Tensor, rng: torch.Generator = rng) -> tuple[Any, Tensor]:
            changed: tuple[Any, Tensor] = next(augment.change_batches([(x, y)], len(y), rng))
            return changed

        for index, groups in drawn:
            x, y = next(taken) if len(index) else silo.train.take(index)
            if augment is not None and len(index):
                x, y = training.by_chunk(change, x, y)
            training.note(y, groups)
            yield x, y
        if until is not None and until():
            return


def check_privacy(info: MethodInfo, common: Common) -> None:
    """Raise UserError if ``dp = true`` is combined with a method or a setting that is not private."""
    if not common.dp:
        return
    if not info.training.dp:
        raise UserError(f"dp = true: not with {info.name}: {info.training.dp}")
    if common.ala:
        raise UserError(
            "dp = true: not with ala = true: how it mixes depends on records without noise"
        )
    common.check_private()
