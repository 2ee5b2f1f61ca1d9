"""The least cost of a round: FedAvg and the methods with own vector algebra as plain loops, without a federation.

Each class has one method's steps and vector operations, in as few passes over memory as the formulas allow. Float
pictures, vectors and matrices are prepared beforehand; there are no settings, messages, state, seeds or checks. The
engine's additional time is its overhead. The formulas are in ``strategies/``; a silo is a row of ``own``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from benchmarks.common import Prepared
from client.local_data import device_of, open_data
from models.flat import FlatModel
from models.initialisation import initial_model
from models.networks.registry import build
from models.samples import Samples
from models.training import use_threads


class Loop:
    """One epoch of SGD in every silo from the global model, then their mean: FedAvg."""

    def __init__(self, prepared: Prepared, channels_last: bool = True) -> None:
        settings, c = prepared.settings, prepared.settings.common
        use_threads(c.threads)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.train: list[tuple[Tensor, Tensor]] = []
        self.val: list[tuple[Tensor, Tensor]] = []
        contexts = list(prepared.federation.grid.contexts.values())  # type: ignore[attr-defined]
        self.device = device_of(settings, contexts[0])
        for context in contexts:
            data = open_data(settings, context)
            for part, found in ((data.train, self.train), (data.val, self.val)):
                x, y = Samples(part.x, part.y, self.device).take(slice(None))
                if x.dim() == 4:
                    # contiguous() does not change grey pictures
                    x = x.clone(memory_format=layout)
                found.append((x, y))
        shape = data.input_shape
        name, options = settings.model_for(shape)
        self.model = FlatModel(build(name, shape, data.classes, options), self.device)
        self.w, self.g = self.model.vector, self.model.gradient
        self.settings = prepared.strategy.settings
        self.rate = c.learning_rate
        self.batch = c.batch_size
        self.center = initial_model(name, shape, data.classes, options, c.seed)("").to(
            self.device, copy=True
        )
        self.own = self.center.repeat(len(self.train), 1)

    def batches(self, samples: int) -> Iterable[Tensor]:
        return torch.randperm(samples, device=self.device).split(self.batch)  # type: ignore[no-any-return, no-untyped-call]

    def gradients(self, silo: int) -> Iterator[None]:
        """Run one epoch: before each ``yield``, write the gradient of the next batch at ``w`` into ``g``."""
        x, y = self.train[silo]
        for index in self.batches(len(y)):
            self.g.zero_()
            torch.nn.functional.cross_entropy(self.model.module(x[index]), y[index]).backward()  # type: ignore[no-untyped-call]
            yield

    def epoch(self, silo: int, center: Tensor | None = None, weight: float = 0.0) -> None:
        """Run one epoch of SGD on ``w``, with a proximal term to ``center`` where one is given."""
        for _ in self.gradients(silo):
            if center is not None:
                self.g.add_(self.w, alpha=weight).sub_(center, alpha=weight)
            self.w.sub_(self.g, alpha=self.rate)

    def start(self, silo: int) -> None:
        """Write the silo's initial model of the round into ``w``."""
        self.w.copy_(self.center)

    def round(self) -> None:
        for i in range(len(self.own)):
            self.start(i)
            self.epoch(i)
            self.own[i] = self.w
        torch.mean(self.own, 0, out=self.center)


class BareDitto(Loop):
    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self.personal = self.own.clone()

    def round(self) -> None:
        for i, personal in enumerate(self.personal):
            self.w.copy_(personal)
            self.epoch(i, self.center, self.settings.lambda_)
            personal.copy_(self.w)
        super().round()


class Mixing(Loop):
    """FedAMP and DiversiFed: all distances, a (silos x silos) matrix times all models, a proximal term."""

    def round(self) -> None:
        distances = torch.cdist(self.own, self.own, compute_mode="donot_use_mm_for_euclid_dist")
        mixtures = distances.softmax(1) @ self.own
        for i, mixture in enumerate(mixtures):
            self.w.copy_(mixture if self.settings.start == "received" else self.own[i])
            self.epoch(i, mixture, self.settings.lambda_ / self.settings.step)
            self.own[i] = self.w


class BareFedFomo(Loop):
    @torch.no_grad()
    def validation_loss(self, silo: int, model: Tensor) -> float:
        self.w.copy_(model)
        x, y = self.val[silo]
        return float(torch.nn.functional.cross_entropy(self.model.module(x), y))

    def round(self) -> None:
        received = self.own.clone()
        for i in range(len(received)):
            mine = self.validation_loss(i, received[i])
            weights = torch.zeros(len(received), device=self.device)
            for j in range(len(received)):
                if j != i:
                    gain = mine - self.validation_loss(i, received[j])
                    weights[j] = gain / max(float(torch.dist(received[j], received[i])), 1e-5)
            weights.clamp_(min=0)
            weights /= weights.sum().clamp(min=1e-12)
            weights[i] += 1 - weights.sum()
            torch.mv(received.t(), weights, out=self.w)
            self.epoch(i)
            self.own[i] = self.w


class BareFedALA(Loop):
    """A later FedALA round: ALA's weights of the last layer are learned for one epoch over features computed once."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self.head = self.model.layout.blocks[-1].slice
        self.mix = torch.ones_like(self.own[:, self.head])
        self.found = torch.empty(0)
        self.model.last_block.register_forward_pre_hook(self.keep)

    def keep(self, _: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.found = inputs[0]

    def start(self, silo: int) -> None:
        super().start(silo)
        (x, y), head, mix = self.train[silo], self.head, self.mix[silo]
        own, difference = self.own[silo][head], self.center[head] - self.own[silo][head]
        torch.addcmul(own, difference, mix, out=self.w[head])
        count = int(len(y) * self.settings.sample_percent / 100)
        sample = torch.randperm(len(y), device=self.device)[:count]
        with torch.no_grad():
            self.model.module(x[sample])
        found, y = self.found, y[sample]
        for index in self.batches(count):
            self.g[head].zero_()
            logits = self.model.last_block(found[index])
            torch.nn.functional.cross_entropy(logits, y[index]).backward()  # type: ignore[no-untyped-call]
            mix.addcmul_(self.g[head], difference, value=-self.settings.eta).clamp_(0, 1)
            torch.addcmul(own, difference, mix, out=self.w[head])


class BareFedAPM(Loop):
    """FedAPM with personal last layers: an epoch for them, without gradients below, then one for the others."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self.cut = self.model.layout.blocks[-self.settings.layers].start
        self.dual = torch.zeros_like(self.own[:, : self.cut])
        self.z = self.dual.clone()

    def round(self) -> None:
        cut, s, alpha = self.cut, self.settings, 1 / len(self.own)
        shared, private = slice(0, cut), slice(cut, len(self.w))
        w, g, u = self.w, self.g, self.center[:cut]
        for i, own in enumerate(self.own):
            w.copy_(own)
            self.model.freeze(shared)
            for _ in self.gradients(i):
                g[private].mul_(alpha).add_(w[private], alpha=s.sigma).sub_(
                    own[private], alpha=s.sigma
                )
                w[private].sub_(g[private], alpha=self.rate)
            w[shared] = u
            self.model.freeze(private)
            for _ in self.gradients(i):
                g[shared].mul_(alpha).add_(self.dual[i]).add_(w[shared], alpha=s.rho).sub_(
                    u, alpha=s.rho
                )
                w[shared].sub_(g[shared], alpha=self.rate)
            self.model.freeze()
            own.copy_(w)
            self.dual[i].add_(w[shared] - u, alpha=s.rho)
            torch.add(w[shared], self.dual[i], alpha=1 / s.rho, out=self.z[i])
        torch.mean(self.z, 0, out=u)


class BareApple(Loop):
    """APPLE: every step mixes all core models, and computes the gradient's inner product with each of them."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self.dr = self.own.new_full((len(self.own), len(self.own)), 1 / len(self.own))

    def round(self) -> None:
        cores, learned = self.own.clone(), self.own.clone()
        p0, prox = self.dr[0].clone(), self.settings.mu
        for i, dr in enumerate(self.dr):
            cores[i - 1] = self.own[i - 1]  # the previous silo worked in its own row
            torch.mv(cores.t(), dr, out=self.w)
            for _ in self.gradients(i):
                grad = torch.mv(cores, self.g).add_(dr - p0, alpha=prox)
                cores[i].sub_(self.g, alpha=self.rate * float(dr[i]))
                dr.sub_(grad, alpha=self.settings.dr_learning_rate)
                torch.mv(cores.t(), dr, out=self.w)
            learned[i] = cores[i]
        self.own = learned


class PlainFedALA:
    """A later round of FedALA without flat vectors: plain modules, ``torch.optim.SGD``, state dictionaries.

    It is ordinary PyTorch code for one network, whose embedding has a dense or a ``sparse`` gradient: ALA of the last
    layer over features computed once, an epoch of SGD, the mean of the silos' models.
    """

    def __init__(self, prepared: Prepared, sparse: bool = False) -> None:
        loop = BareFedALA(prepared)
        self.train = loop.train
        self.rate = loop.rate
        self.batch = loop.batch
        self.settings = loop.settings
        self.net = copy.deepcopy(loop.model.module)
        for layer in self.net.modules():
            if isinstance(layer, torch.nn.Embedding):
                layer.sparse = sparse
        for parameter in self.net.parameters():
            parameter.data, parameter.grad = parameter.data.clone(), None
        self.center = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}
        self.own = [
            {name: tensor.clone() for name, tensor in self.center.items()} for _ in self.train
        ]
        *body, last = self.net.children()
        self.body, self.last = torch.nn.Sequential(*body), last
        self.mix = [
            [torch.ones_like(parameter) for parameter in last.parameters()] for _ in self.train
        ]
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=self.rate)
        self.found = torch.empty(0)
        last.register_forward_pre_hook(self.keep)

    def keep(self, _: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.found = inputs[0]

    def start(self, silo: int) -> None:
        (x, y), mix = self.train[silo], self.mix[silo]
        last_name = list(dict(self.net.named_children()))[-1]
        now = list(self.last.parameters())
        old = [
            self.own[silo][f"{last_name}.{name}"] for name, _ in self.last.named_parameters()
        ]
        differences = [
            parameter.detach() - own for parameter, own in zip(now, old, strict=True)
        ]

        @torch.no_grad()
        def mixed() -> None:
            for parameter, own, difference, weight in zip(
                now, old, differences, mix, strict=True
            ):
                torch.addcmul(own, difference, weight, out=parameter)

        mixed()
        sample = torch.randperm(len(y))[: int(len(y) * self.settings.sample_percent / 100)]
        with torch.no_grad():
            self.net(x[sample])
        found, y = self.found, y[sample]
        for index in torch.split(torch.randperm(len(sample)), self.batch):
            grads = torch.autograd.grad(
                torch.nn.functional.cross_entropy(self.last(found[index]), y[index]), now
            )
            for weight, grad, difference in zip(mix, grads, differences, strict=True):
                weight.addcmul_(grad, difference, value=-self.settings.eta).clamp_(0, 1)
            mixed()

    def round(self) -> None:
        for silo, (x, y) in enumerate(self.train):
            self.net.load_state_dict(self.center)
            self.start(silo)
            for index in torch.split(torch.randperm(len(y)), self.batch):
                self.optimizer.zero_grad()
                torch.nn.functional.cross_entropy(self.net(x[index]), y[index]).backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
            self.own[silo] = {
                name: tensor.clone() for name, tensor in self.net.state_dict().items()
            }
        for name in self.center:
            self.center[name] = torch.stack([own[name] for own in self.own]).mean(0)


METHODS: dict[str, type[Loop]] = {
    "fedavg": Loop,
    "apple": BareApple,
    "fedfomo": BareFedFomo,
    "fedamp": Mixing,
    "diversifed": Mixing,
    "fedala": BareFedALA,
    "ditto": BareDitto,
    "fedapm": BareFedAPM,
}
