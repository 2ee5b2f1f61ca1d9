"""Anonymous memory of samples on disk and in memory, and of evaluation beside training; each case in a fresh process.

    python -m benchmarks.memory [data] [signals] [evaluation]

data: a tenth of 60,000 pictures of 224 x 224 x 3 is read, divided over three silos, trained on and evaluated. signals:
12-channel float32 signals are loaded. evaluation: a ResNet-18 on pictures of 224 and 512 pixels, batch 8.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.common import table
from models.flat import FlatModel
from models.networks.registry import build
from models.samples import Samples, at_once
from models.training import loss_gradient, predict
from partitions import stored
from partitions.npz import write_npz
from partitions.silo_file import read_silo_file
from partitions.simulated import Division, part_of

MB = 1e6
PICTURES = (6000, 224, 224, 3)
SIGNALS = (20000, 12, 1000)


def anonymous() -> float:
    """Return this process's anonymous memory in MB: without pages of mapped files, which the kernel takes back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return (
        next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024 / MB
    )


def peak(work: Callable[[], object]) -> float:
    """Return the most anonymous memory during ``work``, in MB beyond that before it."""
    found, done = [anonymous()], threading.Event()

    def watch() -> None:
        while not done.is_set():
            found.append(anonymous())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return max(found) - found[0]


def epoch(model: FlatModel, train: Samples, size: int) -> None:
    for x, y in train.batches(torch.split(torch.arange(len(train)), size)):
        loss_gradient(model, x, y, functional.cross_entropy)


def one_file(file: str, on_disk: str) -> float:
    """Return the peak while a file is read, divided, trained on and evaluated."""
    stored.IN_MEMORY = 1 if on_disk == "disk" else 1 << 50
    model = FlatModel(nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 2)))

    def work() -> None:
        parts = [part_of(Division(file, "", "iid", 3, 1, 0.2), silo) for silo in range(3)]
        for data in (read_silo_file(file), *parts):
            epoch(model, Samples(data.train.x, data.train.y), 32)
            predict(model, Samples(data.test.x, data.test.y))

    return peak(work)


def loaded(file: str, on_disk: str) -> float:
    stored.IN_MEMORY = 1 if on_disk == "disk" else 1 << 50

    def work() -> None:
        data = read_silo_file(file)
        Samples(data.train.x, data.train.y).take(slice(32))

    return peak(work)


def evaluated(side: str, what: str) -> float:
    """Return the peak of a training step of 8 pictures, or of the evaluation of two batches."""
    model = FlatModel(build("resnet18", (3, int(side), int(side)), 2))
    shape = (int(side), int(side), 3)
    count = at_once((1, *shape), np.dtype(np.uint8)) + 8
    x = np.zeros((count, *shape), np.uint8)
    samples = Samples(x, np.arange(count) % 2)
    if what == "training":
        return peak(lambda: epoch(model, Samples(x[:8], np.arange(8) % 2), 8))
    return peak(lambda: predict(model, samples))


CASES = {"data": one_file, "signals": loaded, "evaluation": evaluated}


def measure(case: str, *arguments: str) -> float:
    command = [sys.executable, "-m", "benchmarks.memory", "--one", case, *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def of_file(case: str, shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "a.npz"))
        x = rng.integers(0, 255, shape, np.uint8).astype(dtype)
        write_npz(Path(file), {"x": x, "y": np.arange(len(x)) % 2})
        size = x.nbytes / MB
        rows = []
        for place in ("memory", "disk"):
            most = measure(case, file, place)
            rows.append([place, f"{most:.0f}", f"{most / size:.2f}"])
    print(f"{case}: {size:.0f} MB")
    print(table(rows, ["samples", "peak, MB", "of the samples' size"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs="+")
    parser.add_argument("cases", nargs="*")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.one:
        print(CASES[given.one[0]](*given.one[1:]))
        return
    chosen = given.cases or [*CASES]
    if "data" in chosen:
        of_file("data", PICTURES, "uint8")
    if "signals" in chosen:
        of_file("signals", SIGNALS, "float32")
    if "evaluation" in chosen:
        rows = []
        for side in ("224", "512"):
            training, evaluation = (
                measure("evaluation", side, w) for w in ("training", "evaluation")
            )
            rows.append(
                [side, f"{training:.0f}", f"{evaluation:.0f}", f"{evaluation / training:.2f}"]
            )
        print(table(rows, ["pixels", "training, MB", "evaluation, MB", "ratio"]))


if __name__ == "__main__":
    main()
