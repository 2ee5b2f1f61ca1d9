"""pFedLA: a hypernetwork per silo, on the server, learns the weight of every silo's model for this silo, per layer.

Ma, Zhang, Guo and Xu, CVPR 2022, arXiv 2205.03993. The server keeps all models θ_j; silo i's hypernetwork, with the
parameters φ_i = (v_i, V, c, U, d), v_i an embedding, gives a weight for every silo j and layer block l:

    s = U relu(V v_i + c) + d,   α_lj = relu(s_lj) / sum_m relu(s_lm)             (1/N where no s_lm is above 0)
    θ̄_i^l = θ_i^l + sum_j α_lj (θ_j^l - θ_i^l)                                     = sum_j α_lj θ_j^l
    silo   θ_i: E epochs of SGD on f_i from θ̄_i
    server φ_i <- φ_i - η_hn (∂θ̄_i/∂φ_i)ᵀ (θ̄_i - θ_i),   then θ_i is what the silo sent

θ̄_i - θ_i, received minus trained, approximates the direction of the loss's gradient with respect to θ̄_i. Descent along
it increases α for silos towards whose models the training moved. (Two public versions have the opposite sign, and so
ascend.) ∂/∂α is G_lj = <θ_j^l - θ_i^l, (θ̄_i - θ_i)^l>, with the θ_j that made θ̄_i. With differences from the silo's
own model, equal models mix to themselves exactly.

Sent: Σ down, Σ up (the paper's silo sends the difference, of the same size). Kept: server all θ_j, which start from the
common initial model, and φ_i; silo nothing. Absent silos: their θ_i and φ_i stay, and the others continue to mix that
θ_i. A late joiner's θ is the mean of the others', its φ is newly initialised, and every φ_i gets newly initialised
outputs for it. Special cases: α = 1 for the silo's own model is Local; with equal α every silo starts from the
unweighted mean; η_hn = 0 keeps the initial random mixture. No official code was found; sizes and η_hn are FL-bench's.
The φ_i are initialised like torch's linear layers. Not built: HeurpFedLA, which keeps the layers of the highest own
weights in the silo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.training import generator
from strategies.base.info import OWN_MIXTURE
from strategies.base.robust import weighted_mean
from strategies.base.settings import setting
from strategies.base.state import GLOBAL, Arrays, ServerState
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Model, Payload, Update


@dataclass(frozen=True)
class LaSettings:
    """Settings of pFedLA."""

    embedding: int = setting(100, "size of a silo's embedding", minimum=1)
    hidden: int = setting(100, "hidden units of a hypernetwork", minimum=1)
    hyper_learning_rate: float = setting(
        0.005, "learning rate of the hypernetworks", symbol="η_hn", minimum=0
    )


def shapes(settings: LaSettings, layers: int, silos: int) -> list[tuple[int, ...]]:
    """Return the shapes of v, V, c, U and d."""
    size, hidden, out = settings.embedding, settings.hidden, layers * silos
    return [(size,), (hidden, size), (hidden,), (out, hidden), (out,)]


def first_hypernetwork(
    settings: LaSettings, layers: int, silos: int, rng: torch.Generator
) -> Tensor:
    """Return an initial φ as one vector: v standard normal, weights and biases uniform within 1/√inputs."""
    size, *sizes = [math.prod(shape) for shape in shapes(settings, layers, silos)]
    inputs = (settings.embedding, settings.embedding, settings.hidden, settings.hidden)
    parts = [torch.randn(size, generator=rng)]
    for size, n in zip(sizes, inputs, strict=True):
        parts.append((2 * torch.rand(size, generator=rng) - 1) / math.sqrt(n))
    return torch.cat(parts)


def layer_weights(phi: Tensor, settings: LaSettings, layers: int, silos: int) -> Tensor:
    """Return α (layers, silos) from φ."""
    wanted = shapes(settings, layers, silos)
    pieces = torch.split(phi, [math.prod(shape) for shape in wanted])
    v, weight, bias, out, out_bias = (
        p.view(shape) for p, shape in zip(pieces, wanted, strict=True)
    )
    scores = (out @ (weight @ v + bias).relu() + out_bias).view(layers, silos).relu()
    total = scores.sum(1, keepdim=True)
    return torch.where(total > 0, scores / total.clamp(min=1e-12), 1 / silos)


def grow_hypernetwork(
    phi: Tensor, fresh: Tensor, settings: LaSettings, layers: int, silos: int, place: int
) -> Tensor:
    """Return φ with outputs for ``silos``: at ``place`` from ``fresh``, all others from φ, which has one silo fewer."""
    old = torch.split(phi, [math.prod(shape) for shape in shapes(settings, layers, silos - 1)])
    new = torch.split(fresh, [math.prod(shape) for shape in shapes(settings, layers, silos)])
    others = [j for j in range(silos) if j != place]
    parts = list(old[:3])
    for width, kept, start in ((settings.hidden, old[3], new[3]), (1, old[4], new[4])):
        table = start.view(layers, silos, width).clone()
        table[:, others] = kept.view(layers, silos - 1, width)
        parts.append(table.flatten())
    return torch.cat(parts)


class LaServerState(ServerState):
    hyper = Arrays("hyper.")  # φ_i, by the silo's name


class PFedLA(PersonalizedStrategy):
    info = OWN_MIXTURE(
        name="pfedla",
        title="Layer-wise mixtures by hypernetworks",
        paper="Ma et al., CVPR 2022, arXiv 2205.03993",
        spelling="pFedLA",
        late="grows",
    )
    state_type = LaServerState
    state: LaServerState
    Settings = LaSettings
    search = (("hyper-learning-rate", 0.0005, 0.05),)
    settings: LaSettings

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        start = initial("")
        for name in self.silos:
            rng = generator(self.common.seed, "hypernetwork", name)
            self.state.models[name] = start
            self.state.hyper[name] = first_hypernetwork(
                self.settings, len(self.layout.blocks), len(self.silos), rng
            )

    def alphas(self, phi: Tensor) -> Tensor:
        return layer_weights(phi, self.settings, len(self.layout.blocks), len(self.silos))

    def differences(self, silo: str) -> Tensor:
        """Return θ_j - θ_i (silos, Σ)."""
        models = torch.stack([self.state.models[name] for name in self.silos])
        return models - self.state.models[silo]

    def mixture(self, silo: str, alphas: Tensor, differences: Tensor) -> Tensor:
        """Return θ̄_i (Σ,)."""
        mixed = self.state.models[silo].clone()
        for alpha, block in zip(alphas, self.layout.blocks, strict=True):
            mixed[block.slice] += alpha @ differences[:, block.slice]
        return mixed

    def welcome(self, silo: str, *, trains: bool) -> None:
        """Store the mean of the others' models as this silo's: no hypernetwork was trained with it."""
        models = self.state.models
        models[silo] = weighted_mean(models.values())
        if trains:
            self.grow(silo)

    def grow(self, silo: str) -> None:
        """Add newly initialised outputs for the newcomer to every φ_i, and an initial φ for the newcomer."""
        layers, n = len(self.layout.blocks), len(self.silos)
        place = sorted(self.silos).index(silo)
        for name, phi in self.state.hyper.items():
            fresh = first_hypernetwork(
                self.settings, layers, n, generator(self.common.seed, "grown", name, silo)
            )
            self.state.hyper[name] = grow_hypernetwork(
                phi, fresh, self.settings, layers, n, place
            )
        rng = generator(self.common.seed, "hypernetwork", silo)
        self.state.hyper[silo] = first_hypernetwork(self.settings, layers, n, rng)

    def payload(self, silo: str) -> Payload:
        if silo not in self.state.hyper:
            return Payload({GLOBAL: Model(self.state.models[silo], silo, self.round - 1)})
        mixed = self.mixture(silo, self.alphas(self.state.hyper[silo]), self.differences(silo))
        return Payload({GLOBAL: Model(mixed, silo, self.round - 1)})

    def aggregate(self, updates: Sequence[Update]) -> None:
        learned = {u.silo: self.learn(u.silo, u.vector) for u in updates}
        self.state.hyper.update(learned)
        self.state.models.update({u.silo: u.vector for u in updates})

    def learn(self, silo: str, trained: Tensor) -> Tensor:
        """Return φ_i after this round's step, with the models that made this round's mixture."""
        phi = self.state.hyper[silo].clone().requires_grad_()
        alphas, differences = self.alphas(phi), self.differences(silo)
        moved = self.mixture(silo, alphas.detach(), differences) - trained
        grads = torch.stack(
            [differences[:, b.slice] @ moved[b.slice] for b in self.layout.blocks]
        )
        (gradient,) = torch.autograd.grad(alphas, phi, grads)
        return phi.detach() - self.settings.hyper_learning_rate * gradient
