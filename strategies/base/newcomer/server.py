"""The server's half: what a silo gets in a round that was in none before."""

from __future__ import annotations

import copy
from dataclasses import replace

from strategies.base.strategy import PersonalizedStrategy, SiloInfo
from strategies.base.transport.payload import Payload
from strategies.base.typed_state import ServerState


def admit(strategy: PersonalizedStrategy, info: SiloInfo) -> None:
    """Add a silo that was not there before, by the method's rule (:meth:`PersonalizedStrategy.welcome`)."""
    strategy.silos = dict(sorted({**strategy.silos, info.name: info}.items()))
    strategy.weigh()
    strategy.welcome(info.name)


def join(strategy: PersonalizedStrategy, info: SiloInfo, server_round: int) -> None:
    """Take in a silo that trains from this round on (:meth:`PersonalizedStrategy.grow`)."""
    admit(strategy, info)
    strategy.joined[info.name] = server_round
    strategy.grow(info.name)


def newcomer_payload(strategy: PersonalizedStrategy, info: SiloInfo, state: ServerState) -> Payload:
    """What this silo would get in the strategy's round, of the server's ``state`` before it, if it came then.

    Nothing in ``strategy`` changes.
    """
    guest = copy.copy(strategy)
    guest.common = replace(strategy.common, participation=1.0)  # it is not drawn with the others
    guest.state = state.copy()
    admit(guest, info)
    guest.begin_round()
    return guest.full_payload(info.name)
