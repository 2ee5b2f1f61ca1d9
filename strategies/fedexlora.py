"""FedEx-LoRA: a mean of low-rank changes that is exact, by a residual beside the mean factors.

Singhal et al., ACL 2025, arXiv 2410.09432. W = W_0 + (α/r) (B A + R), W_0 frozen (models/lora.py, the setting
``lora-rank``), p_i = n_i / n over the round's silos:

    silo     (A_i, B_i): E epochs of SGD on f_i from the received (A, B), with R fixed
    server   R <- R + sum_i p_i B_i A_i - B' A',   A <- A' = sum_i p_i A_i,   B <- B' = sum_i p_i B_i

so that B A + R is the mean of the silos' B_i A_i + R. What is added to R is sum_i p_i (B_i - B') (A_i - A'), which is
how it is computed: 0 where all B_i, or all A_i, are equal. The rest of what is trained (the head) is averaged.

Sent: Σ down, Σ_s up: all but R, which has the size of every adapted layer. Kept: server A, B, R; silo nothing. An
absent silo is left out of the mean, and misses nothing. An export has W, merged. R is not of low rank, and grows by the
spread of the silos in each round.
Special cases: one silo: Local. Whatever the rank, and so with a full one, W is the mean of the silos' W.

Paper and code: the paper sends what is added to R as factors, of a rank of at most that of all silos' factors together;
these would show other silos' changes, and a silo that misses a round lacks them. The code adds it to W_0, as the silo
has it. Both weight silos equally (``average = "silos"``).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from models.flat import gather, scatter
from models.layout import Layout
from partitions.common.errors import UserError
from strategies.base.client import SiloClient
from strategies.base.info import EACH_MODEL, ONE_MODEL, No
from strategies.base.settings import Averaging
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.kinds import SHARED
from strategies.base.transport.payload import Update

RESIDUAL = ".lora_residual"


def trained_parts(layout: Layout) -> tuple[slice, ...]:
    """Return the parts of the vector outside R. Raises UserError where there is none."""
    residuals = [slice(e.start, e.stop) for e in layout.parameters if e.name.endswith(RESIDUAL)]
    if not residuals:
        raise UserError(
            "strategy = fedex-lora averages the changes that frozen layers learn: set lora-rank = 8, for example"
        )
    return layout.outside(residuals)


class FedExLoRAClient(SiloClient):
    def local_update(self) -> list[Tensor]:
        parts = trained_parts(self.layout)
        self.train(parts=parts)
        return [gather(self.model.vector, parts)]


class FedExLoRA(PersonalizedStrategy):
    info = ONE_MODEL(
        name="fedex-lora",
        title="An exact mean of low-rank changes",
        paper="Singhal et al., ACL 2025, arXiv 2410.09432",
        spelling="FedEx-LoRA",
        sends=("Σ", "Σ_s"),
        uploads={"shared": SHARED},
        own_model="layers",
        note="the rest of it is what all receive",
        ala=False,
        robust=(),
        lossy=No("the server multiplies what a silo sends, and with it what a format loses"),
        sums=EACH_MODEL,
    )
    client = FedExLoRAClient
    Settings = Averaging
    lora_residual = True

    def check_fit(self) -> None:
        trained_parts(self.layout)

    def sent_parts(self, silo: str) -> tuple[slice, ...]:
        return trained_parts(self.layout)

    def aggregate(self, updates: Sequence[Update]) -> None:
        parts, weights = trained_parts(self.layout), self.weights(updates)
        model = scatter(self.state.model, parts, self.average(updates))
        mean = self.layout.unflatten(model)
        for update, weight in zip(updates, weights, strict=True):
            trained = self.layout.unflatten(scatter(model, parts, update.vector))
            for name in mean:
                if name.endswith(RESIDUAL):
                    layer = name.removesuffix(RESIDUAL)
                    a, b = (f"{layer}.lora_{factor}" for factor in "ab")
                    change = (trained[b] - mean[b]) @ (trained[a] - mean[a])
                    mean[name].add_(change, alpha=weight / sum(weights))
        self.state.model = model
