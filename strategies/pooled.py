"""Pooled: one model trained on all silos' data in one place, for simulation only, to show federation's cost.

    w <- E epochs of SGD on f = sum_i (n_i / n) f_i, all training samples shuffled together

A reference, not a method: it is FedAvg without federation, and runs in simulations only, where one process has all
data. The silo of partition 0 trains on all silos' training samples; every silo evaluates the model on its own data.
Validation and test splits are not changed, so that a study compares the same samples.

Sent: Σ down, Σ up by the one that trains. Kept: server w. Special case: one silo is FedAvg, and Local, bit for bit.
"""

from __future__ import annotations

from strategies.base.info import ONE_MODEL, No
from strategies.base.strategy import PersonalizedStrategy


class Pooled(PersonalizedStrategy):
    info = ONE_MODEL(
        name="pooled",
        title="All silos' data in one place (a reference, simulations only)",
        paper="no method: what federation is measured against",
        spelling="Pooled",
        dp=No("it shows what pooled records would give, whose owners share no noise"),
        note="needs all data in one place: simulations only",
        late=No("its one model trains on all hospitals' data from round 1 on"),
        pooled=True,
        sums=No("one silo has all data, and no other is in the sum"),
        trees="also",
        ala=False,
    )

    def participants(self) -> list[str]:
        return list(self.silos)[:1]
