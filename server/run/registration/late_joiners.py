"""Hospitals that join a run after it has begun (the setting ``late-joiners``).

A hospital joins between two rounds. Schema, standardisation and classes of the run do not change: a hospital whose data
do not fit is left out, and its sums of columns are not requested. The method defines its initial state and the change
of the others' states (``PersonalizedStrategy.welcome``, ``grow``). A run has at most ``silos`` hospitals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strategies.base.newcomer.settings import ANY
from strategies.base.settings import Common

JOIN_SECONDS = 60.0  # how long a round waits for the data summary of a new node


@dataclass(frozen=True)
class Joiner:
    """A hospital that is online and not yet among the run's silos."""

    node: int
    summary: Mapping[str, Any]
    first: int  # the earliest round in which it takes part


class LateJoiners:
    """The hospitals that may join one run late."""

    def __init__(self, common: Common) -> None:
        self.common = common
        self.waiting: dict[str, Joiner] = {}

    @property
    def expected(self) -> int:
        """The number of silos that a new run waits for; the quorum, if there is one and every silo may join late."""
        if self.common.late_joiners == ANY and self.common.min_silos:
            return self.common.min_silos
        return self.common.silos - len(self.common.late)

    def allows(self, name: str) -> bool:
        """Return whether a hospital may join during the run."""
        return self.common.late_joiners == ANY or name in self.common.late

    def is_late(self, name: str, before: Mapping[str, Any]) -> bool:
        """Return whether a hospital that is online does not take part yet. ``before``: the silos of a resumed run."""
        return name not in before if before and self.allows(name) else name in self.common.late and not before

    def wait(self, name: str, node: int, summary: Mapping[str, Any], first: int = 0) -> None:
        """Keep a hospital until its round."""
        self.waiting[name] = Joiner(node, summary, first or self.common.late.get(name, 0))

    def due(self, server_round: int) -> dict[str, Joiner]:
        """Return the hospitals that may join in this round, by name."""
        return {name: joiner for name, joiner in sorted(self.waiting.items()) if joiner.first <= server_round}

    def awaited(self, silos: Mapping[str, Any]) -> bool:
        """Return whether a hospital other than the run's ``silos`` may still join."""
        return bool(self.common.late.keys() - silos.keys()) or self.common.late_joiners == ANY
