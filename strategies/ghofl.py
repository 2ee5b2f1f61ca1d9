"""GH-OFL: one message of class moments of frozen features, from which Gaussian heads follow in closed form.

Turazza, Picone and Mamei, ICLR 2026, arXiv 2602.01186. z = φ(x) in R^K are the features. The body φ is the seed's, or
that of ``init-weights``, in every silo, and nothing is trained. Of a silo's n_i samples:

    silo     shares n_ic / n_i, sums of z / n_i of each class c, and sums / n_i of: z z' of all samples (``lda``), z z'
             of each class (``qda``), z_k² of each class (``nb``)
    server   their sample-weighted means are those of the N pooled samples: π_c, π_c μ_c, and of the products M or M_c

    lda      h(z)_c = z'a_c + log π_c - μ_c'a_c / 2,  a_c = S'⁻¹ μ_c,      S = N / (N - C) (M - sum_c π_c μ_c μ_c')
    qda      h(z)_c = log π_c - (log |S_c'| + (z - μ_c)'S_c'⁻¹(z - μ_c)) / 2,  S_c = N_c / (N_c - 1) (M_c - μ_c μ_c')
    nb       h(z)_c = log π_c - sum_k (log v_ck + (z_k - μ_ck)² / v_ck) / 2,   v_c = diag(M_c - μ_c μ_c'), at least e
    S' = (1 - s) S + s tr(S)/K I + e I,  s the setting ``shrink``,  e = 10⁻⁶;  log π_c at least log 10⁻¹²

So the model equals that of the pooled samples, however they are divided (with a ``min-cell``, up to the rounding of
shares). ``rounds = 1`` gives it; a later round makes it anew, of the silos that come. Settings of training change
nothing.

Sent: nothing down in round 1, then the head: C (K + 1), for ``nb`` CK more, for ``qda`` CK² more. Up C (K + 1), and of
products K (K + 1)/2, CK or C K (K + 1)/2. Shares tell which classes a silo has. Products of fewer records than features
span the same space as these records. Of a class with fewer patients than the policy's ``min-cell`` nothing leaves (with
dp: below). No message has a body, so a server cannot choose one that singles out a patient. Kept: server the head; silo
nothing. An absent silo is in no sum of that round. Personal: the head of the silo's own moments. A newcomer has the
received head. With secure sums each silo must have all classes (as in strategies/fedproto.py); a sum beyond
``secure-clip`` counts less, as a whole.

With ``dp = true`` a record adds (1, u, u u') to the silo's sums, with u = z / C, or the z that is shortened to C =
``dp.clip-norm``; a patient adds the mean of their records' parts. Of u u' it is the triangle, with sqrt(2) times what
is off the diagonal, which is as long as u u', or the diagonal alone. So one unit more or less moves the sums by sqrt(3)
at most. They get noise of σ sqrt(3), once in a round, in each silo also under masks: one Gaussian release without
sampling. They are divided by the noised number of units; n_i itself is the silo's weight, which leaves without noise,
as with every method. ``min-cell`` is compared with the noised count of a class, for an exact comparison would reveal
one patient; the products of all stay whole. The silo's own model is that of the noised sums.

Paper and code: equations are those of the authors' code; the paper's text was not available, (unverified). Its ``s`` is
0.05 for ``lda``, and 0.1 for ``qda``. It has S_c = S for a class of one sample; here ``nb`` has this too, and a class
of none. An eigenvalue of S that rounding, noise or a false message makes negative counts as 0, in tr(S) too. Not here:
FisherMix and Proto-Hyper, trained on samples that the server draws; and random projections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING

import torch
from flwr.common import log
from torch import Tensor, nn

from models.features import all_features, members
from models.flat import is_finite, scatter
from models.layout import Layout
from models.networks.blocks import Values
from models.privacy.records import features_of_each
from partitions.common.errors import DataError, UserError
from strategies.base.client import SiloClient
from strategies.base.info import METHOD, No, Sums
from strategies.base.privacy import PrivateTraining
from strategies.base.settings import setting
from strategies.base.silo import least_samples
from strategies.base.state import Array, ServerState
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.kinds import CLASS_MOMENTS, POOLED_MOMENTS, class_shares
from strategies.base.transport.payload import Payload, Update
from strategies.fedproto import LEAST, check_all_classes

HEAD = "head"
MOST_FEATURES = 1024  # whose products travel
FLOOR = 1e-6  # e
LEAST_SHARE = 1e-12
MOST = 3**0.5  # the norm of 1, a vector of norm 1 and products of norm 1


@dataclass(frozen=True)
class GaussianSettings:
    """Settings of GH-OFL."""

    head: str = setting(
        "lda",
        "one covariance for all classes, one each, or variances of each",
        choices=("lda", "qda", "nb"),
    )
    shrink: float = setting(
        0.05, "share of a multiple of I in a covariance", symbol="s", minimum=0, maximum=1
    )

    @property
    def uploads(self) -> tuple[str, ...]:
        return ("pooled",) if self.head == "lda" else ("moments",)


class GaussianHead(nn.Module):
    """Outputs bias_c - ||R_c (z - μ_c)||² / 2; R_c is the root of S_c'⁻¹ (K, K), or of 1 / v_c (K,)."""

    block_names = ("roots", "centres")

    def __init__(self, layer: nn.Linear, size: str) -> None:
        super().__init__()
        shape = (*layer.weight.shape, *([layer.in_features] if size == "qda" else []))
        self.roots = Values(0)
        self.roots.values = nn.Parameter(torch.zeros(shape))
        self.centres = layer

    def forward(self, z: Tensor) -> Tensor:
        apart, roots = z[:, None] - self.centres.weight, self.roots()
        full = roots.dim() == 3
        scaled = torch.einsum("bck,cjk->bcj", apart, roots) if full else apart * roots
        return self.centres.bias - scaled.square().sum(2) / 2


def make_head(layer: nn.Linear, size: str) -> nn.Module:
    """Return the head of this name; that of ``lda`` is the linear layer."""
    return layer if size == "lda" else GaussianHead(layer, size)


def head_of(layout: Layout, settings: GaussianSettings) -> slice:
    """Return the head's part of the vector."""
    return slice(layout.blocks[-1 if settings.head == "lda" else -2].start, layout.size)


def products(z: Tensor, weights: Tensor) -> Tensor:
    """Return the lower triangle (K (K + 1)/2,) of the sum of weights_i z_i z_i'."""
    size = z.shape[1]
    rows, columns = torch.tril_indices(size, size, device=z.device)
    return ((z * weights[:, None]).T @ z)[rows, columns]


def pack(z: Tensor, rows: Tensor, head: str) -> Tensor:
    """Return the moments of features (n, K), weighted by class as in rows (n, C), both float64, as one vector."""
    table = [rows.sum(0)[:, None], rows.T @ z]
    if head == "lda":
        return torch.cat([torch.cat(table, 1).flatten(), products(z, rows.sum(1))])
    if head == "nb":
        table.append(rows.T @ z.square())
    else:
        table.append(torch.stack([products(z, weights) for weights in rows.T]))
    return torch.cat(table, 1).flatten()


def norms_of(layout: Layout, head: str, c: float) -> Tensor:
    """Return by what to divide the moments of features of norm c, so that all sums and all products have norm 1.

    A product of two features is in their triangle once, and twice in the matrix of norm c².
    """
    k = layout.features
    rows, columns = torch.tril_indices(k, k)
    square = c * c * (rows != columns).double().mul(-0.5).exp2()
    square = square[rows == columns] if head == "nb" else square
    row = torch.cat([square.new_ones(1), square.new_full((k,), c)])
    if head == "lda":
        return torch.cat([row.repeat(layout.classes), square])
    return torch.cat([row, square]).repeat(layout.classes)


def moments_size(layout: Layout, head: str) -> int:
    """Return the length of what :func:`pack` returns."""
    classes, features = layout.classes, layout.features
    square = features * (features + 1) // 2
    more = {"lda": square, "nb": classes * features, "qda": classes * square}
    return classes * (features + 1) + more[head]


def table_of(sums: Tensor, layout: Layout, head: str) -> tuple[Tensor, Tensor]:
    """Return the classes' rows (C, ...), each share, K sums and products, and the products of all classes."""
    classes, k = layout.classes, layout.features
    size = classes * (k + 1) if head == "lda" else len(sums)
    table, pooled = sums.double().tensor_split([size])
    return table.view(classes, -1), pooled


def square_of(lower: Tensor, size: int) -> Tensor:
    """Return symmetric matrices (n, K, K) of lower triangles (n, K (K + 1)/2)."""
    result = lower.new_zeros(len(lower), size, size)
    rows, columns = torch.tril_indices(size, size, device=lower.device)
    result[:, rows, columns] = lower
    result[:, columns, rows] = lower
    return result


def spectrum(s: Tensor, shrink: float) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (n, K) and eigenvectors (n, K, K) of S' for covariances (n, K, K)."""
    values, vectors = torch.linalg.eigh(s)
    values = values.clamp(min=0)
    return (1 - shrink) * values + shrink * values.mean(1, keepdim=True) + FLOOR, vectors


def solve(sums: Tensor, layout: Layout, settings: GaussianSettings, samples: int) -> Tensor:
    """Return the head's parameters from the moments of ``samples`` samples, float32."""
    k, head = layout.features, settings.head
    table, pooled = table_of(sums, layout, head)
    shares, means, second = table.tensor_split([1, 1 + k], 1)
    total = shares.clamp(min=0).sum().clamp(min=LEAST)
    held = shares > LEAST
    safe = torch.where(held, shares, 1.0)
    means, second = (torch.where(held, part / safe, 0.0) for part in (means, second))
    prior = torch.where(held, shares, 0.0) / total
    bias = prior[:, 0].clamp(min=LEAST_SHARE).log()
    counts = samples * prior
    within = samples / max(samples - len(table), 1)
    if head == "lda":
        s = square_of(pooled[None] / total, k) - (prior * means).T @ means
        values, vectors = (part[0] for part in spectrum(within * s, settings.shrink))
        weight = (means @ vectors / values) @ vectors.T
        return torch.cat([weight.flatten(), bias - (means * weight).sum(1) / 2]).float()
    few = counts < 1.5
    if head == "nb":
        values = second - means.square()
        values = torch.where(few, (prior * values).sum(0), values).clamp(min=FLOOR)
        roots = values.rsqrt()
    else:
        s = square_of(second, k) - means[:, :, None] * means[:, None]
        all_classes = within * (prior[..., None] * s).sum(0)
        s = s * (counts / (counts - 1).clamp(min=0.5))[..., None]
        values, vectors = spectrum(torch.where(few[..., None], all_classes, s), settings.shrink)
        roots = vectors * values.rsqrt()[:, None] @ vectors.mT
    bias = bias - values.log().sum(1) / 2
    return torch.cat([roots.flatten(), means.flatten(), bias]).float()


class GaussianClient(SiloClient):
    settings: GaussianSettings

    def receive(self) -> Tensor:
        if HEAD not in self.models:
            return self.silo.initial("")
        part = head_of(self.layout, self.settings)
        # The body stays the seed's from round to round
        return scatter(self.previous(), [part], self.models[HEAD].vector)

    def received_blocks(self) -> list[str]:
        layout = self.layout
        return layout.names_in([head_of(layout, self.settings)])

    def local_update(self) -> list[Tensor]:
        silo, s, layout = self.silo, self.settings, self.layout
        least_samples(silo, self.common, len(silo.train))
        rows = members(silo.train.y, layout.classes).double()
        if self.privacy is None:
            z, counts = all_features(self.model, silo.train).flatten(1).double(), rows.sum(0)
            shares, each = class_shares(silo, counts), rows / counts.clamp(min=1)
            personal, sent = (
                pack(z, each * c, s.head) for c in (counts / counts.sum(), shares)
            )
        else:
            personal = sent = self.noised_moments(self.privacy, rows)
            shares = table_of(sent, layout, s.head)[0][:, 0]
        if self.common.secure_aggregation:
            check_all_classes(self, shares)
        self.model.vector[head_of(layout, s)] = solve(personal, layout, s, len(rows))
        return [sent.float()]

    def noised_moments(self, privacy: PrivateTraining, rows: Tensor) -> Tensor:
        """Return the moments of classes (n, C) with noise, divided by the noised number of units."""
        norm = privacy.plan.clip_norm
        z, some = features_of_each(self.model, self.silo.train, norm)
        rows = rows * (some * privacy.unit_shares().to(some))[:, None]
        most = norms_of(self.layout, self.settings.head, norm).to(z)
        moments = pack(z, rows, self.settings.head)
        moments = privacy.noised(moments / most, MOST) * most
        table = table_of(moments, self.layout, self.settings.head)[0]  # a view
        table[table[:, 0] < self.silo.min_cell] = 0.0
        return moments / table[:, 0].sum().clamp(min=1)


class GaussianState(ServerState):
    head = Array(HEAD)  # its parameters; None in round 1


class GaussianHeads(PersonalizedStrategy):
    info = METHOD(
        name="gh-ofl",
        title="Gaussian heads from one message of class moments",
        paper="Turazza, Picone and Mamei, ICLR 2026, arXiv 2602.01186",
        spelling="GH-OFL",
        sends=("C (K + 1)", "C (K + 1) + K (K + 1)/2"),
        uploads={"pooled": POOLED_MOMENTS, "moments": CLASS_MOMENTS},
        own_model="kept",
        note="it is the seed's body with the head of its own moments",
        step=4.0,  # the last exchange brings another head
        reports="received",
        newcomer="model",
        late="starts",
        one_model=True,
        needs_classes=True,
        dp="sums",
        lossy=No("what is sent are sums, no steps"),
        sums=Sums(),
        buffers="local",
        trainer=No("nothing is trained"),
        block_rates=No("nothing is trained"),
    )
    client = GaussianClient
    head = staticmethod(make_head)
    head_size = "head"
    state_type = GaussianState
    state: GaussianState
    Settings = GaussianSettings
    settings: GaussianSettings

    def check_fit(self) -> None:
        if self.settings.head != "nb" and self.layout.features > MOST_FEATURES:
            raise UserError(
                f"gh-ofl.head = {self.settings.head}: products of {self.layout.features} features are too many, at "
                f"most of {MOST_FEATURES}; take nb, or a network with a narrower last layer"
            )

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        self.state.model = initial("")

    def sizes(self, silo: str) -> Mapping[str, int]:
        [name] = self.settings.uploads
        return {name: moments_size(self.layout, self.settings.head)}

    def payload(self, silo: str) -> Payload:
        head = self.state.head
        return self.pack({} if head is None else {HEAD: head})

    def check(self, update: Update) -> None:
        if self.common.secure_aggregation:
            return
        shares = table_of(update.vector, self.layout, self.settings.head)[0][:, 0]
        if bool((shares < 0).any()) or float(shares.sum()) > 1 + LEAST:
            raise DataError("the shares of its classes are not between 0 and 1")
        if not is_finite(self.solved([update])):
            raise DataError("its sums are those of no samples")

    def solved(self, updates: Sequence[Update]) -> Tensor:
        samples = sum(u.samples for u in updates)
        return solve(self.average(updates), self.layout, self.settings, samples)

    def aggregate(self, updates: Sequence[Update]) -> None:
        if not is_finite(head := self.solved(updates)):
            reason = "the sums are those of no samples; the head stays"
            log(WARNING, "round %d: %s", self.round, reason)
            return
        part = head_of(self.layout, self.settings)
        self.state.head = head
        self.state.model = scatter(self.state.model, [part], head)
