"""The report's section on evidence of measurements: what it says, in the label's unit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from server.simulation.simulate import simulate


def test_a_regression_has_its_evidence(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3)).astype(np.float32)
    y = (500 + 90 * x[:, 0] + rng.normal(0, 30, 300)).astype(np.float32)
    np.savez(tmp_path / "all.npz", x=x, y=y, subgroup=np.where(x[:, 1] > 0, "scanner A", "scanner B"))
    given = {"dataset": str(tmp_path / "all.npz"), "partition": "iid", "silos": 3, "rounds": 2, "model": "linear"}
    out = simulate({**given, "strategy": "local,fedavg", "threads": 1, "out": str(tmp_path / "run")}, quiet=True)
    page = (out / "report.html").read_text()
    for runs in json.loads((out / "summary.json").read_text())["runs"]:
        for silo, values in runs["per_silo"].items():
            n, mean, low, high = values["evidence"]["agreement"]
            assert n == values["n_test"] and mean == values["calibration_in_the_large"] and low < mean < high
            assert values["brier"] is None and values["ece"] is None
            assert values["evidence"]["subgroup.scanner A"][1] > 0, silo
    assert "Limits of agreement" in page and "Predicted against measured" in page and "Mean absolute error" in page
    assert "Net benefit" not in page and page.count('id="values-') >= 3
    assert "have no intervals" in page and "chance alone lets about 0.6 of those below miss" in page
    assert "no theorem promises" in page
    assert "distance of mean measured and mean predicted" in page
