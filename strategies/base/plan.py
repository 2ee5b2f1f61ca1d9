"""Frozen values that the round loop hands its strategy, and who learns from whom, for the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.base.robust import plausible_counts
from strategies.base.settings import Common
from strategies.base.transport.data_summary import read_agreed, sample_weights

OFFLINE = 0  # no node has this number: a silo of a resumed run that is offline


@dataclass(frozen=True)
class SiloInfo:
    """A silo as the server sees it, from its data summary."""

    name: str
    node_id: int
    n_train: int
    n_val: int = 0
    n_test: int = 0


@dataclass(frozen=True)
class RoundPlan:
    """What the round loop decides of a round; a strategy receives a new one before each round, and only reads it."""

    # The run's silos, sorted by name
    silos: Mapping[str, SiloInfo] = field(default_factory=dict)
    # For every silo's app, beside the payload (classes, ...)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    # Each silo's weight in a mean: agreed, or capped; never taken from the silos' replies
    samples: Mapping[str, int] = field(default_factory=dict)
    last: int = 0  # the run's last round: an earlier one than planned where it stops early
    # Silo -> the round that a report would show of it now
    shown: Mapping[str, int] = field(default_factory=dict)
    # Silo -> its rounds with differential privacy
    attended: Mapping[str, int] = field(default_factory=dict)
    # Silo that joined during the run -> its first round
    joined: Mapping[str, int] = field(default_factory=dict)
    # Silo that takes no part in the next round -> why
    left_out: Mapping[str, str] = field(default_factory=dict)
    # Silo -> its group in sums, as the silos state it; empty: by the setting
    groups: Mapping[str, str] = field(default_factory=dict)
    # Silo -> its weight in the sum that was asked for in this round before
    weights: Mapping[str, int] = field(default_factory=dict)
    # Attempts at the next round so far, with this one
    attempt: int = 1

    def with_silos(self, silos: Iterable[SiloInfo], common: Common) -> RoundPlan:
        """Return the plan with these silos; a weight by sample count is taken from their data summaries alone."""
        infos = {info.name: info for info in sorted(silos, key=lambda info: info.name)}
        agreed = read_agreed(common.agreed).get("samples", {})
        samples = sample_weights(
            {name: info.n_train for name, info in infos.items()}, common.weight_cap, agreed
        )
        if common.robust == "screen" and common.weight_cap:
            samples = plausible_counts(samples, agreed)
        return replace(self, silos=infos, samples=samples)

    def saved(self) -> dict[str, Any]:
        """Return what a later process needs to end this round, in JSON values."""
        nodes = {name: info.node_id for name, info in self.silos.items()}
        of = {"attempt": self.attempt, "weights": self.weights, "left_out": self.left_out}
        return {**of, "nodes": nodes}

    def restored(self, nodes: Mapping[str, int], **of: Any) -> RoundPlan:
        """Return the plan of a saved round: its silos are those of then, online or not."""
        silos = {name: replace(info, node_id=nodes[name]) for name, info in self.silos.items()}
        return replace(self, silos=silos, **of)

    @property
    def nodes(self) -> dict[int, str]:
        """The silos' names by node."""
        return {info.node_id: name for name, info in self.silos.items()}

    def flags(self, silo: str) -> dict[str, int]:
        """Return what a message to this silo says of the silo."""
        known = {"reported": self.shown, "attended": self.attended, "late": self.joined}
        return {key: of[silo] for key, of in known.items() if silo in of}


Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Relationships:
    """``values[k, i, j]``: the weight, at least 0, of silo j for silo i after round ``rounds[k]``."""

    names: list[str]
    rounds: list[int]
    values: Array  # (rounds, N, N), nan before a silo's first round

    @classmethod
    def of(
        cls, histories: Mapping[str, Array], rounds: Mapping[str, Sequence[int]]
    ) -> Relationships | None:
        """Build it from each silo's own history (rounds, N) and the rounds of its rows; None if they do not match."""
        names = sorted(histories)
        n = len(names)
        if n < 2 or any(history.shape[1] != n for history in histories.values()):
            return None
        every = sorted({r for name in names for r in rounds[name]})
        values = np.full((len(every), n, n), np.nan)
        for i, name in enumerate(names):
            for row, r in zip(histories[name], rounds[name], strict=True):
                values[every.index(r) :, i] = row  # an absent silo keeps its last row
        return cls(names, every, values)
