"""What a method overrides, and what it may use, in both halves; every hook has FedAvg's behaviour.

Names follow the papers: w model, g gradient, Σ number of parameters, N silos, n_i training samples of silo i. The round
loop calls the hooks through :class:`~strategies.base.client.SiloClient` and
:class:`~strategies.base.strategy.PersonalizedStrategy`, which a method subclasses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from models.features import compute_frozen
from models.flat import gather
from models.layout import Layout, size_of
from models.training import Loss, Network, generator, loss_gradient
from partitions.common.errors import DataError
from strategies.base.aggregation.bounded import replacement
from strategies.base.aggregation.spread import COUNT
from strategies.base.info import OWN_LOSS, MethodInfo
from strategies.base.plan import RoundPlan, SiloInfo
from strategies.base.robust import weighted_mean
from strategies.base.settings import Common, NoSettings
from strategies.base.state import BUFFERS, GLOBAL, ClientState, ServerState
from strategies.base.trainer.loop import TrainingLoop
from strategies.base.transport.kinds import Plain
from strategies.base.transport.payload import Model, Number, Payload, Update, model_of


class Uploading:
    """What silo and server both know of the vectors that a silo sends."""

    info: MethodInfo
    common: Common
    settings: Any  # the method's own
    layout: Layout  # of the model

    def shared_buffers(self) -> tuple[slice, ...]:
        """Return the parts of the BatchNorm statistics (of shared blocks) that travel with ``buffers = "shared"``."""
        return self.layout.buffer_parts([slice(0, self.layout.size)])

    @property
    def shares_buffers(self) -> bool:
        """Return whether BatchNorm statistics travel with the models of this round."""
        both = self.info.training.buffers == self.common.buffers == "shared"
        return both and bool(self.info.uploads) and bool(self.shared_buffers())

    def upload_names(self) -> tuple[str, ...]:
        """Return the names of the vectors that a silo sends in this round; settings may narrow ``info.uploads``."""
        names = getattr(self.settings, "uploads", self.info.uploads)
        also = self.info.summed_also if self.common.secure_aggregation else ()
        return (*names, *also, *([BUFFERS] if self.shares_buffers else []))


class SiloMethod(Uploading, TrainingLoop):
    """The silo's half. Most methods override :meth:`receive`, :meth:`local_update` and :meth:`personal`.

    ``self.state`` holds what has to last until the next round. Replace an array, never write into it: if a round fails,
    its state is discarded as a whole. Received vectors are shared with other silos and must not be written to either.
    """

    # The method's silo state, in typed fields
    state_type: ClassVar[type[ClientState]] = ClientState
    # State entries that prediction needs in addition to the vector
    needed_to_predict: ClassVar[tuple[str, ...]] = ()
    no_file: str = ""  # the reason why no file of one network can hold the personal model

    # What the server sent: vectors and numbers by name. What a method sends in addition to its vectors.
    models: Mapping[str, Model]
    numbers: Mapping[str, Number]
    replies: dict[str, Number]
    # The start of this round, not to be written to
    received: Tensor
    received_buffers: Tensor
    late: bool  # whether the silo joined during the run
    moved: dict[str, Mapping[str, tuple[Tensor, Tensor]]]

    # ---- To override -----------------------------------------------------------------------------------------------

    def receive(self) -> Tensor:
        """Return the model (Σ,) that this silo starts the round from; it is evaluated as ``received``."""
        return self.shared_model

    def local_update(self) -> list[Tensor]:
        """Train from the received model in ``self.model``, and return the vectors named in ``info.uploads``."""
        self.train()
        return [self.model.vector.clone()]

    def personal(self) -> Tensor:
        """Return the silo's own model (Σ,) after the local update; evaluated as ``personal``, kept in the silo."""
        return self.model.vector

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """Write the gradient of one batch at ``self.model.vector`` to ``self.model.gradient``; return the loss."""
        return loss_gradient(self.model, x, y, self.loss)

    def newcomer(self) -> Tensor:
        """Return the model (Σ,) that a silo without a state has before it trains."""
        return self.received

    def personalise(self) -> Tensor:
        """Return a newcomer's model (Σ,): :meth:`newcomer`'s after local-epochs epochs; shared parts do not change."""
        if self.info.newcomer != "model":
            self.train()
        return self.model.vector

    def first_model(self) -> Tensor:
        """Return what :meth:`receive` returns in round 1 if the server sends the seed's models (Σ,); read-only."""
        return self.silo.initial("")

    def received_blocks(self) -> list[str]:
        """Return the names of the layer blocks that come from the server, input to output."""
        return [b.name for b in self.layout.blocks]

    def bounded_parts(self) -> Sequence[slice]:
        """Return the parts of a received model that a study's ``step`` bounds: all, but what no length bounds."""
        return [slice(None)]

    def noised_passes(self) -> tuple[int, ...]:
        """Return the epochs of each training with private gradients in this round's :meth:`local_update`.

        A method with K gradients of each batch has ``gradients_per_batch`` among its settings.
        """
        return (self.common.local_epochs,)

    def predicting(self) -> Network:
        """Return the network that predicts as the reported model, whose vector is in ``self.model``."""
        return self.model

    @property
    def needs_one_answer(self) -> bool:
        """Whether it computes with a network's answers in training, beside the run's loss of them."""
        return not self.info.training.plain_loss or self.info.training.trainer == OWN_LOSS

    # ---- To use: :meth:`train` and :meth:`batches` (trainer/loop.py), and ------------------------------------------

    @property
    def shared_model(self) -> Tensor:
        """The vector that the server sent as the shared model; read-only."""
        return self.models[GLOBAL].vector

    def previous(self) -> Tensor:
        """Return the silo's own model (Σ,) before this round: the previous one, or the initial one in its first."""
        return self.first() if self.state.personal is None else self.state.personal

    def first(self) -> Tensor:
        """Return the model (Σ,) before the silo's first round: the initial one, or for a late joiner its copy."""
        copies = self.late and self.info.newcomer in ("model", "copy") and GLOBAL in self.models
        return self.shared_model if copies else self.silo.initial("")

    def taught(self, x: Any) -> Tensor:
        """Return what the received model answers to a batch, in evaluation mode."""
        teacher = self.layout.unflatten(self.received, self.received_buffers)
        return compute_frozen(self.model, teacher, x)[1]

    def loss_over(self, weights: Tensor | None) -> Loss:
        """Return the run's loss of one answer, over as many classes as have weights."""
        c = self.common
        return self.silo.task.loss(c.loss, c.focal_gamma, c.label_smoothing, weights)

    def propose_step(self, of: str, **steps: tuple[Tensor, Tensor]) -> None:
        """Propose entries that a step moves from one value to another, as far as the vector ``of`` has it.

        A secure sum may have a part of it only: a silo that took over all would differ from what the server adds.
        """
        self.moved[of] = steps


class ServerMethod(Uploading):
    """The server's half. Most methods override :meth:`start_state`, :meth:`payload` and :meth:`aggregate`.

    Everything it needs in the next round is in ``self.state``, which is checkpointed. A silo that is absent from a
    round is not in ``updates``. What the round loop decides is in ``self.plan``.
    """

    Settings: ClassVar[type[Any]] = NoSettings
    # What a search draws on a log scale, with lowest and highest value: the run's learning rate (unless it stands here,
    # from .01 to .5) and at most one setting of the method. ``rate_times_silos``: a silo's steps are scaled by its
    # weight among N, so rates are N times as high.
    search: ClassVar[tuple[tuple[str, float, float], ...]] = ()
    rate_times_silos: ClassVar[bool] = False
    # The method's server state, in typed fields
    state_type: ClassVar[type[ServerState]] = ServerState
    # A module class that builds the network's head from its last layer, or one around networks
    # (models/networks/blocks.py); None: the network as it is. ``head_size``: the method's setting that it takes as
    # ``size``; "": none.
    head: ClassVar[Any] = None
    head_size: ClassVar[str] = ""
    # Whether a change of low rank has a residual beside its factors, which the server sets (models/lora.py)
    lora_residual: ClassVar[bool] = False

    state: ServerState
    plan: RoundPlan
    round: int
    initial: Callable[[str], Tensor]
    # The models that each silo of the round trains from
    sent: dict[str, Mapping[str, Model]]

    # ---- To override -----------------------------------------------------------------------------------------------

    def check_fit(self) -> None:
        """Raise UserError if the run's settings or its network do not fit the method."""

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        """Set ``self.state`` before the first round; ``initial(purpose)`` is a seeded initial model (Σ,)."""
        self.state.model = initial("")

    def welcome(self, silo: str, *, trains: bool) -> None:
        """Add a new silo, which is already in ``self.silos``, to ``self.state``.

        ``trains``: what is kept for N silos grows to N + 1; else the silo is only evaluated.
        """

    def participants(self) -> list[str]:
        """Return the silos that train in this round: a share of all, drawn by (seed, round)."""
        names = list(self.silos)
        # 0.57 of 100: 57
        count = max(int(self.common.participation * len(names) + 1e-9), 1)
        if count == len(names):
            return names
        rng = generator(self.common.seed, "participants", self.round)
        return sorted(
            names[i] for i in torch.randperm(len(names), generator=rng)[:count].tolist()
        )

    def begin_round(self) -> None:
        """Compute once per round what :meth:`payload` sends to the silos of round ``self.round``."""

    def payload(self, silo: str) -> Payload:
        """Return the payload of this silo in round ``self.round``."""
        return self.pack({GLOBAL: self.state.model})

    def sent_parts(self, silo: str) -> Sequence[slice] | None:
        """Return the parts of ``self.state.model`` in this silo's first vector of this round; None: other ones."""
        return None

    def sizes(self, silo: str) -> Mapping[str, int]:
        """Return the lengths of uploaded vectors that are no whole model, in this round and from this silo."""
        parts = self.sent_parts(silo)
        return {} if parts is None else {next(iter(self.info.uploads)): size_of(parts)}

    def most_sizes(self, silo: str) -> Mapping[str, int]:
        """Return the most that :meth:`sizes` returns in any round; a method whose lengths change overrides it."""
        return self.sizes(silo)

    def check(self, update: Update) -> None:
        """Raise DataError, with one line, if a silo's numbers are not valid for :meth:`aggregate`.

        Any other error is a fault of the method: it ends the run, and is not attributed to a silo.
        """

    def aggregate(self, updates: Sequence[Update]) -> None:
        """Change ``self.state`` by the updates of round ``self.round`` (at least one, sorted by silo name)."""
        self.state.model = self.average(updates)

    def weights(self, updates: Sequence[Update]) -> list[float]:
        """Return each update's weight in a mean: its samples, or 1 with the setting ``average = "silos"``."""
        alike = getattr(self.settings, "average", "samples") == "silos"
        return [1 if alike else u.samples for u in updates]

    def centre(self, name: str, update: Update) -> Tensor | None:
        """Return the point that a silo's vector is a step from: by default what was sent, else its own last model.

        None: the vector is a step already, or one from 0.
        """
        if self.info.kinds[name].step:
            return None
        parts = self.sent_parts(update.silo)
        if parts is not None and name == next(iter(self.info.uploads)):
            return gather(self.state.model, parts)
        sent = self.sent.get(update.silo, {})
        base = sent.get(name)
        if base is None and name != BUFFERS:
            last = self.state.arrays.get(model_of(update.silo))
            base = sent.get(GLOBAL) or Model(self.initial("") if last is None else last)
        fits = base is not None and len(base.vector) == self.upload_size(name, update.silo)
        return base.vector if base is not None and fits else None

    # ---- To use ----------------------------------------------------------------------------------------------------

    @property
    def silos(self) -> Mapping[str, SiloInfo]:
        """The participating silos, sorted by name."""
        return self.plan.silos

    def pack(self, vectors: Mapping[str, Tensor], **numbers: Number) -> Payload:
        """Return a payload of these vectors by name, as of the round before, and of these numbers."""
        models = {name: Model(v, round=self.round - 1) for name, v in vectors.items()}
        return Payload(models, numbers)

    def mean(self, vectors: Iterable[Tensor], weights: Sequence[float] | None = None) -> Tensor:
        """Return the mean of silos' vectors (no weights: each counts the same), or what ``robust`` puts there."""
        rule = replacement(self.common)
        return weighted_mean(vectors, weights) if rule is None else rule(list(vectors))

    def average(self, updates: Sequence[Update], *, equal: bool = False) -> Tensor:
        """Return the mean of the silos' first vectors, by :meth:`weights`, or each counting the same."""
        return self.mean((u.vector for u in updates), None if equal else self.weights(updates))

    def step_towards(self, mean: Tensor, share: float) -> None:
        """Move the model by a share of the way to a mean; a share of 1 is the mean itself, without rounding."""
        w = self.state.model
        self.state.model = mean if share == 1 else w + share * (mean - w)

    def number(self, update: Update, name: str, high: float = math.inf) -> Any:
        """Return a number that a silo sent, or several. Raises DataError where its kind does not allow it."""
        kind, value = self.info.sends_numbers[name], update.numbers.get(name)
        if isinstance(kind, Plain) and not kind.allows(value, high):
            raise DataError(f"'{name}' is {value!r:.80}, not a {kind.words_of_bounds(high)}")
        return value

    def upload_size(self, name: str, silo: str = "", *, most: bool = False) -> int:
        """Return the length of the uploaded vector of this name from this silo, in this round; ``most``: in any."""
        if name == BUFFERS:
            return size_of(self.shared_buffers())
        sizes = self.most_sizes(silo) if most else self.sizes(silo)
        times = COUNT if name in self.info.summed_also else 1
        return times * sizes.get(name, self.layout.size)
