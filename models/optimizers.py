"""SGD and Adam on flat vectors, with their state as explicit arrays.

They are ours because ``torch.optim`` imports ``torch._dynamo`` on its first step, which costs every freshly started
silo process about two seconds; tests hold them equal to ``torch.optim``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from models.flat import BatchedBackend
from partitions.common.errors import UserError


class Optimizer(ABC):
    """Steps of a model's vector, element by element.

    So rows of several models, which have taken as many steps, can be one ``vector``.
    """

    only_where_gradient = False  # whether a number without a gradient stays as it is

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.state: dict[str, Tensor] = {}
        self.backend: BatchedBackend | None = None  # of the model whose parts it steps, where silos train together
        self.joined: tuple[Optimizer, int, int] | None = None  # of whose state this one's is a row: which, of how many

    def step(self, vector: Tensor, gradient: Tensor) -> None:
        if self.backend is None:
            self.own_step(vector, gradient)
        else:
            self.backend.step(self, vector, gradient)

    @abstractmethod
    def own_step(self, vector: Tensor, gradient: Tensor) -> None:
        """One step, in place."""

    @abstractmethod
    def form(self) -> tuple[float, ...]:
        """Return a key: equal for optimisers that do the same in their next step."""

    @abstractmethod
    def empty_copy(self) -> Optimizer:
        """Another one of this form, without state."""


class Sgd(Optimizer):
    """v <- m v + (g + wd w); w <- w - lr v, as ``torch.optim.SGD`` without dampening."""

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(lr)
        self.momentum, self.weight_decay = momentum, weight_decay
        self.only_where_gradient = not momentum and not weight_decay

    def form(self) -> tuple[float, ...]:
        return self.lr, self.momentum, self.weight_decay, len(self.state)

    def empty_copy(self) -> Sgd:
        return Sgd(self.lr, self.momentum, self.weight_decay)

    @torch.no_grad()
    def own_step(self, vector: Tensor, gradient: Tensor) -> None:
        if self.weight_decay:
            gradient = gradient.add(vector, alpha=self.weight_decay)
        if self.momentum:
            velocity = self.state.get("momentum")
            if velocity is None:
                velocity = self.state["momentum"] = gradient.clone()
            else:
                velocity.mul_(self.momentum).add_(gradient)
            gradient = velocity
        vector.add_(gradient, alpha=-self.lr)


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, algorithm 1) with L2 weight decay in the gradient; ``amsgrad`` keeps the largest v."""

    def __init__(
        self,
        lr: float,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(lr)
        self.weight_decay, self.amsgrad, self.betas, self.eps = weight_decay, amsgrad, betas, eps

    def form(self) -> tuple[float, ...]:
        steps = float(self.state["steps"]) if self.state else 0.0
        return self.lr, self.weight_decay, self.amsgrad, *self.betas, self.eps, steps, len(self.state)

    def empty_copy(self) -> Adam:
        return Adam(self.lr, self.weight_decay, self.amsgrad, self.betas, self.eps)

    @torch.no_grad()
    def own_step(self, vector: Tensor, gradient: Tensor) -> None:
        if not self.state:
            self.state = {"steps": torch.zeros(()), "m": torch.zeros_like(vector), "v": torch.zeros_like(vector)}
            if self.amsgrad:
                self.state["v_max"] = torch.zeros_like(vector)
        if self.weight_decay:
            gradient = gradient.add(vector, alpha=self.weight_decay)
        beta1, beta2 = self.betas
        # Reading a count that is kept on a GPU would make every step wait for it.
        self.state["steps"] = self.state["steps"].cpu() + 1
        steps = self.state["steps"].item()
        m = self.state["m"].lerp_(gradient, 1 - beta1)
        v = self.state["v"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if self.amsgrad:
            v = torch.maximum(self.state["v_max"], v, out=self.state["v_max"])
        denominator = v.sqrt().div_((1 - beta2**steps) ** 0.5).add_(self.eps)
        vector.addcdiv_(m, denominator, value=-self.lr / (1 - beta1**steps))


def make_optimizer(
    name: str, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, amsgrad: bool = False
) -> Optimizer:
    """The optimiser of that name (``sgd`` or ``adam``) without state."""
    if name == "sgd":
        return Sgd(lr, momentum, weight_decay)
    if name == "adam":
        return Adam(lr, weight_decay, amsgrad)
    raise UserError(f"unknown optimizer '{name}': sgd, adam")
