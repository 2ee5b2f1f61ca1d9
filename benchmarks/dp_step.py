"""What a private step costs, beside the plain one, and whether it is Opacus's: `python -m benchmarks.dp_step`.

Opacus is no dependency, and installs top-level packages `benchmarks` and `examples`. So it is taken from a folder of
its own, where there is one:

    pip install --no-deps --target /tmp/opacus opacus==1.6.0 opt-einsum
    python -m benchmarks.dp_step --opacus /tmp/opacus

Times are the best of ``--repeats``, taken in turns.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.initialisation import flat_model
from models.networks.registry import build
from models.privacy.clipping import Clipping
from models.privacy.noise import derived, digest_of, noised
from models.training import own_gradient

CASES: dict[str, tuple[Any, ...]] = {
    "fedala-cnn": (1, 28, 28),
    "small-cnn": (1, 8, 8),
    "mlp": (1, 8, 8),
    "fasttext": ("tokens", 200, 20000),
}
BATCH, CLASSES, CLIP, RATE = 64, 5, 0.5, 0.1


def batch(shape: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    y = torch.randint(0, CLASSES, (BATCH,))
    if shape[0] == "tokens":
        return torch.randint(1, shape[2], (BATCH, shape[1]), dtype=torch.int32), y
    return torch.randn(BATCH, *shape), y


def in_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Milliseconds of each call, the best of so many rounds of all."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats + 1):  # the first one warms up
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - started))
    return best


def flat(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def opacus_calls(name: str, x: Tensor, y: Tensor, total: Tensor) -> tuple[dict[str, Callable[[], object]], float]:
    """Its two ways as calls, and the largest difference of one step of its from ours."""
    samples = importlib.import_module("opacus.grad_sample")
    fast = importlib.import_module("opacus.grad_sample.grad_sample_module_fast_gradient_clipping")
    losses = importlib.import_module("opacus.utils.fast_gradient_clipping_utils")
    optimizers = importlib.import_module("opacus.optimizers")
    network = build(name, CASES[name], CLASSES)
    network.load_state_dict(
        {k: v.clone() for k, v in flat_model(name, CASES[name], CLASSES, None, "cpu").module.state_dict().items()}
    )
    module = samples.GradSampleModule(network)
    settings = {"noise_multiplier": 0.0, "max_grad_norm": CLIP, "expected_batch_size": BATCH}
    optimizer = optimizers.DPOptimizer(torch.optim.SGD(module.parameters(), lr=RATE), **settings)
    before = flat(module)
    F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    apart = float((before - RATE * total / BATCH - flat(module)).abs().max())
    ghost = fast.GradSampleModuleFastGradientClipping(build(name, CASES[name], CLASSES), max_grad_norm=CLIP)
    second = optimizers.DPOptimizerFastGradientClipping(torch.optim.SGD(ghost.parameters(), lr=RATE), **settings)
    criterion = losses.DPLossFastGradientClipping(ghost, second, torch.nn.CrossEntropyLoss(), "mean")

    def each() -> None:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.pre_step()

    def by_ghost() -> None:
        second.zero_grad()
        criterion(ghost(x), y).backward()
        second.pre_step()

    return {"Opacus, ghost": by_ghost, "Opacus, each sample": each}, apart


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dp_step", description=__doc__.splitlines()[0])
    parser.add_argument("--opacus", metavar="DIR", help="a folder that Opacus is installed in")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds of measurement (default: 5)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if args.opacus:
        sys.path.append(args.opacus)  # behind our own `benchmarks`
    for name, shape in CASES.items():
        torch.manual_seed(0)
        model, (x, y) = flat_model(name, shape, CLASSES, None, "cpu"), batch(shape)
        clipping = Clipping(model, CLIP)
        total, _ = clipping.total(x, y, F.cross_entropy, None, None)

        def private(model: Any = model, clipping: Any = clipping, x: Tensor = x, y: Tensor = y) -> None:
            found, _ = clipping.total(x, y, F.cross_entropy, None, None)
            noised(found, CLIP, derived(b"", "noise", digest_of([model.vector, found])))

        calls: dict[str, Callable[[], object]] = {
            "plain": lambda model=model, x=x, y=y: own_gradient(model, x, y, F.cross_entropy),  # type: ignore[misc]
            "clipped": lambda clipping=clipping, x=x, y=y: clipping.total(x, y, F.cross_entropy, None, None),  # type: ignore[misc]
            "clipped and noised": private,
        }
        apart = None
        if args.opacus:
            more, apart = opacus_calls(name, x, y, total)
            calls |= more
        found = in_turns(calls, args.repeats)
        times = ", ".join(f"{what} {ms:.1f} ms ({ms / found['plain']:.1f})" for what, ms in found.items())
        print(f"{name}: {times}" + ("" if apart is None else f"; a step differs from Opacus's by {apart:.1e}"))


if __name__ == "__main__":
    main()
