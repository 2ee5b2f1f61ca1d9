"""``simulate --hold-out``: a study with and without hospitals, in turns, side by side, interrupted; what it refuses."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from flwr.app import Message
from inline_workers import inline, left
from resuming import assert_equal, crash_after, interrupted
from taken import silofl
from tiny import comparable, federate, random_silos, simulated, summary_of, write_silo

import server.simulation.workers
from client.app import app
from partitions.common.errors import UserError
from partitions.simulated import pool_of
from server.report.write import write_report
from server.results.hold_out import part_of
from server.results.run_directory import RunDirectory
from server.run.loop import RoundLoop
from server.simulation.engine import flower_identity
from server.simulation.simulate import simulate
from server.simulation.workers import side_by_side
from strategies.base.newcomers import NEWCOMER
from strategies.base.run_settings import parse_settings

HELD = "hospital-02"


def values(table, out, **changes):
    given = {
        "dataset": str(table),
        "partition": "iid",
        "silos": 3,
        "rounds": 2,
        "threads": 1,
        "out": str(out),
    }
    return {**given, "strategy": "fedper,pooled", "seed": "1,2", "validation": 0.2, **changes}


@pytest.fixture(scope="module")
def each(table, tmp_path_factory):
    return simulate(
        values(table, tmp_path_factory.mktemp("runs") / "study"), quiet=True, hold_out="each"
    )


def summary(run):
    return summary_of(run)


def all_left(study):
    parts = [study, *sorted(p for p in (study / "hold-out").iterdir() if p.is_dir())]
    return [*map(left, parts), summary(study)["hold_out"]]


def test_a_study_holds_out_each_hospital_once(each):
    """The means over both seeds of what the runs' own summaries have; Local has come to the methods by itself."""
    found = summary(each)["hold_out"]
    page = (each / "report.html").read_text()
    assert "Hospitals that did not train" in page and "none was held out" not in page
    assert write_report(each).read_text() == page
    assert list(found) == ["hospital-01", "hospital-02", "hospital-03"]
    assert {r["strategy"] for r in summary(each)["runs"]} == {"local", "fedper", "pooled"}
    for name, of in found.items():
        assert list(of) == ["fedper", "pooled"]
        without = summary(each / "hold-out" / name)["runs"]
        assert all(name not in run["silos"] and len(run["silos"]) == 2 for run in without)
        for method, row in of.items():
            newcomers = [r["hold_out"][name] for r in without if r["strategy"] == method]
            assert row["zero_shot"] == sum(n["zero_shot"]["accuracy"] for n in newcomers) / 2
            assert (
                row["personalised"] == sum(n["personalised"]["accuracy"] for n in newcomers) / 2
            )
            everybody = {
                kind: [
                    r["per_silo"][name]["accuracy"]
                    for r in summary(each)["runs"]
                    if r["strategy"] == strategy
                ]
                for kind, strategy in (("local", "local"), ("all_in", method))
            }
            assert all(row[kind] == sum(scores) / 2 for kind, scores in everybody.items())
        assert of["fedper"]["zero_shot"] != of["fedper"]["personalised"]
        assert of["pooled"]["zero_shot"] == of["pooled"]["personalised"]
    assert all((each / "hold-out" / name / "report.html").is_file() for name in found)


def test_pooled_data_are_the_others(table, tmp_path, monkeypatch):
    """hospital-01, which would train for all, is held out: hospital-02 trains, on its data and hospital-03's."""
    asked = []

    def watch(division, silos):
        asked.append(silos)
        return pool_of(division, silos)

    monkeypatch.setattr("client.local_data.pool_of", watch)
    simulate(
        {
            **values(table, tmp_path / "run", strategy="pooled", seed=1),
            "hold-out": "hospital-01",
        },
        quiet=True,
    )
    assert set(asked) == {(1, 2)}


@pytest.mark.exhaustive
def test_side_by_side_and_after_a_crash_the_study_is_the_same(table, tmp_path, monkeypatch):
    """Interrupted in a run without hospital-02, and gone on without a word of who was held out."""
    less = {"strategy": "fedper", "seed": 1}
    each = simulate(values(table, tmp_path / "each", **less), quiet=True, hold_out="each")
    executor = partial(side_by_side, engine=inline, workers="2")
    apart = simulate(
        values(table, tmp_path / "apart", **less),
        quiet=True,
        hold_out="each",
        executor=executor,
    )
    assert all_left(apart) == all_left(each)
    original = RoundLoop.round

    def stop(loop, strategy, number):
        if (loop.common.held_out, number) == ((HELD,), 2):
            raise KeyboardInterrupt
        original(loop, strategy, number)

    monkeypatch.setattr(RoundLoop, "round", stop)
    with pytest.raises(KeyboardInterrupt):
        simulate(values(table, tmp_path / "broken", **less), quiet=True, hold_out="each")
    # Whose runs have ended
    assert list(summary(tmp_path / "broken")["hold_out"]) == ["hospital-01"]
    monkeypatch.undo()
    again = simulate(values(table, tmp_path / "broken", **less, resume=True), quiet=True)
    assert all_left(again) == all_left(each)
    with pytest.raises(UserError, match="was run with another"):
        simulate(values(table, again, **less, resume=True), quiet=True, hold_out=HELD)


@pytest.mark.exhaustive
def test_two_processes_from_the_command_line(table, tmp_path, capsys):
    given = f"--strategy fedavg --data {table} --partition iid --silos 3 --rounds 1".split()
    given += ["--set", "threads=1", "--workers", "2", "--hold-out", "hospital-01,hospital-03"]
    assert silofl("simulate", *given, "--out", tmp_path / "run") == 0
    found = summary(tmp_path / "run")["hold_out"]
    assert list(found) == ["hospital-01", "hospital-03"]
    assert set(found["hospital-01"]["fedavg"]) == {
        "zero_shot",
        "personalised",
        "local",
        "all_in",
    }
    assert summary(tmp_path / "run/hold-out/hospital-01+hospital-03")["runs"][0]["silos"] == [
        HELD
    ]
    assert "zero-shot" in capsys.readouterr().out


def test_hospitals_of_a_folder_are_called_as_their_files(tmp_path):
    """In the results, in the states, and where one is held out of all others', pooled ones included."""
    (tmp_path / "centres").mkdir()
    random_silos(tmp_path / "centres", {"south": 20, "east": 30, "North": 40})
    given = f"--data {tmp_path}/centres --strategy pooled --rounds 1 --hold-out north".split()
    assert silofl("simulate", *given, *f"--set threads=1 --out {tmp_path}/run".split()) == 0
    assert list(summary(tmp_path / "run")["hold_out"]) == ["north"]
    found = {run["strategy"]: run for run in summary(tmp_path / "run")["runs"]}
    names = ["east", "north", "south"]
    assert sorted(found["pooled"]["silos"]) == sorted(found["local"]["silos"]) == names
    (without,) = summary(tmp_path / "run/hold-out/north")["runs"]
    assert sorted(without["silos"]) == ["east", "south"]
    assert {
        state.name for state in (tmp_path / "run/checkpoint").glob("local-*/silos/*")
    } == set(names)


@pytest.mark.parametrize(
    ("changes", "hold_out", "line"),
    [
        ({}, "hospital-04", "unknown silo to hold out 'hospital-04'"),
        ({}, " , ", "names of hospitals are needed"),
        ({}, "hospital-01,hospital-02,hospital-03", "none would be left"),
        ({}, "hospital-01,hospital-01", "twice"),
        ({"evaluate-every": 0}, "each", "leaves no round to choose"),
        ({"hold-out": HELD}, "each", "one of them is wanted"),
        ({}, "", "names of hospitals are needed"),
        ({"hold-out": "hospital-9"}, None, "there is no silo 'hospital-9'"),
    ],
)
def test_what_cannot_be_held_out(table, tmp_path, changes, hold_out, line):
    with pytest.raises(UserError, match=line):
        simulate({**values(table, tmp_path / "run"), **changes}, quiet=True, hold_out=hold_out)


# ---- The hospital held out, in one run ------------------------------------------------------------------------------


@pytest.fixture
def four(tmp_path):
    return random_silos(tmp_path, {"a": 6, "b": 10, "c": 8, "d": 7})


def test_nothing_of_it_is_in_what_was_agreed(four, tmp_path):
    """Its columns are a thousand times larger: neither sums nor weights nor the choice of the round know it."""
    rng = np.random.default_rng(5)
    far = {
        **four,
        "b": write_silo(
            tmp_path / "far.npz", 1000 * rng.normal(size=(10, 3)), [0, 1, 2, 0, 1] * 2, 3
        ),
    }
    given = {"strategy": "apple", "normalization": "agreed", "rounds": 3, "hold_out": "b"}
    runs = [federate(files, **given) for files in (four, far)]
    rows = [comparable([r for r in run.rows if r.silo != "b"]) for run in runs]
    assert rows[0] == rows[1]
    assert comparable(runs[0].rows) != comparable(runs[1].rows)
    sums = [
        str(reply.content)
        for m, reply in runs[0].grid.traffic
        if runs[0].grid.name_of(m.metadata.dst_node_id) == "b"
    ]
    assert "square_sum" not in sums[0]


@pytest.mark.parametrize("method", ["fedavg", "apple", "fedfomo"])
def test_a_resumed_run_evaluates_the_same_newcomer(four, tmp_path, method):
    """Killed after its best round: what the newcomer would have got in that round is in the checkpoint."""
    given = {"strategy": method, "rounds": 4, "hold_out": "b", "learning_rate": 3.0}
    whole = federate(four, directory=tmp_path / "whole", **given)
    interrupted(four, tmp_path / "broken", watch=crash_after(3), **given)
    resumed = federate(four, directory=tmp_path / "broken", resume=True, **given)
    assert_equal(whole, resumed, (tmp_path / "whole", tmp_path / "broken"))
    assert whole.federation.hold_out.results == resumed.federation.hold_out.results
    assert whole.federation.hold_out.results["b"]["zero_shot"]["accuracy"] is not None


def test_a_hospital_refuses_the_other_role(two):
    """The server's message says that it is none, or one, and the run's settings, which its policy sees, otherwise."""

    def before(silo, message, context):
        if message.metadata.message_type == "train":
            message.content["config"][NEWCOMER] = True
        elif message.metadata.message_type == "evaluate":
            message.content["config"].pop(NEWCOMER, None)

    with pytest.raises(
        RuntimeError,
        match="a refuses: the run has hold-out = 'b', and a message takes it as a newcomer",
    ):
        federate(two, strategy="fedavg", rounds=1, hold_out="b", before=before)


def test_a_held_out_hospital_never_trains(two):
    """Its own question, sent as one to train: nothing leaves."""
    run = federate(two, strategy="fedavg", rounds=1, hold_out="b")
    asked = next(
        m
        for m, _ in run.grid.traffic
        if "config" in m.content and NEWCOMER in m.content["config"]
    )
    node = asked.metadata.dst_node_id
    with flower_identity():
        reply = app(Message(asked.content, node, "train"), run.grid.contexts[node])
    assert (
        reply.error.reason
        == "b refuses: the run has hold-out = b, and a message asks it to train"
    )


def test_a_hospital_that_does_not_fit_is_named(four, tmp_path):
    wide = {**four, "b": write_silo(tmp_path / "wide.npz", np.ones((4, 5)), [0, 1, 2, 0], 3)}
    run = federate(
        wide,
        strategy="fedavg",
        rounds=1,
        hold_out="b,zz",
        silos=5,
        directory=tmp_path / "run",
        min_silos=1,
        round_timeout=1,
    )
    results = run.federation.hold_out.results
    assert results["b"]["n_train"] is None and results["zz"]["zero_shot"] == {}
    assert "samples of shape" in run.federation.registration.left_out["b"]
    assert "it is not here" in run.federation.registration.left_out["zz"]


def test_the_ray_engine_knows_where_a_run_belongs(table, tmp_path):
    directory = RunDirectory(tmp_path)
    (tmp_path / "hold-out").mkdir()
    runs = [parse_settings({"hold-out": held}) for held in ("", HELD)]
    assert [part_of(directory, run).path for run in runs] == [
        tmp_path,
        tmp_path / "hold-out" / HELD,
    ]
    assert [run.label for run in runs] == ["fedavg-42", f"fedavg-42 without {HELD}"]
    assert server.simulation.workers.part_of is part_of


def test_a_single_run_by_the_setting(tmp_path):
    loop = simulated(strategy="fedavg", rounds=1, hold_out=HELD)
    assert list(loop.hold_out.results) == [HELD]
    assert HELD not in loop.registration.summaries and len(loop.registration.summaries) == 5
