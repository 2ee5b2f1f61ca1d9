"""Silos that train together (``vectorize = true``): their gradients are computed in one go.

Each silo's ClientApp runs in a coroutine of its own (a greenlet, so methods are ordinary code and know nothing of it)
with a network of its own, whose vector and gradient are rows of two (silos x Σ) matrices. Where a method asks for the
gradient of a batch, its coroutine waits. Once all silos wait or are done, requests of one kind (same part of the
network, same trained parameters, same shape of a sample, same loss) are computed together by ``torch.func.vmap``,
short batches padded with samples that the loss ignores, and the others one by one; then all silos go on. Losses on
features may differ from silo to silo: the outputs are computed together, each loss from its silo's part of them.

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
from models.training import Loss, OnFeatures, own_gradient

# As measured on a CPU (benchmarks/README.md). A joint computation costs a few gradients' time beside its arithmetic,
# and its arithmetic is slower than that of one network after the other, which stays in the cache from step to step.
FEWEST_SILOS = 4
LARGEST_BATCH = 600_000  # parameters times samples
LARGEST_NETWORK = 30_000  # parameters

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


class Networks:
    """Copies of one network. Their vectors are the rows of a matrix (silos, Σ), their gradients those of another."""

    def __init__(self, shared: FlatModel, count: int) -> None:
        self.vectors = shared.vector.new_zeros(count, shared.layout.size)
        self.gradients = torch.zeros_like(self.vectors)
        rows = zip(self.vectors, self.gradients, strict=True)
        self.models = [FlatModel(copy.deepcopy(shared.module), shared.device, row) for row in rows]
        self.entries, self.last_name = shared.layout.parameters, shared.head_name
        self.whole, self.last = joint_form(shared.module, self.last_name), joint_form(shared.last_block)
        self.largest = LARGEST_BATCH if shared.device.type == "cpu" else math.inf

    def hindrance(self, row: int, x: Any, y: Tensor, network: nn.Module | None) -> str:
        """Why this batch had better be computed by itself; empty: it can be joined."""
        model = self.models[row]
        if network not in (None, model.module, model.last_block):
            return "a method runs a part of the network that only it knows"
        size = model.head.stop - model.head.start if network is model.last_block else model.layout.size
        if not isinstance(x, Tensor):
            return "a sample has several inputs"
        if size * len(y) > self.largest:
            return f"on a CPU, batches of over {self.largest // size:.0f} samples are not faster together"
        return ""

    def kind(self, row: int, x: Tensor, y: Tensor, loss: Loss | OnFeatures, network: nn.Module | None) -> Hashable:
        """Equal for requests that can be joined."""
        model = self.models[row]
        trained = tuple([parameter.requires_grad for parameter in model.parameters])
        form = id(self), network is model.last_block, trained, x.shape[1:], x.dtype
        if isinstance(loss, OnFeatures):  # each silo's own loss, of its own part of the outputs
            return *form, OnFeatures, None
        return *form, loss, None if ignores_padding(loss) else len(y)

    def joint(self, requests: Sequence[Request]) -> list[Tensor]:
        """Fill the gradients of these requests, which are of one kind; returns their losses."""
        rows, first = [request.row for request in requests], requests[0]
        model = self.models[first.row]
        only_last = first.network is model.last_block
        outputs, prefix = (self.last, f"{self.last_name}.") if only_last else (self.whole, "")
        # Neighbours are a part of the matrix as it stands, others are gathered from it.
        neighbours = rows == list(range(rows[0], rows[-1] + 1))
        chosen: Any = slice(rows[0], rows[-1] + 1) if neighbours else torch.tensor(rows)
        vectors = self.vectors[chosen]
        values, trained = {}, []
        for entry, parameter in zip(self.entries, model.parameters, strict=True):
            if entry.name.startswith(prefix):
                value = vectors[:, entry.start : entry.stop].view(len(rows), *entry.shape)
                values[entry.name.removeprefix(prefix)] = value
                if parameter.requires_grad:
                    trained.append((entry, value.requires_grad_()))
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
        return list(losses.detach().unbind())


class JointLinear(nn.Linear):
    """x (silos, b, inputs), weight (silos, outputs, inputs), bias (silos, outputs) -> (silos, b, outputs)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.bmm(x, self.weight.mT)
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)


def joint_form(network: nn.Module, head: str = "") -> Callable[[dict[str, Tensor], Tensor], tuple[Tensor, Tensor]]:
    """The outputs (silos, b, C) of many copies of a network, from their parameters by name, each (silos, ...), and x.

    With the features (silos, b, K), what the part of the network that is called ``head`` gets.

    By vmap; where the network does with any leading dimensions, with its linear layers as batched products, which for
    few silos takes half the time.
    """

    def run(values: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        found: list[Tensor] = []
        hook = network.get_submodule(head).register_forward_pre_hook(lambda _, given: found.append(given[0]))
        try:
            return functional_call(network, values, (x,)), found[-1]
        finally:
            hook.remove()

    if type(network) is nn.Linear or getattr(network, "any_batch", False):
        network = copy.deepcopy(network)
        for layer in network.modules():
            if type(layer) is nn.Linear:
                layer.__class__ = JointLinear
        return run
    return vmap(run)


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
    many computations the joint ones took.
    """

    def __init__(self) -> None:
        self.takes_turns = ""  # why the silos take turns after all
        self.joint = self.computations = self.single = 0
        self._networks: dict[FlatModel, Networks] = {}
        self._told: set[str] = set()
        self._asked: dict[int, int] = {}  # gradients by silo, in its last round

    def run(self, calls: Mapping[int, Callable[[], T]]) -> dict[int, T]:
        """What each silo's call returns. An exception that leaves a call ends all of them."""
        results: dict[int, T] = {}
        waiting: list[Request] = []

        def follow(silo: int, returned: Any) -> None:
            if coroutines[silo].dead:
                results[silo] = returned
            else:
                waiting.append(returned)

        # Whoever goes on longest comes first, so that those still training at the end of a round are neighbours.
        order = sorted(calls, key=lambda silo: -self._asked.get(silo, 0))
        coroutines = {silo: greenlet(calls[silo]) for silo in order}
        self._asked |= dict.fromkeys(order, 0)
        for row, silo in enumerate(order):
            coroutines[silo].gr_context = self._context(silo, row, len(order))
            follow(silo, coroutines[silo].switch())
        while waiting:
            requests = waiting.copy()
            waiting.clear()
            for request, answer in zip(requests, self._answers(requests), strict=True):
                coroutine = coroutines[request.silo]
                go_on = coroutine.throw if isinstance(answer, Exception) else coroutine.switch
                follow(request.silo, go_on(answer))
        return results

    def _context(self, silo: int, row: int, rows: int) -> Context:
        """In which the silo gets the network of this row."""

        def network(shared: FlatModel) -> FlatModel:
            if not self.takes_turns:
                self._take_turns(hindrance(shared))
            if self.takes_turns:
                return shared
            networks = self._networks.get(shared)
            if networks is None or len(networks.models) < rows:
                networks = self._networks[shared] = Networks(shared, rows)
            networks.models[row].together = partial(self._wait, silo, row, networks)
            return networks.models[row]

        context = copy_context()
        context.run(network_of.set, network)
        return context

    def _wait(
        self,
        silo: int,
        row: int,
        networks: Networks,
        x: Tensor,
        y: Tensor,
        loss: Loss | OnFeatures,
        network: nn.Module | None,
    ) -> Tensor:
        """In a silo's coroutine: the loss, once the gradient is there."""
        self._asked[silo] += 1
        reason = networks.hindrance(row, x, y, network)
        self._tell(reason)
        if reason or self.takes_turns:  # where that was found out in the middle of a round
            self.single += 1
            return own_gradient(networks.models[row], x, y, loss, network)
        kind = networks.kind(row, x, y, loss, network)
        answer: Tensor = getcurrent().parent.switch(Request(silo, row, networks, x, y, loss, network, kind))
        return answer

    def _answers(self, requests: Sequence[Request]) -> list[Tensor | Exception]:
        """The loss of each request, or what went wrong with it."""
        groups: dict[Hashable, list[Request]] = {}
        for request in requests:
            groups.setdefault(request.kind, []).append(request)
        answers: dict[int, Tensor | Exception] = {}
        for group in groups.values():
            enough = len(group) >= FEWEST_SILOS
            losses = self._joint(group) if enough else [self._single(request) for request in group]
            answers |= {request.silo: loss for request, loss in zip(group, losses, strict=True)}
        return [answers[request.silo] for request in requests]

    def _joint(self, group: Sequence[Request]) -> list[Tensor | Exception]:
        try:
            losses: list[Tensor | Exception] = [*group[0].networks.joint(group)]
        except Exception as error:  # a silo's own fault shows again when each computes by itself
            losses = [self._single(request) for request in group]
            if not any(isinstance(loss, Exception) for loss in losses):
                why = str(error).strip().partition("\n")[0] or type(error).__name__
                self._take_turns(f"this network cannot be computed jointly ({why})")
            return losses
        self.joint += len(group)
        self.computations += 1
        return losses

    def _single(self, request: Request) -> Tensor | Exception:
        self.single += 1
        try:
            return request.by_itself()
        except Exception as error:
            return error

    def _take_turns(self, reason: str) -> None:
        self.takes_turns = reason
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        if reason and reason not in self._told:
            self._told.add(reason)
            log(WARNING, "vectorize = true: silos take turns all the same: %s", reason)


def hindrance(network: FlatModel) -> str:
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
        if network.layout.size > LARGEST_NETWORK:
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
