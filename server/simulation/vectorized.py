"""Vectorized engine (``vectorize = true``): the gradients of all silos in one computation.

Each silo's ClientApp runs in its own coroutine (a greenlet, so methods are ordinary code) with its own network. The
networks' vectors and gradients are rows of two (silos x Σ) matrices. When a method requests a batch's gradient, an Adam
step or a model's metrics, its coroutine waits. Once all silos wait or are done, requests of one kind are computed
jointly (``joint_networks.py``), and the others one by one; then all silos go on. Metrics wait until no silo trains.

The results equal those of silos that compute one after the other, up to the order of floating-point sums. Memory for
training is needed for all silos at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import Context, copy_context
from functools import partial
from logging import WARNING
from typing import Any, TypeVar

from flwr.common import log
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from models.flat import FlatModel
from models.initialisation import network_of
from models.optimizers import Adam, Optimizer
from models.samples import Samples
from models.tasks import Task
from models.training import Loss, OnFeatures, own_gradient
from server.simulation.joint_networks import Evaluation, Networks, Request, Step

# Measured on a CPU (benchmarks/README.md).
FEWEST_SILOS = 4
LARGEST_NETWORK = 30_000  # parameters

T = TypeVar("T")
Asked = Request | Step | Evaluation


class VectorizedEngine:
    """Engine that runs the silos' calls of a round jointly.

    Counters: ``joint`` and ``single``: gradients computed jointly and one by one; ``computations``: the number of joint
    gradient computations; ``steps`` and ``evaluations``: those computed jointly.
    """

    def __init__(self) -> None:
        self.takes_turns = ""  # the reason why the silos compute one after the other; empty: they compute jointly
        self.joint = self.computations = self.single = self.steps = self.evaluations = 0
        self.logged: set[str] = set()
        self.asked: dict[int, int] = {}  # silo -> number of gradients in its last round
        self._networks: dict[FlatModel, Networks] = {}

    def run(self, calls: Mapping[int, Callable[[], T]]) -> dict[int, T]:
        """Return the result of each silo's call. An uncaught exception in one call ends all calls."""
        # Silos with the most steps come first, so that those still training at the end of a round have adjacent rows.
        order = sorted(calls, key=lambda silo: -self.asked.get(silo, 0))
        self.asked |= dict.fromkeys(order, 0)
        coroutines = {silo: greenlet(partial(_begin, calls[silo])) for silo in order}
        for row, silo in enumerate(order):
            coroutines[silo].gr_context = self._context(silo, row, len(order))
        results: dict[int, T] = {}
        waiting: list[Asked] = []
        answers: dict[int, Any] = dict.fromkeys(order)
        while answers:
            for silo, answer in answers.items():
                # All switches are made here: a PyTorch error walks the C stack, and crashes the process if a coroutine
                # is resumed from another place than where it began.
                go_on = coroutines[silo].switch
                returned = go_on(answer)
                if coroutines[silo].dead:
                    results[silo] = returned
                else:
                    waiting.append(returned)
            # Metrics wait for the silos that still train, so that all are computed at once.
            requests = [r for r in waiting if not isinstance(r, Evaluation)] or waiting
            answers = self._answers(requests)
            waiting = [r for r in waiting if r.silo not in answers]
        return results

    def _context(self, silo: int, row: int, rows: int) -> Context:
        """Return a context in which the silo uses the network of this row."""

        def network(shared: FlatModel) -> FlatModel:
            if not self.takes_turns:
                self._take_turns(incompatibility(shared))
            if self.takes_turns:
                return shared
            networks = self._networks.get(shared)
            if networks is None or len(networks.models) < rows:
                networks = self._networks[shared] = Networks(shared, rows)
            networks.models[row].backend = ClientHandle(self, silo, row, networks)
            return networks.models[row]

        context = copy_context()
        context.run(network_of.set, network)
        return context

    def _answers(self, requests: Sequence[Asked]) -> dict[int, Any]:
        """Return each request's answer by silo, in the order of the requests; a failure is answered by its error."""
        answers: dict[int, Any] = {request.silo: None for request in requests}
        groups: dict[Hashable, list[Any]] = {}
        for request in requests:
            groups.setdefault(request.kind, []).append(request)
        for group in groups.values():
            if isinstance(group[0], Step):
                self._step(group)
                continue
            enough = len(group) >= FEWEST_SILOS
            found = self._joint(group) if enough else [self._single(request) for request in group]
            answers |= {request.silo: answer for request, answer in zip(group, found, strict=True)}
        return answers

    def _joint(self, group: Sequence[Request] | Sequence[Evaluation]) -> list[Any]:
        networks, of_gradients = group[0].networks, isinstance(group[0], Request)
        try:
            found: list[Any] = networks.gradient(group) if of_gradients else networks.evaluate(group)  # type: ignore[arg-type]
        except Exception as error:  # an error of one silo occurs again when each computes alone
            found = [self._single(request) for request in group]
            if not any(isinstance(answer, Exception) for answer in found):
                why = str(error).strip().partition("\n")[0] or type(error).__name__
                self._take_turns(f"this network cannot be computed jointly ({why})")
            return found
        if of_gradients:
            self.joint += len(group)
            self.computations += 1
        else:
            self.evaluations += len(group)
        return found

    def _single(self, request: Request | Evaluation) -> Any:
        self.single += isinstance(request, Request)
        try:
            return request.by_itself()
        except Exception as error:
            return error

    def _step(self, group: Sequence[Step]) -> None:
        """Execute the steps of adjacent rows jointly, as many as fit in the cache."""
        first = group[0]
        most = first.networks.largest_step / (first.part.stop - first.part.start)
        run: list[Step] = []
        for request in sorted(group, key=lambda request: request.row):
            if run and (request.row != run[-1].row + 1 or len(run) + 1 > most):
                self._step_together(run)
                run = []
            run.append(request)
        self._step_together(run)

    def _step_together(self, run: Sequence[Step]) -> None:
        if len(run) < FEWEST_SILOS:
            for request in run:
                request.by_itself()
        else:
            run[0].networks.step(run)
            self.steps += len(run)

    def _take_turns(self, reason: str) -> None:
        self.takes_turns = reason
        self.log_once(reason)

    def log_once(self, reason: str) -> None:
        if reason and reason not in self.logged:
            self.logged.add(reason)
            log(WARNING, "vectorize = true: silos take turns all the same: %s", reason)


class ClientHandle:
    """A silo's handle on the engine; calls suspend its coroutine (a :class:`models.flat.BatchedBackend`)."""

    def __init__(self, engine: VectorizedEngine, silo: int, row: int, networks: Networks) -> None:
        self.engine, self.silo, self.row, self.networks = engine, silo, row, networks

    def gradient(self, x: Tensor, y: Tensor, loss: Loss | OnFeatures, network: nn.Module | None) -> Tensor:
        engine, networks, row = self.engine, self.networks, self.row
        engine.asked[self.silo] += 1
        reason = networks.incompatibility(row, x, y, network)
        engine.log_once(reason)
        if reason or engine.takes_turns:  # `takes_turns` may be set in the middle of a round
            engine.single += 1
            return own_gradient(networks.models[row], x, y, loss, network)
        kind = networks.kind(row, x, y, loss, network)
        loss_of_batch: Tensor = self._wait(Request(self.silo, row, networks, x, y, loss, network, kind))
        return loss_of_batch

    def step(self, optimizer: Optimizer, vector: Tensor, gradient: Tensor) -> None:
        part = self._part(vector, gradient)
        if part is None or type(optimizer) is not Adam or part.stop - part.start > self.networks.largest_step:
            optimizer.joined = None
            optimizer.own_step(vector, gradient)
            return
        kind = id(self.networks), part.start, part.stop, optimizer.form()
        self._wait(Step(self.silo, self.row, self.networks, optimizer, part, kind))

    def _part(self, vector: Tensor, gradient: Tensor) -> slice | None:
        """Return the slice of the silo's row that vector and gradient cover; None if they are not part of it."""
        model, count = self.networks.models[self.row], len(vector)
        start, rest = divmod(vector.data_ptr() - model.vector.data_ptr(), vector.element_size())
        same = gradient.data_ptr() - model.gradient.data_ptr() == start * vector.element_size()
        if rest or not same or not 0 <= start <= model.layout.size - count or not vector.is_contiguous():
            return None
        return slice(start, start + count)

    def evaluate(self, task: Task, samples: Samples) -> dict[str, float]:
        networks, row = self.networks, self.row
        if self.engine.takes_turns or not isinstance(samples.x, Tensor):
            return task.own_evaluate(networks.models[row], samples)
        kind = id(networks), samples.x.shape[1:], samples.x.dtype
        found: dict[str, float] = self._wait(Evaluation(self.silo, row, networks, task, samples, kind))
        return found

    def _wait(self, asked: Asked) -> Any:
        answer = getcurrent().parent.switch(asked)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _begin(call: Callable[[], T], _: None) -> T:
    return call()


def incompatibility(network: FlatModel) -> str:
    """Return why silos with this network compute one after the other; empty if they can train jointly."""
    if not network.is_whole:
        return "a part of the network is frozen"
    if network.has_batch_norm or network.buffers.numel():
        return "batch normalisation keeps statistics of each silo"
    if network.has_dropout:
        return "dropout draws for one silo after the other"
    if network.embeddings:
        return "an embedding's gradient is that of the few rows which a batch looks up"
    if network.device.type == "cpu":
        if any(isinstance(layer, nn.modules.conv._ConvNd) for layer in network.module.modules()):
            return "on a CPU, convolutions are not faster together"
        if network.layout.size > LARGEST_NETWORK:
            return f"on a CPU, networks of {network.layout.size} parameters are not faster together"
    return ""
