"""Methods whose server sends each silo its own mixture of all silos' models: FedAMP, HeurFedAMP, DiversiFed.

The server stores every silo's last model. W is their (silos x parameters) matrix, C a (silos x silos) matrix of
coefficients whose rows sum to one. Silo i receives u_i = sum_j C_ij w_j and minimises f_i(w) + (λ/2a) ||w - u_i||².
The methods differ in C only. u_i is computed as w_i + sum_j C_ij (w_j - w_i), so that equal models give exactly w_i:
the product C W leaves a rounding error there, which Adam turns into full steps.

Sent: Σ down, Σ up, nothing down in a silo's first round, which is plain local training from the common initial model.
Kept: server all w_i; silo w_i. Absent silos: the mixture is over this round's participants that have sent a model once.
A newcomer's w_i is the mean of the others'.
BatchNorm statistics are the mean over silos, as everywhere, unless ``buffers = "local"``.

If the weights of all others are 0, a method is Local with a proximal term; if all are equal, FedAvg with one. Both
mean that a setting does not fit the distances between the models, which the log reports once, in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any, ClassVar

import torch
from flwr.common import log
from torch import Tensor

from strategies.base.aggregation.mean import weighted_mean
from strategies.base.client import SiloClient, proximal
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Model, Payload, stack
from strategies.base.transport.replies import Update

NO_WEIGHT = 1e-5  # smaller weights count as 0
ALIKE = 0.9  # weights count as equal above this ratio of the smallest to the largest
ROWS_AT_ONCE = 8  # models per step of the distance computation


@dataclass(frozen=True)
class MixingSettings:
    """Settings of all mixing methods."""

    lambda_: float = setting(1.0, "weight of the proximal term", symbol="λ", minimum=0, kind="decay")
    step: float = setting(1.0, "the server's step, which divides λ", symbol="a", above=0, kind="decay-divisor")
    start: str = setting("received", "where local training starts", choices=("received", "own"))


class MixingClient(SiloClient):
    settings: Any  # has the fields of MixingSettings

    def receive(self) -> Tensor:
        mixed = self.models.get("mixture")
        return self.own() if mixed is None or self.settings.start == "own" else mixed.vector

    def newcomer(self) -> Tensor:
        mixed = self.models.get("mixture")
        return self.received if mixed is None else mixed.vector

    def personalise(self) -> Tensor:
        return self.local_update()[0]

    def local_update(self) -> list[Tensor]:
        mixed, weight = self.models.get("mixture"), self.settings.lambda_ / self.settings.step
        self.train(correction=None if mixed is None else proximal(mixed.vector, weight))
        return [self.model.vector.clone()]


class MixingStrategy(PersonalizedStrategy):
    client: ClassVar[type[SiloClient]] = MixingClient
    # Advice for the log if all weights of others are 0, and if they are all equal.
    advice: ClassVar[tuple[str, str]] = ("", "")

    def coefficients(self, models: Tensor) -> Tensor:
        """Return C (n, n) from the models (n, Σ); rows sum to one."""
        raise NotImplementedError

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        self._reported = False

    def welcome(self, silo: str) -> None:
        """Store the mean of the others' models as this silo's model, which is mixed with theirs from now on."""
        if self.state.models:
            self.state.models[silo] = weighted_mean(self.state.models.values(), [1.0] * len(self.state.models))

    def begin_round(self) -> None:
        self._mixtures = self.mixtures()

    def payload(self, silo: str) -> Payload:
        mixed = self._mixtures.get(silo)
        return Payload() if mixed is None else Payload({"mixture": Model(mixed, silo, self.round - 1)})

    def mixtures(self) -> dict[str, Tensor]:
        """Return u_i for this round's participants that have sent a model."""
        names = [n for n in self.participants() if n in self.state.models]
        if not names:
            return {}
        models = stack(Model(self.state.models[n]) for n in names)
        coefficients = self.coefficients(models)
        self._tell_degenerate(models, coefficients)
        return dict(zip(names, mix(models, coefficients), strict=True))

    def _tell_degenerate(self, models: Tensor, coefficients: Tensor) -> None:
        """Log once that all weights of others are 0 or equal; two silos leave nothing to choose."""
        if len(models) < 3:
            return
        others = coefficients.abs().fill_diagonal_(0)
        most, least = float(others.max()), float(others.fill_diagonal_(torch.inf).min())
        none, alike = most < NO_WEIGHT, least > ALIKE * most
        if self._reported or not (none or alike):
            return
        self._reported = True
        distance = float(squared_distances(models).sqrt().fill_diagonal_(torch.nan).nanmedian())
        log(
            WARNING,
            "round %d: %s weighs all other silos %s, their models are %.3g apart (median): it is %s with a "
            "proximal term now; %s",
            self.round,
            self.info.name,
            "with 0" if none else f"alike ({least:.3g} to {most:.3g})",
            distance,
            "Local" if none else "FedAvg",
            self.advice[not none],
        )

    def centre(self, name: str, update: Update) -> Tensor | None:
        mixed = self.sent.get(update.silo, {}).get("mixture")
        starts = name == "model" and mixed is not None and self.settings.start == "received"
        return mixed.vector if mixed is not None and starts else super().centre(name, update)

    def aggregate(self, updates: Sequence[Update]) -> None:
        for update in updates:
            self.state.models[update.silo] = update.vector


def mix(models: Tensor, coefficients: Tensor) -> list[Tensor]:
    """Return u_i = w_i + sum_j C_ij (w_j - w_i) for every row w_i of ``models`` (n, Σ)."""
    return [w + c @ (models - w) for w, c in zip(models, coefficients, strict=True)]


def squared_distances(models: Tensor) -> Tensor:
    """Return ||w_i - w_j||² (n, n) from differences: with the Gram matrix, near models would cancel.

    A few rows at a time are compared with the rows from them on; the result is symmetric.
    """
    n = len(models)
    above = models.new_zeros(n, n)
    for i in range(0, n, ROWS_AT_ONCE):
        rows = models[i : i + ROWS_AT_ONCE]
        above[i : i + ROWS_AT_ONCE, i:] = torch.cdist(rows, models[i:], compute_mode="donot_use_mm_for_euclid_dist")
    return (above.triu() + above.triu(1).T).square()
