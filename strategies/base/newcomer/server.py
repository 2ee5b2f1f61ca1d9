"""The server's half: what a silo gets in a round that was in none before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, Self

from strategies.base.settings import Common
from strategies.base.state import State
from strategies.base.transport.payload import Payload


class Newcomer(Protocol):
    """What the server knows of one (:class:`strategies.base.strategy.SiloInfo`)."""

    @property
    def name(self) -> str: ...


class NewcomerStrategy:
    """Part of :class:`PersonalizedStrategy`."""

    common: Common
    state: Any
    silos: Any
    begin_round: Callable[[], None]
    handed: Callable[[str], Payload]
    weigh: Callable[[], None]

    def welcome(self, silo: str) -> None:
        """Set in ``self.state`` what the server holds of a silo that was not there before; most methods hold nothing.

        ``self.silos`` has it, ``self.state`` has not.
        """

    def admit(self, info: Newcomer) -> None:
        """Add a silo that was not there before, by the method's rule (:meth:`welcome`)."""
        self.silos = dict(sorted({**self.silos, info.name: info}.items()))
        self.weigh()
        self.welcome(info.name)

    def newcomer_payload(self, info: Newcomer, state: State) -> Payload:
        """What this silo would get in round ``self.round``, of the server's ``state`` before it, if it came then.

        Nothing here changes.
        """
        return self._with(info, state).handed(info.name)

    def _with(self, info: Newcomer, state: State) -> Self:
        guest = copy.copy(self)
        guest.common = replace(self.common, participation=1.0)  # it is not drawn with the others
        guest.state = state.copy()
        guest.admit(info)
        guest.begin_round()
        return guest
