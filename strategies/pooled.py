"""Pooled: one model trained on all silos' data in one place, as nobody may in earnest. What federation costs.

    w <- E epochs of SGD on f = sum_i (n_i / n) f_i, all training samples shuffled together

A reference, not a method: it is what FedAvg would be without federation, and runs in simulations only, where all data
are one process's. The silo of partition 0 trains, on everybody's training samples; every silo evaluates the model on
its own. Validation and test parts stay as they are, so that a study compares the same samples.

Sent: Σ down, Σ up by the one that trains. Kept: server w. Special case: one silo is FedAvg, and Local, bit for bit.
"""

from __future__ import annotations

from strategies.base.server import PersonalizedStrategy


class Pooled(PersonalizedStrategy):
    name = "pooled"
    note = "needs all data in one place: simulations only"
    spelling = "Pooled"
    title = "All silos' data in one place (a reference, simulations only)"
    paper = "no method: what federation is measured against"
    reports = "received"
    one_model = True
    pooled = True
    takes_ala = False

    def participants(self) -> list[str]:
        return list(self.silos)[:1]
