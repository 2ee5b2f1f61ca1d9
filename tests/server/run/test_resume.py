"""A run that was interrupted and resumed equals one that was not, bit for bit, for every method.

The resumed run has a fresh engine: a new grid, new contexts, no network left over; all it has are the files.
"""

from __future__ import annotations

import pytest
import torch
from failing import fails
from resuming import (
    Crash,
    assert_equal,
    assert_resumes,
    crash_after,
    interrupted,
    personal_models,
)
from tiny import METHODS, comparable, federate, round_of, same, write_silo

from partitions.common.errors import UserError
from server.run.checkpoints import Checkpoints

EACH_WAY = ("fedala", "apple", "fedavg-ft")  # a state here, the others' models there, neither
OPTIONS = {
    "batch_size": 4,
    "local_epochs": 2,
    "learning_rate": 0.2,
    "momentum": 0.9,
    "optimizer_state": "keep",
    "apple.max-downloads": 1,
    "apple.dr-learning-rate": 0.1,
    "apple.mu": 1.0,
    "apple.prox-share": 1.0,
    "fedala.max-epochs": 4,
    "fedala.window": 2,
}


@pytest.mark.parametrize("method", METHODS)
def test_two_rounds_and_two_more_are_four(three, tmp_path, method):
    """With BatchNorm, and other silos in each round: ``test_every_method.py``."""
    options = {**OPTIONS, "strategy": method, "rounds": 4}
    assert_resumes(three, tmp_path, 2, **options)


@pytest.mark.parametrize("method", EACH_WAY)
def test_a_crash_between_the_silos_save_and_the_servers(three, tmp_path, method, monkeypatch):
    """All silos hold round 3, the server's checkpoint is of round 2: round 3 is done again from the silos' round 2."""
    options = {**OPTIONS, "strategy": method, "rounds": 4}
    whole = federate(three, directory=tmp_path / "whole", **options)
    save = Checkpoints.save

    def failing(self, run_state, strategy, *others):
        if strategy.round == 3:
            raise Crash
        save(self, run_state, strategy, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", failing)
        interrupted(three, tmp_path / "parts", **options)
    ahead = [p.name for p in (tmp_path / "parts").rglob("a/round-*")]
    assert sorted(ahead) == [f"round-00000{number}.safetensors" for number in (1, 2, 3)]
    resumed = federate(three, directory=tmp_path / "parts", resume=True, **options)
    assert {round_of(m) for m, _ in resumed.grid.traffic} == {0, 3, 4, 5}
    assert_equal(whole, resumed, (tmp_path / "whole", tmp_path / "parts"))


@pytest.mark.parametrize("method", EACH_WAY)
def test_a_crash_in_the_middle_of_a_round(three, tmp_path, method):
    """a has saved round 3, b and c have not; the silos keep their state in files only."""

    def before(silo, message, context):
        if silo == "b" and round_of(message) == 3:
            raise Crash

    options = {**OPTIONS, "strategy": method, "rounds": 4}
    whole = federate(
        three, directory=tmp_path / "whole/run", state_dir=tmp_path / "whole/silos", **options
    )
    parts = {"directory": tmp_path / "parts/run", "state_dir": tmp_path / "parts/silos"}
    with pytest.raises(Crash):
        federate(three, before=before, **parts, **options)
    resumed = federate(three, resume=True, **parts, **options)
    assert comparable(resumed.rows) == comparable(whole.rows)
    kept = [personal_models(tmp_path / d / "silos") for d in ("whole", "parts")]
    for silo in three:
        assert all(same(kept[0][silo][k], kept[1][silo][k]) for k in kept[0][silo])


@pytest.mark.parametrize("method", ["fedala", "apple"])
def test_resume_from_a_checkpoint_of_every_other_round(three, tmp_path, method):
    """Stopped after round 5 of 6 with checkpoints at 2 and 4: rounds 5 and 6 are done (again) from round 4.

    Where the state is in files only, the silos' round 5 must not have pushed their round 4 out.
    """
    options = {**OPTIONS, "strategy": method, "rounds": 6, "checkpoint_every": 2}
    whole = federate(three, directory=tmp_path / "whole", state_dir=tmp_path / "ws", **options)
    interrupted(
        three, tmp_path / "parts", state_dir=tmp_path / "ps", watch=crash_after(5), **options
    )
    resumed = federate(
        three, directory=tmp_path / "parts", state_dir=tmp_path / "ps", resume=True, **options
    )
    assert {round_of(m) for m, _ in resumed.grid.traffic} == {0, 5, 6, 7}
    assert comparable(resumed.rows) == comparable(whole.rows)


@pytest.mark.parametrize("method", ["fedavg", "fedala", "local"])
def test_more_rounds_than_were_asked_for_first(three, tmp_path, method):
    """A finished run of 2 rounds goes on to 4; its closing evaluation is replaced by round 3.

    (Not APPLE: its λ depends on the number of rounds from the start.)
    """
    options = {**OPTIONS, "strategy": method}
    whole = federate(three, directory=tmp_path / "whole", rounds=4, **options)
    federate(three, directory=tmp_path / "parts", rounds=2, **options)
    resumed = federate(three, directory=tmp_path / "parts", rounds=4, resume=True, **options)
    assert_equal(whole, resumed, (tmp_path / "whole", tmp_path / "parts"))


def test_dropout_after_a_resume(three, tmp_path):
    options = {
        "strategy": "fedala",
        "rounds": 4,
        "mlp.hidden": "6",
        "mlp.dropout": 0.5,
        "fedala.max-epochs": 3,
    }
    assert_resumes(three, tmp_path, 2, **options)


def test_a_finished_run_resumed_changes_nothing(three, tmp_path):
    whole = federate(three, directory=tmp_path / "run", strategy="fedavg", rounds=2)
    again = federate(
        three, directory=tmp_path / "run", strategy="fedavg", rounds=2, resume=True
    )
    assert {round_of(m) for m, _ in again.grid.traffic} == {0, 3}
    assert comparable(again.rows) == comparable(whole.rows)


def test_other_silos_are_refused(three, tmp_path):
    federate(three, directory=tmp_path / "run", strategy="fedavg", rounds=1)
    renamed = dict(zip("abx", three.values(), strict=True))
    with pytest.raises(UserError, match="is of the silos a, b, c; here are a, b, x"):
        federate(renamed, directory=tmp_path / "run", strategy="fedavg", rounds=2, resume=True)


# A run that goes on with two of three silos
RESUMED = {"resume": True, "min_silos": 2, "round_timeout": 0.1}


@pytest.mark.parametrize("method", EACH_WAY)
def test_a_quorum_goes_on_without_a_silo(three, tmp_path, method):
    """After round 2 the server is started anew and c is away: as if it had failed in rounds 3 and 4.

    It is named in every round, keeps its share in what the method knows of it, and is in the summary's silos; without
    ``min-silos`` the run is refused.
    """
    options = {**OPTIONS, "strategy": method, "rounds": 4}

    def without_c(grid):
        nodes = list(grid.contexts)
        grid.get_node_ids = lambda: nodes[:2]

    whole = federate(
        three, directory=tmp_path / "whole", absent={("c", 3), ("c", 4)}, **options
    )
    interrupted(three, tmp_path / "parts", watch=crash_after(2), **options)
    again = {**options, **RESUMED, "directory": tmp_path / "parts", "prepare": without_c}
    resumed = federate(three, **again)
    rejected = resumed.rejected()
    assert rejected == [(3, "c"), (4, "c"), (5, "c")]
    assert list(resumed.federation.registration.summaries) == ["a", "b", "c"]
    for name, array in whole.strategy.state.arrays.items():
        assert same(array, resumed.strategy.state.arrays[name])
    for silo in "ab":
        assert same(whole.personal(silo), resumed.personal(silo))
    fails(RuntimeError, "here are 2: a, b", federate, three, **{**again, "min_silos": 0})


def away_in_round_three(grid):
    """The third silo is not here until a message of round 3 has been answered."""
    nodes = list(grid.contexts)

    def here():
        return nodes if any(round_of(m) == 3 for m, _ in grid.traffic) else nodes[:2]

    grid.get_node_ids = here


@pytest.mark.parametrize("method", EACH_WAY)
def test_a_silo_that_was_away_rejoins_in_the_next_round(three, tmp_path, method):
    """c is away when the run is resumed, and back in round 4: as if it had failed in round 3 alone."""
    options = {**OPTIONS, "strategy": method, "rounds": 4}

    whole = federate(three, directory=tmp_path / "whole", absent={("c", 3)}, **options)
    interrupted(three, tmp_path / "parts", watch=crash_after(2), **options)
    again = {**options, **RESUMED, "directory": tmp_path / "parts"}
    resumed = federate(three, prepare=away_in_round_three, **again)
    assert resumed.rejected() == [(3, "c")]
    for name, array in whole.strategy.state.arrays.items():
        assert same(array, resumed.strategy.state.arrays[name])
    for silo in "abc":
        assert same(whole.personal(silo), resumed.personal(silo))
    assert (
        "c is back, and takes part from round 4 on"
        in (tmp_path / "parts/progress.jsonl").read_text()
    )


def test_a_silo_whose_fault_is_mended_rejoins_in_the_next_round(three, tmp_path):
    """c's data cannot be read when the run is resumed; from round 4 on they can."""
    options = {**OPTIONS, "strategy": "fedala", "rounds": 5}
    interrupted(three, tmp_path / "run", watch=crash_after(2), **options)
    away = three["c"].rename(tmp_path / "unmounted")

    def before(silo, message, context):
        if (silo, round_of(message)) == ("a", 4) and away.exists():
            away.rename(three["c"])

    again = {**options, **RESUMED, "directory": tmp_path / "run", "round_timeout": 5}
    resumed = federate(three, before=before, **again)
    assert resumed.rejected() == [(3, "c"), (4, "c")]
    assert not resumed.federation.registration.left_out
    told = (tmp_path / "run/progress.jsonl").read_text()
    assert (
        told.count("cannot take part") == 1
        and "c is back, and takes part from round 5 on" in told
    )


@pytest.mark.parametrize("rows, says", [(8, ""), (4, "with other data than before")])
def test_who_comes_back_with_other_data_stays_away(three, tmp_path, rows, says):
    """c has a column more, or another number of rows, which may be."""
    options = {"strategy": "fedavg", "rounds": 4}

    def prepare(grid):
        away_in_round_three(grid)
        columns = 4 if says else 3
        generator = torch.Generator().manual_seed(1)
        x = torch.randint(0, 9, (rows, columns), generator=generator).tolist()
        other = write_silo(tmp_path / "other.npz", x, [0, 1, 2, 0] * (rows // 4), classes=3)
        grid.contexts[3].node_config["data"] = str(other)

    interrupted(three, tmp_path / "run", watch=crash_after(2), **options)
    again = {**options, **RESUMED, "directory": tmp_path / "run"}
    resumed = federate(three, prepare=prepare, **again)
    rejected = resumed.rejected()
    assert rejected == ([(3, "c"), (4, "c"), (5, "c")] if says else [(3, "c")])
    assert says in (tmp_path / "run/progress.jsonl").read_text()


def test_a_cut_off_history_is_mended(three, tmp_path):
    """A power cut in the middle of a line of history.csv: the line is left out and its round repeated."""
    options = {"strategy": "fedavg", "rounds": 3}
    whole = federate(three, directory=tmp_path / "whole", **options)
    interrupted(three, tmp_path / "parts", watch=crash_after(2), **options)
    file = tmp_path / "parts/history.csv"
    file.write_text(file.read_text() + "fedavg,7,3,a,test,received,accu")
    resumed = federate(three, directory=tmp_path / "parts", resume=True, **options)
    assert comparable(resumed.rows) == comparable(whole.rows)
