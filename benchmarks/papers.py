"""The papers' own statistics of finished runs, from ``history.csv``; docs/papers.md compares them with the papers.

    python -m benchmarks.papers RUN...

accuracy: the unweighted mean over silos of test accuracy in its best round (chosen on test data, as in the papers), of
the received and of the personal models; the mean over seeds. A silo that misses a round counts with its last value.

FedALA (arXiv 2212.01197): accuracy weighted by test samples, in its best round (*by samples*).

FedAPM (KDD 2025): accuracy, weighted F1 and AUC, means over silos, each in its own best round (*each best*).

PLayer-FL (arXiv 2502.08829): of each silo the locally trained model (personal) of least validation loss (cross-entropy;
the authors' code takes the training loss, which is another where that is focal), its test macro-F1; F1 is the mean over
silos, weighted by test samples, then the median over seeds with its 95 % bootstrap interval. Fairness is the variance
over silos of their median F1, the incentivised participation rate (IPR) the share of silos whose median F1 is above
those of ``local`` and of ``fedavg``, which must be among the runs.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import command_line, print_table
from server.results.history import History, Row, history_file
from server.results.summary import values_by_round

Runs = Mapping[str, Mapping[int, list[Row]]]  # method -> seed -> rows


def read_runs(folders: Sequence[Path]) -> Runs:
    """Read the rows of all runs. Raises ValueError for a folder without a history, or a repeated method and seed."""
    runs: dict[str, dict[int, list[Row]]] = defaultdict(dict)
    for folder in folders:
        if not history_file(folder / "history.csv").is_file():
            raise ValueError(f"{folder} has no history.csv: name run directories of silofl")
        history = History(folder / "history.csv")
        for method, seed in dict.fromkeys(row.which for row in history.rows):
            if seed in runs[method]:
                raise ValueError(
                    f"{method} with seed {seed} is in {folder} and in a folder before it"
                )
            runs[method][seed] = history.of(method, seed)
    return runs


def means_by_round(
    rows: Sequence[Row], snapshot: str, metric: str = "accuracy"
) -> dict[int, float]:
    """Return for each round the mean test score over silos."""
    by_round = values_by_round(rows, "test", snapshot, metric)
    return {number: statistics.fmean(silos.values()) for number, silos in by_round.items()}


def best_round(rows: Sequence[Row], snapshot: str) -> tuple[int, float]:
    """Return (round, mean test accuracy over silos) of the best round; (0, nan) where there is none."""
    means = means_by_round(rows, snapshot)
    return max(means.items(), key=lambda item: item[1], default=(0, math.nan))


def best_by_samples(rows: Sequence[Row], snapshot: str) -> float:
    """Return FedALA's statistic: the best round's mean test accuracy over silos, weighted by their test samples."""
    counts = {r.silo: r.n or 0 for r in rows if r.split == "test" and r.metric == "accuracy"}
    means = []
    for values in values_by_round(rows, "test", snapshot).values():
        total = sum(counts[silo] for silo in values)
        means += [sum(v * counts[silo] for silo, v in values.items()) / total] if total else []
    return max(means, default=math.nan)


def best_of_each(rows: Sequence[Row], snapshot: str) -> list[float]:
    """Return FedAPM's statistics: mean test accuracy, weighted F1 and AUC over silos, each in its own best round."""
    return [
        max(means_by_round(rows, snapshot, metric).values(), default=math.nan)
        for metric in ("accuracy", "weighted_f1", "auc")
    ]


def selected(rows: Sequence[Row], metric: str = "macro_f1") -> dict[str, Row]:
    """Return each silo's test metric of its personal model in the round with the least validation loss."""
    personal = [r for r in rows if r.snapshot == "personal" and not math.isnan(r.value)]
    chosen: dict[str, tuple[float, int]] = {}
    for r in personal:
        if (r.split, r.metric) == ("val", "loss"):
            chosen[r.silo] = min(chosen.get(r.silo, (math.inf, 0)), (r.value, r.round))
    tested = {(r.silo, r.round): r for r in personal if (r.split, r.metric) == ("test", metric)}
    return {silo: tested[silo, at] for silo, (_, at) in chosen.items() if (silo, at) in tested}


def weighted(rows: Mapping[str, Row]) -> float:
    """Return the mean over silos, weighted by test samples."""
    total = sum(r.n or 0 for r in rows.values())
    return sum(r.value * (r.n or 0) for r in rows.values()) / total if total else math.nan


def median_interval(samples: Sequence[float], draws: int = 10_000) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the median."""
    drawn = np.random.default_rng(0).choice(np.asarray(samples), size=(draws, len(samples)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(low), float(high)


def silo_medians(seeds: Mapping[int, list[Row]]) -> dict[str, float]:
    """Return each silo's median over seeds of its selected F1."""
    of_silos: dict[str, list[float]] = defaultdict(list)
    for rows in seeds.values():
        for silo, row in selected(rows).items():
            of_silos[silo].append(row.value)
    return {silo: statistics.median(f1) for silo, f1 in of_silos.items()}


def accuracy_rows(runs: Runs) -> Iterator[list[object]]:
    for method, seeds in runs.items():
        for snapshot in ("received", "personal"):
            best = [best_round(rows, snapshot) for rows in seeds.values()]
            if math.isnan(best[0][1]):
                continue
            by_samples = [best_by_samples(rows, snapshot) for rows in seeds.values()]
            each = [best_of_each(rows, snapshot) for rows in seeds.values()]
            means = (statistics.fmean(column) for column in zip(*each, strict=True))
            yield [
                method,
                snapshot,
                100 * statistics.fmean(accuracy for _, accuracy in best),
                ", ".join(str(number) for number, _ in best),
                100 * statistics.fmean(by_samples),
                " ".join(f"{100 * mean:.1f}" for mean in means),
                len(best),
            ]


def player_rows(runs: Runs) -> Iterator[list[object]]:
    medians = {method: silo_medians(seeds) for method, seeds in runs.items()}
    bars = [medians[name] for name in ("local", "fedavg") if name in medians]
    for method, seeds in runs.items():
        if not medians[method]:
            continue
        f1 = [100 * weighted(selected(rows)) for rows in seeds.values()]
        accuracy = [100 * weighted(selected(rows, "accuracy")) for rows in seeds.values()]
        middle, rate = f"{statistics.median(f1):.1f}", ""
        if len(f1) > 1:
            low, high = median_interval(f1)
            middle += f" ({low:.1f} to {high:.1f})"
        if len(bars) == 2 and method not in ("local", "fedavg"):
            better = [all(v > bar[s] for bar in bars) for s, v in medians[method].items()]
            rate = f"{100 * statistics.fmean(better):.0f}"
        spread = f"{statistics.pvariance(medians[method].values()):.3f}"
        yield [method, middle, f"{statistics.median(accuracy):.1f}", spread, rate]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories of silofl")
    try:
        runs = read_runs(parser.parse_args(arguments).runs)
    except ValueError as error:
        parser.error(str(error))
    print_table(
        "method | snapshot | best accuracy | round | by samples | each best: accuracy, F1, AUC | seeds",
        accuracy_rows(runs),
    )
    print("\nPLayer-FL's statistics: the personal model of least validation loss\n")
    print_table("method | F1 (95 %) | accuracy | fairness | IPR", player_rows(runs))


if __name__ == "__main__":
    main()
