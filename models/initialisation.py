"""Networks and their initial weights: drawn from (seed, purpose), equal in every process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from models.flat import FlatModel
from models.layout import join_parameters
from models.lora import adapt
from models.networks.blocks import Make, with_method
from models.networks.registry import build, resolve, spec_of
from models.shapes import Shape
from models.trainable import WHOLE, Part, freeze
from models.training import generator, seed_torch
from models.weights import start_from
from partitions.common.memory import return_memory

SMALL = 1 << 24  # bytes


@lru_cache(maxsize=4)
def flat_model(
    name: str,
    shape: Shape,
    classes: int,
    options: Any,
    device: str,
    head: Make = None,
    part: Part = WHOLE,
) -> FlatModel:
    """Return the network that all silos of this process use in turn; parameters outside ``part`` come from its seed."""
    model = FlatModel(
        _build_seeded(name, shape, classes, options, part.seed, "", head, part), device
    )
    return_memory()
    return model


@lru_cache(maxsize=4)
def initial_model(
    name: str,
    shape: Shape,
    classes: int,
    options: Any,
    seed: int,
    head: Make = None,
    part: Part = WHOLE,
) -> Callable[[str], Tensor]:
    """Return ``initial(purpose)``: the initial vector (Σ,) for (seed, purpose), equal in every process.

    Vectors that somebody holds are kept, and the last two small ones.
    """
    held, last = WeakValueDictionary[str, Tensor](), deque[Tensor](maxlen=2)

    def initial(purpose: str) -> Tensor:
        if (vector := held.get(purpose)) is None:
            network = _build_seeded(name, shape, classes, options, seed, purpose, head, part)
            vector = join_parameters([p for p in network.parameters() if p.requires_grad])
            held[purpose] = vector
            if vector.nbytes < SMALL:
                last.append(vector)
            else:
                del network
                return_memory()
        return vector

    return initial


def _build_seeded(
    name: str,
    shape: Shape,
    classes: int,
    options: Any,
    seed: int,
    purpose: str,
    head: Make,
    part: Part,
) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        seed_torch(generator(seed, "model", purpose))

        def start() -> torch.nn.Module:
            network = build(name, shape, classes, options)
            if part.weights is not None:
                start_from(network, part.weights, spec_of(resolve(name, shape)).published)
            return network

        def finish(network: torch.nn.Module) -> torch.nn.Module:
            network = freeze(network, part)
            if not part.lora_rank:
                return network
            return adapt(network, part.lora_rank, part.lora_alpha, part.lora_residual)

        return with_method(head, shape, start, finish)
