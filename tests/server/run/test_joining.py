"""Hospitals that join a run as it goes on: who is taken in, what is asked of it, and what a joiner cannot do."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ConfigRecord
from representatives import product
from resuming import assert_equal, crash_after, interrupted
from tiny import comparable, federate, notes, random_silos, round_of, write_silo

from server.results.run_directory import RunDirectory
from server.results.summary import write_summary
from server.run.registration.data_summaries import JOIN_SECONDS

RUN = {
    "strategy": "fedavg",
    "rounds": 4,
    "evaluate_every": 1,
    "silos": 4,
    "min_silos": 2,
    "round_timeout": 0.2,
}


@pytest.fixture
def four(tmp_path):
    return random_silos(tmp_path, {"a": 6, "b": 10, "c": 8, "d": 7})


def coming(silo, server_round, also=lambda grid: None):
    """For ``prepare``: the silo's node is online from that round on."""

    def prepare(grid):
        nodes, seen = grid.get_node_ids, [0]

        def before(name, message, context):
            seen[0] = max(seen[0], round_of(message))

        def online():
            here = seen[0] >= server_round - 1
            return [n for n in nodes() if here or grid.name_of(n) != silo]

        grid.before, grid.get_node_ids = before, online
        also(grid)

    return prepare


def trained(run, silo):
    asked = [m for m, _ in run.grid.traffic if run.grid.name_of(m.metadata.dst_node_id) == silo]
    return [round_of(m) for m in asked if m.metadata.message_type == "train"]


def test_whoever_connects_takes_part_from_the_next_round_on(four, tmp_path):
    run = federate(
        four, **RUN, late_joiners="any", directory=tmp_path / "run", prepare=coming("b", 3)
    )
    assert trained(run, "b") == [3, 4] and trained(run, "a") == [1, 2, 3, 4]
    assert "b joins the run, and takes part from round 3 on" in notes(tmp_path / "run")
    entry = write_summary(
        RunDirectory(tmp_path / "run"), run.federation.history, run.federation.finish_run()
    )["runs"][0]
    assert entry["joined"] == {"b": 3} and entry["silos"] == ["a", "b", "c", "d"]


def test_a_run_that_anybody_may_join_begins_with_its_quorum(four, monkeypatch):
    """It does not wait for `silos`, which is the most that it may ever have."""

    def waits(seconds):
        raise AssertionError("the run waits for silos")

    monkeypatch.setattr("time.sleep", waits)
    here = {**RUN, "min_silos": 3, "round_timeout": 3600.0, "straggler_factor": 0.0}
    run = federate(four, **here, late_joiners="any", prepare=coming("b", 3))
    assert trained(run, "b") == [3, 4] and trained(run, "a") == [1, 2, 3, 4]


def test_without_the_setting_it_is_not_even_asked(four):
    run = federate(four, **RUN, prepare=coming("b", 3))
    assert trained(run, "b") == [] and "b" not in {
        run.grid.name_of(m.metadata.dst_node_id) for m, _ in run.grid.traffic
    }


def test_another_than_the_named_one_does_not_join(four, tmp_path):
    changes = {**RUN, "late_joiners": "e=2", "silos": 5}
    run = federate(four, **changes, directory=tmp_path / "run", prepare=coming("b", 3))
    assert trained(run, "b") == []
    assert "b is here, and is none of this run's silos" in notes(tmp_path / "run")


def test_a_run_has_no_more_than_its_silos(four, tmp_path):
    changes = {**RUN, "silos": 3}
    run = federate(
        four, **changes, late_joiners="any", directory=tmp_path / "run", prepare=coming("b", 3)
    )
    assert trained(run, "b") == []
    assert "b cannot join the run, which has silos = 3 and so many already" in notes(
        tmp_path / "run"
    )


def test_data_that_do_not_fit_stay_out(four, tmp_path):
    """The run goes on; the reason is in summary.json and in the notes, once."""
    wide = write_silo(tmp_path / "wide.npz", np.zeros((5, 7)), [0, 1, 0, 1, 0], 3)
    files = {**four, "b": wide}
    run = federate(
        files, **RUN, late_joiners="any", directory=tmp_path / "run", prepare=coming("b", 2)
    )
    said = [
        line
        for line in notes(tmp_path / "run")
        if line.startswith("b cannot join the run: it has")
    ]
    assert (
        len(said) == 1
        and "shape" in said[0]
        and trained(run, "b") == []
        and trained(run, "a") == [1, 2, 3, 4]
    )
    assert run.federation.finish_run().left_out == {"b": said[0]}


def test_a_name_that_takes_part_cannot_be_taken(four, tmp_path):
    """Where names are not registered, a second node calls itself like a silo that trains: it learns nothing."""

    def prepare(grid):
        coming("b", 3)(grid)
        seen = grid.before

        def before(silo, message, context):
            seen(silo, message, context)
            if silo == "b":
                context.node_config["name"] = "a"

        grid.before = before

    run = federate(four, **RUN, late_joiners="any", directory=tmp_path / "run", prepare=prepare)
    node = list(four).index("b") + 1
    assert [
        m.metadata.message_type for m, _ in run.grid.traffic if m.metadata.dst_node_id == node
    ] == ["query"]
    assert "a second node calls itself a, which takes part already: it does not" in notes(
        tmp_path / "run"
    )


@pytest.mark.parametrize(
    ("setting", "silo", "late"),
    [("", "a", 2), ("b=3", "a", 2), ("b=3", "b", 2), ("b=3", "b", 4), ("any", "a", "2")],
)
def test_a_silo_is_a_late_joiner_only_as_the_settings_say(four, setting, silo, late):
    """A server says so in round 3 of another silo, or of another round: the silo does not train."""

    def before(name, message, context):
        if name == silo and round_of(message) == 3 and message.metadata.message_type == "train":
            message.content.config_records["config"]["late"] = late

    run = federate(four, **RUN, late_joiners=setting, before=before)
    refused = {
        (run.grid.name_of(m.metadata.dst_node_id), round_of(m)): str(r.error.reason)
        for m, r in run.grid.traffic
        if r.has_error()
    }
    assert list(refused) == [(silo, 3)]
    assert (
        f"late-joiners = {setting!r}, and a message of round 3 takes it as one that joined"
        in refused[silo, 3]
    )


def test_one_that_is_offline_in_its_round_joins_once_it_is_back(four):
    """It is there as the run begins, away before rounds 2 and 3, and back before round 4."""

    def prepare(grid):
        nodes, seen = grid.get_node_ids, [0]

        def before(name, message, context):
            seen[0] = max(seen[0], round_of(message))

        def online():
            return [n for n in nodes() if seen[0] in (0, 3, 4) or grid.name_of(n) != "b"]

        grid.before, grid.get_node_ids = before, online

    run = federate(four, **RUN, late_joiners="b=2", prepare=prepare)
    assert trained(run, "b") == [4] and run.strategy.plan.joined == {"b": 4}


def test_its_sums_are_not_asked_for(four):
    """Tables are standardised as before it came: what it would add stays in the hospital."""
    changes = {**RUN, "normalization": "agreed", "late_joiners": "any"}
    run = federate(four, **changes, prepare=coming("b", 3))
    summaries = {
        run.grid.name_of(m.metadata.dst_node_id): dict(r.content.config_records["summary"])
        for m, r in run.grid.traffic
        if m.metadata.message_type == "query"
    }
    assert "sum" in summaries["a"] and not {"sum", "square_sum"} & set(summaries["b"])
    means = [
        list(r["mean"])  # type: ignore[arg-type]
        for m, _ in run.grid.traffic
        if m.metadata.message_type == "train"
        and isinstance(r := m.content["config"], ConfigRecord)
    ]
    assert all(mean == means[0] for mean in means) and trained(run, "b") == [3, 4]


def test_a_named_one_sends_no_sums_whatever_the_server_asks(four):
    changes = {**RUN, "normalization": "agreed", "late_joiners": "b=3"}
    run = federate(four, **changes)
    sent = next(
        r for m, r in run.grid.traffic if run.grid.name_of(m.metadata.dst_node_id) == "b"
    )
    assert "sum" not in sent.content.config_records["summary"]


def test_a_silent_node_holds_nobody_up_for_long(four, tmp_path, monkeypatch):
    """Three times the limit in all, and then it is not asked any more."""
    assert JOIN_SECONDS == 60
    monkeypatch.setattr("server.run.registration.data_summaries.JOIN_SECONDS", 0.01)

    def silence(grid):
        grid.silent = {("b", 0)}

    changes = {**RUN, "rounds": 6}
    run = federate(
        four,
        **changes,
        late_joiners="any",
        directory=tmp_path / "run",
        prepare=coming("b", 2, silence),
    )
    assert trained(run, "a") == [1, 2, 3, 4, 5, 6] and trained(run, "b") == []
    assert [
        line for line in notes(tmp_path / "run") if "gave no data summary within" in line
    ] != []


@product(strategy=["fedavg", "apple", "pfedla", "scaffold", "ditto"], killed=[2, 3])
def test_resume_keeps_who_joined_and_who_is_to_join(four, tmp_path, strategy, killed):
    changes = {**RUN, "strategy": strategy, "late_joiners": "b=3"}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    undisturbed = federate(four, **changes, directory=whole)
    interrupted(four, cut, **changes, watch=crash_after(killed))
    resumed = federate(four, **changes, directory=cut, resume=True)
    assert_equal(undisturbed, resumed, (whole, cut))
    assert resumed.strategy.plan.joined == {"b": 3}


def test_a_run_that_goes_back_lets_it_join_again(four, tmp_path):
    """A state is damaged in round 4: from the checkpoint of round 2, before the joiner came, all is repeated."""
    changes = {**RUN, "strategy": "apple", "late_joiners": "b=3", "checkpoint_every": 1}
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    undisturbed = federate(four, **changes, directory=whole, state_dir=tmp_path / "states-1")

    def prepare(grid):
        done: list[int] = []

        def before(silo, message, context):
            if silo == "a" and round_of(message) == 4 and not done:
                done.append(4)
                for file in (tmp_path / "states-2").rglob("round-000003.safetensors"):
                    if "/a/" in str(file):
                        file.write_bytes(b"damaged")

        grid.before = before

    again = federate(
        four, **changes, directory=hurt, state_dir=tmp_path / "states-2", prepare=prepare
    )
    assert trained(again, "b") == [3, 4, 3, 4] or trained(again, "b") == [3, 3, 4]
    assert_equal_rows(undisturbed, again)


def assert_equal_rows(first, second):
    without = ("round_seconds", "bytes_down", "bytes_up")
    assert comparable(first.rows, without=without) == comparable(second.rows, without=without)
