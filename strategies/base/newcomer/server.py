"""The server's half: the payload of a silo in its first round."""

from __future__ import annotations

import copy
from dataclasses import replace

from strategies.base.strategy import PersonalizedStrategy, SiloInfo
from strategies.base.transport.payload import Payload
from strategies.base.typed_state import ServerState


def admit(strategy: PersonalizedStrategy, info: SiloInfo) -> None:
    """Add a new silo by the method's rule (:meth:`PersonalizedStrategy.welcome`)."""
    strategy.silos = dict(sorted({**strategy.silos, info.name: info}.items()))
    strategy.weigh()
    strategy.welcome(info.name)


def join(strategy: PersonalizedStrategy, info: SiloInfo, server_round: int) -> None:
    """Add a silo that trains from this round on (:meth:`PersonalizedStrategy.grow`)."""
    admit(strategy, info)
    strategy.joined[info.name] = server_round
    strategy.grow(info.name)


def newcomer_payload(strategy: PersonalizedStrategy, info: SiloInfo, state: ServerState) -> Payload:
    """Return the payload of a silo that joins in the strategy's round, from the server's ``state`` before it.

    ``strategy`` is not changed.
    """
    guest = copy.copy(strategy)
    guest.common = replace(strategy.common, participation=1.0)  # it takes no part in the draw of participants
    guest.state = state.copy()
    admit(guest, info)
    guest.begin_round()
    return guest.full_payload(info.name)
