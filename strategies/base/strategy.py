"""The server's half of every method: :class:`PersonalizedStrategy`, which implements FedAvg.

It sends one model and computes the sample-weighted mean of the replies; a method subclasses it and states only its
difference. Names follow the papers: w model, Σ number of parameters, N silos, n_i training samples of silo i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Any, ClassVar, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from models.layout import Layout
from models.tasks import Task
from models.training import generator
from partitions.common.errors import DataError, RunFailedError, UserError
from strategies.base.bounded import Bounds, replacement
from strategies.base.client import SiloClient
from strategies.base.info import MethodInfo, Relationships, shares_buffers
from strategies.base.robust import plausible_counts, weighted_mean
from strategies.base.settings import Common, setting
from strategies.base.state import BUFFERS, GLOBAL, ServerState, State
from strategies.base.transport.data_summary import read_agreed, sample_weights
from strategies.base.transport.error_feedback import acknowledge, acknowledgement, base_of
from strategies.base.transport.payload import (
    Expected,
    Model,
    Number,
    Payload,
    Update,
    Wire,
    check_statistics,
    encode,
    model_of,
    read_update,
    wire_bytes,
)
from strategies.base.transport.reporting import printable, read_metrics, reason_of


@dataclass(frozen=True)
class NoSettings:
    """A method without settings of its own."""


@dataclass(frozen=True)
class Averaging:
    """Settings of methods whose paper and published code average differently."""

    average: str = setting(
        "samples", "what silos count in the mean: as their samples, or alike", choices=("samples", "silos")
    )


OFFLINE = 0  # no node has this number: a silo of a resumed run that is offline


@dataclass(frozen=True)
class SiloInfo:
    """A silo as the server sees it, from its data summary."""

    name: str
    node_id: int
    n_train: int
    n_val: int = 0
    n_test: int = 0


def check_task(method: type[PersonalizedStrategy], task: Task, outputs: int, common: Common) -> None:
    """Raise UserError if the method, the loss or the number of outputs does not fit this task."""
    if method.info.needs_classes and not task.single_label:
        raise UserError(f"{method.info.name} works on samples that have one class each, which {task.name} has not")
    task.check_outputs(outputs)
    task.loss(common.loss, common.focal_gamma)


def check_buffers(info: MethodInfo, common: Common, layout: Layout) -> None:
    """Raise UserError if BatchNorm statistics are to be averaged and the method declares no handling of them."""
    if common.buffers == "shared" and not info.buffers and layout.buffer_size:
        raise UserError(
            f"buffers = shared: {info.name} does not declare what it does with BatchNorm statistics "
            "(MethodInfo.buffers); buffers = local keeps them in the silos"
        )


_REGISTRY: dict[str, type[PersonalizedStrategy]] = {}
_EVALUATIONS: dict[str, type[PersonalizedStrategy]] = {}  # runnable strategies that are no methods


class PersonalizedStrategy(Strategy):
    """The server's half of FedAvg, and the base class of every other method.

    A method overrides :meth:`start_state`, :meth:`payload` and :meth:`aggregate`. Everything it needs in the next round
    is in ``self.state``, which is checkpointed. A silo that is absent from a round is not in ``updates``.
    """

    info: ClassVar[MethodInfo]
    client: ClassVar[type[SiloClient]] = SiloClient
    state_type: ClassVar[type[ServerState]] = ServerState  # the method's server state, in typed fields
    state: ServerState
    Settings: ClassVar[type[Any]] = NoSettings
    # A module class that builds the network's head from its last layer; None: that layer (models.networks.registry).
    head: ClassVar[Any] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "info" in cls.__dict__:
            (_REGISTRY if cls.info.trains else _EVALUATIONS)[cls.info.name] = cls

    def __init__(self, common: Common, settings: Any, layout: Layout) -> None:
        check_buffers(self.info, common, layout)
        self.common, self.settings, self.layout = common, settings, layout
        self.state = self.state_type()
        self.silos: dict[str, SiloInfo] = {}
        self.samples: dict[str, int] = {}  # each silo's weight in a mean: its samples, agreed or capped
        self.round = 0
        self.last_round = common.rounds  # an earlier one where the run stops early
        self.extra: dict[str, Number] = {}  # numbers for the silo's app in addition to the payload (classes, ...)
        self.shown: dict[str, int] = {}  # the round of each silo that the report would show if the run ended now
        self.attended: dict[str, int] = {}  # each silo's rounds with differential privacy in this run
        self.joined: dict[str, int] = {}  # the first round of each silo that joined during the run
        self.rejected: dict[str, str] = {}
        self.bounded: dict[str, tuple[float, str]] = {}  # silo -> the share of its step that counts, and why
        self.sent: dict[str, Mapping[str, Model]] = {}  # the models that each silo of the round trains from
        self.bytes_down = self.bytes_up = 0
        self.wire = Wire()

    # -- what a method overrides ----------------------------------------------------------------------------------

    @classmethod
    def added_to(cls, client: type[SiloClient], settings: Any) -> type[SiloClient]:
        """Return another method's silo half with this one's added; only for a method with ``adds``."""
        raise NotImplementedError

    @classmethod
    def read_relationships(cls, states: Mapping[str, State]) -> Relationships | None:
        """Return who learns from whom, from the newest states of all silos; None if they do not contain it."""
        return None

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        """Set ``self.state`` before the first round; ``initial(purpose)`` is a seeded initial model (Σ,)."""
        self.state.model = initial("")

    def welcome(self, silo: str) -> None:
        """Add a new silo's entries to ``self.state``; most methods have none.

        The silo is already in ``self.silos``.
        """

    def grow(self, silo: str) -> None:
        """Extend the state of N silos to N + 1 when one joins to train; called after ``welcome``."""

    def begin_round(self) -> None:
        """Compute once per round what :meth:`payload` sends to the silos of round ``self.round``."""

    def payload(self, silo: str) -> Payload:
        """Return the payload of this silo in round ``self.round``."""
        return Payload({GLOBAL: Model(self.state.model, round=self.round - 1)})

    def aggregate(self, updates: Sequence[Update]) -> None:
        """Change ``self.state`` by the updates of round ``self.round`` (at least one, sorted by silo name)."""
        self.state.model = self.mean((u.vector for u in updates), self.weights(updates))

    def mean(self, vectors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
        """Return the weighted mean of silos' vectors, or the estimate with which ``robust`` replaces it."""
        rule = replacement(self.common)
        return weighted_mean(vectors, weights) if rule is None else rule(list(vectors))

    def centre(self, name: str, update: Update) -> Tensor | None:
        """Return the point that a silo's vector of this name is a step from; None: it is a step already, or one from 0.

        By default the vector sent under this name, else the model that was sent, else the silo's own last model.
        """
        sent = self.sent.get(update.silo, {})
        found = sent.get(name) if name in sent or name == BUFFERS else sent.get(GLOBAL)
        if found is None and name != BUFFERS:
            own = self.state.arrays.get(model_of(update.silo))
            found = Model(self.initial("") if own is None else own)
        fits = found is not None and len(found.vector) == self.upload_size(name, update.silo)
        return found.vector if found is not None and fits else None

    def weights(self, updates: Sequence[Update]) -> list[float]:
        """Return each update's weight in a mean: its samples, or 1 with the setting ``average = "silos"``."""
        alike = getattr(self.settings, "average", "samples") == "silos"
        return [1 if alike else u.samples for u in updates]

    def shared_buffers(self) -> tuple[slice, ...]:
        """Return the parts of the BatchNorm statistics that travel with ``buffers = "shared"``."""
        return self.layout.buffer_parts([slice(0, self.layout.size)])

    def upload_size(self, name: str, silo: str = "") -> int:
        """Return the length that the uploaded vector of this name must have, in this round and from this silo."""
        if name == BUFFERS:
            return sum(int(part.stop - part.start) for part in self.shared_buffers())
        return self.layout.size

    def upload_names(self) -> tuple[str, ...]:
        """Return the names of the vectors that a reply of this round must have; equal to the client's."""
        return (*self.info.uploads, BUFFERS) if self.shares_buffers else self.info.uploads

    def check(self, update: Update) -> None:
        """Raise DataError, with one line, if a silo's numbers are not valid for :meth:`aggregate`.

        Any other error is a fault of the method: it ends the run, and is not attributed to a silo.
        """

    # -- Flower's interface ---------------------------------------------------------------------------------------

    def initialise(self, silos: Sequence[SiloInfo], initial: Callable[[str], Tensor]) -> None:
        """Set the participating silos and the state for round 1."""
        self.silos = {s.name: s for s in sorted(silos, key=lambda s: s.name)}
        self.weigh()
        self.state, self.initial = self.state_type(), initial
        self.start_state(initial)

    def weigh(self) -> None:
        """Set ``self.samples``, from which all weights by sample count are taken (never from the silos' replies)."""
        counts = {name: info.n_train for name, info in self.silos.items()}
        agreed = read_agreed(self.common.agreed).get("samples", {})
        self.samples = sample_weights(counts, self.common.weight_cap, agreed)
        if self.common.robust == "screen" and self.common.weight_cap:
            self.samples = plausible_counts(self.samples, agreed)

    def participants(self) -> list[str]:
        """Return the silos that train in this round: a share of all, drawn by (seed, round)."""
        names = list(self.silos)
        count = max(int(self.common.participation * len(names) + 1e-9), 1)  # 0.57 of 100 is 57
        if count == len(names):
            return names
        rng = generator(self.common.seed, "participants", self.round)
        return sorted(names[i] for i in torch.randperm(len(names), generator=rng)[:count].tolist())

    def _online(self) -> list[str]:
        """Return the silos that are online, and reject those that were offline when the run was resumed."""
        for name, info in self.silos.items():
            if info.node_id == OFFLINE:
                self.reject(name, "it was offline when the run was resumed")
        return [name for name, info in self.silos.items() if info.node_id != OFFLINE]

    def evaluates(self) -> bool:
        """Return whether this round's models are evaluated."""
        every = self.common.evaluate_every
        return every > 0 and (self.round % every == 0 or self.round == self.common.rounds)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return a train message for each participant and, in an evaluated round, an evaluate message for the others.

        ``arrays`` is not used: a silo receives the method's :meth:`payload`.
        """
        self.round, self.bytes_down, self.bytes_up = server_round, 0, 0
        self.rejected, self.bounded, self.sent = {}, {}, {}
        self.wire = Wire(self.common.wire_dtype)
        self.begin_round()
        online = self._online()
        chosen = set(self.participants()) & set(online)
        evaluate = self.evaluates()
        messages = []
        for name in online:
            if name in chosen:  # "participants": a silo may require a minimum, for its own privacy
                flags: dict[str, Number] = {"evaluate": evaluate, "participants": len(chosen)}
                messages.append(self._message(name, MessageType.TRAIN, config, **flags))
            elif evaluate:
                messages.append(self._message(name, MessageType.EVALUATE, config, personal=True))
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the closing exchange's messages (silos evaluate the start of round ``rounds + 1``), else none."""
        if server_round < self.last_round or self.common.evaluate_every == 0:
            return []
        self.round, self.bytes_down, self.bytes_up = server_round + 1, 0, 0
        self.rejected, self.bounded, self.sent = {}, {}, {}
        self.wire = Wire(self.common.wire_dtype)
        self.begin_round()
        return [self._message(n, MessageType.EVALUATE, config, personal=False) for n in self._online()]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Leave out unusable replies (reasons in ``self.rejected``) and aggregate the rest, sorted by silo name."""
        usable = self.within_bounds(self._in_one_place(self.updates(replies)))
        if not usable:
            reasons = "; ".join(f"{silo}: {reason}" for silo, reason in self.rejected.items()) or "no silo replied"
            raise RunFailedError(f"round {server_round}: no silo sent a usable update ({reasons})")
        if self.shares_buffers:
            buffers = (u.vectors[BUFFERS] for u in usable)
            self.state.buffers = self.mean(buffers, self.weights(usable))
        self.aggregate(usable)
        acknowledge(self.common, self.state, (u.silo for u in usable), self.round)
        return None, None

    def within_bounds(self, updates: list[Update]) -> list[Update]:
        """Return the updates to aggregate: without diverging silos, and within the bounds of the setting ``robust``."""
        bounds = Bounds(self.info, self.common, self.round, self.centre, self.sent, bounded=self.bounded)
        usable = bounds.within(updates)
        for silo, reason in bounds.rejected.items():
            self.reject(silo, reason)
        return usable

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Reject the silos whose evaluation failed; the round loop writes the others' metrics into the history."""
        names = {info.node_id: name for name, info in self.silos.items()}
        for reply in replies:
            if reply.metadata.message_type != MessageType.EVALUATE:
                continue
            try:
                if reply.has_error():
                    raise DataError(reason_of(reply.error.reason))
                read_metrics(reply.content.get("metrics"))
            except DataError as error:
                node = reply.metadata.src_node_id
                self.reject(names.get(node, f"node {node}"), str(error))
        return None

    def summary(self) -> None:
        log(INFO, "%s (%s), %d silos, settings %s", self.info.name, self.info.paper, len(self.silos), self.settings)

    @property
    def shares_buffers(self) -> bool:
        """Return whether BatchNorm statistics travel with the models of this round."""
        return shares_buffers(self.info, self.common) and bool(self.upload_size(BUFFERS))

    # -- replies --------------------------------------------------------------------------------------------------

    def updates(self, replies: Iterable[Message]) -> list[Update]:
        """Return the well-formed train replies, sorted by silo name; the others are entered in ``self.rejected``."""
        names = {info.node_id: name for name, info in self.silos.items()}
        numbers = self.info.sends_numbers
        names_up, size = self.upload_names(), self.upload_size

        def base(name: str, silo: str) -> Tensor | None:
            found = base_of(self.sent.get(silo, {}), name, size(name, silo))
            return None if found is None else self.wire.arrives(found)

        expected = Expected(self.info.name, self.round, self.samples, names_up, size, numbers, base)
        result = []
        for reply in replies:
            if reply.metadata.message_type != MessageType.TRAIN:
                continue
            silo = names.get(reply.metadata.src_node_id, f"node {reply.metadata.src_node_id}")
            try:
                update = read_update(reply, silo, expected)
                if BUFFERS in update.vectors:
                    check_statistics(update.vectors[BUFFERS], self.layout, self.shared_buffers())
                self.bytes_up += update.bytes
                self.check(update)
                result.append(update)
            except DataError as error:
                self.reject(silo, str(error))
        return sorted(result, key=lambda u: u.silo)

    def _in_one_place(self, updates: list[Update]) -> list[Update]:
        """Move the updates and the state to the first update's device (a GPU if the silos run in this process)."""
        device = next((vector.device for u in updates for vector in u.vectors.values()), None)
        if device is None:
            return updates
        self.state.arrays = {name: tensor.to(device) for name, tensor in self.state.arrays.items()}
        return [replace(u, vectors={n: vector.to(device) for n, vector in u.vectors.items()}) for u in updates]

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
        buffers = Model(self.state.buffers, round=self.round - 1)
        return Payload({**payload.models, BUFFERS: buffers}, payload.numbers)

    def _message(self, silo: str, kind: str, config: ConfigRecord, **flags: Number) -> Message:
        payload = self.full_payload(silo)
        if kind == MessageType.TRAIN:
            self.sent[silo] = payload.models
        flags = {**flags, **acknowledgement(self.common, self.state, silo), "round": self.round}
        flags |= {"reported": self.shown[silo]} if silo in self.shown else {}
        flags |= {"attended": self.attended[silo]} if silo in self.attended else {}
        flags |= {"late": self.joined[silo]} if silo in self.joined else {}
        return self.message(self.silos[silo].node_id, kind, payload, {**cast(dict[str, Number], dict(config)), **flags})

    def message(self, node: int, kind: str, payload: Payload, config: Mapping[str, Number]) -> Message:
        """Return a message to a node, and add its size to ``bytes_down``."""
        content = encode(payload, {**self.extra, **config}, self.wire)
        self.bytes_down += wire_bytes(content)
        return Message(content, dst_node_id=node, message_type=kind, ttl=self.common.round_timeout)
