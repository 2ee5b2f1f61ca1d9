"""SGD, Adam and AdamW on flat vectors, with their state as explicit arrays.

``torch.optim`` is not used because its first step imports ``torch._dynamo``: about two seconds in every new silo
process. Tests check that these optimisers equal ``torch.optim``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import product

import torch
from torch import Tensor

from models.layout import Block
from partitions.common.errors import UserError


class Optimizer(ABC):
    """Optimiser of a flat vector, element by element."""

    # True where a step leaves an element with a zero gradient as it is
    only_where_gradient = False

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.warmup = 0
        self.taken = 0
        self.state: dict[str, Tensor] = {}

    def warm_up(self, steps: int) -> None:
        """Let the rate rise over the first steps: step s of W has s / (W + 1) of it, as torch's LinearLR."""
        self.warmup = steps
        self.only_where_gradient = self.only_where_gradient and not steps

    def step(self, vector: Tensor, gradient: Tensor) -> None:
        """Take one step, in place."""
        rate = self.lr
        self.taken += 1
        if self.taken <= self.warmup:
            rate *= self.taken / (self.warmup + 1)
        self.move(vector, gradient, rate)

    @abstractmethod
    def move(self, vector: Tensor, gradient: Tensor, rate: float) -> None:
        """Move the vector by one step with this rate, in place."""


class Sgd(Optimizer):
    """v <- m v + (g + wd w); w <- w - lr v, as ``torch.optim.SGD`` without dampening."""

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(lr)
        self.momentum, self.weight_decay = momentum, weight_decay
        self.only_where_gradient = not momentum and not weight_decay

    @torch.no_grad()
    def move(self, vector: Tensor, gradient: Tensor, rate: float) -> None:
        if self.weight_decay:
            gradient = gradient.add(vector, alpha=self.weight_decay)
        if self.momentum:
            velocity = self.state.get("momentum")
            if velocity is None:
                velocity = self.state["momentum"] = gradient.clone()
            else:
                velocity.mul_(self.momentum).add_(gradient)
            gradient = velocity
        vector.add_(gradient, alpha=-rate)


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, algorithm 1) with L2 weight decay in the gradient; ``amsgrad`` keeps the largest v.

    ``decoupled``: AdamW (Loshchilov and Hutter 2019, algorithm 2), whose decay shrinks the vector instead.
    """

    def __init__(
        self,
        lr: float,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        decoupled: bool = False,
    ) -> None:
        super().__init__(lr)
        self.decoupled = decoupled
        self.weight_decay = weight_decay
        self.amsgrad = amsgrad
        self.betas = betas
        self.eps = eps

    @torch.no_grad()
    def move(self, vector: Tensor, gradient: Tensor, rate: float) -> None:
        if not self.state:
            self.state = {
                "steps": torch.zeros(()),
                "m": torch.zeros_like(vector),
                "v": torch.zeros_like(vector),
            }
            if self.amsgrad:
                self.state["v_max"] = torch.zeros_like(vector)
        if self.decoupled:
            vector.mul_(1 - rate * self.weight_decay)
        elif self.weight_decay:
            gradient = gradient.add(vector, alpha=self.weight_decay)
        beta1, beta2 = self.betas
        # The count stays on the CPU: reading it from a GPU would synchronise at every step.
        self.state["steps"] = self.state["steps"].cpu() + 1
        steps = self.state["steps"].item()
        m = self.state["m"].lerp_(gradient, 1 - beta1)
        v = self.state["v"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if self.amsgrad:
            v = torch.maximum(self.state["v_max"], v, out=self.state["v_max"])
        denominator = v.sqrt().div_((1 - beta2**steps) ** 0.5).add_(self.eps)
        vector.addcdiv_(m, denominator, value=-rate / (1 - beta1**steps))


def make_optimizer(
    name: str,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> Optimizer:
    """Return the optimiser of that name (the settings have no other: sgd, adam, adamw), without state."""
    if name == "sgd":
        return Sgd(lr, momentum, weight_decay)
    return Adam(lr, weight_decay, amsgrad, decoupled=name == "adamw")


SHARE = re.compile(r"\s*(\S+)\s*=\s*(\d*\.?\d+(?:e-?\d+)?)\s*")


def read_shares(text: str) -> dict[str, float]:
    """Return shares of the learning rate by patterns of blocks' names. Raises UserError for another form."""
    entries = [SHARE.fullmatch(entry) for entry in text.split(",")] if text else []
    shares = {match[1]: float(match[2]) for match in entries if match}
    if len(shares) < len(entries) or not all(0 < share <= 1 for share in shares.values()):
        raise UserError(
            f"block-rates = {text[:200]!r}: NAME=SHARE with commas is needed here, each name once, shares above 0 and "
            "at most 1"
        )
    return shares


def block_shares(text: str, blocks: Sequence[Block]) -> list[float]:
    """Return the share of each layer block. Raises UserError for an unknown block, or one with two shares."""
    shares, names = read_shares(text), [block.name for block in blocks]
    fitting = {name: [p for p in shares if fnmatchcase(name, p)] for name in names}
    used = [pattern for patterns in fitting.values() for pattern in patterns[:1]]
    if max(map(len, fitting.values())) > 1 or shares.keys() != set(used):
        raise UserError(
            f"block-rates = {text[:200]!r}: each name must be of layer blocks, and a block in one entry alone; there "
            f"are: {', '.join(names)}"
        )
    return [shares[patterns[0]] if patterns else 1.0 for patterns in fitting.values()]


def rate_groups(
    text: str, blocks: Sequence[Block], parts: Sequence[slice]
) -> list[tuple[slice, float]]:
    """Return the parts of a vector with their shares of the learning rate; the blocks' shares divide parts."""
    if not text:
        return [(part, 1.0) for part in parts]
    groups = []
    for part, (block, share) in product(
        parts, zip(blocks, block_shares(text, blocks), strict=True)
    ):
        start, stop = max(part.start, block.start), min(part.stop, block.stop)
        if start < stop:
            groups.append((slice(start, stop), share))
    return groups
