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

import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Prepared, command_line, interleaved, print_table, ratios
from models.initialisation import flat_model
from models.samples import Samples
from models.training import use_threads
from partitions.common.errors import UserError
from partitions.npz import write_npz
from partitions.simulated import part_of
from strategies import strategies

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
        for index in range(common.silos):
            data = part_of(settings.division, index)
            samples = Samples(data.train.x, data.train.y, torch.device(common.device))
            x, y = samples.take(slice(None))
            # contiguous() does not change grey pictures
            self.train.append((x.clone(memory_format=layout) if x.dim() == 4 else x, y))
        name, options = settings.model_for(data.input_shape)
        self.model = flat_model(name, data.input_shape, data.classes, options, common.device)
        self.center = self.model.vector.clone()
        self.rate, self.batch_size = common.learning_rate, common.batch_size

    def round(self) -> None:
        w, g = self.model.vector, self.model.gradient
        models = self.center.new_empty(len(self.train), len(self.center))
        for (x, y), result in zip(self.train, models, strict=True):
            w.copy_(self.center)
            order = torch.randperm(len(y), device=y.device)
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
def random_pictures(shape: tuple[int, ...], silos: int, samples: int) -> Iterator[Values]:
    """Context with the settings for a file of random pictures of ten classes, ``samples`` per silo for training."""
    rng, count = np.random.default_rng(0), silos * samples
    x, y = rng.integers(0, 256, (count, *shape), np.uint8), np.arange(count) % 10
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "random.npz"
        write_npz(file, {"x_train": x, "y_train": y, "x_test": x, "y_test": y})
        yield {"dataset": str(file), "validation": 0.0}


def floor(options: Values, repeats: int) -> None:
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
    print_table(
        "one round | seconds | over the plain loop | over the channels-last loop",
        ([n, statistics.median(times[n]), relative[n], same[n]] for n in works),
    )


def methods(options: Values, repeats: int) -> None:
    works = {}
    for name in sorted(strategies()):
        with suppress(UserError):  # fedbn without its layers
            works[name] = Prepared({**values_of(options, 12), "strategy": name}).round
    for work in works.values():  # past the first rounds, which differ for several methods
        work()
        work()
    relative = ratios(interleaved(works, repeats), "fedavg")
    counts = {name: GRADIENTS.get(name, 1) for name in works}
    print_table(
        "method | round over FedAvg's | gradients | overhead",
        ([name, relative[name], n, relative[name] / n] for name, n in counts.items()),
    )


def augment(options: Values, repeats: int) -> None:
    rows = []
    for text, shape in AUGMENTED:
        with random_pictures(shape, 4, 256) as pictures:
            values = values_of({**options, **pictures, "threads": 1}, 4)
            values["model"] = "fedala-cnn"
            works = {
                "plain": Prepared(values).round,
                "changed": Prepared({**values, "augment": text}).round,
            }
            times = interleaved(works, repeats)
        rows.append([text, shape, ratios(times, "plain")["changed"]])
    print_table("augment | pictures | round over one without", rows)


def precision(options: Values, repeats: int) -> None:
    rows = []
    for model, shape in NETWORKS.items():
        with random_pictures(shape, 2, 512) as pictures:
            values = values_of({**options, **pictures, "learning-rate": 1e-3}, 2)
            works, memory = {}, {}
            for name, changes in FORMATS.items():
                works[name] = Prepared({**values, "model": model, **changes}).round
                works[name]()
                torch.cuda.reset_peak_memory_stats()
                works[name]()
                memory[name] = torch.cuda.max_memory_allocated() / 2**30
            times = interleaved(works, repeats)
        for name, relative in ratios(times, next(iter(FORMATS))).items():
            speed = round(1024 / statistics.median(times[name]))
            rows.append([model, name, speed, relative, memory[name]])
    print_table("network | numbers | pictures a second | time over the first | GiB", rows)


WORKS = {work.__name__: work for work in (floor, methods, augment, precision)}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("what", nargs="*", default=["floor", "methods"], help=", ".join(WORKS))
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    options = {"dataset": args.dataset, "device": args.device}
    print(f"{torch.__version__}, {os.cpu_count()} cores, {options}")
    for name in args.what:
        print(f"\n## {name}\n")
        WORKS[name](options, args.repeats)


if __name__ == "__main__":
    main()
