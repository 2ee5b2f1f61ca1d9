"""Seconds of one aggregation on the server, by the setting ``robust``.

``python -m benchmarks.aggregation [PARAMETERS]``: FedAvg, 40 silos with 11 million parameters, one thread; the rules in
turns, the median of three. *mean* is the weighted mean alone; with every rule the server measures all steps before it.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import table
from strategies.base.bounded import UpdateBounds
from strategies.base.run_settings import parse_settings
from strategies.base.state import GLOBAL
from strategies.base.transport.payload import Model, Update
from strategies.fedavg import FedAvg

SILOS, PARAMETERS = 40, 11_000_000
RULES = ("mean", "none", "clip", "screen")


def main(parameters: int) -> None:
    random = torch.Generator().manual_seed(1)
    start, common = (torch.randn(parameters, generator=random) for _ in range(2))
    vectors = [
        torch.randn(parameters, generator=random).add_(start).add_(common) for _ in range(SILOS)
    ]
    updates = [
        Update(f"{i:02}", 100, {"model": vector}, {}, {}) for i, vector in enumerate(vectors)
    ]
    layout: Any = SimpleNamespace(size=parameters)
    seconds: dict[str, list[float]] = {rule: [] for rule in RULES}
    for _, rule in itertools.product(range(3), RULES):
        given = {
            "strategy": "fedavg",
            "silos": SILOS,
            "robust": "none" if rule == "mean" else rule,
        }
        strategy = FedAvg(parse_settings(given).common, None, layout)
        strategy.sent = {update.silo: {GLOBAL: Model(start)} for update in updates}
        begun = time.perf_counter()
        strategy.aggregate(
            updates if rule == "mean" else UpdateBounds(strategy).within(updates)
        )
        seconds[rule].append(time.perf_counter() - begun)
    medians = {rule: statistics.median(of) for rule, of in seconds.items()}
    rows = [[rule, f"{of:.2f}", f"{of / medians['mean']:.1f}"] for rule, of in medians.items()]
    print(table(rows, ["robust", "seconds", "over the mean"]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else PARAMETERS)
