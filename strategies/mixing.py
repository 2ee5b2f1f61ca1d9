"""Methods whose server sends each silo its own mixture of all silos' models: FedAMP, HeurFedAMP, DiversiFed.

The server keeps every silo's last model; with W their (silos x parameters) matrix and C a (silos x silos) matrix of
coefficients, silo i gets u_i = sum_j C_ij w_j and minimises f_i(w) + (λ/2a) ||w - u_i||². The methods differ in C only.

Sent: Σ down, Σ up, nothing down in a silo's first round, which is plain local training from the common initial model.
Kept: server all w_i; silo w_i. Absent silos: the mixture is over this round's participants that have sent a model once.
BatchNorm statistics are the mean over silos, as everywhere, unless ``buffers = "local"``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from strategies.base import PersonalizedStrategy, SiloClient, Update
from strategies.payload import Model, Payload, stack
from strategies.settings import setting


@dataclass(frozen=True)
class MixingSettings:
    """What the mixing methods share."""

    lambda_: float = setting(1.0, "weight of the proximal term", symbol="λ", minimum=0)
    step: float = setting(1.0, "the server's step, which divides λ", symbol="a", above=0)
    start: str = setting("received", "where local training starts", choices=("received", "own"))


class MixingClient(SiloClient):
    settings: Any  # has the fields of MixingSettings

    def receive(self) -> Tensor:
        mixed = self.models.get("mixture")
        return self.own() if mixed is None or self.settings.start == "own" else mixed.vector

    def local_update(self) -> list[Tensor]:
        mixed, weight = self.models.get("mixture"), self.settings.lambda_ / self.settings.step
        if mixed is None or weight == 0:
            self.train()
        else:
            centre = mixed.vector
            self.train(correction=lambda w, g: g.add_(w - centre, alpha=weight))
        return [self.model.vector.clone()]


class MixingStrategy(PersonalizedStrategy):
    client: ClassVar[type[SiloClient]] = MixingClient

    def coefficients(self, models: Tensor) -> Tensor:
        """C (n, n) from the models (n, Σ); rows sum to one."""
        raise NotImplementedError

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        pass

    def begin_round(self) -> None:
        self._mixtures = self.mixtures()

    def payload(self, silo: str) -> Payload:
        mixed = self._mixtures.get(silo)
        return Payload() if mixed is None else Payload({"mixture": Model(mixed, silo, self.round - 1)})

    def mixtures(self) -> dict[str, Tensor]:
        """u_i for this round's participants that have sent a model."""
        names = [n for n in self.participants() if n in self.state.arrays]
        if not names:
            return {}
        models = stack(Model(self.state.arrays[n]) for n in names)
        return dict(zip(names, self.coefficients(models) @ models, strict=True))

    def aggregate(self, updates: Sequence[Update]) -> None:
        for update in updates:
            self.state.arrays[update.silo] = update.vector


def squared_distances(models: Tensor) -> Tensor:
    """||w_i - w_j||² (n, n), by differences: the Gram matrix would cancel where models are near each other."""
    return torch.cdist(models, models, compute_mode="donot_use_mm_for_euclid_dist").square()
