"""Silo state whose changes the server sums: control variates, duals. Both sides count a round once, or not at all.

A reply may be lost, or the server may leave it out. If the silo updated its control variate all the same, the server's
sum and the silos' vectors would never agree again. So a silo only *proposes* its new vectors. The server's next message
contains the last round of this silo that it counted, and only then does the silo commit them.

Sent in addition to the method's messages: one number down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from strategies.base.client import SiloClient
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Payload
from strategies.base.transport.replies import Update
from strategies.base.typed_state import Arrays, ClientState, Item, ServerState

PROPOSED = "proposed."


class ConfirmedClientState(ClientState):
    """Vectors that the silo commits once the server has counted the round in which they were proposed."""

    proposals = Arrays(PROPOSED)
    proposed = Item[int | None](lambda: None)  # the round


class ConfirmedClient(SiloClient):
    state_type: ClassVar[type[ConfirmedClientState]] = ConfirmedClientState
    state: ConfirmedClientState

    def propose(self, **arrays: Tensor) -> None:
        """Propose vectors, which the silo commits in its next round if the server counts this one."""
        self.state.proposals.update(arrays)
        self.state.proposed = self.round

    def begin(self, config: Mapping[str, Any]) -> Tensor:
        state, counted = self.state, self.state.proposed == config["numbers"].get("counted")
        proposals = dict(state.proposals)
        state.proposals.clear()
        state.proposed = None
        if counted:
            state.arrays.update(proposals)
        return super().begin(config)


class ConfirmedServerState(ServerState):
    counted = Item[dict[str, int]](dict)  # the last round of each silo that is in the sums


class ConfirmedStrategy(PersonalizedStrategy):
    state_type: ClassVar[type[ConfirmedServerState]] = ConfirmedServerState
    state: ConfirmedServerState

    def payload(self, silo: str) -> Payload:
        payload, counted = super().payload(silo), self.state.counted
        return Payload(payload.models, {**payload.numbers, "counted": counted.get(silo, 0)})

    def count(self, updates: Sequence[Update]) -> None:
        """Record that these silos' replies are in the sums; their next messages contain this round's number."""
        self.state.counted = self.state.counted | {u.silo: self.round for u in updates}
