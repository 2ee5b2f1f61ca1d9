"""The round that the report will show, found while the run goes on."""

from __future__ import annotations

import math
import random
from itertools import groupby

import pytest

from server.results.history import Chosen, History, Row
from server.results.summary import FinishedRun, run_summary


def random_history(rng, splits):
    """Up to eight rounds of up to four silos that miss rounds, come late, and withhold; scores repeat."""
    rows = []
    for number in range(1, rng.randint(2, 9)):
        for silo in ("a", "b", "c", "d")[: rng.randint(1, 4)]:
            if rng.random() < 0.7:
                for split in splits:
                    value = (
                        math.nan
                        if rng.random() < 0.05 and split == "test"
                        else rng.randint(0, 4) / 4
                    )
                    rows.append(
                        Row("fedavg", 1, number, silo, split, "received", "accuracy", value, 5)
                    )
                    rows.append(
                        Row(
                            "fedavg",
                            1,
                            number,
                            silo,
                            split,
                            "personal",
                            "accuracy",
                            rng.random(),
                            5,
                        )
                    )
    return rows


@pytest.mark.parametrize("splits", [("val", "test"), ("test",)])
def test_it_is_the_summarys(splits):
    """After every round of 300 random runs: the round, and each silo's own, that the summary finds in the whole."""
    rng, compared = random.Random(0), 0
    for _ in range(300):
        history, chosen = History(), Chosen("received", "accuracy")
        for _, of_round in groupby(random_history(rng, splits), key=lambda row: row.round):
            rows = list(of_round)
            history.add(rows)
            chosen.add(rows)
            cards = {silo: {"n_train": 5, "n_test": 5} for silo in ("a", "b", "c", "d")}
            totals = {"down": 0, "up": 0}
            run = FinishedRun(
                strategy="fedavg", seed=1, rounds=9, silos=cards, total_bytes=totals, seconds={}
            )
            found = run_summary(history, run)
            if found["final"]["round"] is None:
                continue
            compared += 1
            assert chosen.round == found["final"]["round"]
            own = {silo: values["round"] for silo, values in found["per_silo"].items()}
            assert own == {silo: chosen.rounds.get(silo) for silo in cards}
            assert chosen.of(["a", "z"])["z"] == chosen.round
    assert compared > 500


def test_before_the_first_score_there_is_none():
    chosen = Chosen("received", "accuracy")
    chosen.add([Row("fedavg", 1, 1, "a", "val", "received", "accuracy", math.nan, 5)])
    assert chosen.of(["a"]) == {}
