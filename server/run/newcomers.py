"""Held-out hospitals of a run: what each would receive in the reported round, and its metrics with that.

They do not take part: schema, standardisation and the choice of the round come from the other hospitals alone. In
each round that becomes the reported one, the server keeps what a newcomer would have received. After the closing
exchange it sends this to each held-out hospital, which returns the metrics of two models
(``strategies/base/newcomers.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import MessageType
from torch import Tensor

from server.results.history import Row
from server.run.collector import Collector
from server.run.recorder import silo_rows
from strategies.base.newcomers import NEWCOMER, newcomer_payload
from strategies.base.state import ServerState
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Model, Number, Payload
from strategies.base.transport.reporting import metrics_of_reply, read_replies

# Name in a reply -> in history and summary
SNAPSHOTS = {"received": "zero_shot", "personal": "personalised"}
ARRAYS = "newcomer/"  # prefix of the array names in the checkpoint


@dataclass
class NewcomerPayloads:
    """The payload that each held-out hospital would have received in ``round``."""

    round: int = 0
    payloads: dict[str, Payload] = field(default_factory=dict)

    def pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return arrays and numbers for the checkpoint."""
        arrays, silos = dict[str, Tensor](), dict[str, Any]()
        for name, payload in self.payloads.items():
            arrays |= {
                f"{ARRAYS}{name}/{key}": model.vector for key, model in payload.models.items()
            }
            models = {key: [m.silo, m.round, m.samples] for key, m in payload.models.items()}
            silos[name] = {"models": models, "numbers": dict(payload.numbers)}
        return arrays, {"round": self.round, "silos": silos}

    @classmethod
    def unpack(cls, arrays: dict[str, Tensor], numbers: Mapping[str, Any]) -> NewcomerPayloads:
        """Return the value stored in a checkpoint, and remove its entries from the checkpoint's ``arrays``."""
        payloads = {}
        for name, of in numbers.get("silos", {}).items():
            models = {
                key: Model(arrays.pop(f"{ARRAYS}{name}/{key}"), *rest)
                for key, rest in of["models"].items()
            }
            payloads[name] = Payload(models, of["numbers"])
        return cls(int(numbers.get("round", 0)), payloads)


class HoldOut:
    """The held-out hospitals of one run."""

    def __init__(self, collector: Collector) -> None:
        self.registration, self.collector = collector.registration, collector
        self.before: ServerState | None = None  # the strategy's state as the round began
        self.results: dict[str, Any] = {}

    def begin_round(self, strategy: PersonalizedStrategy) -> None:
        """Keep a copy of the state from which the messages of this round are made."""
        self.before = strategy.state.copy() if self.registration.held_out else None

    def keep(self, strategy: PersonalizedStrategy) -> NewcomerPayloads:
        """Return the payloads that newcomers would have received in the strategy's round."""
        payloads = {
            name: newcomer_payload(strategy, info, self.before)
            for name, info in self.registration.held_out.items()
            if self.before is not None
        }
        return NewcomerPayloads(strategy.round, payloads)

    def evaluate(self, strategy: PersonalizedStrategy, kept: NewcomerPayloads) -> list[Row]:
        """Evaluate the held-out hospitals; return rows of the history, and set ``results`` for the summary."""
        c, silos = strategy.common, self.registration.held_out
        config: dict[str, Number] = {
            "round": kept.round,
            NEWCOMER: True,
            "personal": True,
            "save": False,
        }
        messages = [
            strategy.message(silos[name].node_id, MessageType.EVALUATE, payload, config)
            for name, payload in kept.payloads.items()
            if name in silos
        ]
        replies = self.collector.exchange(messages, strategy, {}) if messages else []
        measured, faults = read_replies(
            replies, {info.node_id: name for name, info in silos.items()}, metrics_of_reply
        )
        self.registration.reporter.note_reasons(
            (name, f"{name}, which is held out, was not evaluated: {reason}")
            for name, reason in faults.items()
        )
        rows: list[Row] = []
        for name, metrics in sorted(measured.items()):
            rows += silo_rows(
                strategy, silos[name], metrics, strategy.round, self.registration.task.score
            )
        rows = [row._replace(snapshot=SNAPSHOTS[row.snapshot]) for row in rows]
        self.results = {name: self._result(name, rows, kept.round) for name in c.held_out}
        return rows

    def _result(self, name: str, rows: Sequence[Row], server_round: int) -> dict[str, Any]:
        """Return a hospital's counts, the reported round, and its test metrics of both models; null if unknown."""
        info = self.registration.held_out.get(name)
        metrics = {kind: dict[str, Any]() for kind in SNAPSHOTS.values()}
        for row in rows:
            if (row.silo, row.split) == (name, "test"):
                metrics[row.snapshot][row.metric] = None if math.isnan(row.value) else row.value
        counts = {key: getattr(info, key, None) for key in ("n_train", "n_test")}
        return {**counts, "round": server_round, **metrics}
