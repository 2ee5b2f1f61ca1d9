"""Local ("Separate"): every silo trains alone. Only metrics are sent.

Optimises f_i(w_i) per silo, in as many rounds of E epochs as the other methods have. All silos start from the same
seeded initial model, which each computes itself. Sent: 0 down, 0 up. Kept: silo w_i. An absent silo does not train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from strategies.base.client import SiloClient
from strategies.base.info import METHOD, Sums
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Payload, Update


class LocalClient(SiloClient):
    def receive(self) -> Tensor:
        return self.previous()

    def local_update(self) -> list[Tensor]:
        self.train()
        return []


class Local(PersonalizedStrategy):
    info = METHOD(
        name="local",
        title="Local training (Separate)",
        paper="the baseline of every paper",
        spelling="Local",
        sends=("0", "0"),
        uploads={},
        dp="nothing",
        local_steps=True,
        own_model="kept",
        receives="nothing",
        note="nothing leaves but metrics",
        newcomer="own",
        late="starts",
        baseline="training alone",
        sums=Sums("silos"),
        buffers="local",
        plain_loss=True,
        trainer=True,
        trees="also",
        block_rates=True,
    )
    client = LocalClient

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        pass

    def payload(self, silo: str) -> Payload:
        return Payload()

    def aggregate(self, updates: Sequence[Update]) -> None:
        pass
