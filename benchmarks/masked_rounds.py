"""What two masked sums disclose of a silo that is in the first and missing in the next.

``python -m benchmarks.masked_rounds``: FedAvg, 12 silos of digits, ``mlp``, three divisions of the data, three seeds.
S_r is the weighted sum of all silos' steps in round r, which the server opens. If silo i is missing in round r + 1, the
server has S_r - S_{r+1}. Its cosine with i's step of round r is what is measured, for every silo and round: 1 is the
direction of the silo's step itself. The protocol does not protect from that (docs/privacy.md). In groups of g
(``secure-group``) all silos of its group are missing with it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import print_table, whole_run
from partitions.common.sum_weights import groups_of
from strategies.base.state import GLOBAL
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Update

SILOS, ROUNDS = 12, 8
SIZES = (1, 2, 3)  # of groups: larger ones may not be missing, of 12
RUN: dict[str, Any] = {
    "strategy": "fedavg",
    "threads": 1,
    "device": "cpu",
    "dataset": "digits",
    "partition": "dirichlet",
    "silos": SILOS,
    "model": "mlp",
    "rounds": ROUNDS,
    "batch-size": 10,
    "local-epochs": 2,
    "evaluate-every": 0,
    "robust": "none",
}
Steps = Mapping[str, Tensor]  # a round's weighted steps, by silo


def steps_of(settings: Mapping[str, Any], size: int) -> list[Steps]:
    """Return the weighted steps of all silos in each round of a run, with equal weights in a group of this size."""
    steps: list[Steps] = []
    real = PersonalizedStrategy.aggregate

    def note(strategy: PersonalizedStrategy, updates: Sequence[Update]) -> None:
        weights = dict(zip((u.silo for u in updates), strategy.weights(updates), strict=True))
        for group in groups_of(weights, size):
            weights |= dict.fromkeys(group, sum(weights[silo] for silo in group) / len(group))
        step, total = {}, sum(weights.values())
        for u in updates:
            change = u.vector - strategy.sent[u.silo][GLOBAL].vector
            step[u.silo] = weights[u.silo] / total * change.double()
        steps.append(step)
        real(strategy, updates)

    with mock.patch.object(PersonalizedStrategy, "aggregate", note):
        whole_run({**RUN, **settings})
    return steps


def cosines(rounds: Sequence[Steps], size: int) -> list[float]:
    """Return the cosine of S_r - S_{r+1} with the step of round r of each silo that is missing in round r + 1."""
    result, groups = [], groups_of(rounds[0], size)
    for before, after in itertools.pairwise(rounds):
        whole = torch.stack([*before.values()]).sum(0)
        for silo, step in before.items():
            gone = next(group for group in groups if silo in group)
            less = torch.stack([after[name] for name in after if name not in gone]).sum(0)
            result.append(float(torch.cosine_similarity(whole - less, step, dim=0)))
    return result


def main() -> None:
    """Print the median, the 90th percentile and the largest cosine by division of the data."""

    def rows() -> Iterator[list[object]]:
        for beta, size in itertools.product((0.1, 1.0, 100.0), SIZES):
            values = list[float]()
            for seed in (1, 2, 3):
                values += cosines(steps_of({"dirichlet.beta": beta, "seed": seed}, size), size)
            ends = map(float, np.quantile(values, (0.5, 0.9, 1.0)))
            yield [f"`dirichlet.beta = {beta:g}`", size, *ends]

    print_table("division | group | median | 90 of 100 | largest", rows())


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    main()
