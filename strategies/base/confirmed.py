"""State of a silo whose changes the server adds up: control variates, duals. A round counts once, in both places.

A reply may be lost on its way, or be left out by the server. Had the silo moved its control variate on all the same,
the server's sum and the silos' vectors would never agree again. So a silo only *proposes* its new vectors; the server
says in its next message which round of this silo it counted last, and only then does the silo take them over.

Sent beside a method's own: one number down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from strategies.base.payload import Payload
from strategies.base.replies import Update
from strategies.base.server import PersonalizedStrategy
from strategies.base.silo import SiloClient

PROPOSED = "proposed."


class ConfirmedClient(SiloClient):
    def propose(self, **arrays: Tensor) -> None:
        """Vectors that are the silo's from its next round on, if the server counts this one."""
        self.state.arrays |= {f"{PROPOSED}{name}": vector for name, vector in arrays.items()}
        self.state.numbers["proposed"] = self.round

    def _begin(self, config: Mapping[str, Any]) -> Tensor:
        arrays, numbers = self.state.arrays, self.state.numbers
        counted = numbers.pop("proposed", None) == config["numbers"].get("counted")
        for key in [key for key in arrays if key.startswith(PROPOSED)]:
            vector = arrays.pop(key)
            if counted:
                arrays[key.removeprefix(PROPOSED)] = vector
        return super()._begin(config)


class ConfirmedStrategy(PersonalizedStrategy):
    uncoded = "silos and server add up the same changes each for themselves, which would differ"

    def payload(self, silo: str) -> Payload:
        payload, counted = super().payload(silo), self.state.numbers.get("counted", {})
        return Payload(payload.models, {**payload.numbers, "counted": counted.get(silo, 0)})

    def count(self, updates: Sequence[Update]) -> None:
        """These silos' replies are in the sums: they are told so in their next message."""
        counted = self.state.numbers.get("counted", {})
        self.state.numbers["counted"] = counted | {u.silo: self.round for u in updates}
