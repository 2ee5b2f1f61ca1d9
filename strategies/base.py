"""The two halves of every method: :class:`PersonalizedStrategy` on the server, :class:`SiloClient` in the silo.

A method file subclasses both and states only its difference from FedAvg, which is what the base does: the server
hands out one model and takes the sample-weighted mean of what comes back; the silo trains what it received. Names
follow the papers: w received model, g gradient, Σ number of parameters, N silos, n_i training samples of silo i.

A round is one exchange. The reply carries the update, the metrics of the *received* model (before local training) and
of the *personal* model (after it), because papers differ in which of the two they report.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Any, ClassVar, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.client import NumPyClient
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore import log
from torch import Tensor

from models.flat import FlatModel, Layout, gather, is_finite, scatter, write
from models.metrics import classification_metrics, loss_function
from models.training import (
    Optimizer,
    Samples,
    batches,
    generator,
    loss_gradient,
    make_optimizer,
    predict,
    seed_dropout,
)
from strategies.payload import Model, Number, Payload, Wire, decode, encode, wire_bytes
from strategies.reports import read_metrics
from strategies.settings import Common, UserError
from strategies.state import State

GLOBAL = "global"
BUFFERS = "buffers"


@dataclass(frozen=True)
class NoSettings:
    """A method without settings of its own."""


# ---------------------------------------------------------------------------------------------------------------------
# The silo's half


@dataclass(frozen=True)
class Silo:
    """What a method may touch of a silo: its data on its device, one model to work with, seeded initial models."""

    name: str
    train: Samples
    val: Samples
    test: Samples
    model: FlatModel
    initial: Callable[[str], Tensor]  # purpose -> initial vector (Σ,), the same in every process


class SiloClient(NumPyClient):
    """The silo's half of FedAvg; the base of every other method's.

    A method overrides :meth:`receive`, :meth:`local_update` and :meth:`personal`. What it keeps between rounds goes
    into ``self.state.arrays`` and ``self.state.numbers`` (replace an array, never write into it: a state that failed
    half-way is thrown away whole). Received vectors are shared with other silos and must not be written to either.
    """

    # Names of the vectors that local_update returns, and of the numbers in ``replies`` that may leave the silo.
    uploads: ClassVar[tuple[str, ...]] = ("model",)
    sends_numbers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, silo: Silo, common: Common, settings: Any, state: State) -> None:
        self.silo, self.common, self.settings, self.state = silo, common, settings, state
        self.model = silo.model
        self.loss = loss_function(common.loss, common.focal_gamma)
        self.round = 0
        self.models: Mapping[str, Model] = {}
        self.numbers: Mapping[str, Number] = {}
        self.replies: dict[str, Number] = {}  # numbers that a method sends up beside its vectors
        self.train_loss = float("nan")

    # -- what a method overrides ----------------------------------------------------------------------------------

    def receive(self) -> Tensor:
        """The model (Σ,) that this silo starts the round from; it is evaluated as ``received``."""
        return self.models[GLOBAL].vector

    def received_blocks(self) -> list[str]:
        """The layer blocks that come from the server, input to output."""
        return [b.name for b in self.model.layout.blocks]

    def local_update(self) -> list[Tensor]:
        """Train from the received model, which ``self.model`` holds; returns the vectors named in ``uploads``."""
        self.train()
        return [self.model.vector.clone()]

    def personal(self) -> Tensor:
        """The silo's own model (Σ,) after the local update; evaluated as ``personal``, kept in the silo."""
        return self.model.vector

    # -- what a method uses ---------------------------------------------------------------------------------------

    @property
    def previous(self) -> Tensor | None:
        """The personal model of the last round that this silo took part in; None before its first."""
        return self.state.arrays.get("personal")

    def own(self) -> Tensor:
        """The silo's own model (Σ,) of before this round: the previous one, before its first the initial model."""
        previous = self.previous
        return self.silo.initial("") if previous is None else previous

    def learning_rate(self) -> float:
        """η of this round: the first round's times lr-decay per round since."""
        return self.common.learning_rate * self.common.lr_decay ** (self.round - 1)

    def optimizer(self, key: str = "") -> Optimizer:
        """The silo's optimiser for this round. ``key`` tells several optimisers of one method apart.

        Its moments start afresh (``optimizer-state = "reset"``) or are those that :meth:`keep_optimizer` left.
        """
        c = self.common
        optimizer = make_optimizer(c.optimizer, self.learning_rate(), c.momentum, c.weight_decay, c.amsgrad)
        if c.optimizer_state == "keep":
            prefix = f"optimizer.{key}."
            kept = {
                k.removeprefix(prefix): v.clone()
                for k, v in self.state.arrays.items()
                if k.startswith(prefix)
            }
            optimizer.state = kept
        return optimizer

    def keep_optimizer(self, optimizer: Optimizer, key: str = "") -> None:
        if self.common.optimizer_state == "keep":
            self.state.arrays |= {f"optimizer.{key}.{k}": v for k, v in optimizer.state.items()}

    def batches(
        self,
        epochs: int | None = None,
        purpose: str = "train",
        until: Callable[[], bool] | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled mini-batches (x, y) of the training part; the order hangs on seed, silo, round and purpose only.

        ``until`` is asked after every epoch, and ends them.
        """
        c = self.common
        rng = generator(c.seed, self.silo.name, self.round, purpose)
        seed_dropout(rng)
        epochs = c.local_epochs if epochs is None else epochs
        train, single = self.silo.train, self.model.has_batch_norm
        for _ in range(epochs):
            for index in batches(
                len(train), c.batch_size, 1, rng, merge_single=single, device=train.y.device
            ):
                yield train.take(index)
            if until is not None and until():
                return

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """Fill ``self.model.gradient`` by one batch at ``self.model.vector``; returns the loss."""
        return loss_gradient(self.model, x, y, self.loss)

    def train(
        self,
        *,
        correction: Callable[[Tensor, Tensor], object] | None = None,
        epochs: int | None = None,
        purpose: str = "train",
        parts: Sequence[slice] | None = None,
        until: Callable[[], bool] | None = None,
        optimizer_key: str = "",
    ) -> None:
        """Local training of ``self.model`` for ``epochs`` (default local-epochs), or until ``until`` says so after one.

        ``correction(vector, gradient)`` may add to the gradient of each step (a proximal term, a control variate).
        ``parts`` trains only those parts of the vector; the rest stays as it is, and out of the backward pass.
        """
        vector, gradient = self.model.vector, self.model.gradient
        trained = [slice(0, len(vector))] if parts is None else list(parts)
        pairs = [
            (vector[p], gradient[p], self.optimizer(f"{optimizer_key}{i}")) for i, p in enumerate(trained)
        ]
        total, steps = torch.zeros((), device=vector.device), 0
        self.model.freeze(*self.model.layout.outside(trained))
        try:
            for x, y in self.batches(epochs, purpose, until):
                total += self.gradient(x, y)
                steps += 1
                if correction is not None:
                    correction(vector, gradient)
                for part, slope, optimizer in pairs:
                    optimizer.step(part, slope)
        finally:  # the silos of a process share the network
            self.model.freeze()
        for i, (_, _, optimizer) in enumerate(pairs):
            self.keep_optimizer(optimizer, f"{optimizer_key}{i}")
        if steps:
            self.train_loss = float(total) / steps

    def measure(
        self, snapshot: str, vector: Tensor, splits: Sequence[str] = ("val", "test")
    ) -> dict[str, float]:
        """Metrics of a model on this silo's splits: ``{"received.test.accuracy": ...}``."""
        self.model.load(vector)
        result: dict[str, float] = {}
        for split in splits:
            samples: Samples = getattr(self.silo, split)
            if len(samples):
                metrics = classification_metrics(predict(self.model, samples), samples.y)
                result |= {f"{snapshot}.{split}.{name}": value for name, value in metrics.items()}
        return result

    # -- Flower's interface ---------------------------------------------------------------------------------------

    def fit(  # type: ignore[override]
        self, parameters: Sequence[Tensor], config: Mapping[str, Any]
    ) -> tuple[list[Tensor], int, dict[str, Any]]:
        """One round in this silo: receive, local update, personal model; the metrics of both snapshots.

        ``config["models"]`` holds the received models, ``config["numbers"]`` the method's numbers; ``parameters`` is
        the list of the received vectors, as any NumPyClient gets them. Returns the vectors named by
        :meth:`upload_names`, the number of training samples, and the metrics. Raises ValueError where the result is
        not finite.
        """
        started = time.perf_counter()
        received = self._begin(config)
        begun = time.perf_counter()
        metrics: dict[str, Any] = {}
        if config["evaluate"]:
            metrics |= self.measure("received", received)
        self.model.load(received)
        evaluated = time.perf_counter()
        vectors = self.local_update()
        if self.shares_buffers:
            vectors = [*vectors, gather(self.model.buffers, self.shared_buffers())]
        personal = self.personal().clone()
        # A state that is not finite would stay so: nothing is kept, and the next round starts from the last good one.
        if not all(is_finite(vector) for vector in (personal, *vectors)):
            raise ValueError("the local training diverged (a lower learning-rate may help)")
        trained = time.perf_counter()
        if config["evaluate"]:
            metrics |= self.measure("personal", personal)
        if self.train_loss == self.train_loss:
            metrics["personal.train.loss"] = self.train_loss
        self._keep(personal, metrics.get("personal.val.accuracy"))
        seconds = {"seconds.train": begun - started + trained - evaluated}
        seconds["seconds.evaluate"] = time.perf_counter() - started - seconds["seconds.train"]
        return vectors, len(self.silo.train), metrics | seconds

    def evaluate(  # type: ignore[override]
        self, parameters: Sequence[Tensor], config: Mapping[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Metrics without training: of the model this silo would start from and, on request, of its personal model."""
        metrics = self.measure("received", self._begin(config))
        if config["personal"]:
            self._load_buffers("personal.buffers")
            metrics |= self.measure("personal", self.own())
        return metrics.get("received.test.loss", float("nan")), len(self.silo.test), metrics

    @property
    def shares_buffers(self) -> bool:
        """Whether BatchNorm statistics travel with the model."""
        return bool(self.uploads) and self.common.buffers == "shared" and bool(self.shared_buffers())

    def shared_buffers(self) -> tuple[slice, ...]:
        """The parts of the BatchNorm statistics that travel, with ``buffers = "shared"``: those of shared blocks."""
        layout = self.model.layout
        return layout.buffer_parts([slice(0, layout.size)])

    def upload_names(self) -> tuple[str, ...]:
        return (*self.uploads, BUFFERS) if self.shares_buffers else self.uploads

    def _begin(self, config: Mapping[str, Any]) -> Tensor:
        self.round, self.models, self.numbers = config["round"], config["models"], config["numbers"]
        self.model.freeze()  # the silos of a process share the network; one that failed may have left parts frozen
        self._load_buffers("personal.buffers")
        if self.shares_buffers and BUFFERS in self.models:
            write(self.model.buffers, self.shared_buffers(), self.models[BUFFERS].vector)
        return self.receive()

    def _load_buffers(self, name: str) -> None:
        if name in self.state.arrays:
            self.model.buffers.copy_(self.state.arrays[name])
        else:
            self.model.reset_buffers()

    def _keep(self, personal: Tensor, accuracy: float | None) -> None:
        """The last personal model, and the best one by validation accuracy (without validation data: the last)."""
        arrays, numbers = self.state.arrays, self.state.numbers
        arrays["personal"] = personal
        if self.model.buffers.numel():
            arrays["personal.buffers"] = self.model.buffers.clone()
        # A round that is not evaluated says nothing about its model, where earlier ones were.
        if "best_accuracy" not in numbers or (accuracy is not None and accuracy > numbers["best_accuracy"]):
            arrays["best"] = personal
            if "personal.buffers" in arrays:
                arrays["best.buffers"] = arrays["personal.buffers"]
            numbers["best_round"] = self.round
            if accuracy is not None:
                numbers["best_accuracy"] = accuracy


# ---------------------------------------------------------------------------------------------------------------------
# The server's half


AWAY = 0  # no node has this number: a silo of a resumed run that is not here


@dataclass(frozen=True)
class SiloInfo:
    """What the server knows of a silo, from its data card."""

    name: str
    node_id: int
    n_train: int
    n_val: int = 0
    n_test: int = 0


@dataclass(frozen=True)
class Update:
    """What a silo sent back: the vectors named in its client's ``uploads``, and the method's numbers."""

    silo: str
    samples: int
    vectors: Mapping[str, Tensor]
    numbers: Mapping[str, Number]
    metrics: Mapping[str, float]

    @property
    def vector(self) -> Tensor:
        """The first, and mostly the only, vector."""
        return next(iter(self.vectors.values()))


def weighted_mean(vectors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_k w_k v_k / sum_k w_k, added up in the given order (floating-point sums depend on it)."""
    total = sum(weights)
    result: Tensor | None = None
    for vector, weight in zip(vectors, weights, strict=True):
        if result is None:
            result = vector * (weight / total)
        else:
            result.add_(vector, alpha=weight / total)
    if result is None:
        raise ValueError("a mean of no vectors")
    return result


_REGISTRY: dict[str, type[PersonalizedStrategy]] = {}


class PersonalizedStrategy(Strategy):
    """The server's half of FedAvg; the base of every other method's.

    A method overrides :meth:`start_state`, :meth:`payload` and :meth:`aggregate`. Whatever it needs in the next round
    is in ``self.state``, which is checkpointed. A silo that is absent from a round is simply not in ``updates``.
    """

    name: ClassVar[str] = ""  # on the command line
    title: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    sends: ClassVar[tuple[str, str]] = ("Σ", "Σ")  # per participating silo and round: down, up
    reports: ClassVar[str] = "personal"  # the snapshot that the paper evaluates
    client: ClassVar[type[SiloClient]] = SiloClient
    Settings: ClassVar[type[Any]] = NoSettings
    takes_ala: ClassVar[bool] = True  # whether its silos start from a received model, which ``ala`` may mix

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__dict__.get("name"):
            _REGISTRY[cls.name] = cls

    def __init__(self, common: Common, settings: Any, layout: Layout) -> None:
        self.common, self.settings, self.layout = common, settings, layout
        self.state = State()
        self.silos: dict[str, SiloInfo] = {}
        self.round = 0
        self.extra: dict[str, Number] = {}  # what the silo's app needs beside the payload (classes, ...)
        self.rejected: dict[str, str] = {}
        self.bytes_down = self.bytes_up = 0
        self.wire = Wire()

    # -- what a method overrides ----------------------------------------------------------------------------------

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        """Set ``self.state`` before the first round; ``initial(purpose)`` is a seeded initial model (Σ,)."""
        self.state.arrays[GLOBAL] = initial("")

    def begin_round(self) -> None:
        """Compute once what :meth:`payload` hands out to the silos of round ``self.round``."""

    def payload(self, silo: str) -> Payload:
        """What this silo gets in round ``self.round``."""
        return Payload({GLOBAL: Model(self.state.arrays[GLOBAL], round=self.round - 1)})

    def aggregate(self, updates: Sequence[Update]) -> None:
        """Change ``self.state`` by the updates of round ``self.round``: at least one, sorted by silo name."""
        self.state.arrays[GLOBAL] = weighted_mean((u.vector for u in updates), [u.samples for u in updates])

    def shared_buffers(self) -> tuple[slice, ...]:
        """The parts of the BatchNorm statistics that travel, with ``buffers = "shared"``."""
        return self.layout.buffer_parts([slice(0, self.layout.size)])

    def upload_size(self, name: str) -> int:
        """Length that the uploaded vector of this name must have."""
        if name == BUFFERS:
            return sum(int(part.stop - part.start) for part in self.shared_buffers())
        return self.layout.size

    def check(self, update: Update) -> None:
        """Raise ValueError, with one line, where a silo's numbers are not what :meth:`aggregate` needs."""

    # -- Flower's interface ---------------------------------------------------------------------------------------

    def initialise(self, silos: Sequence[SiloInfo], initial: Callable[[str], Tensor]) -> None:
        """Tell the strategy who takes part, and set its state for round 1."""
        self.silos = {s.name: s for s in sorted(silos, key=lambda s: s.name)}
        self.state = State()
        self.start_state(initial)

    def participants(self) -> list[str]:
        """The silos that train in this round: a share of all, drawn by (seed, round)."""
        names = list(self.silos)
        count = max(int(self.common.participation * len(names) + 1e-9), 1)  # 0.57 of 100 is 57
        if count == len(names):
            return names
        rng = generator(self.common.seed, "participants", self.round)
        return sorted(names[i] for i in torch.randperm(len(names), generator=rng)[:count].tolist())

    def _present(self) -> list[str]:
        """The silos that can be asked; those that were away when the run was resumed are named."""
        for name, info in self.silos.items():
            if info.node_id == AWAY:
                self.reject(name, "it was not here when the run was resumed")
        return [name for name, info in self.silos.items() if info.node_id != AWAY]

    def evaluates(self) -> bool:
        """Whether this round's models are evaluated."""
        every = self.common.evaluate_every
        return every > 0 and (self.round % every == 0 or self.round == self.common.rounds)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """A train message to each participant and, where the round is evaluated, an evaluate message to the others.

        ``arrays`` is not used: what a silo gets is the method's :meth:`payload`.
        """
        self.round, self.bytes_down, self.bytes_up, self.rejected = server_round, 0, 0, {}
        self.wire = Wire(self.common.wire_dtype)
        self.begin_round()
        chosen = set(self.participants())
        evaluate = self.evaluates()
        messages = []
        for name in self._present():
            if name in chosen:
                messages.append(self._message(name, MessageType.TRAIN, config, evaluate=evaluate))
            elif evaluate:
                messages.append(self._message(name, MessageType.EVALUATE, config, personal=True))
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """The closing exchange: every silo evaluates what it would start round ``rounds + 1`` from. Else nothing."""
        if server_round < self.common.rounds or self.common.evaluate_every == 0:
            return []
        self.round, self.bytes_down, self.bytes_up, self.rejected = server_round + 1, 0, 0, {}
        self.wire = Wire(self.common.wire_dtype)
        self.begin_round()
        return [self._message(n, MessageType.EVALUATE, config, personal=False) for n in self._present()]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Leave out what is unusable (``self.rejected`` says why), aggregate the rest sorted by silo name."""
        usable = self._reject_exploding(self._in_one_place(self.updates(replies)))
        if not usable:
            reasons = (
                "; ".join(f"{silo}: {reason}" for silo, reason in self.rejected.items()) or "no silo replied"
            )
            raise RuntimeError(f"round {server_round}: no silo sent a usable update ({reasons})")
        if self.shares_buffers:
            weights = [u.samples for u in usable]
            self.state.arrays[BUFFERS] = weighted_mean((u.vectors[BUFFERS] for u in usable), weights)
        self.aggregate(usable)
        return None, None

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Names the silos whose evaluation failed; the round loop writes the others' metrics into the history."""
        names = {info.node_id: name for name, info in self.silos.items()}
        for reply in replies:
            if reply.metadata.message_type != MessageType.EVALUATE:
                continue
            try:
                if reply.has_error():
                    raise ValueError(reply.error.reason or "failed without a reason")
                read_metrics(reply.content.get("metrics"))
            except ValueError as error:
                node = reply.metadata.src_node_id
                self.reject(names.get(node, f"node {node}"), str(error))
        return None

    def summary(self) -> None:
        log(INFO, "%s (%s), %d silos, settings %s", self.name, self.paper, len(self.silos), self.settings)

    @property
    def shares_buffers(self) -> bool:
        """Whether BatchNorm statistics travel with the models of this round."""
        shared = bool(self.client.uploads) and self.common.buffers == "shared"
        return shared and bool(self.upload_size(BUFFERS))

    # -- replies --------------------------------------------------------------------------------------------------

    def updates(self, replies: Iterable[Message]) -> list[Update]:
        """The well-formed train replies, sorted by silo name; the others are named in ``self.rejected``."""
        names = {info.node_id: name for name, info in self.silos.items()}
        result = []
        for reply in replies:
            if reply.metadata.message_type != MessageType.TRAIN:
                continue
            silo = names.get(reply.metadata.src_node_id, f"node {reply.metadata.src_node_id}")
            try:
                result.append(self._read(silo, reply))
            except ValueError as error:
                self.reject(silo, str(error))
            except Exception as error:  # whatever a silo sends, the others go on
                self.reject(silo, f"the reply cannot be read ({type(error).__name__}: {error})")
        return sorted(result, key=lambda u: u.silo)

    def _read(self, silo: str, reply: Message) -> Update:
        if reply.has_error():
            raise ValueError(reply.error.reason or "failed without a reason")
        payload, config = decode(reply.content)
        if config["round"] != self.round or config["silo"] != silo:
            raise ValueError(
                f"a reply of {config['silo']} for round {config['round']}, not of {silo} for {self.round}"
            )
        metrics = read_metrics(reply.content.get("metrics"))
        wanted = (*self.client.uploads, BUFFERS) if self.shares_buffers else self.client.uploads
        missing, unknown = set(wanted) - set(payload.models), set(payload.models) - set(wanted)
        if missing:
            raise ValueError(f"the reply lacks {', '.join(sorted(missing))}")
        if unknown:
            raise ValueError(f"the reply holds {', '.join(sorted(unknown))}, which {self.name} does not send")
        vectors = {name: self._vector(name, payload.models[name].vector) for name in wanted}
        self.bytes_up += sum(vector.numel() for vector in vectors.values()) * self.wire.width
        samples = self.silos[silo].n_train  # its data card's word, not another one per round
        update = Update(silo, samples, vectors, payload.numbers, metrics)
        self.check(update)
        return update

    def _vector(self, name: str, vector: Tensor) -> Tensor:
        size = self.upload_size(name)
        if vector.dtype != torch.float32 or vector.shape != (size,):
            raise ValueError(
                f"'{name}' is {vector.dtype} of shape {tuple(vector.shape)}, not float32 of ({size},)"
            )
        if not is_finite(vector):
            raise ValueError(f"'{name}' holds values that are not finite: the local training diverged")
        if name == BUFFERS:
            whole = scatter(vector.new_zeros(self.layout.buffer_size), self.shared_buffers(), vector)
            entries = [e for e in self.layout.buffers if e.name.endswith("running_var")]
            if any(bool((whole[e.start : e.stop] < 0).any()) for e in entries):
                raise ValueError(f"'{name}' holds a variance below 0")
        return vector

    def _in_one_place(self, updates: list[Update]) -> list[Update]:
        """The updates on the first one's device, and the state too: on the GPU of silos that run in this process."""
        device = next((vector.device for u in updates for vector in u.vectors.values()), None)
        if device is None:
            return updates
        self.state.arrays = {name: tensor.to(device) for name, tensor in self.state.arrays.items()}
        return [
            replace(u, vectors={n: vector.to(device) for n, vector in u.vectors.items()}) for u in updates
        ]

    def _reject_exploding(self, updates: list[Update]) -> list[Update]:
        """Leave out a vector whose norm is over a thousand times the median of this round's, or of what was sent."""
        for name in updates[0].vectors if updates else ():
            norms = torch.stack([u.vectors[name].norm() for u in updates]).tolist()
            sent = self.state.arrays.get(BUFFERS if name == BUFFERS else GLOBAL)
            among = norms if len(norms) > 2 or sent is None else [*norms, float(sent.norm())]
            if len(among) < 2:
                continue
            limit = 1000 * max(statistics.median_low(among), 1.0)
            for update, norm in zip(updates, norms, strict=True):
                if norm > limit and update.silo not in self.rejected:
                    what = "the model" if name != BUFFERS else f"'{name}'"
                    reason = f"{what} exploded: its norm {norm:.3g} is over 1000 times the others'"
                    self.reject(update.silo, reason)
        return [u for u in updates if u.silo not in self.rejected]

    def reject(self, silo: str, reason: str) -> None:
        log(WARNING, "round %d leaves %s out: %s", self.round, silo, reason)
        self.rejected[silo] = reason

    def _message(self, silo: str, kind: str, config: ConfigRecord, **flags: bool) -> Message:
        payload = self.payload(silo)
        if BUFFERS in self.state.arrays and self.client.uploads:
            buffers = Model(self.state.arrays[BUFFERS], round=self.round - 1)
            payload = Payload({**payload.models, BUFFERS: buffers}, payload.numbers)
        extra = {**cast(dict[str, Number], dict(config)), **self.extra, "round": self.round, **flags}
        ttl = self.common.round_timeout
        content = encode(payload, extra, self.wire)
        self.bytes_down += wire_bytes(content)
        return Message(content, dst_node_id=self.silos[silo].node_id, message_type=kind, ttl=ttl)


def check_cards(cards: Sequence[Mapping[str, Any]]) -> None:
    """Refuse silos that do not fit each other: equal names, different input shapes. Raises UserError naming them."""
    first = cards[0]
    without = [str(card["name"]) for card in cards if "sum" not in card]
    if without and len(without) < len(cards):
        raise UserError(f"no sums of the columns from {', '.join(without)}: is it of another version?")
    names: set[str] = set()
    for card in cards:
        if card["name"] in names:
            raise UserError(
                f"two silos are called '{card['name']}': give each its own `name` in its node config"
            )
        names.add(card["name"])
        if card["name"] in (GLOBAL, BUFFERS):
            raise UserError(
                f"a silo cannot be called '{card['name']}': give it another `name` in its node config"
            )
        if list(card["shape"]) != list(first["shape"]):
            raise UserError(
                f"{card['name']} has samples of shape {tuple(card['shape'])}, {first['name']} of "
                f"{tuple(first['shape'])}: all silos need data of the same shape"
            )
