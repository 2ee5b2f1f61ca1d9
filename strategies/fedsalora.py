"""FedSA-LoRA: of each low-rank change B A of a frozen layer, the silos share A, and each keeps its own B.

Guo et al., ICLR 2025, arXiv 2410.01463. W = W_0 + (α/r) B A, W_0 frozen (models/lora.py, the setting ``lora-rank``).
A model is w = (u, v): u all A, v all B and what else is trained, which is the head.

    silo     (u_i, v_i): E epochs of joint SGD on f_i, from the received u and its own v_i
    server   u <- sum_{i in S} n_i u_i / sum_{i in S} n_i

A mean of B and one of A would not have the mean of B A as their product; as B is never averaged, none is needed.

Sent: Σ_s, the sum of r times the inputs of every adapted layer, down and up. Kept: server u; silo v_i. An absent silo
keeps v_i. A starts alike in all silos, from the run's seed, and B at 0. A newcomer is the frozen network with A, whose
change is 0 until it trains v. Statistics of batch normalisation are frozen with W_0.
Special cases: it is FedPer with v in place of the highest blocks. As B = 0 at first, A has no gradient in a silo's
first step. One silo: Local. The other way round, A frozen and B shared, is FFA-LoRA: not here.
"""

from __future__ import annotations

from models.layout import Layout
from partitions.common.errors import UserError
from strategies.base.info import OWN_LAYERS
from strategies.base.partial import PartialClient, PartialStrategy, Split
from strategies.base.settings import NoSettings
from strategies.base.transport.kinds import SHARED_SOME


class FedSALoRAClient(PartialClient):
    @staticmethod
    def split(layout: Layout, *_: object) -> Split:
        shared = tuple(
            slice(e.start, e.stop) for e in layout.parameters if e.name.endswith(".lora_a")
        )
        if not shared:
            raise UserError(
                "strategy = fedsa-lora shares A of the changes that frozen layers learn: set lora-rank = 8, for example"
            )
        return shared, layout.outside(shared)


class FedSALoRA(PartialStrategy):
    info = OWN_LAYERS(
        name="fedsa-lora",
        title="One half of low-rank changes shared, the other personal",
        paper="Guo et al., ICLR 2025, arXiv 2410.01463",
        spelling="FedSA-LoRA",
        uploads={"shared": SHARED_SOME},
        buffers="local",
    )
    client = FedSALoRAClient
    Settings = NoSettings
