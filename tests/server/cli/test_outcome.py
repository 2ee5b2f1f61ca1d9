"""The line in which a study's runs end."""

from __future__ import annotations

from server.cli.research import outcome

RUN = {"silos": ["a", "b"], "rounds": 3, "bmcta": 0.75, "reports": "personal"}


def test_a_run_of_an_earlier_version_is_about_its_accuracy() -> None:
    """A study that was begun with it, and goes on, has such entries in its summary."""
    run = {**RUN, "final": {"round": 2, "accuracy_mean": 0.5}}
    assert outcome(run).startswith("accuracy 0.5000, the mean of 2 silos' test parts at round 2")
    run = {**RUN, "score": "auc", "final": {"round": 2, "auc_mean": 0.25}}
    assert outcome(run).startswith("auc 0.2500, the mean")
    assert outcome({**run, "final": {"round": None, "auc_mean": None}}) == "3 rounds, nothing evaluated"
