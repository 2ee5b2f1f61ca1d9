"""Hospitals that are not there when a run begins, and join it (the setting ``late-joiners``).

A hospital joins between two rounds. Schema, standardisation and classes are those of the run: one whose data do not fit
is left out, and its sums of columns are not asked for. The method says what it starts from, and what the others' state
does (``PersonalizedStrategy.welcome``, ``grow``). A run has at most ``silos`` hospitals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strategies.base.newcomer.settings import ANY
from strategies.base.settings import Common

JOIN_SECONDS = 60.0  # so long a round waits for the data summary of a node that has come


@dataclass(frozen=True)
class Joiner:
    """A hospital that is here and not yet among the run's silos."""

    node: int
    summary: Mapping[str, Any]
    first: int  # the round from which on it takes part, or the next one after it


class LateJoiners:
    """The hospitals that may join one run late."""

    def __init__(self, common: Common) -> None:
        self.common = common
        self.waiting: dict[str, Joiner] = {}

    @property
    def expected(self) -> int:
        """Return how many silos a new run waits for: of those that may all join late a quorum, where there is one."""
        if self.common.late_joiners == ANY and self.common.min_silos:
            return self.common.min_silos
        return self.common.silos - len(self.common.late)

    def allows(self, name: str) -> bool:
        """Return whether a hospital may join as the run goes on."""
        return self.common.late_joiners == ANY or name in self.common.late

    def is_late(self, name: str, before: Mapping[str, Any]) -> bool:
        """Return whether a hospital that is here takes no part yet. ``before``: the silos of a resumed run."""
        return name not in before if before and self.allows(name) else name in self.common.late and not before

    def wait(self, name: str, node: int, summary: Mapping[str, Any], first: int = 0) -> None:
        """Keep a hospital until its round."""
        self.waiting[name] = Joiner(node, summary, first or self.common.late.get(name, 0))

    def due(self, server_round: int) -> dict[str, Joiner]:
        """Return the hospitals that may join in this round, by name."""
        return {name: joiner for name, joiner in sorted(self.waiting.items()) if joiner.first <= server_round}

    def awaited(self, silos: Mapping[str, Any]) -> bool:
        """Return whether a hospital may still come, beside the run's ``silos``."""
        return bool(self.common.late.keys() - silos.keys()) or self.common.late_joiners == ANY
