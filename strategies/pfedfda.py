"""pFedFDA: features of each class are Gaussian; the head follows from them, and silos mix their own estimates in.

McLaughlin and Su, NeurIPS 2024, arXiv 2411.00329. φ is the body, z = φ(x) in R^K the input of the last layer, which is
the discriminant of the Gaussians N(μ_c, S) and the silo's own class shares p_ic, and never trained:

    h(z)_c   = z'a_c + b_c,   a_c = S'^-1 μ_c,   b_c = log π_ic - μ_c'a_c / 2                      (``discriminant``)
    S'       = (1 - e) S + e tr(S)/K I,   π_ic = (p_ic + e) / (1 + C e),   e = 10⁻⁴

    silo     1  E epochs of SGD on the body below h(μ_g, S_g, π_i); the features of all batches are collected
             2  μ_l: means of each class of them (one that is missing: μ_g);  S_l = scatter around them / (n - 1) + r I
             3  β_i: argmin over [0, 1]² of the loss of h(β_1 μ_l + (1 - β_1) μ_g, β_2 S_l + (1 - β_2) S_g, π_i),
                with μ_l and S_l of one half of each class on the other half, and the other way round
             4  μ_i, S_i: the mixtures with β_i, of estimates from all of them
    server   φ, μ_g, S_g <- the sample-weighted means of φ_i, μ_i, S_i;   first μ_g uniform in 0..1, S_g = I

Sent: Σ_s + CK + K (K + 1)/2 down and up: body and Gaussians. Class means leave, and a class that a silo lacks shows by
the μ_g that it returns, as does one of fewer patients than the policy's ``min-cell``, which S_l lacks, too. Kept:
server these; silo nothing, so an absent silo loses nothing. Without a class of two samples β_i is 0. A mean S_g that is
no covariance, as of medians, loses its negative eigenvalues. Evaluated: the received body with the head of steps 2 to 4
on the training samples' features, without training. Personal: the trained body with μ_i, S_i. A newcomer has the head
of μ_g and S_g, and the evaluated one as its own. Special cases: ``betas = "none"`` (β = 0) leaves μ_g and S_g as they
began: FedBABU's body below a random discriminant. β = 1 is the silo's own discriminant. With S = I and equal shares h
is the nearest class mean.

Paper and code: β is sought by two sweeps of golden sections, each over one of the two (or over both at once, with
``betas = "one"``), which need not end at the argmin over both; the code's ten steps of L-BFGS from 1/2 need not either.
Halves are by the order of passing, so after several epochs a sample may be in both. The one sample of a class is tried
with μ_g as its mean, and the mean made of it on none. Of two samples each half has one, with no scatter around itself.
The code's least number of samples of a class counts all of the silo's, so it never acts. The code adds 10⁻⁴ to every
entry of S_l, and I; r I (``ridge``) was probably meant (unverified), and needs no clipped eigenvalues.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from models.features import all_features, class_sums, means_of, members
from models.flat import gather, is_finite
from models.layout import Layout
from models.training import feature_gradient, generator
from partitions.common.errors import DataError, UserError
from strategies.base.info import OWN_PARTS, No
from strategies.base.partial import PartialClient, PartialStrategy, Split, split_parts
from strategies.base.settings import setting
from strategies.base.state import GLOBAL, RequiredArray, ServerState
from strategies.base.transport.kinds import CLASS_GAUSSIANS, SHARED_SOME, released_classes
from strategies.base.transport.payload import Payload, Update

GAUSSIANS = "gaussians"
MOST_FEATURES = 1024  # whose covariance travels
SWEEPS = 2
SHRINK = 1e-4  # of a covariance towards a multiple of I, and of class shares towards equal ones
GOLDEN = (math.sqrt(5) - 1) / 2
STEPS = 24  # of a search by golden sections


@dataclass(frozen=True)
class FdaSettings:
    """Settings of pFedFDA."""

    betas: str = setting(
        "two",
        "shares of the own estimates: one for means and one for the covariance, one for both, none",
        symbol="β",
        choices=("two", "one", "none"),
    )
    ridge: float = setting(1e-4, "added to the own variances", symbol="r", above=0, maximum=1)


@dataclass(frozen=True)
class Gaussians:
    """Means of the classes μ (C, K) and the covariance S (K, K) of all, float64."""

    means: Tensor
    covariance: Tensor

    def pack(self) -> Tensor:
        """Return the means and the lower triangle, (CK + K (K + 1)/2,)."""
        size = len(self.covariance)
        rows, columns = torch.tril_indices(size, size, device=self.covariance.device)
        return torch.cat([self.means.flatten(), self.covariance[rows, columns]]).float()

    def is_positive(self) -> bool:
        """Return whether S has no negative eigenvalue, up to rounding."""
        values = torch.linalg.eigvalsh(self.covariance)
        return bool(values[0] >= -1e-6 * values[-1])


def read_gaussians(vector: Tensor, layout: Layout) -> Gaussians:
    """Return what :meth:`Gaussians.pack` wrote."""
    classes, features = layout.classes, layout.features
    means, lower = vector.double().tensor_split([classes * features])
    covariance = lower.new_zeros(features, features)
    rows, columns = torch.tril_indices(features, features, device=lower.device)
    covariance[rows, columns] = lower
    covariance[columns, rows] = lower
    return Gaussians(means.view(classes, features), covariance)


def packed_size(layout: Layout) -> int:
    """Return CK + K (K + 1)/2."""
    features = layout.features
    return layout.classes * features + features * (features + 1) // 2


def estimates(z: Tensor, y: Tensor, shared: Tensor, ridge: float) -> Gaussians:
    """Return μ_l and S_l of features (n, K), float64. ``shared``: μ_g (C, K)."""
    sums, counts = class_sums(z, y, len(shared))
    means = torch.where(counts[:, None] > 0, means_of(sums, counts), shared)
    apart = z - means[y]
    covariance = apart.T @ apart / max(len(z) - 1, 1)
    return Gaussians(means, covariance + ridge * z.new_ones(z.shape[1]).diag())


def root_of(s: Tensor) -> Tensor:
    """Return the Cholesky factor of S' (K, K). Raises UserError where S is no covariance."""
    k = len(s)
    shrunk = (1 - SHRINK) * s + SHRINK * s.trace() / k * s.new_ones(k).diag()
    root: Tensor
    root, fault = torch.linalg.cholesky_ex(shrunk)
    if fault:
        raise UserError(
            "the covariance of the features has no inverse; start from another seed"
        )
    return root


def discriminant(means: Tensor, root: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return a (C, K) and b (C,) of h. ``root``: the factor of S'; ``shares``: π_i (C,)."""
    weight = torch.cholesky_solve(means.T, root).T
    return weight, shares.log() - (means * weight).sum(1) / 2


def halves(y: Tensor, classes: int) -> Tensor:
    """Return bool (n,): every second sample of each class, in their order."""
    mask = members(y, classes)
    return (mask.cumsum(0) * mask).sum(1) % 2 == 0


def least(value: Callable[[float], float]) -> float:
    """Return the argmin over [0, 1] by golden sections."""
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        low, high = (low, b) if value(a) <= value(b) else (a, high)
    return min((low, high, (low + high) / 2), key=value)


class FDAClient(PartialClient):
    settings: FdaSettings

    @staticmethod
    def split(layout: Layout, *_: object) -> Split:
        return split_parts(layout, [layout.blocks[-1].name])

    def receive(self) -> Tensor:
        self.gaussians = read_gaussians(self.models[GAUSSIANS].vector, self.layout)
        return super().receive()

    def first_model(self) -> Tensor:
        other, layout = copy.copy(self), self.layout
        other.gaussians = read_gaussians(first_gaussians(layout, self.common.seed), layout)
        return other.place_own(self.silo.initial("").clone())

    def bounded_parts(self) -> Sequence[slice]:
        return self.shared  # the head has any length

    def place_own(self, vector: Tensor) -> Tensor:
        """Write the head of the received Gaussians, mixed with the own estimates below the body."""
        classes = self.layout.classes
        y = self.silo.train.y
        shares = members(y, classes).double().mean(0)
        self.shares = (shares + SHRINK) / (1 + classes * SHRINK)
        self.model.load(vector)
        z = all_features(self.model, self.silo.train)
        self.adapted_gaussians = self.own_gaussians(z, y)
        self.place_head(vector, self.adapted_gaussians)
        return vector

    def place_head(self, vector: Tensor, gaussians: Gaussians) -> None:
        weight, bias = discriminant(gaussians.means, root_of(gaussians.covariance), self.shares)
        vector[self.private[0]] = torch.cat([weight.flatten(), bias]).to(vector)

    def own_gaussians(self, z: Tensor, y: Tensor) -> Gaussians:
        """Return μ_i, S_i of features (n, K)."""
        z, shared = z.flatten(1).double(), self.gaussians
        # A training that diverged is refused by its body
        if self.settings.betas == "none" or not is_finite(z):
            return shared
        local = estimates(z, y, shared.means, self.settings.ridge)
        of_means, of_covariance = self.best_betas(z, y)
        return Gaussians(
            shared.means.lerp(local.means, of_means),
            shared.covariance.lerp(local.covariance, of_covariance),
        )

    def best_betas(self, z: Tensor, y: Tensor) -> Sequence[float]:
        second, shared = halves(y, len(self.shares)), self.gaussians
        if not bool(second.any()):
            return 0.0, 0.0
        folds = [
            (estimates(z[a], y[a], shared.means, self.settings.ridge), z[~a], y[~a])
            for a in (second, ~second)
        ]

        def roots(beta: float) -> list[Tensor]:
            return [
                root_of(shared.covariance.lerp(half.covariance, beta)) for half, _, _ in folds
            ]

        def loss(beta: float, roots: Sequence[Tensor]) -> float:
            total = 0.0
            for (half, rows, labels), root in zip(folds, roots, strict=True):
                means = shared.means.lerp(half.means, beta)
                logits = F.linear(rows, *discriminant(means, root, self.shares))
                total += float(F.cross_entropy(logits, labels, reduction="sum"))
            return total

        if self.settings.betas == "one":
            return [least(lambda b: loss(b, roots(b)))] * 2
        of_means = of_covariance = 0.5
        for _ in range(SWEEPS):
            of_means = least(partial(loss, roots=roots(of_covariance)))
            of_covariance = least(lambda b, m=of_means: loss(m, roots(b)))  # type: ignore[misc]
        return of_means, of_covariance

    def local_update(self) -> list[Tensor]:
        self.place_head(self.model.vector, self.gaussians)
        self.passed: list[tuple[Tensor, Tensor]] = []
        if self.shared:
            self.train(parts=self.shared)
        z, y = all_features(self.model, self.silo.train), self.silo.train.y
        if self.passed:
            z, y = (torch.cat(parts) for parts in zip(*self.passed, strict=True))
        mixed = self.own_gaussians(z, y)
        self.place_head(self.model.vector, mixed)
        kept = released_classes(self.silo)[y]
        sent = mixed if bool(kept.all()) else self.own_gaussians(z[kept], y[kept])
        return [gather(self.model.vector, self.shared), sent.pack()]

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        def loss(logits: Tensor, z: Tensor, y: Tensor) -> Tensor:
            self.passed.append((z.detach().flatten(1), y))
            return self.loss(logits, y)

        return feature_gradient(self.model, x, y, loss)

    def newcomer(self) -> Tensor:
        """Return the received body with the head of μ_g, S_g and the own class shares."""
        vector = self.received.clone()
        self.place_head(vector, self.gaussians)
        return vector

    def personalise(self) -> Tensor:
        """Return the received body with its own head, without training."""
        self.place_head(self.model.vector, self.adapted_gaussians)
        return self.model.vector


def first_gaussians(layout: Layout, seed: int) -> Tensor:
    """Return the packed Gaussians before round 1."""
    classes, features = layout.classes, layout.features
    if features > MOST_FEATURES:
        raise UserError(
            f"pfedfda: the covariance of {features} features is too large, at most of {MOST_FEATURES}; take a "
            "network with a narrower last layer"
        )
    means = torch.rand(classes, features, generator=generator(seed, "gaussians"))
    return Gaussians(means.double(), torch.eye(features, dtype=torch.float64)).pack()


class FdaServerState(ServerState):
    gaussians = RequiredArray(GAUSSIANS)


class PFedFDA(PartialStrategy):
    info = OWN_PARTS(
        name="pfedfda",
        title="Heads from Gaussian features, shared and own",
        paper="McLaughlin and Su, NeurIPS 2024, arXiv 2411.00329",
        spelling="pFedFDA",
        sends=("Σ_s + CK + K (K + 1)/2", "Σ_s + CK + K (K + 1)/2"),
        uploads={"shared": SHARED_SOME, GAUSSIANS: CLASS_GAUSSIANS},
        dp=No("means and covariance of features leave, without noise"),
        note="its head follows from the Gaussians that are sent and from its class shares",
        needs_classes=True,
        lossy=No("a covariance that is rounded need not be one"),
    )
    client = FDAClient
    state_type = FdaServerState
    state: FdaServerState
    Settings = FdaSettings

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        super().start_state(initial)
        self.state.gaussians = first_gaussians(self.layout, self.common.seed)

    def payload(self, silo: str) -> Payload:
        return self.pack({GLOBAL: self.state.model, GAUSSIANS: self.state.gaussians})

    def sizes(self, silo: str) -> dict[str, int]:
        return {**super().sizes(silo), GAUSSIANS: packed_size(self.layout)}

    def check(self, update: Update) -> None:
        sent = update.vectors.get(GAUSSIANS)
        if sent is not None and not read_gaussians(sent, self.layout).is_positive():
            raise DataError("'gaussians' holds no covariance")

    def aggregate(self, updates: Sequence[Update]) -> None:
        super().aggregate(updates)
        mean = self.mean((u.vectors[GAUSSIANS] for u in updates), self.weights(updates))
        gaussians = read_gaussians(mean, self.layout)
        if not gaussians.is_positive():
            values, vectors = torch.linalg.eigh(gaussians.covariance)
            clipped = vectors @ values.clamp(min=0).diag() @ vectors.T
            mean = Gaussians(gaussians.means, clipped).pack()
        self.state.gaussians = mean
