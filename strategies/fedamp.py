"""FedAMP and HeurFedAMP: attentive message passing, in which similar silos attract each other.

Huang et al., AAAI 2021, arXiv 2007.03797. min sum_i f_i(w_i) + λ sum_{i<j} A(||w_i - w_j||²), A(x) = 1 - exp(-x/σ):

    FedAMP       u_i = (1 - a sum_{j≠i} A'(d_ij²)) w_i + a sum_{j≠i} A'(d_ij²) w_j,   A'(x) = exp(-x/σ) / σ
    HeurFedAMP   u_i = ξ w_i + (1 - ξ) sum_{j≠i} softmax_j(σ cos(w_i, w_j)) w_j
    silo         min f_i(w) + (λ/2a) ||w - u_i||², started from u_i

Sent, kept, absent silos: as below. Special cases: λ = 0 and ``start = "own"`` is Local; models far
apart (all A' = 0) give u_i = w_i; HeurFedAMP with ξ = 1 too; ξ = 1/N and σ = 0 is the plain average. For real networks
d² is far above σ and FedAMP becomes Local with a proximal term: the paper's σ suits small distances. HeurFedAMP's σ of
0.1 makes nearly equal weights, so that it becomes FedAvg with a proximal term. The log reports both.

u_i is a convex combination only if a sum_j A' <= 1. With the step of 1000 that experiments use, models near each
other violate that: w_i gets a weight of minus thousands, and training diverges. ``convex`` divides such a row by
a sum_j A'; without it the formula is used unchanged.

Methods whose server sends each silo its own mixture of all silos' models: FedAMP, HeurFedAMP, DiversiFed.

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

from strategies.base.client import SiloClient, proximal
from strategies.base.info import OWN_MIXTURE
from strategies.base.robust import weighted_mean
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Model, Payload, Update

NO_WEIGHT = 1e-5  # smaller weights count as 0
ALIKE = 0.9  # weights count as equal above this ratio of the smallest to the largest
ROWS_AT_ONCE = 8  # models per step of the distance computation


@dataclass(frozen=True)
class MixingSettings:
    """Settings of all mixing methods."""

    lambda_: float = setting(
        1.0, "weight of the proximal term", symbol="λ", minimum=0, kind="decay"
    )
    step: float = setting(
        1.0, "the server's step, which divides λ", symbol="a", above=0, kind="decay-divisor"
    )
    start: str = setting("received", "where local training starts", choices=("received", "own"))


class MixingClient(SiloClient):
    settings: Any  # has the fields of MixingSettings

    def receive(self) -> Tensor:
        mixed = self.models.get("mixture")
        return (
            self.previous() if mixed is None or self.settings.start == "own" else mixed.vector
        )

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
    client = MixingClient
    # Advice for the log if all weights of others are 0, and if they are all equal.
    advice: ClassVar[tuple[str, str]] = ("", "")

    def coefficients(self, models: Tensor) -> Tensor:
        """Return C (n, n) from the models (n, Σ); rows sum to one."""
        raise NotImplementedError

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        self._reported = False

    def welcome(self, silo: str, *, trains: bool) -> None:
        """Store the mean of the others' models as this silo's model, which is mixed with theirs from now on."""
        if self.state.models:
            self.state.models[silo] = weighted_mean(self.state.models.values())

    def begin_round(self) -> None:
        self._mixtures = self.mixtures()

    def payload(self, silo: str) -> Payload:
        mixed = self._mixtures.get(silo)
        return (
            Payload()
            if mixed is None
            else Payload({"mixture": Model(mixed, silo, self.round - 1)})
        )

    def mixtures(self) -> dict[str, Tensor]:
        """Return u_i for this round's participants that have sent a model."""
        names = [n for n in self.participants() if n in self.state.models]
        if not names:
            return {}
        models = torch.stack([self.state.models[n] for n in names])
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
        distance = float(model_distances(models).sqrt().fill_diagonal_(torch.nan).nanmedian())
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


def model_distances(models: Tensor) -> Tensor:
    """Return ||w_i - w_j||² (n, n) from differences: with the Gram matrix, near models would cancel.

    A few rows at a time are compared with the rows from them on; the result is symmetric.
    """
    n = len(models)
    above = models.new_zeros(n, n)
    for i in range(0, n, ROWS_AT_ONCE):
        rows = models[i : i + ROWS_AT_ONCE]
        above[i : i + ROWS_AT_ONCE, i:] = torch.cdist(
            rows, models[i:], compute_mode="donot_use_mm_for_euclid_dist"
        )
    return (above.triu() + above.triu(1).T).square()


@dataclass(frozen=True)
class AmpSettings(MixingSettings):
    """Settings of FedAMP; defaults as in FedALA's experiments."""

    sigma: float = setting(0.1, "width of the attention", symbol="σ", above=0)
    step: float = setting(
        1000.0, "the server's step", symbol="a", above=0, kind="decay-divisor"
    )
    convex: bool = setting(
        True, "a silo's step is shortened to where its own weight would be negative"
    )


class FedAMP(MixingStrategy):
    info = OWN_MIXTURE(
        name="fedamp",
        title="Attentive message passing",
        paper="Huang et al., AAAI 2021, arXiv 2007.03797",
        spelling="FedAMP",
    )
    Settings = AmpSettings
    search = (("lambda", 0.1, 10.0),)
    settings: AmpSettings
    advice = (
        "a fedamp.sigma near the square of that distance would make them differ",
        "a fedamp.sigma below the square of that distance would make them differ",
    )

    def coefficients(self, models: Tensor) -> Tensor:
        s = self.settings
        pull = s.step * torch.exp(-model_distances(models) / s.sigma) / s.sigma
        pull.fill_diagonal_(0)
        if s.convex:
            pull /= pull.sum(1, keepdim=True).clamp(min=1)
        return pull + torch.diag(1 - pull.sum(1))


@dataclass(frozen=True)
class HeurSettings(MixingSettings):
    """Settings of HeurFedAMP."""

    sigma: float = setting(0.1, "sharpness of the attention", symbol="σ", minimum=0)
    self_weight: float = setting(
        0.1, "a silo's attention to its own model", symbol="ξ", minimum=0, maximum=1
    )


class HeurFedAMP(MixingStrategy):
    info = OWN_MIXTURE(
        name="heurfedamp",
        title="Attentive message passing by cosine similarity",
        paper="Huang et al., AAAI 2021, arXiv 2007.03797",
        spelling="HeurFedAMP",
    )
    Settings = HeurSettings
    search = (("lambda", 0.01, 1.0),)
    settings: HeurSettings
    advice = (
        "a heurfedamp.self-weight below 1 would let the others in",
        "a greater heurfedamp.sigma would make them differ",
    )

    def coefficients(self, models: Tensor) -> Tensor:
        s = self.settings
        if len(models) == 1:
            return torch.ones(1, 1, device=models.device)
        unit = torch.nn.functional.normalize(models, dim=1)
        scores = (s.sigma * unit @ unit.T).fill_diagonal_(-torch.inf)
        return (1 - s.self_weight) * scores.softmax(1) + s.self_weight * torch.eye(
            len(models), device=models.device
        )
