"""Silos that train together (``vectorize = true``): their gradients are computed in one go.

Each silo's ClientApp runs in a coroutine of its own (a greenlet, so methods are ordinary code and know nothing of it)
with a network of its own, whose vector and gradient are rows of two (silos x Σ) matrices. Where a method asks for the
gradient of a batch, a step of Adam or the metrics of a model, its coroutine waits. Once all silos wait or are done,
requests of one kind are computed together, and the others one by one; then all silos go on.

* Gradients (same part of the network, same shape of a sample, same loss) by ``torch.func.vmap``, short batches padded
  with samples that the loss ignores. What is trained may differ: the gradient is that of everything that somebody
  trains, and each silo gets its own part of it. Losses on features may differ, too: the outputs are computed together,
  each loss from its silo's part of them.
* Steps as one on rows of the matrices, as many as the cache holds; each silo's moments are rows of matrices as well.
* Metrics once no silo trains any more: the outputs together, and of classifiers the metrics together, too.

The numbers are those of silos that take turns, up to the order of floating-point sums. What a silo holds while it
trains is held by all silos at once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import Context, copy_context
from functools import lru_cache, partial
from logging import WARNING
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from flwr.common import log
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.rnn import pad_sequence

from models.flat import FlatModel
from models.initial import network_of
from models.metrics import IGNORED
from models.tasks import Task
from models.training import Adam, Loss, OnFeatures, Optimizer, Samples, own_gradient, predict

# As measured on a CPU (benchmarks/README.md). A joint computation costs a few gradients' time beside its arithmetic,
# and its arithmetic is slower than that of one network after the other, which stays in the cache from step to step.
FEWEST_SILOS = 4
LARGEST_BATCH = 600_000  # parameters times samples
LARGEST_NETWORK = 30_000  # parameters
LARGEST_TRIED = 200_000  # parameters, where rounds are timed (choice.py); batches of any size
LARGEST_STEP = 100_000  # parameters of all silos that step at once

T = TypeVar("T")


class Request(NamedTuple):
    """A silo waits for the gradient of a batch by the network in this row. Requests of one ``kind`` can be joined."""

    silo: int
    row: int
    networks: Networks
    x: Tensor
    y: Tensor
    loss: Loss | OnFeatures
    network: nn.Module | None
    kind: Hashable

    def by_itself(self) -> Tensor:
        return own_gradient(self.networks.models[self.row], self.x, self.y, self.loss, self.network)


class Step(NamedTuple):
    """A silo waits for its optimiser's step on a part of its row."""

    silo: int
    row: int
    networks: Networks
    optimizer: Optimizer
    part: slice
    kind: Hashable

    def by_itself(self) -> None:
        networks, part = self.networks, self.part
        self.optimizer.joined = None
        self.optimizer.own_step(networks.vectors[self.row, part], networks.gradients[self.row, part])


class Evaluation(NamedTuple):
    """A silo waits for the metrics of the network in this row."""

    silo: int
    row: int
    networks: Networks
    task: Task
    samples: Samples
    kind: Hashable

    def by_itself(self) -> dict[str, float]:
        return self.task.own_evaluate(self.networks.models[self.row], self.samples)


Asked = Request | Step | Evaluation


class Networks:
    """Copies of one network. Their vectors are the rows of a matrix (silos, Σ), their gradients those of another."""

    def __init__(self, shared: FlatModel, count: int, *, tried: bool = False) -> None:
        self.vectors = shared.vector.new_zeros(count, shared.layout.size)
        self.gradients = torch.zeros_like(self.vectors)
        rows = zip(self.vectors, self.gradients, strict=True)
        self.models = [FlatModel(copy.deepcopy(shared.module), shared.device, row) for row in rows]
        self.entries, self.last_name = shared.layout.parameters, shared.head_name
        self.whole, self.last = JointForm(shared.module, self.last_name), JointForm(shared.last_block)
        on_cpu = shared.device.type == "cpu"
        self.largest: float = LARGEST_BATCH if on_cpu and not tried else math.inf
        self.largest_step: float = LARGEST_STEP if on_cpu else math.inf

    def hindrance(self, row: int, x: Any, y: Tensor, network: nn.Module | None) -> str:
        """Why this batch had better be computed by itself; empty: it can be joined."""
        model = self.models[row]
        if not isinstance(x, Tensor):
            return "samples of several inputs are not joined"
        if network not in (None, model.module, model.last_block):
            return "a method runs a part of the network that only it knows"
        size = model.head.stop - model.head.start if network is model.last_block else model.layout.size
        if size * len(y) > self.largest:
            return f"on a CPU, batches of over {self.largest // size:.0f} samples are not faster together"
        return ""

    def kind(self, row: int, x: Tensor, y: Tensor, loss: Loss | OnFeatures, network: nn.Module | None) -> Hashable:
        """Equal for requests that can be joined."""
        form = id(self), network is self.models[row].last_block, x.shape[1:], x.dtype
        if isinstance(loss, OnFeatures):  # each silo's own loss, of its own part of the outputs
            return *form, OnFeatures, None
        return *form, loss, None if ignores_padding(loss) else len(y)

    def chosen(self, requests: Sequence[Request | Evaluation]) -> Any:
        """Their rows: neighbours are a part of the matrix as it stands, others are gathered from it."""
        rows = [request.row for request in requests]
        neighbours = rows == list(range(rows[0], rows[-1] + 1))
        return slice(rows[0], rows[-1] + 1) if neighbours else torch.tensor(rows)

    def values(self, vectors: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """The parameters (silos, ...) behind ``prefix`` by name, as views of these vectors (silos, Σ)."""
        return {
            entry.name.removeprefix(prefix): vectors[:, entry.start : entry.stop].view(len(vectors), *entry.shape)
            for entry in self.entries
            if entry.name.startswith(prefix)
        }

    def gradient(self, requests: Sequence[Request]) -> list[Tensor]:
        """Fill the gradients of these requests, which are of one kind; returns their losses."""
        first, chosen = requests[0], self.chosen(requests)
        only_last = first.network is self.models[first.row].last_block
        outputs, prefix = (self.last, f"{self.last_name}.") if only_last else (self.whole, "")
        values = self.values(self.vectors[chosen], prefix)
        # What somebody trains, and who of them does not.
        trained, frozen = [], []
        for i, entry in enumerate(self.entries):
            if entry.name.startswith(prefix):
                asked = [self.models[request.row].parameters[i].requires_grad for request in requests]
                if any(asked):
                    trained.append((entry, values[entry.name.removeprefix(prefix)].requires_grad_()))
                    frozen += [(entry, r.row) for r, wanted in zip(requests, asked, strict=True) if not wanted]
        x = pad_sequence([request.x for request in requests], batch_first=True)
        y = pad_sequence([request.y for request in requests], batch_first=True, padding_value=IGNORED)
        logits, features = outputs(values, x)
        if isinstance(first.loss, OnFeatures):
            losses = torch.stack(
                [
                    request.loss.of(logits[i, : len(request.y)], features[i, : len(request.y)], request.y)
                    for i, request in enumerate(requests)
                    if isinstance(request.loss, OnFeatures)
                ]
            )
        else:
            losses = joint_losses(first.loss, logits, y)
        # The silos share nothing, so a row of the sum's gradient is the gradient of the row's own loss.
        grads = torch.autograd.grad(losses.sum(), [value for _, value in trained])
        if len(trained) < len(self.entries):
            self.gradients[chosen] = 0.0
        for (entry, _), grad in zip(trained, grads, strict=True):
            self.gradients[chosen, entry.start : entry.stop] = grad.flatten(1)
        for entry, row in frozen:
            self.gradients[row, entry.start : entry.stop] = 0.0
        return list(losses.detach().unbind())

    def step(self, requests: Sequence[Step]) -> None:
        """The steps of optimisers of one form, on the same part of neighbouring rows.

        Their states become rows of one optimiser's, and stay that as long as the same optimisers step together.
        """
        optimizers, first = [request.optimizer for request in requests], requests[0]
        n = len(requests)
        rows = slice(first.row, first.row + n)
        known = first.optimizer.joined
        joint = known[0] if known else None
        if joint is None or [o.joined for o in optimizers] != [(joint, i, n) for i in range(n)]:
            joint = first.optimizer.alike()
            for name, value in first.optimizer.state.items():
                joint.state[name] = torch.stack([o.state[name] for o in optimizers]) if value.dim() else value
            for optimizer in optimizers:
                optimizer.joined = None
        joint.own_step(self.vectors[rows, first.part], self.gradients[rows, first.part])
        for i, optimizer in enumerate(optimizers):
            if optimizer.joined is None:
                optimizer.joined = joint, i, n
                optimizer.state = {name: value[i] if value.dim() else value for name, value in joint.state.items()}
            elif "steps" in joint.state:
                optimizer.state["steps"] = joint.state["steps"]

    @torch.no_grad()
    def evaluate(self, requests: Sequence[Evaluation]) -> list[dict[str, float]]:
        """The metrics of these requests, which are of one kind: of inputs of one shape."""
        lengths = [len(request.samples) for request in requests]
        at_once = requests[0].samples.at_once
        if max(lengths) > at_once or max(lengths) * self.vectors.shape[1] > self.largest:
            outputs = [predict(self.models[request.row], request.samples) for request in requests]
        else:
            x = pad_sequence([request.samples.take(slice(None))[0] for request in requests], batch_first=True)
            self.whole.network.eval()
            padded, _ = self.whole(self.values(self.vectors[self.chosen(requests)]), x)
            self.whole.network.train()
            outputs = [of_one[:length] for of_one, length in zip(padded, lengths, strict=True)]
        labels, task = [request.samples.labels() for request in requests], requests[0].task
        if all(request.task == task for request in requests):
            return task.measure_all(outputs, labels)
        return [request.task.measure(o, y) for request, o, y in zip(requests, outputs, labels, strict=True)]


class JointLinear(nn.Linear):
    """x (silos, b, inputs), weight (silos, outputs, inputs), bias (silos, outputs) -> (silos, b, outputs)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.bmm(x, self.weight.mT)
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)


class JointForm:
    """The outputs (silos, b, C) of many copies of a network, from their parameters by name, each (silos, ...), and x.

    With the features (silos, b, K), what the part of the network that is called ``head`` gets.

    By vmap; where the network does with any leading dimensions, with its linear layers as batched products, which for
    few silos takes half the time.
    """

    def __init__(self, network: nn.Module, head: str = "") -> None:
        self.network, self.head = network, head
        self.run = vmap(self._run)
        if type(network) is nn.Linear or getattr(network, "any_batch", False):
            self.network = copy.deepcopy(network)
            for layer in self.network.modules():
                if type(layer) is nn.Linear:
                    layer.__class__ = JointLinear
            self.run = self._run

    def __call__(self, values: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.run(values, x)
        return found

    def _run(self, values: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        found: list[Tensor] = []
        hook = self.network.get_submodule(self.head).register_forward_pre_hook(lambda _, given: found.append(given[0]))
        try:
            return functional_call(self.network, values, (x,)), found[-1]
        finally:
            hook.remove()


def joint_losses(loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """The mean loss of each silo (silos,) from outputs (silos, b, C) and labels (silos, b), some of them ignored."""
    if loss is F.cross_entropy:  # as vmap has it, in half the time for few silos
        each = F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none", ignore_index=IGNORED)
        return each.view(y.shape).sum(1) / (y != IGNORED).sum(1)
    losses: Tensor = vmap(loss)(outputs, y)
    return losses


class Lockstep:
    """Runs the silos' calls of a round together.

    ``joint`` and ``single`` count the gradients that were computed with others and one by one, ``computations`` how
    many computations the joint ones took; ``steps`` and ``evaluations`` what else was computed with others.
    ``quiet``: what takes turns all the same is not named. ``tried``: also what is large trains together.
    """

    def __init__(self, *, quiet: bool = False, tried: bool = False) -> None:
        self.quiet, self.tried = quiet, tried
        self.takes_turns = ""  # why the silos take turns after all
        self.joint = self.computations = self.single = self.steps = self.evaluations = 0
        self.told: set[str] = set()
        self.asked: dict[int, int] = {}  # gradients by silo, in its last round
        self._networks: dict[FlatModel, Networks] = {}

    def run(self, calls: Mapping[int, Callable[[], T]]) -> dict[int, T]:
        """What each silo's call returns. An exception that leaves a call ends all of them."""
        # Whoever goes on longest comes first, so that those still training at the end of a round are neighbours.
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
                # All switches are made here: an error of PyTorch's walks the C stack, and would crash the process where
                # a coroutine goes on from another place than it began at.
                go_on = coroutines[silo].switch
                returned = go_on(answer)
                if coroutines[silo].dead:
                    results[silo] = returned
                else:
                    waiting.append(returned)
            # Metrics wait for the silos that still train: all have theirs computed at once.
            requests = [r for r in waiting if not isinstance(r, Evaluation)] or waiting
            answers = self._answers(requests)
            waiting = [r for r in waiting if r.silo not in answers]
        return results

    def _context(self, silo: int, row: int, rows: int) -> Context:
        """In which the silo gets the network of this row."""

        def network(shared: FlatModel) -> FlatModel:
            if not self.takes_turns:
                self._take_turns(hindrance(shared, LARGEST_TRIED if self.tried else LARGEST_NETWORK))
            if self.takes_turns:
                return shared
            networks = self._networks.get(shared)
            if networks is None or len(networks.models) < rows:
                networks = self._networks[shared] = Networks(shared, rows, tried=self.tried)
            networks.models[row].together = Seat(self, silo, row, networks)
            return networks.models[row]

        context = copy_context()
        context.run(network_of.set, network)
        return context

    def _answers(self, requests: Sequence[Asked]) -> dict[int, Any]:
        """By silo, in the order of the requests: the answer, or what went wrong."""
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
        except Exception as error:  # a silo's own fault shows again when each computes by itself
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
        """Neighbours step together, as many as the cache holds."""
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
        self.tell(reason)

    def tell(self, reason: str) -> None:
        if reason and not self.quiet and reason not in self.told:
            self.told.add(reason)
            log(WARNING, "vectorize = true: silos take turns all the same: %s", reason)


class Seat:
    """Where a silo asks: in its own coroutine, which waits for the answer (:class:`models.flat.Together`)."""

    def __init__(self, lockstep: Lockstep, silo: int, row: int, networks: Networks) -> None:
        self.lockstep, self.silo, self.row, self.networks = lockstep, silo, row, networks

    def gradient(self, x: Tensor, y: Tensor, loss: Loss | OnFeatures, network: nn.Module | None) -> Tensor:
        lockstep, networks, row = self.lockstep, self.networks, self.row
        lockstep.asked[self.silo] += 1
        reason = networks.hindrance(row, x, y, network)
        lockstep.tell(reason)
        if reason or lockstep.takes_turns:  # where that was found out in the middle of a round
            lockstep.single += 1
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
        """Which part of the silo's row these are; None: they are something else."""
        model, count = self.networks.models[self.row], len(vector)
        start, rest = divmod(vector.data_ptr() - model.vector.data_ptr(), vector.element_size())
        same = gradient.data_ptr() - model.gradient.data_ptr() == start * vector.element_size()
        if rest or not same or not 0 <= start <= model.layout.size - count or not vector.is_contiguous():
            return None
        return slice(start, start + count)

    def evaluate(self, task: Task, samples: Samples) -> dict[str, float]:
        networks, row = self.networks, self.row
        if self.lockstep.takes_turns or not isinstance(samples.x, Tensor):
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


def hindrance(network: FlatModel, largest: int = LARGEST_NETWORK) -> str:
    """Why silos with this network had better take turns; empty: they can train together."""
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
        if network.layout.size > largest:
            return f"on a CPU, networks of {network.layout.size} parameters are not faster together"
    return ""


@lru_cache(maxsize=256)
def ignores_padding(loss: Loss) -> bool:
    """Whether a sample labelled as ignored changes nothing in this loss."""
    logits, y = torch.tensor([[0.5, -1.0], [2.0, 1.0], [0.0, 0.0]]), torch.tensor([0, 1, IGNORED])
    try:
        return torch.equal(loss(logits, y), loss(logits[:2], y[:2]))
    except Exception:
        return False
