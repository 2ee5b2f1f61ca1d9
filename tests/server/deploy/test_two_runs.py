"""Two runs at once: a round takes about twice as long as alone, since each silo keeps a process for each run.

python -m pytest -s -m drill tests/server/deploy/test_two_runs.py
"""

from __future__ import annotations

from statistics import median

import pytest
from tiny import events_of
from trio import RUN, rows, start_run

from server.simulation.simulate import simulate

pytestmark = [pytest.mark.deployed, pytest.mark.drill]

MOST = 2.2  # times as long as alone
ROUNDS = 12
SETTINGS = {**RUN, "strategy": "fedavg", "rounds": ROUNDS, "local-epochs": 40}


def seconds_of(*outs):
    """Of a round, the median of those that other rounds were beside: not the first and last two."""
    rounds = [event for out in outs for event in events_of(out) if event["event"] == "round"]
    return median(e["seconds"] for e in rounds if 2 < e["round"] < ROUNDS - 1)


def test_a_round_beside_another_run(folder, federation, tmp_path):
    """In pairs, alone and together, so that what else the machine does meets both; numbers stay those of one alone."""
    ratios = []
    for pair in range(3):
        outs = [tmp_path / f"{pair}-{name}" for name in ("alone", "first", "second")]
        start_run(SETTINGS, outs[0]).join(300)
        together = [start_run(SETTINGS, out, now=True) for out in outs[1:]]
        for thread in together:
            thread.join(300)
        ratios.append(seconds_of(*outs[1:]) / seconds_of(outs[0]))
        print(f"alone {seconds_of(outs[0]):.2f} s, two at once {seconds_of(*outs[1:]):.2f} s")
    print(f"a round takes {median(ratios):.2f} times as long ({sorted(ratios)})")
    simulate({**SETTINGS, "silos": 3, "out": str(tmp_path / "here")}, quiet=True)
    assert all(rows(out) == rows(tmp_path / "here") for out in outs)
    assert median(ratios) <= MOST
