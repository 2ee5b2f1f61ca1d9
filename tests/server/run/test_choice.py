"""``vectorize = "auto"``: the first rounds of a run say which way is faster; what was chosen is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message
from tiny import Files, Run, comparable, federate, random_silos, round_of, same
from two_layers import DEEP

import server.run.engine
import server.run.lockstep
from server.run.choice import FEWEST_ROUNDS, Choice
from server.run.lockstep import Lockstep
from strategies.base.run_settings import parse_settings
from strategies.base.settings import UserError

SMALL: dict[str, Any] = {"strategy": "fedavg", **DEEP, "batch_size": 4, "rounds": 20}


@pytest.fixture
def silos(tmp_path: Path) -> Files:
    return random_silos(tmp_path, {"a": 6, "b": 6, "c": 5, "d": 6})


class Pace:
    """Stands for the clock: a silo that trains with others takes so many times as long as one whose turn it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
        self.now, self.share = 0.0, share
        self.joined = False
        self.together: list[int] = []  # rounds in which silos trained together
        monkeypatch.setattr(server.run.engine, "clock", lambda: self.now)
        monkeypatch.setattr(server.run.lockstep, "FEWEST_SILOS", 2)
        ordinary = Lockstep.run

        def run(lockstep: Lockstep, calls: Any) -> Any:
            self.joined = True
            try:
                return ordinary(lockstep, calls)
            finally:
                self.joined = False

        monkeypatch.setattr(Lockstep, "run", run)

    def prepare(self, grid: Any) -> None:
        grid.before = self.before

    def before(self, silo: str, message: Message, context: Context) -> None:
        """Each silo begins its part of a round."""
        self.now += self.share if self.joined else 1.0
        if self.joined and round_of(message) not in self.together:
            self.together.append(round_of(message))


def run_auto(silos: Files, pace: Pace, **changes: Any) -> Run:
    return federate(silos, **{**SMALL, "vectorize": "auto", **changes}, prepare=pace.prepare)


@pytest.mark.parametrize(("share", "then"), [(0.94, True), (0.96, False)])
def test_the_faster_way_is_chosen_written_down_and_named(
    silos: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: Callable[[], list[str]],
    share: float,
    then: bool,
) -> None:
    pace = Pace(monkeypatch, share)
    run_auto(silos, pace, directory=tmp_path / "run")
    assert pace.together == [3, 4, 7, 8, *(range(9, 22) if then else [])]  # 21: the closing exchange
    (line,) = lines()
    assert f"silos {'train together' if then else 'take turns'}: " in line and f"{share:.2f} of the time" in line
    state = json.loads((tmp_path / "run" / "checkpoint" / "fedavg-7" / "vectorize.json").read_text())
    assert state["together"] is then and state["first"] == 1


@pytest.mark.parametrize("stop", [7, 12])
def test_a_run_that_is_resumed_keeps_what_was_found_out(
    silos: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """Bit for bit what it would have been; also where the two ways take another time then."""

    class Stopped(Exception):
        pass

    def watch(progress: Any) -> None:
        if progress.round == stop:
            raise Stopped

    whole = run_auto(silos, Pace(monkeypatch, 0.5), directory=tmp_path / "whole")
    with pytest.raises(Stopped):
        run_auto(silos, Pace(monkeypatch, 0.5), directory=tmp_path / "parts", watch=watch)
    pace = Pace(monkeypatch, 0.5 if stop < 8 else 3.0)
    resumed = run_auto(silos, pace, directory=tmp_path / "parts", resume=True)
    assert pace.together == [r for r in (3, 4, 7, 8, *range(9, 22)) if r > stop]
    assert comparable(whole.rows) == comparable(resumed.rows)
    assert all(same(whole.personal(silo), resumed.personal(silo)) for silo in silos)


def test_numbers_are_those_of_the_ways_that_were_taken(silos: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the order of sums those of silos that take turns; where turns are chosen and kept, bit for bit so far."""
    turns = federate(silos, **SMALL)
    for share in (0.5, 3.0):
        auto = run_auto(silos, Pace(monkeypatch, share))
        for one, other in zip(turns.rows, auto.rows, strict=True):
            if one.metric != "round_seconds":
                assert one.value == pytest.approx(other.value, rel=1e-3, abs=1e-4, nan_ok=True)
            if one.metric != "round_seconds" and one.round <= 2:
                assert one == other


def test_few_rounds_take_turns(
    silos: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    """Bit for bit, and a continuation of more rounds finds out."""
    pace = Pace(monkeypatch, 0.5)
    few = run_auto(silos, pace, rounds=FEWEST_ROUNDS - 1, directory=tmp_path / "run")
    assert comparable(few.rows) == comparable(federate(silos, **{**SMALL, "rounds": FEWEST_ROUNDS - 1}).rows)
    assert pace.together == []
    (line,) = lines()
    assert "too few to tell" in line
    run_auto(silos, pace, rounds=2 * FEWEST_ROUNDS - 1, directory=tmp_path / "run", resume=True)
    assert pace.together[:5] == [FEWEST_ROUNDS + 2, FEWEST_ROUNDS + 3, FEWEST_ROUNDS + 6, FEWEST_ROUNDS + 7, 28]


def test_networks_that_cannot_train_together_take_turns(
    silos: Files, tiny_bn: None, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    settings: dict[str, Any] = {**SMALL, "model": "tiny-bn"}
    pace = Pace(monkeypatch, 0.5)
    assert comparable(run_auto(silos, pace, **settings).rows) == comparable(federate(silos, **settings).rows)
    assert pace.together == [3]
    (line,) = lines()
    assert "vectorize = auto: silos take turns: batch normalisation" in line


@pytest.mark.parametrize(("rounds", "tried"), [(99, False), (100, True)])
def test_large_networks_are_tried_in_long_runs(
    silos: Files, monkeypatch: pytest.MonkeyPatch, rounds: int, tried: bool
) -> None:
    """Of more parameters, in batches of more samples, than ``true`` joins; 8 rounds are enough to see it."""
    monkeypatch.setattr(server.run.lockstep, "LARGEST_NETWORK", 30)
    monkeypatch.setattr(server.run.lockstep, "LARGEST_BATCH", 1)

    class Stopped(Exception):
        pass

    def watch(progress: Any) -> None:
        if progress.round == 8:
            raise Stopped

    found: list[Any] = []
    pace = Pace(monkeypatch, 0.5)

    def prepare(grid: Any) -> None:
        found.append(grid)
        pace.prepare(grid)

    with pytest.raises(Stopped):
        federate(silos, **{**SMALL, "vectorize": "auto", "rounds": rounds}, prepare=prepare, watch=watch)
    assert found[0].choice.chosen is tried
    assert (found[0].lockstep.joint > 0) is tried


def test_a_choice_that_cannot_be_read_is_made_again(
    silos: Files, tmp_path: Path, lines: Callable[[], list[str]]
) -> None:
    file = tmp_path / "vectorize.json"
    for text in ("{", "[]", '{"first": 1}', '{"first": "x", "seconds": {}, "together": null}'):
        file.write_text(text)
        choice = Choice({"rounds": 100}, file)
        assert (choice.first, choice.chosen) == (0, None)
        assert "cannot be read" in lines()[-1]


@pytest.mark.parametrize(
    ("given", "value"),
    [(True, True), (False, False), ("true", True), ("False", False), ("TRUE", True), ("auto", "auto")],
)
def test_how_it_is_written(given: object, value: object) -> None:
    settings = parse_settings({"vectorize": given})
    assert settings.common.vectorize == value and type(settings.common.vectorize) is type(value)
    assert parse_settings(settings.flat()).common.vectorize == value  # and once more, as a silo reads it


@pytest.mark.parametrize("given", ["yes", 1, "", None])
def test_what_it_cannot_be(given: object) -> None:
    with pytest.raises(UserError, match=r"vectorize = .*: true, false, auto is wanted here"):
        parse_settings({"vectorize": given})


def test_other_switches_have_no_third_way() -> None:
    with pytest.raises(UserError, match=r"amsgrad = 'auto': true or false is wanted here"):
        parse_settings({"amsgrad": "auto"})
