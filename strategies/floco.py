"""Floco: the last layer is a simplex of networks, trained as a whole; each silo gets a region of it by its own step.

Grinwald, Wiesner and Nakajima, NeurIPS 2024, "Federated learning over connected modes". z = φ(x) are the features,
W_1..W_M the corners, b a bias that they share. A point α of the simplex is the network with the last layer

    h(z) = (sum_m α_m W_m) z + b

    rounds 1 to τ   each step of SGD, on φ, all W_m and b, is at its own α, drawn uniformly from the simplex
    after round τ   s_i = the silo's step, received - sent, of all W_m;  κ_i = its first M principal components over the
                    silos;  β_i(ζ) = the point of {β >= 0, sum β = ζ} nearest to κ_i, divided by ζ;
                    α_i = β_i(ζ) of the ζ of 0.0001..1 (1,000 of them) with the lowest sum over pairs of ||β_i - β_j||⁻²
    later rounds    each step is at α_i + r u, with r uniform in 0..ρ and u = v / ||v||_1, v uniform in -1..1
    server          φ, W_m, b <- the sample-weighted means

Sent: Σ_s down and up (body, M last layers, b), and α_i down after round τ. Kept: server these; silo nothing, but its
own model has α_i as the layer block ``point``, so that a file of it predicts alone. In round τ all silos train, at any
``participation``. A silo that is absent then, or comes later, stays on the whole simplex and predicts at its centre;
so does a newcomer. The server learns which silos are near each other; α_i tells a silo how its step lay among all.
Evaluated: the received simplex at α_i.

Special cases: M = 1 with ρ = 0 is FedAvg bit for bit. ``tau = 0`` trains the whole simplex in all rounds. Of two silos
with different steps one gets a corner, and the other the middle of the rest: a corner, too, with M = 2.

The paper's text was not available; all this is from its authors' baseline in Flower (Apache 2.0, code not copied). Its
τ is the round that begins with regions, one more than here. The equations leave the sign of a component open: here the
entry of its axis with the largest magnitude is positive. It trains the silos that round τ did not draw for their steps
alone; here they are in its mean. It needs M silos: of fewer, the components that are missing are 0. It draws all
corners by Xavier's normal distribution; here the first is FedAvg's last layer, and the others are drawn as that is. Not
here: Floco+, which adds Ditto's model of a silo's own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.flat import gather
from models.layout import Layout
from models.networks.blocks import Values
from strategies.base.info import OWN_LAYERS, No, Sums
from strategies.base.partial import (
    PartialClient,
    PartialStrategy,
    Split,
    head_blocks,
    head_parts,
    split_parts,
)
from strategies.base.settings import setting
from strategies.base.state import Arrays, ServerState
from strategies.base.transport.payload import Model, Payload, Update

POINT = "point"
NEAREST = 1e-4  # in place of a smaller distance between two silos


@dataclass(frozen=True)
class FlocoSettings:
    """Settings of Floco."""

    corners: int = setting(10, "corners of the simplex", symbol="M", minimum=1, maximum=64)
    tau: int = setting(
        10,
        "the round after which each silo gets its region, 0: none does",
        symbol="τ",
        minimum=0,
    )
    rho: float = setting(0.1, "radius of a region", symbol="ρ", minimum=0, maximum=2)


class SimplexHead(nn.Module):
    """A linear layer whose weights are a mixture of corners."""

    block_names = ("corners", "bias", POINT)
    # A point for each batch
    has_dropout = True

    def __init__(self, layer: nn.Linear, size: int) -> None:
        super().__init__()
        others = [copy.deepcopy(layer) for _ in range(size - 1)]
        for other in others:
            other.reset_parameters()
        weights = torch.stack([each.weight.detach() for each in (layer, *others)])
        self.corners = Values(0)
        self.corners.values = nn.Parameter(weights)
        self.bias = Values(0)
        self.bias.values = layer.bias
        self.point = Values(size)
        nn.init.constant_(self.point.values, 1 / size)

    def forward(self, z: Tensor) -> Tensor:
        weight = torch.tensordot(self.point(), self.corners(), 1)
        return F.linear(z, weight, self.bias())


def nearest_points(scores: Tensor, size: float) -> Tensor:
    """Return the points of {β >= 0, sum β = size} that are nearest to the rows of ``scores`` (N, M)."""
    ordered = scores.sort(1, descending=True).values
    over = (ordered.cumsum(1) - size) / torch.arange(1, 1 + scores.shape[1])
    last = (ordered > over).sum(1, keepdim=True) - 1
    return (scores - over.gather(1, last)).clamp(min=0)


def energy(points: Tensor) -> float:
    """Return the sum over pairs of points (N, M) of 1 / distance²."""
    return float(F.pdist(points).clamp(min=NEAREST).pow(-2).sum())


def silo_points(steps: Tensor, corners: int) -> Tensor:
    """Return α (N, M) from the silos' steps (N, ...), float64."""
    u, lengths, axes = torch.linalg.svd(steps - steps.mean(0), full_matrices=False)
    # An axis points to where its largest entry is positive
    signs = axes.gather(1, axes.abs().argmax(1, keepdim=True)).squeeze(1).sign()
    scores = F.pad(u * lengths * signs, (0, corners - len(lengths)))
    tried = [nearest_points(scores, float(size)) for size in torch.linspace(1e-4, 1, 1000)]
    return min((p / p.sum(1, keepdim=True) for p in tried), key=energy)


class FlocoClient(PartialClient):
    settings: FlocoSettings

    @staticmethod
    def split(layout: Layout, *_: object) -> Split:
        return split_parts(layout, head_blocks(layout, POINT))

    def place_own(self, vector: Tensor) -> Tensor:
        point = self.models.get(POINT)
        vector[self.private[0]] = 1 / self.settings.corners if point is None else point.vector
        return vector

    def local_update(self) -> list[Tensor]:
        (place,), vector = self.private, self.model.vector
        self.point = vector[place].clone()
        self.train(parts=self.shared)
        vector[place] = self.point
        return [gather(vector, self.shared)]

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        self.model.vector[self.private[0]] = self.draw_point()
        return super().gradient(x, y)

    def draw_point(self) -> Tensor:
        """Return a point of the silo's region (M,), from torch's global generator."""
        drawn = torch.empty_like(self.point)
        if POINT not in self.models:
            drawn.exponential_()
            return drawn / drawn.sum()
        drawn.uniform_(-1, 1)
        radius = torch.empty_like(drawn[:1]).uniform_(0, self.settings.rho)
        return self.point + radius * drawn / drawn.abs().sum()

    def newcomer_parts(self) -> Sequence[slice]:
        return ()


class FlocoServerState(ServerState):
    points = Arrays("point.")  # α_i (M,), by the silo's name


class Floco(PartialStrategy):
    info = OWN_LAYERS(
        name="floco",
        title="A simplex of last layers, with a region for each silo",
        paper="Grinwald, Wiesner and Nakajima, NeurIPS 2024",
        spelling="Floco",
        sends=("Σ_s + M", "Σ_s"),
        note="the server has the own point, which is not sent",
        receives="mixture",
        reports="received",
        sums=Sums(at={"tau": (0,)}, otherwise="the server compares the steps of single silos"),
        ala=False,
        trainer=No("its last layer is another one for each batch"),
    )
    client = FlocoClient
    head = SimplexHead
    head_size = "corners"
    Settings = FlocoSettings
    settings: FlocoSettings
    state_type = FlocoServerState
    state: FlocoServerState

    def participants(self) -> list[str]:
        everyone = self.round == self.settings.tau
        return list(self.silos) if everyone else super().participants()

    def payload(self, silo: str) -> Payload:
        models, point = super().payload(silo).models, self.state.points.get(silo)
        place = {} if point is None else {POINT: Model(point, round=self.settings.tau)}
        return Payload({**models, **place})

    def aggregate(self, updates: Sequence[Update]) -> None:
        if self.round == self.settings.tau:
            (part,) = head_parts(self.layout, "corners")
            w = self.state.model[part]
            steps = torch.stack([w - u.vector[part] for u in updates]).double().cpu()
            points = silo_points(steps, self.settings.corners).to(w)
            self.state.points.update({u.silo: p for u, p in zip(updates, points, strict=True)})
        super().aggregate(updates)
