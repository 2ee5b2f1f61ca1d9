"""A study whose runs take turns against the same with N workers; both leave the same rows.

    python -m benchmarks.workers [--workers 2] [--rounds 15] [--repeats 3]

FedAvg, APPLE and FedALA with two seeds on `digits`, 12 silos, one thread each: what a study is made of here. A worker
starts a process for each run, which takes some 2 s of imports: the shorter the runs, the less there is to win.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from benchmarks.common import interleaved, ratios
from server.simulation.simulate import StudyExecutor, simulate
from server.simulation.workers import executor_of


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    values = {
        "strategy": "fedavg,apple,fedala",
        "seed": "1,2",
        "rounds": given.rounds,
        "threads": 1,
    }
    values |= {"local-epochs": 2, "batch-size": 10, "momentum": 0.5}

    def study(executor: StudyExecutor) -> None:
        with tempfile.TemporaryDirectory() as folder:
            simulate(
                {**values, "out": str(Path(folder) / "run")}, quiet=True, executor=executor
            )

    works = {
        "in turns": lambda: study(executor_of("1")),
        "side by side": lambda: study(executor_of(given.workers)),
    }
    times = interleaved(works, given.repeats)
    seconds = {name: f"{statistics.median(t):.1f} s" for name, t in times.items()}
    faster = ratios(times, "side by side")["in turns"]
    print(f"{os.cpu_count()} cores, {given.workers} workers: {seconds}, faster by {faster:.2f}")


if __name__ == "__main__":
    main()
