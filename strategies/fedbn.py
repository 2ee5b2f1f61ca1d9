"""FedBN: batch normalisation stays in the silo, its weights and its statistics; everything else is averaged.

Li, Jiang, Zhang, Kamp and Dou, ICLR 2021, arXiv 2102.07623. A model is w = (u, b): b the weights and biases (γ, β) of
all batch normalisation layers, u the rest.

    silo     (u_i, b_i): E epochs of joint SGD on f_i, from the received u and its own b_i and running statistics
    server   u <- (1 / |S|) sum_{i in S} u_i

The layers are found by their type: the official code searches for "bn" in their names and so averages those in a
residual network's shortcuts. Group and layer normalisation have no statistics and are shared like other layers. A
network without batch normalisation is refused, because its FedBN would be FedAvg.

Sent: Σ - Σ_bn down and up. Kept: server u; silo b_i and its statistics, which stay with any value of ``buffers``. An
absent silo keeps both; after a long absence they belong to an older u. A silo that has never trained has those of the
initial model. Evaluated: the averaged u with the silo's own b_i, before local training; the statistics were computed
with the silo's own u_i. Paper and code average without weights; ``average = "samples"`` weights as FedAvg does.

Related: FedAvg with ``buffers = "local"`` is SiloBN (arXiv 2008.07424): statistics local, γ and β shared. Special
cases: normalisation without γ and β is SiloBN bit for bit; one silo is Local.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.layout import Layout
from strategies.base.info import OWN_LAYERS, No
from strategies.base.partial import PartialClient, PartialStrategy, Split, norm_parts
from strategies.base.settings import Averaging, setting
from strategies.base.transport.kinds import SHARED_SOME


@dataclass(frozen=True)
class BnSettings(Averaging):
    """Settings of FedBN."""

    average: str = setting(
        "silos",
        "what silos count in the mean: as their samples, or alike",
        choices=("samples", "silos"),
    )


class FedBNClient(PartialClient):
    @staticmethod
    def split(layout: Layout, *_: object) -> Split:
        return norm_parts(layout, "fedbn")


class FedBN(PartialStrategy):
    info = OWN_LAYERS(
        name="fedbn",
        title="Personal batch normalisation",
        paper="Li et al., ICLR 2021, arXiv 2102.07623",
        spelling="FedBN",
        sends=("Σ - Σ_bn", "Σ - Σ_bn"),
        dp=No("it keeps batch normalisation, which mixes records"),
        uploads={"shared": SHARED_SOME},
        reports="received",
        buffers="local",
        local_steps=True,
    )
    client = FedBNClient
    Settings = BnSettings
