"""LG-Mix: a silo's own model takes the own and the mean step, in a ratio of how widely features spread.

Jiang, Le, Li and Dou, "Heterogeneous personalized federated learning by local-global updates mixing via convergence
rate", ICLR 2024. w is the sum of all mean steps, w_i the silo's own model:

    silo     D_i = the step of E epochs on f_i from w_i, which is then undone
             c_i = mean over its rounds of s_i / (s_i + s_g); s: the sum of all eigenvalues but the smallest of the
             covariance of the features (what the last layer takes), as the training's batches pass: s_i of the model
             that is trained, s_g of the received w, in evaluation mode
    server   D = sum_i n_i D_i / n,   w <- w + D
    silo     w_i <- w_i + (1 - c_i) D + c_i D_i

The silo computes D as the difference of the w of two messages: its own model is mixed when the next message arrives,
and is evaluated as *received*. After an absence the difference is the sum of the steps that it missed. If both s are 0,
as of a single sample, c_i of that round is 1/2.

Sent: Σ down (w), Σ up (D_i). Kept: server w; silo w_i, D_i, the last w, c_i. w_i starts at the w of a
silo's first round. Personal: w_i + D_i. Running statistics stay in the silo: a mixed variance could be below 0.
Special cases: ``ratio = 0`` is FedAvg up to rounding, and w_i = w. ``ratio = 1`` is Local up to rounding. So is one
silo.

All this is from the authors' code of the digits; the paper's text was not available, and its formula of c_i is
(unverified). A larger spread gives more weight, so features of a larger scale do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.features import compute_frozen
from models.training import feature_gradient
from partitions.common.errors import UserError
from strategies.base.client import SiloClient
from strategies.base.info import LOCAL_SUMS, OWN_PARTS, No
from strategies.base.settings import setting
from strategies.base.state import Array, ClientState, Item
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.kinds import CHANGE
from strategies.base.transport.payload import Update

MOST_FEATURES = 4096  # of which a covariance matrix is kept


@dataclass(frozen=True)
class LgMixSettings:
    """Settings of LG-Mix."""

    ratio: float = setting(
        -1.0,
        "share of the own step, -1: by the spread of features",
        symbol="c",
        minimum=-1,
        maximum=1,
    )


class LgMixClientState(ClientState):
    mixed = Array()  # w_i (Σ,) before its last step
    change = Array()  # D_i
    last = Array("last-global")  # the w of the last round that it trained in
    ratio = Item(float)  # c_i, over
    rounds = Item(int)  # this number of rounds


class Spread:
    """The sums of features and of their products, over batches."""

    def __init__(self) -> None:
        self.n = 0
        self.total: Tensor | None = None
        self.products: Tensor | None = None

    def add(self, z: Tensor) -> None:
        z = z.detach().flatten(1).double()
        if z.shape[1] > MOST_FEATURES:
            raise UserError(
                f"lg-mix: the covariance of {z.shape[1]} features is too large, at most of {MOST_FEATURES}; set "
                "lg-mix.ratio"
            )
        total, products = z.sum(0), z.T @ z
        self.total = total if self.total is None else self.total + total
        self.products = products if self.products is None else self.products + products
        self.n += len(z)

    def value(self) -> Tensor:
        """Return the sum of all eigenvalues of the covariance but the smallest."""
        if self.total is None or self.products is None:
            return torch.zeros(())
        mean = self.total / self.n
        covariance = self.products / self.n - torch.outer(mean, mean)
        # Of no more samples than features one eigenvalue is 0
        smallest = torch.linalg.eigvalsh(covariance)[0] if self.n > len(mean) else 0.0
        return (covariance.trace() - smallest).clamp(min=0)


class LgMixClient(SiloClient):
    state_type = LgMixClientState
    state: LgMixClientState
    settings: LgMixSettings

    def receive(self) -> Tensor:
        state, w = self.state, self.shared_model
        if state.mixed is None or state.change is None or state.last is None:
            return w
        c = self.settings.ratio if self.settings.ratio >= 0 else state.ratio
        return state.mixed + (1 - c) * (w - state.last) + c * state.change

    def local_update(self) -> list[Tensor]:
        state, w = self.state, self.shared_model
        self.own_spread, self.shared_spread = Spread(), Spread()
        self.shared = self.layout.unflatten(w, self.received_buffers)
        self.train()
        change = self.model.vector - self.received
        if self.settings.ratio < 0:
            spread, shared = self.own_spread.value(), self.shared_spread.value()
            both = spread + shared
            ratio = float(torch.where(both > 0, spread / torch.where(both > 0, both, 1.0), 0.5))
            state.ratio = (state.ratio * state.rounds + ratio) / (state.rounds + 1)
            state.rounds += 1
        state.mixed, state.change, state.last = self.received, change, w
        return [change]

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        if self.settings.ratio >= 0:
            return super().gradient(x, y)
        self.shared_spread.add(compute_frozen(self.model, self.shared, x)[0])

        def loss(logits: Tensor, z: Tensor, y: Tensor) -> Tensor:
            self.own_spread.add(z)
            return self.loss(logits, y)

        return feature_gradient(self.model, x, y, loss)

    def personalise(self) -> Tensor:
        """Train a copy of w, by the loss alone."""
        self.local_update()
        return self.model.vector


class LgMix(PersonalizedStrategy):
    info = OWN_PARTS(
        name="lg-mix",
        title="Own and mean steps, mixed by the spread of features",
        paper="Jiang et al., ICLR 2024",
        spelling="LG-Mix",
        uploads={"change": CHANGE},
        own_model="kept",
        note="what is sent is its last step",
        keeps=("its own model before its last step",),
        lossy=LOCAL_SUMS,
        buffers="local",
        dp=No("its own model, from which it trains, depends on its features without noise"),
        newcomer="copy",
    )
    client = LgMixClient
    Settings = LgMixSettings

    def aggregate(self, updates: Sequence[Update]) -> None:
        self.state.model = self.state.model + self.average(updates)
