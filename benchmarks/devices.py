"""A silo's training on several devices: processor time of a step by one process, and by one for each device.

    python -m benchmarks.devices [cpu,cpu]

``resnet18`` on pictures of 64x64, batch 64, one thread a process; the two turn by turn, the medians. Other work on the
machine changes the clock, and hardly a process's processor time.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import tempfile
import time
from statistics import median

import torch
from torch.nn.functional import cross_entropy

from models.flat import Passes
from models.initialisation import flat_model
from models.networks.blocks import StemSettings
from models.optimizers import Sgd
from models.parallel.group import Group, join_group
from models.training import loss_gradient

BATCH, SIDE, CLASSES, STEPS, TURNS = 64, 64, 10, 3, 3


def seconds_of(device: str, group: Group | None) -> list[float]:
    """Return the seconds of each step, after one that is not measured."""
    model = flat_model("resnet18", (3, SIDE, SIDE), CLASSES, StemSettings(), device)
    model.compute(Passes(group=group))
    optimizer, times = Sgd(0.01), list[float]()
    torch.manual_seed(1)
    x = torch.randn(BATCH, 3, SIDE, SIDE).to(device)
    y = torch.randint(CLASSES, (BATCH,)).to(device)
    for _ in range(1 + STEPS):
        loss_gradient(model, x, y, cross_entropy)
        optimizer.step(model.vector, model.gradient)
        float(model.vector[0])
        times.append(time.process_time())
    return [after - before for before, after in itertools.pairwise(times)]


def run_rank(rank: int, devices: tuple[str, ...], folder: str) -> None:
    """Measure as one of several processes; the first alone in turns."""
    torch.set_num_threads(1)
    group = join_group(rank, folder, devices)
    alone, together = list[float](), list[float]()
    for _ in range(TURNS):
        if not rank:
            alone += seconds_of(devices[0], None)
        group.check_equal(torch.zeros(1, device=devices[rank]))
        together += seconds_of(devices[rank], group)
    if not rank:
        a, b = median(alone), median(together)
        print(f"one process {a:.2f} s a step, {len(devices)} {b:.2f} s each: {a / b:.2f}")


def main() -> None:
    devices = tuple((sys.argv[1:] or ["cpu,cpu"])[0].split(","))
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            spawn.Process(target=run_rank, args=(rank, devices, folder))
            for rank in range(len(devices))
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()
