"""FedLAMA: layers that differ little between silos are averaged less often.

Lee, Zhang and Avestimehr, AAAI 2023, arXiv 2110.10302. A layer is one weight tensor l of dim_l numbers, with an
interval τ_l of 1 or φ rounds (the paper's τ' is one round here: local-epochs). In round t every silo trains its model
x^i, and

    layers with τ_l | t:       u_l <- sum_i p_i x_l^i,  d_l = sum_i p_i ||u_l - x_l^i||² / (τ_l dim_l),  x_l^i <- u_l
    the others:                x_l^i stays as each silo has it
    where φ | t:               sort by d_l, ascending; δ_l = sum_{k<=l} d_k dim_k / sum_k d_k dim_k,
                               λ_l = sum_{k<=l} dim_k / sum_k dim_k; τ = φ up to the first l with 1 - λ_l < δ_l, else 1

Only matrices and kernels are sorted. Biases and normalisation weights enter only δ's denominator; they and running
statistics are averaged every round. All intervals start at 1, and if φ | t all layers are averaged.

With secure sums the server has no x^i. A silo adds to its layers the sums of squares q_l^i = ||x_l^i - c_l||² of its
steps from the last averages c_l, and sum_i p_i ||u_l - x_l^i||² = sum_i p_i q_l^i - ||u_l - c_l||². All silos then
receive the whole u, since masks cancel only if all receive the same. Each takes over the layers that are new to it.

Sent: the layers of the round before down, those of the round up: at most Σ, less with longer intervals; in a silo's
first round Σ down. Kept: server u, τ, the last average of each layer, the last reply of each silo; silo x^i. An absent
silo is left out of the means, and on its return gets all layers averaged since its last reply. So does a silo whose
reply was lost. Special cases: φ = 1 is FedAvg bit for bit, and so is every run before its first adjustment.

Paper and code: the official code averages without weights (``average = "silos"``), does not adjust in the first 6
rounds (``wait``), and keeps its momentum over rounds (``optimizer-state = "keep"``). It counts the layer at which the
curves cross as one of the slow ones, as here. Line 9 of the paper's Algorithm 2 contradicts the paper's own text and
the code, which agree with one another and are followed here. It is no personalised method: if φ | t-1, the
received model of round t is the same for all. In other rounds it has the silo's own slow layers, which improves its
metrics, but not by design.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from models.flat import gather, scatter
from models.layout import Layout
from partitions.common.adding import added
from strategies.base.client import SiloClient
from strategies.base.info import ONE_MODEL, OTHER_LAYERS, Sums
from strategies.base.settings import Averaging, setting
from strategies.base.state import GLOBAL, Array, ClientState, Item, ServerState
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.error_feedback import propose
from strategies.base.transport.kinds import LAYERS
from strategies.base.transport.payload import Number, Payload, Update, silos_of


@dataclass(frozen=True)
class LamaSettings(Averaging):
    """Settings of FedLAMA."""

    phi: int = setting(2, "the longer interval, in rounds", symbol="φ", minimum=1)
    wait: int = setting(0, "rounds before the intervals are first adjusted", minimum=0)


def flagged_parts(layout: Layout, flags: Number) -> list[slice]:
    """Return the parts of the vector of the tensors with a 1 in ``flags``."""
    pairs = zip(layout.parameters, cast(list[int], flags), strict=True)
    return [slice(e.start, e.stop) for e, flag in pairs if flag]


def choose_intervals(layout: Layout, excess: Sequence[float], phi: int) -> list[int]:
    """Return τ_l of every tensor from its d_l dim_l."""
    sizes = [e.stop - e.start for e in layout.parameters]
    kernels = [k for k, e in enumerate(layout.parameters) if len(e.shape) > 1]
    all_sizes, all_excess = sum(sizes[k] for k in kernels), added(excess)
    intervals, size, differs = [1] * len(sizes), 0, 0.0
    for k in sorted(kernels, key=lambda k: excess[k] / sizes[k]):
        intervals[k] = phi
        size, differs = size + sizes[k], differs + excess[k]
        if (1 - size / all_sizes) * all_excess < differs:
            break
    return intervals


def squares_of(layout: Layout, step: Tensor, due: bool) -> Tensor:
    """Return the sum of squares of each tensor (L,); empty if the intervals are not adjusted."""
    sums = [step[e.start : e.stop].square().sum() for e in layout.parameters]
    return torch.stack(sums) if due else step[:0]


class LamaClientState(ClientState):
    heard = Array()  # with secure sums: the last round that the server counted (1,)


class FedLAMAClient(SiloClient):
    state_type = LamaClientState
    state: LamaClientState

    def receive(self) -> Tensor:
        layout, received = self.layout, self.shared_model
        if not self.common.secure_aggregation:
            return scatter(
                self.previous(), flagged_parts(layout, self.numbers["fresh"]), received
            )
        heard = 0 if self.state.heard is None else int(self.state.heard)
        averaged = cast(list[int], self.numbers["averaged"])
        fresh = flagged_parts(layout, [int(r >= heard) for r in averaged])
        self.shared = flagged_parts(layout, self.numbers["due"])
        return scatter(self.previous(), fresh, gather(received, fresh))

    def local_update(self) -> list[Tensor]:
        self.train()
        layout, trained = self.layout, self.model.vector
        layers = gather(trained, flagged_parts(layout, self.numbers["due"]))
        if not self.common.secure_aggregation:
            return [layers]
        propose(self.state, self.round, {"heard": torch.tensor([float(self.round)])})
        step = trained - self.shared_model
        return [layers, squares_of(layout, step, bool(self.numbers["adjusts"]))]


class LamaServerState(ServerState):
    intervals = Item[list[int]](list)  # of each unit, in rounds
    averaged = Item[list[int]](list)  # the last round in which each unit was averaged
    heard = Item[dict[str, int]](dict)  # silo -> the last round it was sent the model in


class FedLAMA(PersonalizedStrategy):
    state_type = LamaServerState
    state: LamaServerState
    info = ONE_MODEL(
        name="fedlama",
        title="Layer-wise adaptive intervals of averaging",
        paper="Lee et al., AAAI 2023, arXiv 2110.10302",
        spelling="FedLAMA",
        sends=("≤ Σ", "≤ Σ"),
        uploads={"layers": LAYERS},
        note="most rounds send some layers, the last ones since are known",
        lossy=OTHER_LAYERS,
        sums=Sums(also={"squares": ""}),
    )
    client = FedLAMAClient
    Settings = LamaSettings
    settings: LamaSettings

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        super().start_state(initial)
        count = len(self.layout.parameters)
        self.state.intervals = [1] * count
        self.state.averaged = [0] * count
        self.state.heard = {}

    def due(self) -> list[int]:
        """Return 1 for every tensor that is averaged in this round, else 0."""
        return [int(self.round % interval == 0) for interval in self.state.intervals]

    def adjusts(self) -> bool:
        """Return whether this round adjusts the intervals."""
        return self.round % self.settings.phi == 0 and self.round > self.settings.wait

    def shared_parts(self) -> list[slice]:
        return flagged_parts(self.layout, self.due())

    def sent_parts(self, silo: str) -> list[slice]:
        return self.shared_parts()

    def sizes(self, silo: str) -> dict[str, int]:
        squares = len(self.layout.parameters) * self.adjusts()
        return {**super().sizes(silo), "squares": squares}

    def most_sizes(self, silo: str) -> dict[str, int]:
        return {"squares": len(self.layout.parameters)}

    def begin_round(self) -> None:
        # What silos that were last heard of in that round get
        self._packed: dict[int, Tensor] = {}

    def payload(self, silo: str) -> Payload:
        if self.common.secure_aggregation:
            return self.pack(
                {GLOBAL: self.state.model},
                averaged=self.state.averaged,
                due=self.due(),
                adjusts=self.adjusts(),
            )
        heard = self.state.heard.get(silo, 0)
        fresh = [int(server_round >= heard) for server_round in self.state.averaged]
        if heard not in self._packed:
            self._packed[heard] = gather(self.state.model, flagged_parts(self.layout, fresh))
        return self.pack({GLOBAL: self._packed[heard]}, fresh=fresh, due=self.due())

    def aggregate(self, updates: Sequence[Update]) -> None:
        state, due, before = self.state, self.due(), self.state.model
        weights = self.weights(updates)
        mean = self.mean((u.vector for u in updates), weights)
        state.model = scatter(before, self.shared_parts(), mean)
        state.averaged = [
            self.round if now else r for now, r in zip(due, state.averaged, strict=True)
        ]
        state.heard = {**state.heard, **dict.fromkeys(silos_of(updates), self.round)}
        # A single silo cannot differ from others: its layers' excess is meaningless.
        if self.adjusts() and len(silos_of(updates)) > 1:
            if "squares" in updates[0].vectors:
                moved = squares_of(self.layout, state.model - before, True)
                sums = [*(updates[0].vectors["squares"] - moved).clamp(min=0)]
            else:
                squares = self.mean(((u.vector - mean).square() for u in updates), weights)
                sums = [squares[e.start : e.stop].sum() for e in self.layout.parameters]
            excess = [float(x) / tau for x, tau in zip(sums, state.intervals, strict=True)]
            state.intervals = choose_intervals(self.layout, excess, self.settings.phi)
