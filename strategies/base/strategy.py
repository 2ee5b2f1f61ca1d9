"""The server's half of every method: :class:`PersonalizedStrategy`, which implements FedAvg.

It sends one model and computes the sample-weighted mean of the replies; a method subclasses it and states only its
difference. Names follow the papers: w model, Σ number of parameters, N silos, n_i training samples of silo i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any, ClassVar, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from models.layout import Layout
from partitions.common.errors import RunFailedError, UserError
from partitions.common.messages import SHARE
from strategies.base.aggregation.bounded import UpdateBounds
from strategies.base.aggregation.secure import mean_of, weights_of
from strategies.base.aggregation.updates import read_updates, read_usable
from strategies.base.client import SiloClient
from strategies.base.contract import ServerMethod
from strategies.base.plan import OFFLINE, RoundPlan, SiloInfo
from strategies.base.settings import Common
from strategies.base.state import BUFFERS
from strategies.base.transport.payload import (
    Model,
    Number,
    Payload,
    Wire,
    encode,
    silos_of,
    wire_bytes,
)
from strategies.base.transport.reporting import metrics_of_reply, printable

_REGISTRY: dict[str, type[PersonalizedStrategy]] = {}
# Runnable strategies that are no methods
_EVALUATIONS: dict[str, type[PersonalizedStrategy]] = {}


class PersonalizedStrategy(ServerMethod, Strategy):
    """The server's half of FedAvg, and the base class of every other method; its hooks are in ``contract.py``."""

    client: ClassVar[type[SiloClient]] = SiloClient
    # Removes the masks of these silos' sum, where they add masks (server/run/secure.py)
    unmask: Callable[[Tensor, Sequence[str]], Tensor] = staticmethod(lambda total, silos: total)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "info" in cls.__dict__:
            (_REGISTRY if cls.info.trains else _EVALUATIONS)[cls.info.name] = cls

    def __init__(self, common: Common, settings: Any, layout: Layout) -> None:
        self.common, self.settings, self.layout = common, settings, layout
        self.state, self.plan = self.state_type(), RoundPlan(last=common.rounds)
        self.start_round(0)

    def initialise(self, plan: RoundPlan, initial: Callable[[str], Tensor]) -> None:
        """Set the participating silos and the state for round 1."""
        self.plan, self.state, self.initial = plan, self.state_type(), initial
        self.check_fit()
        self.start_state(initial)

    def follow(self, plan: RoundPlan) -> None:
        """Take the plan of the next round; silos that are new in it join by the method's rule, one after the other."""
        for name in sorted(plan.silos.keys() - self.silos.keys()):
            self.admit(plan.silos[name], trains=True)
        self.plan = plan

    def admit(self, info: SiloInfo, *, trains: bool) -> None:
        """Add a new silo by the method's rule (:meth:`welcome`)."""
        self.plan = self.plan.with_silos([*self.silos.values(), info], self.common)
        self.welcome(info.name, trains=trains)

    def start_round(self, server_round: int) -> None:
        """Begin the record of a round: bytes, what was sent, and the silos that were left out or bounded."""
        self.round, self.bytes_down, self.bytes_up = server_round, 0, 0
        # The models that each silo of the round trains from
        self.sent: dict[str, Mapping[str, Model]] = {}
        self.rejected: dict[str, str] = {}  # silo -> why it is left out
        # Silo -> the share of its step that counts, and why
        self.bounded: dict[str, tuple[float, str]] = {}
        self.wire = Wire(self.common.wire_dtype)

    def _online(self, server_round: int) -> list[str]:
        """Begin a round; return the silos that are online, and reject those that were offline at the resume."""
        if not self.info.trains:
            raise UserError(
                f"strategy = {self.info.name} trains nothing: silofl {self.info.name} runs it"
            )
        self.start_round(server_round)
        self.begin_round()
        for name, info in self.silos.items():
            if info.node_id == OFFLINE:
                self.reject(name, "it was offline when the run was resumed")
        return [name for name in self.silos if name not in self.rejected]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return a train message for each participant; in an evaluated round an evaluate message for the others."""
        online = self._online(server_round)
        for name, reason in self.plan.left_out.items():
            self.reject(name, reason)
        online = [name for name in online if name not in self.rejected]
        chosen = set(self.participants()) & set(online)
        every = self.common.evaluate_every
        evaluate = every > 0 and (
            server_round % every == 0 or server_round == self.common.rounds
        )
        secure = weights_of(self, chosen) if self.common.secure_aggregation else {}
        messages = []
        for name in online:
            # "participants": a silo may require a minimum, for its own privacy
            if name in chosen:
                flags: dict[str, Number] = {"evaluate": evaluate, "participants": len(chosen)}
                flags |= {SHARE: secure[name] / sum(secure.values())} if secure else {}
                messages.append(self._message(name, MessageType.TRAIN, config, **flags))
            elif evaluate:
                messages.append(
                    self._message(name, MessageType.EVALUATE, config, personal=True)
                )
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the closing exchange's messages (silos evaluate the start of round ``rounds + 1``), else none."""
        if server_round < self.plan.last or self.common.evaluate_every == 0:
            return []
        online = self._online(server_round + 1)
        return [
            self._message(name, MessageType.EVALUATE, config, personal=False) for name in online
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Leave out unusable replies (reasons in ``self.rejected``) and aggregate the rest, sorted by silo name."""
        updates = read_updates(self, replies)
        secure = self.common.secure_aggregation
        usable = updates if secure else UpdateBounds(self).within(updates)
        if not usable:
            reasons = (
                "; ".join(f"{silo}: {reason}" for silo, reason in self.rejected.items())
                or "no silo replied"
            )
            raise RunFailedError(
                f"round {server_round}: no silo sent a usable update ({reasons})"
            )
        if secure and not (usable := mean_of(self, usable, self.upload_names())):
            return None, None
        if self.shares_buffers:
            buffers = (u.vectors[BUFFERS] for u in usable)
            self.state.buffers = self.mean(buffers, self.weights(usable))
        self.aggregate(usable)
        self.state.counted = self.state.counted | dict.fromkeys(silos_of(usable), self.round)
        return None, None

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Reject the silos whose evaluation failed; the round loop writes the others' metrics into the history."""
        read_usable(self, replies, MessageType.EVALUATE, metrics_of_reply)
        return None

    def summary(self) -> None:
        what = f"{self.info.name} ({self.info.paper}), {len(self.silos)} silos"
        log(INFO, "%s, settings %s", what, self.settings)

    def reject(self, silo: str, reason: str) -> None:
        """Leave a silo out of this round. The reason may contain the silo's text, so it is made one printable line."""
        reason = printable(reason)
        log(WARNING, "round %d leaves %s out: %s", self.round, silo, reason)
        self.rejected[silo] = reason

    def full_payload(self, silo: str) -> Payload:
        """Return everything that travels to a silo: the method's payload, and BatchNorm statistics."""
        payload = self.payload(silo)
        if self.state.buffers is None or not self.info.uploads:
            return payload
        buffers = self.pack({BUFFERS: self.state.buffers}).models
        return Payload({**payload.models, **buffers}, payload.numbers)

    def _message(self, silo: str, kind: str, config: ConfigRecord, **flags: Number) -> Message:
        payload, values = self.full_payload(silo), cast(dict[str, Number], dict(config))
        if kind == MessageType.TRAIN:
            self.sent[silo] = payload.models
        values |= {
            **flags,
            "counted": self.state.counted.get(silo, 0),
            "round": self.round,
            **self.plan.flags(silo),
        }
        return self.message(self.silos[silo].node_id, kind, payload, values)

    def message(
        self, node: int, kind: str, payload: Payload, config: Mapping[str, Number]
    ) -> Message:
        """Return a message to a node, and add its size to ``bytes_down``."""
        content = encode(payload, {**self.plan.numbers, **config}, self.wire)
        self.bytes_down += wire_bytes(content)
        return Message(
            content, dst_node_id=node, message_type=kind, ttl=self.common.round_timeout
        )
