"""The report's section on evidence of measurements: what it says, in the label's unit."""

from __future__ import annotations

import numpy as np
from tiny import small_study, summary_of


def test_a_regression_has_its_evidence(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3)).astype(np.float32)
    y = (500 + 90 * x[:, 0] + rng.normal(0, 30, 300)).astype(np.float32)
    np.savez(
        tmp_path / "all.npz", x=x, y=y, subgroup=np.where(x[:, 1] > 0, "scanner A", "scanner B")
    )
    given = {"model": "linear", "strategy": "local,fedavg"}
    out = small_study(tmp_path / "run", tmp_path / "all.npz", **given)
    page = " ".join((out / "report.html").read_text().split())
    for runs in summary_of(out)["runs"]:
        for silo, values in runs["per_silo"].items():
            n, mean, low, high = values["evidence"]["agreement"]
            assert (
                n == values["n_test"]
                and mean == values["calibration_in_the_large"]
                and low < mean < high
            )
            assert values["brier"] is None and values["ece"] is None
            assert values["evidence"]["subgroup.scanner A"][1] > 0, silo
    assert (
        "Limits of agreement" in page
        and "Predicted against measured" in page
        and "Mean absolute error" in page
    )
    assert "Net benefit" not in page and page.count('id="values-') >= 3
    assert (
        "have no intervals" in page
        and "chance alone lets about 0.6 of those below miss" in page
    )
    assert "no theorem promises" in page
    assert "distance of mean measured and mean predicted" in page


def test_several_measurements_have_a_row_each(tmp_path):
    """Names are the file's, whatever characters they have; numbers are in each one's unit."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2)).astype(np.float32)
    y = np.array([500, 5]) + (x + rng.normal(0, 0.3, x.shape)) * np.array([90, 1])
    np.savez(
        tmp_path / "all.npz",
        x=x,
        y=y.astype(np.float32),
        label_names=np.array(["a<b & c", "v1.2"]),
    )
    given = {"model": "linear", "strategy": "local,fedavg"}
    out = small_study(tmp_path / "run", tmp_path / "all.npz", **given)
    page = " ".join((out / "report.html").read_text().split())
    for runs in summary_of(out)["runs"]:
        for values in runs["per_silo"].values():
            assert values["calibration_slope"] is None
            for name, unit in (("a<b & c", 90), ("v1.2", 1)):
                n, mean, low, high = values["evidence"][f"measurement.{name}.agreement"]
                assert n == values["n_test"] and low < mean < high < 3 * unit
                assert (
                    0
                    < values["evidence"][f"measurement.{name}.conformal_intervals"][6]
                    < 20 * unit
                )
    section = page[page.index("Evidence per hospital") :]
    assert section.count("<td>a&lt;b &amp; c</td>") == section.count("<td>v1.2</td>") == 3
    assert "a<b" not in page and "hospital-01: v1.2" in page and page.count('id="values-') >= 6
    assert "calibration_slope" in page and "measurement." not in page
