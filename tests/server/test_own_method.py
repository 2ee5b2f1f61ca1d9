"""A method that lives outside of the package: its class says all that others need to know of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from tiny import json_of, small_study

from client.export import export_model
from server.report.study import StudyResults
from server.simulation.simulate import simulate
from strategies import strategies
from strategies.base import strategy
from strategies.base.client import SiloClient
from strategies.base.info import MethodInfo
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy


@pytest.fixture
def halfway():
    """Registers a method by defining it: silos keep the point between the received and their trained model."""
    strategies()  # the package's own are imported, and stay when this one goes
    before = dict(strategy._REGISTRY)

    @dataclass(frozen=True)
    class HalfwaySettings:
        """Settings of the test's method."""

        share: float = setting(0.5, "of the way that is gone", symbol="s", minimum=0, maximum=1)

    class HalfwayClient(SiloClient):
        settings: HalfwaySettings

        def personal(self):
            return self.received + self.settings.share * (self.model.vector - self.received)

    class Halfway(PersonalizedStrategy):
        info = MethodInfo(
            name="half-way",
            spelling="HalfWay",
            title="Halfway home",
            paper="A. Nobody, 2026",
            keeps=("its half of the way",),
        )
        client = HalfwayClient
        Settings = HalfwaySettings

    yield Halfway
    strategy._REGISTRY.clear()
    strategy._REGISTRY.update(before)


def test_it_runs_is_reported_and_exported(halfway, tmp_path):
    out = small_study(tmp_path / "run", strategy="local,half-way", half_way__share=0.25)
    assert "half-way.share = 0.25" in (out / "config.toml").read_text().replace(
        "[half-way]\nshare", "half-way.share"
    )
    study = StudyResults(out)
    assert study.methods == ["local", "half-way"] and study.personalised == "half-way"
    page = (out / "report.html").read_text()
    assert (
        "HalfWay" in page
        and "A. Nobody, 2026" in page
        and "HalfWay: its half of the way" in page
    )
    card = export_model(
        out, "hospital-01", "last", tmp_path / "own.safetensors", "half-way", None
    )
    assert card.method == "half-way"
    assert json_of(tmp_path / "own.safetensors.json")["paper"] == "A. Nobody, 2026"


def test_its_mistakes_are_the_users(halfway, tmp_path):
    with pytest.raises(ValueError, match=r"half-way.share = 2.0 is out of range: at most 1"):
        simulate(
            {"strategy": "half-way", "half-way.share": 2, "out": str(tmp_path / "run")},
            quiet=True,
        )
    assert not list(tmp_path.iterdir())
