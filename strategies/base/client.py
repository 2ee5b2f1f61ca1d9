"""The silo's half of every method: :class:`SiloClient`, which implements FedAvg.

A method subclasses it and states only its difference. Names follow the papers: w received model, g gradient, Σ number
of parameters. The reply of a round carries the update, the metrics of the *received* model (before local training) and
of the *personal* model (after it), because papers differ in which of the two they report.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from flwr.client import NumPyClient
from torch import Tensor

from models.flat import Passes, apart, gather, is_finite, write
from models.networks.outputs import LossOfSeveral, has_several
from models.privacy.records import quietly
from partitions.common.errors import UserError
from partitions.common.own_code import load_function
from partitions.common.settings import values_of
from strategies.base.aggregation.secure import integers_of
from strategies.base.contract import SiloMethod
from strategies.base.info import MethodInfo
from strategies.base.privacy import PrivateTraining, kept_finite, private_gradients
from strategies.base.settings import Common
from strategies.base.silo import RECEIVED, Silo, check_step, class_weights
from strategies.base.state import BUFFERS, ClientState, State, model_in
from strategies.base.transport.codecs import Encoded
from strategies.base.transport.error_feedback import commit, encode_vectors, propose
from strategies.base.transport.payload import Model, Number


def proximal(centre: Tensor, weight: float) -> Callable[[Tensor, Tensor], object] | None:
    """Return a correction for :meth:`SiloClient.train`: the gradient of (weight / 2) ||w - centre||²; None for 0."""
    return (lambda w, g: g.add_(w - centre, alpha=weight)) if weight else None


class SiloClient(SiloMethod, NumPyClient):
    """The silo's half of FedAvg, and the base class of every other method; its hooks are in ``contract.py``."""

    state: ClientState
    silo: Silo
    privacy: PrivateTraining | None = None  # differential privacy of this round's gradients
    # Whether the state is written to a file, and mapped from it, before the network takes other values
    written_at_once = False

    def __init__(
        self, silo: Silo, common: Common, settings: Any, state: State, info: MethodInfo
    ) -> None:
        self.silo, self.common, self.settings, self.info = silo, common, settings, info
        self.state = self.state_type(state.arrays, state.numbers)
        self.model, self.layout = silo.model, silo.model.layout
        weights = class_weights(silo) if common.class_weights == "balanced" else None
        self.model.compute(
            Passes(
                common.accumulate, common.clip_gradient, common.precision, weights, silo.group
            )
        )
        self.loss = self.loss_over(weights)
        if has_several(self.model.module):
            if common.dp or self.needs_one_answer:
                raise UserError(
                    f"strategy = {info.name}, dp = {common.dp}: the network gives several answers in training (deep "
                    "supervision), and this needs one"
                )
            self.loss = LossOfSeveral(self.loss)
        self.round, self.late = 0, False  # late: the silo joined during the run
        # Of the state that the evaluated personal model belongs to
        self.run_id, self.measured_round = "", 0
        self.models: Mapping[str, Model] = {}
        self.numbers: Mapping[str, Number] = {}
        # Numbers that a method uploads in addition to its vectors
        self.replies: dict[str, Number] = {}
        self.encoded: dict[str, Encoded] = {}  # the uploaded vectors that travel encoded
        self.integers: Tensor | None = None  # all of them, with ``secure-aggregation``
        # By vector that is sent: what a step in it moves in the state, before and after
        self.moved: dict[str, Mapping[str, tuple[Tensor, Tensor]]] = {}
        self.train_loss = float("nan")
        self.trainer = (
            load_function("trainer", common.trainer, "task") if common.trainer else None
        )
        # The start of this round, not to be written to.
        self.received = self.received_buffers = self.received_integers = torch.empty(0)

    def measure(
        self, snapshot: str, vector: Tensor, splits: Sequence[str] = ("val", "test")
    ) -> dict[str, float]:
        """Return metrics of a model on this silo's splits: ``{"received.test.accuracy": ...}``.

        The previous personal model is not evaluated again if this process evaluated it and it has not changed.
        """
        self.model.load(vector)
        network = self.predicting() if snapshot == "personal" else self.model
        known = self.silo.known.get((self.run_id, self.state.numbers.get("round"), *splits))
        if network is not self.model or (known and not self.state.is_previous(self.model)):
            known = None
        if known is None:
            known = {}
            for split in splits:
                if len(samples := getattr(self.silo, split)):
                    metrics = quietly(
                        self.privacy,
                        dict[str, float](),
                        self.silo.task.evaluate,
                        network,
                        samples,
                    )
                    known |= {f"{split}.{name}": value for name, value in metrics.items()}
        if snapshot == "personal" and network is self.model and self.run_id:
            self.silo.known.clear()
            self.silo.known[(self.run_id, self.measured_round, *splits)] = known
        return {f"{snapshot}.{name}": value for name, value in known.items()}

    def fit(  # type: ignore[override]
        self, parameters: Sequence[Tensor], config: Mapping[str, Any]
    ) -> tuple[list[Tensor], int, dict[str, Any]]:
        """Run one round: receive, local update, personal model; the metrics of both snapshots.

        ``config["models"]`` holds the received models, ``config["numbers"]`` the method's numbers; ``parameters`` is
        the list of the received vectors, as in any NumPyClient. Returns the vectors named by :meth:`upload_names`, the
        number of training samples, and the metrics. Raises UserError if the result is not finite.
        """
        started = time.perf_counter()
        received = self.begin(config)
        begun = time.perf_counter()
        metrics: dict[str, Any] = (
            self.measure("received", received) if config["evaluate"] else {}
        )
        self.model.load(received)
        evaluated = time.perf_counter()
        with private_gradients(self.privacy):
            vectors = self.local_update()
        if self.silo.group is not None:
            self.silo.group.check_equal(self.model.vector)
        if self.shares_buffers:
            # With dp no layer may change them: a buffer that one changed in spite of that has no noise, and stays.
            buffers = self.model.buffers if self.privacy is None else self.received_buffers
            vectors = [*vectors, gather(buffers, self.shared_buffers())]
        personal = quietly(self.privacy, received, self.personal)
        if self.written_at_once:
            self.model.release_training()
        if not (self.written_at_once and personal is self.model.vector):
            personal = apart(personal, vectors, self.model.vector)
        if self.privacy is not None:
            personal = kept_finite(self.state, personal, received, self.silo.name)
        self.check_finite(received, personal, *vectors)
        trained = time.perf_counter()
        if config["evaluate"]:
            self.measured_round = self.round
            metrics |= self.measure("personal", personal)
        if self.train_loss == self.train_loss:
            metrics["personal.train.loss"] = self.train_loss
        score = metrics.get(f"personal.val.{self.silo.task.score}")
        parts = personal, self.model.buffers.clone(), self.model.integers.clone()
        self.state.keep_model(parts, self.round, score)
        if self.privacy is not None and math.isfinite(self.silo.max_step):
            self.state.arrays[RECEIVED] = self.received
        if vectors:
            self._encode(dict(zip(self.upload_names(), vectors, strict=True)), config)
        seconds = {"seconds.train": begun - started + trained - evaluated}
        seconds["seconds.evaluate"] = time.perf_counter() - started - seconds["seconds.train"]
        return vectors, len(self.silo.train), metrics | seconds

    def check_finite(self, received: Tensor, *vectors: Tensor) -> None:
        """Raise UserError with the cause if a training's vectors are not finite: the silo's state is discarded.

        The next round then starts from the last state. ``received``: the model that it began with.
        """
        if all(map(is_finite, vectors)):
            return
        common = self.common
        if not is_finite(received):
            half = "; float16 ends at 65504, bfloat16 and float32 do not" * (
                common.wire_dtype == "float16"
            )
            raise UserError(
                f"the received model is not finite (wire-dtype = {common.wire_dtype}{half})"
            )
        keys = ["learning-rate", *values_of(self.settings, common.strategy)]
        rates = " or ".join(key for key in keys if key.endswith("learning-rate"))
        if common.precision == "fp16":
            raise UserError(
                "the network's numbers left the range of precision = fp16, which ends at 65504: take bf16 or float32; "
                f"if the training diverges with these too, a lower {rates} may help"
            )
        raise UserError(f"the local training diverged (a lower {rates} may help)")

    def evaluate(  # type: ignore[override]
        self, parameters: Sequence[Tensor], config: Mapping[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Return metrics without training: of the received and, with ``config["personal"]``, of the personal model."""
        metrics = self.measure("received", self.begin(config))
        if config["personal"]:
            self._load_buffers()
            self.measured_round = self.state.numbers.get("round", 0)
            metrics |= self.measure("personal", self.previous())
        return metrics.get("received.test.loss", float("nan")), len(self.silo.test), metrics

    def begin(self, config: Mapping[str, Any]) -> Tensor:
        """Begin a round or an evaluation with its message; return the received model, which the network holds."""
        self.round = config["round"]
        self.models = config["models"]
        self.numbers = config["numbers"]
        self.run_id, self.late = config.get("run_id", ""), bool(config.get("late"))
        commit(self.state, config.get("counted"))
        self.model.freeze()  # the silos of a process share the network; a failed one may have left parts frozen
        self._load_buffers()
        if self.shares_buffers and BUFFERS in self.models:
            write(self.model.buffers, self.shared_buffers(), self.models[BUFFERS].vector)
        self.received = self.receive()
        check_step(self, self.received)
        self.received_buffers = self.model.buffers.clone()
        self.received_integers = self.model.integers.clone()
        return self.received

    def _encode(self, vectors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """Set what travels in place of the vectors: ``integers`` of them all, or ``encoded`` ones."""
        common, received, cuts = self.common, self.models, dict[str, float]()
        if common.secure_aggregation:
            parts = getattr(self, "shared", ())
            self.integers, cuts = integers_of(
                self.info, common, vectors, received, config, parts
            )
        else:
            self.encoded = encode_vectors(common, self.state, vectors, received, self.round)
        for of, steps in self.moved.items():
            cut = cuts[of] if cuts else 1.0
            for name, (old, new) in steps.items():
                taken = new if cut == 1 else old.lerp(new, cut)
                propose(self.state, self.round, {name: taken})

    def _load_buffers(self) -> None:
        """Load the buffers of the previous personal model, or the initial ones."""
        self.model.reset_buffers()
        self.model.load(self.model.vector, *model_in(self.state.arrays, "personal")[1:])
