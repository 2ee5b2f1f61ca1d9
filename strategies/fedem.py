"""FedEM: every silo's data are a mixture of M shared components; each has a network, and a silo its own shares.

Marfoq, Neglia, Bellet, Kameni and Vidal, NeurIPS 2021, arXiv 2108.10252. θ_1..θ_M are the networks, π_i the silo's
shares, l_m(x, y) the cross-entropy of network m:

    E-step   q_jm = π_im exp(-l_m(x_j, y_j)) / sum_k π_ik exp(-l_k(x_j, y_j)), at the received θ, in evaluation mode
             π_im <- mean over the training samples of q_jm
    M-step   E epochs of SGD of each θ_m on (1/B) sum_{j in B} q_jm l_m(x_j, y_j), not divided by the sum of q_jm
    server   θ_m <- sum_i n_i θ_im / sum_i n_i,   by samples, not by π
    predict  sum_m π_im softmax(θ_m(x))

Sent: M Σ down and up. Kept: server θ; silo π_i, from 1/M on. It is one network: the M networks, and the layer block
``shares`` (π_i), which the silo's own model has. Its outputs are the logarithm of the prediction. All θ_m take each
step together; q_jm is computed for each batch, of the same received θ and π_i, so augmented samples have their own.
Absent silos have no part in the mean, and keep π_i (the code averages over all, the absent with the last θ). π_im below
10⁻⁸ counts as that, so that no component is lost. Which component moves shows π_i.
Evaluated: the received θ with the π_i of the last E-step. A newcomer takes one E-step and trains nothing.

Initial networks differ, and the first is FedAvg's: equal ones would stay equal, as those of ``init-weights`` are but
for what its file leaves out. Special cases: M = 1 is FedAvg bit for bit. With equal networks q is 1/M, and each takes
FedAvg's steps with a rate of η/M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.features import compute_frozen
from models.layout import Layout
from models.networks.blocks import Around, Values
from models.shapes import Shape
from models.training import by_batch, loss_gradient
from partitions.common.errors import UserError
from strategies.base.info import OWN_PARTS, No
from strategies.base.partial import PartialClient, PartialStrategy, Split, split_parts
from strategies.base.settings import setting
from strategies.base.transport.kinds import SHARED

LEAST = 1e-8  # in place of a smaller share


@dataclass(frozen=True)
class EmSettings:
    """Settings of FedEM."""

    components: int = setting(3, "number of networks", symbol="M", minimum=1, maximum=64)


class Components(Around):
    """Networks whose outputs are the logarithm of their mixture, or with ``apart`` each one's logits (b, M, C)."""

    shares: Values
    apart = False

    def __init__(self, make: Callable[[], nn.Module], shape: Shape, size: int) -> None:
        super().__init__([make() for _ in range(size)], "shares")
        self.shares = Values(size)
        nn.init.constant_(self.shares.values, 1 / size)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.networks) == 1:
            alone: Tensor = self.networks[0](x)
            return alone.unsqueeze(1) if self.apart else alone
        logits = torch.stack([network(x) for network in self.networks], 1)
        if self.apart:
            return logits
        weights = self.shares().clamp(min=LEAST).log()
        mixed: Tensor = (logits.log_softmax(2) + weights[:, None]).logsumexp(1)
        return mixed


def component_losses(logits: Tensor, y: Tensor) -> Tensor:
    """Return l_m of each sample (b, M) from logits (b, M, C)."""
    return F.cross_entropy(
        logits.transpose(1, 2), y[:, None].expand(-1, logits.shape[1]), reduction="none"
    )


def responsibilities(logits: Tensor, y: Tensor, shares: Tensor) -> Tensor:
    """Return q (b, M)."""
    return (shares.clamp(min=LEAST).log() - component_losses(logits, y)).softmax(1)


class FedEMClient(PartialClient):
    settings: EmSettings

    @staticmethod
    def split(layout: Layout, *_: object) -> Split:
        return split_parts(layout, ["shares"])

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Context in which the network puts out each component's logits."""
        module = self.model.module
        assert isinstance(module, Components)
        module.apart = True
        try:
            yield
        finally:
            module.apart = False

    def e_step(self, shares: Tensor) -> Tensor:
        """Return the next π_i (M,), of the received model in ``self.model``."""
        train = self.silo.train
        with self.apart():
            parts = by_batch(
                self.model, train, 512, lambda out, y: responsibilities(out, y, shares).sum(0)
            )
        return torch.stack(parts).sum(0) / len(train)

    def local_update(self) -> list[Tensor]:
        (place,), vector = self.private, self.model.vector
        self.before = vector[place].clone()
        self.fixed = self.layout.unflatten(vector.clone(), self.model.buffers.clone())
        vector[place] = self.e_step(self.before)
        self.train(parts=self.shared)
        return [vector[self.shared[0]].clone()]

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        if self.settings.components == 1:
            return super().gradient(x, y)
        with self.apart():
            q = responsibilities(compute_frozen(self.model, self.fixed, x)[1], y, self.before)

            def loss(logits: Tensor, y: Tensor) -> Tensor:
                return (q * component_losses(logits, y)).sum(1).mean()

            return loss_gradient(self.model, x, y, loss)

    def newcomer_parts(self) -> Sequence[slice]:
        return ()

    def personalise(self) -> Tensor:
        """Take one E-step; the networks do not change."""
        (place,), vector = self.private, self.model.vector
        vector[place] = self.e_step(vector[place].clone())
        return vector


class FedEM(PartialStrategy):
    info = OWN_PARTS(
        name="fedem",
        title="A mixture of shared networks, with a silo's own shares",
        paper="Marfoq et al., NeurIPS 2021, arXiv 2108.10252",
        spelling="FedEM",
        sends=("M Σ", "M Σ"),
        note="the networks are what is sent; which of them moves shows the shares that stay",
        needs_classes=True,
        dp=No("its shares, which enter every gradient, depend on its records without noise"),
        uploads={"shared": SHARED},
        lossy=True,
    )
    client = FedEMClient
    head = Components
    head_size = "components"
    Settings = EmSettings

    def check_fit(self) -> None:
        c = self.common
        if c.loss != "cross-entropy" or c.label_smoothing or c.class_weights != "none":
            raise UserError(
                f"fedem: a likelihood is needed, which loss = {c.loss}, label-smoothing = {c.label_smoothing:g}, "
                f"class-weights = {c.class_weights} is not; set cross-entropy, 0 and none"
            )
