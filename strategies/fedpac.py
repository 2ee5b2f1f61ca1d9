"""FedPAC: a shared body with aligned features, and for each silo its own combination of all silos' heads.

Xu, Tong, Huang, ICLR 2023, arXiv 2306.11867. z = φ(x) in R^K are the features. The silo, in this order:

    1  receives the body φ, its mixed head ψ_i and the prototypes c_k (the mean features of each class over all silos)
    2  with these, p_ik its share of class k:   μ_ik = mean of z over its class k,   H_i[k] = p_ik μ_ik,
       V_i = (1/n_i) [ sum_k p_ik mean_{y=k} ||z||² - sum_k p_ik² ||μ_ik||² ]
    3  trains the head, the body held fixed:    CE                                              ``head-epochs``
    4  trains the body, the head held fixed:    CE + λ (1/K) ||z - t_y||², mean over the batch, t_y = c_y, or its own
       μ_iy where there is no c_y; no alignment in round 1                                      ``local-epochs``
    5  sends φ_i, ψ_i, the μ_ik of the trained body, p_ik, H_i, V_i

    server   φ <- the sample-weighted mean of the φ_i,   c_k <- sum_i n_ik μ_ik / sum_i n_ik
             ψ_i <- sum_j α_ij ψ_j,   α_i = argmin a' P_i a,  a >= 0, sum a = 1;  below 10⁻³ it is 0, and the rest is
             scaled to 1;   P_i = diag(V) + D_i,   D_i[j, l] = <H_i - H_j, H_i - H_l>

Heads are mixed among the silos of a round. Features are computed in evaluation mode.

Sent: Σ + C (K + 1) down (Σ in round 1: no prototypes), Σ + C (K + 1) + CK up, and V_i. Kept: server φ, c, every silo's
ψ_i; silo nothing. An absent silo keeps its ψ_i; a class that no silo of a round has keeps its prototype. The server
sees every silo's class shares, class means and head: ``min-count`` withholds classes with fewer samples, and the
policy's ``min-cell`` those with fewer patients (they count as absent). Evaluated: the received body with the mixed
head. Special cases: without mixing, with λ = 0 and one learning rate it is FedRep with these epochs, bit for bit; equal
H: α_j is proportional to 1/V_j; one silo: α = 1.

Defaults are the official code's; its head learning rate of 0.1 is hard-coded there (0: the run's).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from models.features import all_features, class_sums, means_of
from models.flat import scatter
from models.optimizers import Optimizer
from models.training import feature_gradient
from strategies.base.client import SiloClient
from strategies.base.info import EACH_MODEL, OWN_PARTS, No
from strategies.base.robust import weighted_mean
from strategies.base.settings import setting
from strategies.base.state import GLOBAL, Array, Arrays, ServerState
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.kinds import (
    CLASS_MEANS,
    CLASS_PRODUCTS,
    MODEL,
    Measured,
    class_shares,
)
from strategies.base.transport.payload import Payload, Update
from strategies.fedproto import (
    PROTOTYPES,
    average,
    check_table,
    make_table,
    read_table,
    table_size,
)

STATISTICS = "statistics"
LEAST = 1e-3  # coefficients below are 0


@dataclass(frozen=True)
class PacSettings:
    """Settings of FedPAC."""

    lambda_: float = setting(1.0, "weight of the alignment of features", symbol="λ", minimum=0)
    head_epochs: int = setting(1, "epochs on the head", minimum=0, kind="epochs")
    head_learning_rate: float = setting(
        0.1,
        "learning rate of the head, 0: learning-rate",
        symbol="η_g",
        minimum=0,
        kind="learning-rate",
    )
    mix: bool = setting(True, "mix the silos' heads")
    min_count: int = setting(1, "fewest samples of a class that are told of", minimum=1)


class PacServerState(ServerState):
    # c (C (K + 1),): see strategies/fedproto.py; None in round 1
    prototypes = Array(PROTOTYPES)
    heads = Arrays("head.")  # ψ_i, by the silo's name


class FedPACClient(SiloClient):
    settings: PacSettings

    def local_update(self) -> list[Tensor]:
        model, s = self.model, self.settings
        classes = model.layout.classes
        z, y = all_features(model, self.silo.train), self.silo.train.y
        sums, counts = class_sums(z, y, classes)
        shares, means = class_shares(self.silo, counts, s.min_count), means_of(sums, counts)
        squares = means_of(class_sums(z.square().sum(1)[:, None], y, classes)[0], counts)[:, 0]
        spread = (shares * squares).sum() - (shares[:, None] * means).square().sum()
        self.replies["variance"] = float(spread) / len(y)
        self.targets = means_of(sums, counts)
        if PROTOTYPES in self.models:
            prototypes, known = read_table(self.models[PROTOTYPES].vector, classes)
            self.targets = torch.where(known[:, None] > 0, prototypes, self.targets)
        self.aligned = False
        self.train(
            parts=[model.head],
            epochs=s.head_epochs,
            purpose="personal",
            optimizer_key="personal",
        )
        if model.head.start:
            self.aligned = PROTOTYPES in self.models and s.lambda_ > 0
            self.train(parts=model.layout.outside([model.head]), optimizer_key="shared")
        sums, counts = class_sums(all_features(model, self.silo.train), y, classes)
        table = make_table(means_of(sums, counts), shares)
        return [model.vector.clone(), table, (shares[:, None] * means).flatten()]

    def personalise(self) -> Tensor:
        """Train the head; the body is fixed."""
        self.aligned = False
        self.train(parts=[self.model.head], purpose="personal", optimizer_key="personal")
        return self.model.vector

    def optimizer(self, key: str = "") -> Optimizer:
        result = super().optimizer(key)
        if key.startswith("personal") and self.settings.head_learning_rate:
            result.lr = self.learning_rate(self.settings.head_learning_rate)
        return result

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.aligned:
            return super().gradient(x, y)
        return feature_gradient(self.model, x, y, self.aligned_loss)

    def aligned_loss(self, logits: Tensor, z: Tensor, y: Tensor) -> Tensor:
        return (
            self.loss(logits, y) + self.settings.lambda_ * (z - self.targets[y]).square().mean()
        )


def combination(gram: np.ndarray, variance: np.ndarray, silo: int) -> np.ndarray:
    """Return α_i (n,) from G[j, l] = <H_j, H_l> and V: D_i[j, l] = G_ii - G_ij - G_il + G_jl."""
    row = gram[silo]
    alpha = on_simplex(np.diag(variance) + row[silo] - row[:, None] - row[None, :] + gram)
    alpha[alpha < LEAST] = 0
    return cast(np.ndarray, alpha / alpha.sum())


def on_simplex(matrix: np.ndarray) -> np.ndarray:
    """Return argmin a' P a over a >= 0, sum a = 1, for positive semidefinite P (n, n), by non-negative least squares.

    With P = L'L, the minimum of ||L a||² + (sum a - 1)² over a >= 0 is s b, for a b on the simplex. The best s leaves
    b'Pb / (b'Pb + 1), which grows with b'Pb. So b is exactly the solution.
    """
    from scipy.optimize import nnls  # on the server only: a silo's image has no SciPy

    n = len(matrix)
    scale = max(float(np.diag(matrix).max()), np.finfo(float).tiny)
    values, vectors = np.linalg.eigh(matrix / scale)
    # Rounding makes an eigenvalue of 0 negative
    root = np.sqrt(values.clip(min=0) + 1e-12)[:, None] * vectors.T
    a, _ = nnls(np.vstack([root, np.ones(n)]), np.append(np.zeros(n), 1.0))
    return cast(np.ndarray, a / a.sum())


class FedPAC(PersonalizedStrategy):
    info = OWN_PARTS(
        name="fedpac",
        title="Feature alignment and combined heads",
        paper="Xu, Tong, Huang, ICLR 2023, arXiv 2306.11867",
        spelling="FedPAC",
        sends=("Σ + C (K + 1)", "Σ + C (2K + 1)"),
        uploads={"model": MODEL, PROTOTYPES: CLASS_MEANS, STATISTICS: CLASS_PRODUCTS},
        dp=No("means of features, class counts and a variance leave, without noise"),
        sends_numbers={"variance": Measured("the variance of its features", low=-1e-3)},
        receives="mixture",
        needs_classes=True,
        lossy=EACH_MODEL,
        sums=EACH_MODEL,
        own_model="sent",
        robust=(),
    )
    client = FedPACClient
    state_type = PacServerState
    state: PacServerState
    Settings = PacSettings
    search = (("lambda", 0.1, 10.0),)
    settings: PacSettings

    @property
    def last(self) -> slice:
        return self.layout.blocks[-1].slice

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        super().start_state(initial)
        for name in self.silos:
            self.state.heads[name] = initial("")[self.last].clone()

    def welcome(self, silo: str, *, trains: bool) -> None:
        """Store the mean of the others' heads as this silo's."""
        self.state.heads[silo] = self.state.model[self.last].clone()

    def payload(self, silo: str) -> Payload:
        state = self.state
        combined = scatter(state.model, [self.last], state.heads[silo])
        table = state.prototypes
        return self.pack({GLOBAL: combined} | ({} if table is None else {PROTOTYPES: table}))

    def sizes(self, silo: str) -> dict[str, int]:
        size = table_size(self.layout)
        return {PROTOTYPES: size, STATISTICS: size - self.layout.classes}

    def check(self, update: Update) -> None:
        check_table(update.vectors[PROTOTYPES], self.layout.classes)
        self.number(update, "variance")

    def aggregate(self, updates: Sequence[Update]) -> None:
        super().aggregate(updates)
        state, samples = self.state, self.weights(updates)
        tables = [u.vectors[PROTOTYPES] for u in updates]
        state.prototypes = average(tables, samples, self.layout.classes, state.prototypes)
        heads = torch.stack([u.vector[self.last] for u in updates])
        if not self.settings.mix:
            state.heads.update(
                {u.silo: head.clone() for u, head in zip(updates, heads, strict=True)}
            )
            return
        h = torch.stack([u.vectors[STATISTICS] for u in updates]).double()
        gram = np.array([row.tolist() for row in h @ h.T])
        variance = np.array([max(self.number(u, "variance"), 0.0) for u in updates])
        for i, update in enumerate(updates):
            state.heads[update.silo] = weighted_mean(
                heads, combination(gram, variance, i).tolist()
            )
