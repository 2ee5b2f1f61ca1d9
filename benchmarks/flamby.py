"""FLamby's benchmark of Fed-Heart-Disease and Fed-TCGA-BRCA beside silofl, with its own settings and seeds.

    SILOFL_DATA=DIR python -m benchmarks.flamby [--out FOLDER]       eight methods, five seeds, two data sets: minutes

FLamby (NeurIPS 2022, arXiv 2210.04620) publishes results per seed (owkin/FLamby, results_benchmark_fed_*, commit
edacf54). A cell is the mean over silos of the test score, then mean and standard deviation (n - 1) over seeds 42 to
46. A round is 100 updates of every silo (``local-steps``) by SGD; ``local`` and ``pooled`` train once, with Adam. Test
parts, preprocessing and initial weights are FLamby's (:func:`write_start`). The order of batches is not: so the last
column has the difference in units of FLamby's standard deviation over seeds.

Two things are FLamby's that silofl has otherwise:

* Its logistic regression has one output, ours two, w1 and w0. Each moves by eta g, so the log odds w1 - w0 move by 2
  eta g: half of FLamby's rates, at silos and server, give its step.
* Its Cox loss divides by the samples of a batch, ours by the events (:func:`by_samples`).

FedAdagrad has beta_1 = 0.9, as FLamby's, where its paper has 0 (Reddi et al., ICLR 2021).

``--out`` gets ``results_benchmark_silofl_DATASET.csv``: a line per seed, method and silo, with FLamby's columns.
"""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.common import command_line, final_scores, print_table, whole_run
from models.tasks.survival import Survival, cox_loss
from partitions.common.files import write_atomically
from server.results.history import csv_text

SEEDS = range(42, 47)


class PublishedCell(NamedTuple):
    """What FLamby publishes of a method: mean and deviation over seeds; and the settings that it took."""

    mean: float
    deviation: float
    settings: Mapping[str, Any]


class Benchmark(NamedTuple):
    """One data set: the score, the settings of all methods, and our network's two sizes."""

    dataset: str
    metric: str
    settings: Mapping[str, Any]
    cells: Mapping[str, PublishedCell]
    columns: int
    outputs: int


def _adaptive(method: str, learning_rate: float, server: float) -> dict[str, Any]:
    settings = {"server-learning-rate": server, "tau": 1e-8, "beta-1": 0.9}
    if method != "fedadagrad":
        settings["beta-2"] = 0.999
    return {"learning-rate": learning_rate, **{f"{method}.{k}": v for k, v in settings.items()}}


def _alone(learning_rate: float, epochs: int) -> dict[str, Any]:
    """FLamby's baselines are trained once, with Adam."""
    alone = {"local-steps": 0, "local-epochs": epochs, "rounds": 1, "optimizer": "adam"}
    return {**alone, "learning-rate": learning_rate}


HEART = Benchmark(
    "heart-flamby",
    "accuracy",
    {"silos": 4, "rounds": 15, "batch-size": 4, "normalization": "silo"},
    {
        "pooled": PublishedCell(0.735, 0.003, _alone(0.001 / 2, 50)),
        "local": PublishedCell(0.730, 0.029, _alone(0.001 / 2, 50)),
        "fedavg": PublishedCell(0.685, 0.028, {"learning-rate": 0.001 / 2}),
        "fedprox": PublishedCell(
            0.685, 0.028, {"learning-rate": 0.001 / 2, "fedprox.mu": 0.01}
        ),
        "scaffold": PublishedCell(0.684, 0.028, {"learning-rate": 0.001 / 2}),
        "fedadagrad": PublishedCell(
            0.731, 0.013, _adaptive("fedadagrad", 0.003162 / 2, 0.316228 / 2)
        ),
        "fedadam": PublishedCell(0.726, 0.014, _adaptive("fedadam", 0.01 / 2, 0.01 / 2)),
        "fedyogi": PublishedCell(0.731, 0.013, _adaptive("fedyogi", 0.003162 / 2, 0.01 / 2)),
    },
    columns=13,
    outputs=2,
)
BRCA = Benchmark(
    "tcga-brca",
    "c_index",
    {"silos": 6, "rounds": 5, "batch-size": 8, "normalization": "none"},
    {
        "pooled": PublishedCell(0.676, 0.095, _alone(0.1, 30)),
        "local": PublishedCell(0.689, 0.009, _alone(0.1, 30)),
        "fedavg": PublishedCell(0.732, 0.181, {"learning-rate": 0.1}),
        "fedprox": PublishedCell(0.729, 0.168, {"learning-rate": 0.1, "fedprox.mu": 0.1}),
        "scaffold": PublishedCell(0.687, 0.036, {"learning-rate": 0.01}),
        "fedadagrad": PublishedCell(0.813, 0.005, _adaptive("fedadagrad", 0.01, 1.0)),
        "fedadam": PublishedCell(0.815, 0.026, _adaptive("fedadam", 0.01, 0.1)),
        "fedyogi": PublishedCell(0.815, 0.026, _adaptive("fedyogi", 0.01, 0.1)),
    },
    columns=39,
    outputs=1,
)
COMMON: dict[str, Any] = {
    "partition": "natural",
    "validation": 0.0,
    "model": "mlp",
    "mlp.hidden": "",
    "robust": "none",
    "weight-cap": 0.0,
    "threads": 1,
    "device": "cpu",
    "local-steps": 100,
}


def by_samples(outputs: Tensor, y: Tensor) -> Tensor:
    """Return a batch's Cox loss divided by its samples, as FLamby's."""
    return cox_loss(outputs, y) * y[:, 1].sum().clamp(min=1) / len(y)


def write_start(path: Path, benchmark: Benchmark, seed: int) -> None:
    """Write FLamby's initial weights under this seed: w of one output. Two outputs have -w / 2 and w / 2."""
    torch.manual_seed(seed)
    weight, bias = torch.nn.Linear(benchmark.columns, 1).parameters()
    sides = torch.tensor([1.0] if benchmark.outputs == 1 else [-0.5, 0.5])
    save_file({"fc1.weight": sides[:, None] * weight, "fc1.bias": sides * bias}, path)


def scores(benchmark: Benchmark, method: str, seed: int) -> dict[str, float]:
    """Return each silo's test score after the last round: of the shared model, or for ``local`` of its own."""
    settings = {**COMMON, **benchmark.settings, **benchmark.cells[method].settings}
    settings |= {"strategy": method, "seed": seed, "dataset": benchmark.dataset}
    settings["evaluate-every"] = settings["rounds"]
    loss = mock.patch.object(Survival, "own_loss", staticmethod(by_samples))
    with loss, TemporaryDirectory() as folder:
        start = Path(folder) / "start.safetensors"
        write_start(start, benchmark, seed)
        loop = whole_run({**settings, "init-weights": str(start)})
    return final_scores(loop, benchmark.metric)


def compared(benchmark: Benchmark, out: Path | None) -> Iterator[list[str]]:
    """Yield a row of the table for each method; write the scores in FLamby's form into ``out``."""
    lines: list[list[str]] = []
    for method, cell in benchmark.cells.items():
        means, silos = [], defaultdict(list)
        for seed in SEEDS:
            of_seed = scores(benchmark, method, seed)
            means.append(statistics.fmean(of_seed.values()))
            for number, (silo, value) in enumerate(sorted(of_seed.items())):
                silos[silo].append(value)
                lines.append([f"Local Test {number}", repr(value), method, str(seed)])
        mean, deviation = statistics.fmean(means), statistics.stdev(means)
        yield [
            benchmark.dataset,
            method,
            f"{cell.mean:.3f} ({cell.deviation:.3f})",
            f"{mean:.3f} ({deviation:.3f})",
            " ".join(f"{statistics.fmean(values):.3f}" for values in silos.values()),
            f"{(mean - cell.mean) / cell.deviation:+.1f}",
        ]
    if out:
        file = out / f"results_benchmark_silofl_{benchmark.dataset}.csv"
        write_atomically(file, csv_text([["Test", "Metric", "Method", "Seed"], *lines]))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, help="folder for the scores in FLamby's form")
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rows = (row for benchmark in (HEART, BRCA) for row in compared(benchmark, args.out))
    print_table(
        "data set | method | FLamby | silofl | its silos | difference / deviation", rows
    )


if __name__ == "__main__":
    main()
