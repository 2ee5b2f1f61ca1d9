"""The in-process engine against a plain training loop, and every method against FedAvg.

    python -m benchmarks.engine [floor] [methods] [augment] [precision] [--dataset mnist] [--device cuda] [--repeats 5]

floor: one FedAvg round over 12 silos against a plain loop of the same steps (same network, same batches, same threads,
float tensors loaded beforehand, torch's own autograd and an in-place SGD step); without evaluation, with checkpoints
on and off. methods: one round of each method over one of FedAvg; ``gradients`` is how many gradients a method needs
per FedAvg gradient, so ``overhead`` = ratio / gradients is what the method's own algebra costs. augment: a round with
each augmentation over one without, 4 silos, one thread. precision: on a GPU, one round of two silos of 512 random
pictures by ``precision`` and ``tf32``, and the most memory of the card that PyTorch took.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import Prepared, each_method, interleaved, random_pictures, ratios, table
from client.local_data import device_of, open_data
from models.flat import FlatModel
from models.initialisation import initial_model
from models.networks.registry import build
from models.samples import Samples
from models.training import use_threads

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
AUGMENTED = (
    ("flip,shift:2", (28, 28, 1)),
    ("flip,shift:2,rotate:10,brightness:0.1", (28, 28, 1)),
    ("rotate:10,shift:2.8,scale:0.1,perspective:0.2", (28, 28, 1)),
    ("flip,shift:2,rotate:10,brightness:0.1", (32, 32, 3)),
)
NETWORKS = {"resnet50": (224, 224, 3), "resnet18": (224, 224, 3), "fedala-cnn": (28, 28, 1)}
FORMATS: dict[str, dict[str, object]] = {
    "float32, tf32 = off": {"tf32": "off"},
    "float32, tf32 = auto": {},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "bf16, deterministic": {"precision": "bf16", "deterministic": True},
}
Values = dict[str, object]


class Loop:
    """The least cost of a FedAvg round: an epoch of SGD in every silo from the global model, then the mean."""

    def __init__(self, prepared: Prepared, channels_last: bool = True) -> None:
        settings, common = prepared.settings, prepared.settings.common
        use_threads(common.threads)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.train: list[tuple[Tensor, Tensor]] = []
        contexts = list(prepared.federation.grid.contexts.values())  # type: ignore[attr-defined]
        self.device = device_of(settings, contexts[0])
        for context in contexts:
            data = open_data(settings, context)
            x, y = Samples(data.train.x, data.train.y, self.device).take(slice(None))
            # contiguous() does not change grey pictures
            self.train.append((x.clone(memory_format=layout) if x.dim() == 4 else x, y))
        shape = data.input_shape
        name, options = settings.model_for(shape)
        self.model = FlatModel(build(name, shape, data.classes, options), self.device)
        self.rate, self.batch_size = common.learning_rate, common.batch_size
        initial = initial_model(name, shape, data.classes, options, common.seed)("")
        self.center = initial.to(self.device, copy=True)

    def round(self) -> None:
        w, g = self.model.vector, self.model.gradient
        models = self.center.new_empty(len(self.train), len(self.center))
        for (x, y), result in zip(self.train, models, strict=True):
            w.copy_(self.center)
            order = torch.randperm(len(y), device=self.device)
            for index in torch.split(order, self.batch_size):
                g.zero_()
                logits = self.model.module(x[index])
                torch.nn.functional.cross_entropy(logits, y[index]).backward()  # type: ignore[no-untyped-call]
                w.sub_(g, alpha=self.rate)
            result.copy_(w)
        torch.mean(models, 0, out=self.center)


def values_of(options: Values, silos: int) -> Values:
    partition = "apple-practical" if options["dataset"] == "mnist" else "iid"
    return {"partition": partition, "silos": silos, "model": "auto", "threads": 0, **options}


@contextmanager
def on_pictures(shape: tuple[int, ...], silos: int, samples: int) -> Iterator[str]:
    """Context with the path of a file of random pictures."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "random.npz"
        random_pictures(file, shape, silos, samples)
        yield str(file)


def floor(options: Values, repeats: int) -> str:
    values = values_of(options, 12)
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


def methods(options: Values, repeats: int) -> str:
    prepared = each_method(values_of(options, 12), Prepared)
    for (
        federation
    ) in prepared.values():  # past the first rounds, which differ for several methods
        federation.round()
        federation.round()
    relative = ratios(interleaved({n: p.round for n, p in prepared.items()}, repeats), "fedavg")
    counts = {name: GRADIENTS.get(name, 1) for name in prepared}
    rows = [
        [name, f"{relative[name]:.2f}", str(count), f"{relative[name] / count:.2f}"]
        for name, count in counts.items()
    ]
    return table(rows, ["method", "round over FedAvg's", "gradients", "overhead"])


def augment(options: Values, repeats: int) -> str:
    rows = []
    for text, shape in AUGMENTED:
        with on_pictures(shape, 4, 256) as file:
            values = values_of({**options, "dataset": file, "threads": 1}, 4)
            values["model"] = "fedala-cnn"
            works = {
                "plain": Prepared(values).round,
                "changed": Prepared({**values, "augment": text}).round,
            }
            times = interleaved(works, repeats)
        rows.append(
            [text, "x".join(map(str, shape)), f"{ratios(times, 'plain')['changed']:.2f}"]
        )
    return table(rows, ["augment", "pictures", "round over one without"])


def precision(options: Values, repeats: int) -> str:
    rows, base = [], next(iter(FORMATS))
    for model, shape in NETWORKS.items():
        with on_pictures(shape, 2, 512) as file:
            values = values_of({**options, "dataset": file, "learning-rate": 1e-3}, 2)
            works, memory = {}, {}
            for name, changes in FORMATS.items():
                works[name] = Prepared({**values, "model": model, **changes}).round
                works[name]()
                torch.cuda.reset_peak_memory_stats()
                works[name]()
                memory[name] = torch.cuda.max_memory_allocated() / 2**30
            times = interleaved(works, repeats)
        relative = ratios(times, base)
        for name in FORMATS:
            pictures = f"{1024 / statistics.median(times[name]):.0f}"
            rows.append([model, name, pictures, f"{relative[name]:.2f}", f"{memory[name]:.2f}"])
    return table(
        rows, ["network", "numbers", "pictures a second", "time over the first", "GiB"]
    )


WORKS = {work.__name__: work for work in (floor, methods, augment, precision)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=["floor", "methods"], help=", ".join(WORKS))
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(
        f"{torch.__version__}, {args.device}, {os.cpu_count()} cores, data set {args.dataset}\n"
    )
    options = {"dataset": args.dataset, "device": args.device}
    for name in args.what:
        print(f"## {name}\n\n{WORKS[name](options, args.repeats)}\n")


if __name__ == "__main__":
    main()
