"""The in-process engine against the bare arithmetic, and every method against FedAvg.

    python -m benchmarks.engine [floor] [methods] [algebra] [evaluation] [augment] [text]
                                [--dataset mnist] [--device cuda] [--repeats 5]

floor: one FedAvg round over 12 silos against a plain loop of the same steps (same network, same batches, same threads,
float tensors loaded beforehand, torch's own autograd and an in-place SGD step); without evaluation, with checkpoints
on and off. methods: one round of each method over one of FedAvg; ``gradients`` is how many gradients a method needs
per FedAvg gradient, so ``overhead`` = ratio / gradients is what the method's own algebra costs. algebra: one round of
the methods with vector algebra of their own against plain loops of the same arithmetic (``bare.py``); 12 silos of 256
random grey pictures of 28x28, batches of 64, whatever the data set. evaluation: a round in which both models are
evaluated over one in which none is, on one thread, with the data set and with a random table of 30 columns and 224
training rows per silo; FedAvg, Local, and FedAvg with every other silo. text: a later FedALA round of fastText (98,635
words, batches of 10 texts of 200 positions, 4 silos) against a loop of plain modules and ``torch.optim.SGD``, with a
dense and a sparse gradient of the embedding, on one thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.bare import METHODS, Loop, PlainFedALA
from benchmarks.common import Prepared, each_method, interleaved, random_pictures, ratios, table

# Gradients per FedAvg gradient, by the method's definition: two models, two phases, K inner steps, a fine-tuning pass.
GRADIENTS = {
    "fedavg-ft": 2,
    "fedprox-ft": 2,
    "apfl": 2,
    "ditto": 2,
    "fedalt": 2,
    "fedapm": 2,
    "per-fedavg": 2,
    "pfedme": 5,
    "fedrep": 11,
}


Values = dict[str, object]


def values_of(given: Values, silos: int) -> Values:
    partition = "apple-practical" if given["dataset"] == "mnist" else "iid"
    return {"partition": partition, "silos": silos, "model": "auto", "threads": 0, **given}


def floor(given: Values, repeats: int) -> str:
    values = values_of(given, 12)
    engine, on_disk = Prepared(values), Prepared(values, on_disk=True)
    works = {
        "plain loop": Loop(engine, channels_last=False).round,
        "plain loop, channels-last": Loop(engine).round,
        "engine": engine.round,
        "engine with checkpoints": on_disk.round,
    }
    times = interleaved(works, repeats)
    relative, same = ratios(times, "plain loop"), ratios(times, "plain loop, channels-last")
    rows = [
        [n, f"{statistics.median(times[n]):.2f}", f"{relative[n]:.2f}", f"{same[n]:.2f}"]
        for n in works
    ]
    return table(
        rows, ["one round", "seconds", "over the plain loop", "over the channels-last loop"]
    )


def methods(given: Values, repeats: int) -> str:
    prepared = each_method(values_of(given, 12), Prepared)
    for one in prepared.values():  # past the first rounds, which differ for several methods
        one.round()
        one.round()
    times = interleaved({n: p.round for n, p in prepared.items()}, repeats)
    relative = ratios(times, "fedavg")
    rows = []
    for name in prepared:
        count = GRADIENTS.get(name, 1)
        rows.append(
            [name, f"{relative[name]:.2f}", str(count), f"{relative[name] / count:.2f}"]
        )
    return table(rows, ["method", "round over FedAvg's", "gradients", "overhead"])


def algebra(given: Values, repeats: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "random.npz"
        random_pictures(file, (28, 28, 1), 12, 256)
        rounds = {
            n: Prepared(
                {
                    **values_of({**given, "dataset": str(file)}, 12),
                    "strategy": n,
                    "learning-rate": 1e-4,
                }
            )
            for n in METHODS
        }
        works = {}
        for name, loop in METHODS.items():
            rounds[name].round()  # past the first, which differs for several methods
            works[f"{name}, bare"], works[name] = loop(rounds[name]).round, rounds[name].round
        times = interleaved(works, repeats)
    over_bare, over_engine = ratios(times, "fedavg, bare"), ratios(times, "fedavg")
    rows = []
    for name in METHODS:
        own = ratios({name: times[name], "bare": times[f"{name}, bare"]}, "bare")[name]
        rows.append(
            [
                name,
                f"{over_bare[f'{name}, bare']:.2f}",
                f"{over_engine[name]:.2f}",
                f"{own:.2f}",
            ]
        )
    return table(
        rows, ["method", "bare, over FedAvg's", "engine, over FedAvg's", "engine over bare"]
    )


def random_table(path: Path, rows: int) -> None:
    """Write rows of 30 columns in two linearly separable classes as one .npz file."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 30)).astype(np.float32)
    np.savez(path, x=x, y=(x @ rng.normal(size=30) > 0).astype(np.int64))


EVALUATED: dict[str, Values] = {
    "FedAvg": {},
    "FedAvg, half of the silos train": {"participation": 0.5},
    "Local": {"strategy": "local"},
}


def evaluation(given: Values, repeats: int) -> str:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.npz"
        random_table(file, 280 * 12)
        for dataset, model in ((given["dataset"], "auto"), (str(file), "mlp")):
            for name, own in EVALUATED.items():
                values = {
                    **values_of({**given, "dataset": dataset}, 12),
                    "threads": 1,
                    "model": model,
                    **own,
                }
                kinds = {
                    "none": Prepared(values),
                    "both": Prepared({**values, "evaluate-every": 1}),
                }
                times = interleaved({kind: one.round for kind, one in kinds.items()}, repeats)
                share = 1 - ratios(times, "both")["none"]
                rows.append(
                    [name, "table" if model == "mlp" else str(dataset), f"{100 * share:.0f} %"]
                )
    return table(rows, ["method", "data", "share of a round that is evaluation"])


AUGMENTED = {
    "flip,shift:2": ("flip,shift:2", (28, 28, 1)),
    "flip,shift:2,rotate:10,brightness:0.1": (
        "flip,shift:2,rotate:10,brightness:0.1",
        (28, 28, 1),
    ),
    "PLayer-FL's": ("rotate:10,shift:2.8,scale:0.1,perspective:0.2", (28, 28, 1)),
    "flip,shift:2,rotate:10,brightness:0.1, colour": (
        "flip,shift:2,rotate:10,brightness:0.1",
        (32, 32, 3),
    ),
}


def augment(given: Values, repeats: int) -> str:
    rows = []
    for name, (text, shape) in AUGMENTED.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "random.npz"
            random_pictures(file, shape, 4, 256)
            values = {
                **values_of({**given, "dataset": str(file)}, 4),
                "threads": 1,
                "model": "fedala-cnn",
            }
            kinds = {
                "plain": Prepared(values),
                "changed": Prepared({**values, "augment": text}),
            }
            times = interleaved({kind: one.round for kind, one in kinds.items()}, repeats)
        rows.append(
            [name, "x".join(map(str, shape)), f"{ratios(times, 'plain')['changed']:.2f}"]
        )
    return table(rows, ["augment", "pictures", "round over one without"])


VOCABULARY, LENGTH = 98_635, 200  # AG News as in FedALA


def random_texts(path: Path, silos: int, samples: int) -> None:
    """Write texts of 20 to 80 mostly frequent tokens in four classes, equally many for testing and training."""
    rng = np.random.default_rng(0)
    n = 2 * samples * silos
    x = 1 + (rng.random((n, LENGTH)) ** 3 * (VOCABULARY - 1)).astype(np.int32)
    x[np.arange(LENGTH) >= rng.integers(20, 81, (n, 1))] = 0
    np.savez(path, x=x, y=np.arange(n) % 4, vocabulary=np.array(VOCABULARY))


def text(given: Values, repeats: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.npz"
        random_texts(file, 4, 200)
        values = {
            **values_of({**given, "dataset": str(file)}, 4),
            "threads": 1,
            "batch-size": 10,
            "learning-rate": 0.1,
        }
        engine = Prepared({**values, "strategy": "fedala", "validation": 0.0})
        for _ in range(2):  # past the first rounds, in which the weights settle
            engine.round()
        works = {
            "plain loop": PlainFedALA(engine).round,
            "plain loop, sparse gradient": PlainFedALA(engine, sparse=True).round,
            "engine": engine.round,
        }
        times = interleaved(works, repeats)
    relative, sparse = ratios(times, "plain loop"), ratios(times, "plain loop, sparse gradient")
    rows = [
        [n, f"{statistics.median(times[n]):.2f}", f"{relative[n]:.2f}", f"{sparse[n]:.2f}"]
        for n in works
    ]
    return table(
        rows,
        [
            "one FedALA round of fastText",
            "seconds",
            "over the plain loop",
            "over the sparse one",
        ],
    )


WORKS = {work.__name__: work for work in (floor, methods, algebra, evaluation, augment, text)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=["floor", "methods"], help=", ".join(WORKS))
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print(
        f"{torch.__version__}, {given.device}, {os.cpu_count()} cores, data set {given.dataset}\n"
    )
    values = {"dataset": given.dataset, "device": given.device}
    for name in given.what:
        print(f"## {name}\n\n{WORKS[name](values, given.repeats)}\n")


if __name__ == "__main__":
    main()
