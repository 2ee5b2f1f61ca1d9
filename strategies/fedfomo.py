"""FedFomo: each silo weights others' models by how much they lower its validation loss.

Zhang et al., ICLR 2021, arXiv 2012.08565. For every downloaded model w_n, with the silo's own last model w_i:

    ω_n = max(0, (L_val(w_i) - L_val(w_n)) / ||w_n - w_i||),   normalised to sum to one
    w   = w_i + sum_n ω_n (w_n - w_i)      (w_i where no ω_n is positive), then local training from there

The server keeps all models and an affinity matrix P (identity at first). It adds the weights that a silo reports,
P_i += ω_i. It sends the silo the M models of highest P_ij (ties at random), or with probability ε others at random; ε
falls by a factor every round. The held-out share of the training data is the run's ``validation`` (the paper's is 20%);
a silo without validation data cannot compute weights and keeps its own model; if no silo has any, the run is refused.

Sent: M Σ down, Σ up and M weights; in a silo's first round nothing down. Kept: server all w_i and P; silo w_i. An
absent silo's model and its row of P stay. A late joiner's model is the mean of the others' until it sends its own; P
grows by a row and a column, as they start. Special cases: no positive weight at all is Local; equal models have
norm 0, which is bounded below by 1e-5, and weight 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import cast

import torch
from flwr.common import log
from torch import Tensor

from models.training import generator, predict
from partitions.common.adding import added
from partitions.common.errors import DataError, UserError
from strategies.base.client import SiloClient
from strategies.base.info import OWN_MIXTURE, No
from strategies.base.robust import weighted_mean
from strategies.base.settings import setting
from strategies.base.state import MODEL_OF, Item, ServerState
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.kinds import Names
from strategies.base.transport.payload import Model, Payload, Update, is_number, model_of


@dataclass(frozen=True)
class FomoSettings:
    """Settings of FedFomo."""

    max_downloads: int = setting(
        0, "models a silo gets per round, 0: all others", symbol="M", minimum=0
    )
    epsilon: float = setting(
        0.3, "probability that a download is random", symbol="ε", minimum=0, maximum=1
    )
    epsilon_decay: float = setting(0.95, "factor on ε per round", above=0, maximum=1)


class FedFomoClient(SiloClient):
    def receive(self) -> Tensor:
        last = self.previous()
        others = {
            m.silo: m.vector for key, m in self.models.items() if key.startswith(MODEL_OF)
        }
        others.pop(self.silo.name, None)
        if not others or not len(self.silo.val):
            return last
        mine = self.validation_loss(last)
        weights = {}
        for name, other in others.items():
            gain = (mine - self.validation_loss(other)) / max(
                float(torch.dist(other, last)), 1e-5
            )
            if gain > 0:
                weights[name] = gain
        total = added(weights.values())
        mixed = last.clone()
        for name, weight in weights.items():
            mixed.add_(others[name] - last, alpha=weight / total)
        self.replies["weights"] = json.dumps(
            {name: weight / total for name, weight in weights.items()}
        )
        return mixed

    def newcomer(self) -> Tensor:
        """Return the mean of the received models."""
        others = [m.vector for key, m in self.models.items() if key.startswith(MODEL_OF)]
        return torch.stack(others).mean(0) if others else self.received

    def personalise(self) -> Tensor:
        """Weight the received models against their mean, on the validation data, and train from the mixture."""
        self.state.personal = self.received
        self.model.load(self.receive(), self.received_buffers)
        self.train()
        return self.model.vector

    def validation_loss(self, vector: Tensor) -> float:
        self.model.load(vector)
        return float(self.loss(predict(self.model, self.silo.val), self.silo.val.labels()))


class FomoServerState(ServerState):
    # P: silo -> other silo -> sum of its weights
    affinity = Item[dict[str, dict[str, float]]](dict)
    last_rounds = Item[dict[str, int]](dict, "made")  # silo -> round of its last model


class FedFomo(PersonalizedStrategy):
    info = OWN_MIXTURE(
        name="fedfomo",
        title="First-order model optimisation",
        paper="Zhang et al., ICLR 2021, arXiv 2012.08565",
        spelling="FedFomo",
        sends=("M Σ", "Σ"),
        dp=No(
            "its weights, which steer what is sent and leave, are losses on records without noise"
        ),
        sends_numbers={"weights": Names("how much it takes of which silo")},
        receives="models",
        late="grows",
        ala=False,
    )
    client = FedFomoClient
    Settings = FomoSettings
    state_type = FomoServerState
    state: FomoServerState
    settings: FomoSettings

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        names = list(self.silos)
        blind = [name for name, info in self.silos.items() if not info.n_val]
        if len(blind) == len(names):
            raise UserError(
                "fedfomo weighs models on validation data, and no silo has any: set validation > 0"
            )
        if blind:
            log(
                WARNING,
                "without validation data, and so without others' models: %s",
                ", ".join(blind),
            )
        self.state.affinity = {i: {j: float(i == j) for j in names} for i in names}
        self.state.last_rounds = {}

    def welcome(self, silo: str, *, trains: bool) -> None:
        """Store the mean of the others' models as this silo's, until it sends its own."""
        state = self.state
        state.affinity = {i: {**row, silo: 0.0} for i, row in state.affinity.items()}
        state.affinity = {**state.affinity, silo: {j: float(j == silo) for j in self.silos}}
        if state.models:
            state.models[silo] = weighted_mean(state.models.values())
            state.last_rounds = {**state.last_rounds, silo: self.round - 1}

    def payload(self, silo: str) -> Payload:
        if silo not in self.state.models:
            return Payload()
        rounds = self.state.last_rounds
        return Payload(
            {
                model_of(n): Model(self.state.models[n], n, rounds[n], self.plan.samples[n])
                for n in self.choose_others(silo)
            }
        )

    def choose_others(self, silo: str) -> list[str]:
        """Return the M others that this silo gets: by affinity, with probability ε at random."""
        others = [n for n in self.silos if n != silo and n in self.state.models]
        budget = self.settings.max_downloads or len(others)
        affinity = self.state.affinity[silo]
        rng = generator(self.common.seed, "fomo", silo, self.round)
        epsilon = self.settings.epsilon * self.settings.epsilon_decay ** (self.round - 1)
        # Among equals at random, not by name
        order = torch.randperm(len(others), generator=rng).tolist()
        ranked = sorted((others[k] for k in order), key=lambda n: -affinity[n])
        picked: list[str] = []
        while ranked and len(picked) < budget:
            at_random = float(torch.rand(1, generator=rng)) < epsilon
            index = int(torch.randint(len(ranked), (1,), generator=rng)) if at_random else 0
            picked.append(ranked.pop(index))
        return sorted(picked)

    def check(self, update: Update) -> None:
        sent = update.numbers.get("weights", "{}")
        try:
            weights = json.loads(cast(str, sent))
        except (TypeError, ValueError, RecursionError):
            weights = None
        if not isinstance(weights, dict) or not all(
            is_number(w) and w >= 0 for w in weights.values()
        ):
            raise DataError(f"'weights' is {sent!r}, not finite numbers from 0 on by silo")
        if sum(weights.values()) > 1.001:
            raise DataError(f"'weights' is {sent!r}, which is more than 1 in all")

    def centre(self, name: str, update: Update) -> Tensor | None:
        """Return the mixture of sent models that the silo trained from, by its reported weights."""
        default = super().centre(name, update)
        if name != "model" or default is None:
            return default
        mixed = default.clone()
        for other, weight in self.reported_weights(update).items():
            sent = self.sent.get(update.silo, {}).get(model_of(other))
            if sent is not None:
                mixed.add_(sent.vector.to(default.device) - default, alpha=weight)
        return mixed

    def reported_weights(self, update: Update) -> dict[str, float]:
        """Return the silo's reported weights of others' models."""
        weights: dict[str, float] = json.loads(cast(str, update.numbers.get("weights", "{}")))
        return weights

    def aggregate(self, updates: Sequence[Update]) -> None:
        for update in updates:
            self.state.models[update.silo] = update.vector
            self.state.last_rounds[update.silo] = self.round
            row = self.state.affinity[update.silo]
            for name, weight in self.reported_weights(update).items():
                if name in row:
                    row[name] += float(weight)
