"""What a private step costs, beside the plain one, and whether it is Opacus's: `python -m benchmarks.dp audit step`.

Opacus is no dependency, and installs top-level packages `benchmarks` and `examples`. So it is taken from a folder of
its own, where there is one:

    pip install --no-deps --target /tmp/opacus opacus==1.6.0 opt-einsum
    OPACUS=/tmp/opacus python -m benchmarks.dp audit step

A step is a gradient and the update of the model. Times are the best of three, taken in turns, of one core.
Memory is the most at once, with model, gradient and batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from benchmarks.common import interleaved
from models.initialisation import flat_model
from models.networks.registry import build
from models.privacy.clipping import Clipping
from models.privacy.noise import add_noise, derive_key, digest_of
from models.tasks.segmentation import segmentation_loss
from models.training import own_gradient

# Every built-in network that mixes no records; Opacus knows the first four
CASES: dict[str, tuple[Any, ...]] = {
    "fedala-cnn": (1, 28, 28),
    "small-cnn": (1, 8, 8),
    "mlp": (1, 8, 8),
    "fasttext": ("tokens", 200, 20000),
    "apple-cnn": (1, 28, 28),
    "diversifed-cnn": (3, 32, 32),
    "fedapm-cnn": (3, 32, 32),
    "player-cnn": (1, 28, 28),
    "player-heart": (10,),
    "linear": (30,),
    "fedapm-signals": (3, 128),
    "fedapm-image-text": ("tokens", 60, 5000),
    "player-transformer": ("tokens", 119, 9520),
    "vit-s": (3, 64, 64),
    "unet": (1, 32, 32),
}
OPACUS = tuple(CASES)[:4]
# Records of a batch, for all others BATCH
FEWER = {"vit-s": 16, "player-transformer": 16, "unet": 16}
BATCH, CLASSES, CLIP, RATE = 64, 5, 0.5, 0.1


def batch(name: str, records: int = BATCH) -> tuple[Tensor, Tensor]:
    shape = CASES[name]
    y = torch.randint(0, CLASSES, (records, *(shape[1:] if name == "unet" else ())))
    if shape[0] == "tokens":
        return torch.randint(1, shape[2], (records, shape[1]), dtype=torch.int32), y
    return torch.randn(records, *shape), y


def peak(call: Callable[[], object]) -> int:
    """Return the peak of PyTorch's bytes in a call, above those before it."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        call()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(accumulate(sizes), default=0)


def difference_from_opacus(name: str, x: Tensor, y: Tensor, total: Tensor) -> float:
    """Return the largest difference of Opacus's step without noise from ours, whose sum is ``total``."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    network = build(name, CASES[name], CLASSES)
    start = flat_model(name, CASES[name], CLASSES, None, "cpu").module
    network.load_state_dict(start.state_dict())
    module = GradSampleModule(network)
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=RATE),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        expected_batch_size=BATCH,
    )
    before = parameters_to_vector(module.parameters()).detach().clone()
    F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    after = parameters_to_vector(module.parameters()).detach()
    return float((before - RATE * total / BATCH - after).abs().max())


def steps(
    name: str, records: int
) -> tuple[dict[str, Callable[[], object]], Clipping, tuple[Tensor, Tensor]]:
    """Return a plain and a private step of a network, each with its model's update, the clipping, and the batch."""
    torch.manual_seed(0)
    model, (x, y) = flat_model(name, CASES[name], CLASSES, None, "cpu"), batch(name, records)
    loss = segmentation_loss if name == "unet" else F.cross_entropy
    clipping = Clipping(model, CLIP)

    def update() -> None:
        model.step(lambda vector, gradient: vector.sub_(gradient, alpha=1e-9))

    def plain() -> None:
        own_gradient(model, x, y, loss)
        update()

    def private() -> None:
        total, _ = clipping.total(x, y, loss, None, None)
        key = derive_key(b"", "noise", digest_of([model.vector, total]))
        model.gradient.copy_(add_noise(total, CLIP, key).div_(records))
        update()

    clipping.total(x, y, loss, None, None)  # the trial
    return {"plain": plain, "private": private}, clipping, (x, y)


COLUMNS = (
    "network | numbers | records | clipped | plain, ms | private, ms | ratio | plain, MB | private, MB | ratio | "
    "from Opacus's step"
)


def costs(opacus: bool) -> Iterator[list[object]]:
    """Yield a row for each network: time and memory of a private step compared with a plain one, in turns."""
    for name in CASES:
        records = FEWER.get(name, BATCH)
        calls, clipping, (x, y) = steps(name, records)
        size, apart = clipping.model.layout.size, ""
        if opacus and name in OPACUS:
            total, _ = clipping.total(x, y, F.cross_entropy, None, None)
            apart = f"{difference_from_opacus(name, x, y, total):.1e}"
        times = interleaved(calls, 3, time.thread_time).values()
        plain, private = (1e3 * min(of) for of in times)
        # The model, its gradient, the batch
        kept = 8 * size + x.numel() * x.element_size()
        before, after = ((kept + peak(call)) / 1e6 for call in calls.values())
        how = "together" if all(clipping.tried.values()) else "one by one"
        memory = before, after, after / before
        yield [name, size, records, how, plain, private, private / plain, *memory, apart]
