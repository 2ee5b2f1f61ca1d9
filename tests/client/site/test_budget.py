"""The ledger of a privacy budget: what is charged, what is refused, what is free, and every way to a fresh budget."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from failing import fails
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from forks import ended, fork, in_fork
from taken import silofl

from client.commands.budget import budgets, is_of_records
from client.protocol.parsed import SiteError
from client.protocol.policy import Policy
from client.site.budget import accounting
from client.site.budget import ledger as site_ledger
from client.site.budget.accounting import (
    MessageCost,
    cost_of,
    data_file,
    epsilon_of,
    find_data_file,
    read_by_process,
)
from client.site.budget.ledger import LEAST_EPSILON, Ledger, Release, in_ledger, spent_of
from client.site.head import Head
from client.site.record import Record
from client.site.release import describe_reply
from models.privacy.accountant import epsilon
from partitions.silo_file import check_silo_file, read_silo_file, write_silo_file
from partitions.units import describe_units
from server.simulation.engine import flower_identity

COST = MessageCost("record", 200, 0.1, 1.5, 10, 1e-5)
NO_BUDGET = Policy()
ANY_TOTAL = {"data": "a", "units": 200, "rate": 0.1, "noise": 1.5}


def write_file(path, rows, **arrays):
    """A table whose row i says i, 60 % of them for training; equal rows are equal samples."""
    x = np.array(rows, np.float32)[:, None] * np.ones(3, np.float32)
    y = np.arange(len(rows)) % 2
    third = len(rows) * 3 // 5
    parts: dict[str, Any] = {
        "x_train": x[:third],
        "y_train": y[:third],
        "x_test": x[third:],
        "y_test": y[third:],
    }
    np.savez(path, **parts, x_val=x[:0], y_val=y[:0], **arrays)
    return path


def known(state, name="a", rows=range(20), **arrays):
    """A version of a silo's data file, as the site notes it; its name stands for its SHA-256."""
    state.mkdir(exist_ok=True)
    return data_file(state, name, "clinic", write_file(state / f"{name}.npz", rows, **arrays))


def message(data, number=1, run="run-1", **changes):
    return replace(
        Release(f"{run} {number}", "clinic", run, f"name of {run}", number, data, COST),
        **changes,
    )


def total(state, data):
    """Epsilon that is spent of the people of a data file, at the delta of COST."""
    ledger = Ledger(state)
    with ledger.open() as db:
        return epsilon_of(ledger.of_cohort(db, data), 1e-5)


def steps(count):
    return epsilon(COST.noise, COST.rate, count, COST.delta)


def refused(reason, ledger, release, policy=NO_BUDGET, **attended):
    fails(SiteError, reason, ledger.charge, release, policy, **attended)


# --- charges ----------------------------------------------------------------------------------------------------------


def test_rounds_and_runs_add_up(tmp_path):
    """Three rounds of one run and one of another are 40 steps, at the delta of 200 units: 1e-5."""
    data, ledger = known(tmp_path), Ledger(tmp_path)
    before = 0.0
    for number, release in enumerate(
        [*(message(data, n) for n in (1, 2, 3)), message(data, run="run-2")], 1
    ):
        spent = ledger.charge(release, NO_BUDGET)
        assert (spent.before, spent.delta) == (before, 1e-5)
        before = spent.after
        assert spent.after == pytest.approx(steps(10 * number), rel=1e-12)
    (line, *_) = ledger.lines()
    assert {
        key: line[key]
        for key in ("kind", "units", "noise", "rate", "steps", "data", "round", "run")
    } == {
        "kind": "charge",
        "units": 200,
        "noise": 1.5,
        "rate": 0.1,
        "steps": 10,
        "data": "a",
        "round": 1,
        "run": "name of run-1",
    }


def test_different_noise_composes_by_order(tmp_path):
    """Not the sum of both epsilons, which is more."""
    data, ledger = known(tmp_path), Ledger(tmp_path)
    ledger.charge(message(data, 1), NO_BUDGET)
    both = ledger.charge(message(data, 2, cost=replace(COST, noise=0.8)), NO_BUDGET)
    assert steps(10) < both.after < steps(10) + epsilon(0.8, 0.1, 10, 1e-5)


def test_a_round_beyond_the_budget_is_refused_and_costs_nothing(tmp_path):
    data, ledger, policy = known(tmp_path), Ledger(tmp_path), Policy(epsilon=steps(25))
    for number in (1, 2):
        ledger.charge(message(data, number), policy)
    refused(
        r"its policy has epsilon = .*, and this round would bring what is spent from",
        ledger,
        message(data, 3),
        policy,
    )
    assert len(ledger.lines()) == 2 and total(tmp_path, data) == pytest.approx(steps(20))
    ledger.charge(message(data, 3, cost=replace(COST, steps=5)), policy)  # less fits
    ledger.charge(message(data, 2), policy)  # and what was charged may be repeated


def test_delta_is_the_policys_or_of_the_largest_version(tmp_path):
    data = known(tmp_path)
    few = message(data, 1, cost=replace(COST, units=50_000))
    assert Ledger(tmp_path).charge(few, NO_BUDGET).delta == pytest.approx(1 / 500_000)
    assert Ledger(tmp_path).charge(message(data, 2), NO_BUDGET).delta == pytest.approx(
        1 / 500_000
    )
    assert Ledger(tmp_path).charge(message(data, 3), Policy(delta=1e-3)).delta == 1e-3


# --- messages that are repeated ---------------------------------------------------------------------------------------


def test_a_repeated_message_is_free_as_long_as_its_reply_has_the_same_bits(tmp_path):
    """Killed before the reply, resumed after it: free. Another reply for the same message is another release."""
    data, ledger = known(tmp_path), Ledger(tmp_path)
    release, policy = message(data), Policy(epsilon=steps(25))
    ledger.charge(release, policy)
    for _ in range(2):  # killed, then repeated
        assert ledger.charge(release, policy).after == pytest.approx(steps(10))
    for _ in range(2):
        assert ledger.note_reply(release, "bits", policy).after == pytest.approx(steps(10))
    assert ledger.note_reply(release, "other bits", policy).after == pytest.approx(steps(20))
    ledger.note_reply(release, "other bits", policy)
    fails(SiteError, "its policy has epsilon", ledger.note_reply, release, "third bits", policy)
    assert [line["kind"] for line in ledger.lines()] == ["charge", "sent", "charge", "sent"]
    assert total(tmp_path, data) == pytest.approx(steps(20))


def test_a_message_with_another_model_in_the_same_round_costs_again(tmp_path):
    """Its noise is another one, so the server cannot subtract; and it is another release."""
    data, ledger = known(tmp_path), Ledger(tmp_path)
    ledger.charge(message(data), NO_BUDGET)
    assert ledger.charge(message(data, key="other"), NO_BUDGET).after == pytest.approx(
        steps(20)
    )


OTHER_COSTS = [
    {"noise": 0.1},
    {"rate": 0.5},
    {"steps": 3100},
    {"units": 100},
    {"unit": "patient"},
]


@pytest.mark.parametrize("change", OTHER_COSTS)
def test_a_charge_pays_for_no_other_cost(change, tmp_path):
    """A cheap charge whose reply was an error, then the same message at another price."""
    data, ledger = known(tmp_path), Ledger(tmp_path)
    cheap = message(data, cost=replace(COST, noise=1e5))
    dear = replace(cheap, cost=replace(COST, **change))
    ledger.charge(cheap, NO_BUDGET)
    refused("its policy has epsilon", ledger, dear, Policy(epsilon=1e-3))
    with pytest.raises(SiteError, match="its policy has epsilon"):
        ledger.note_reply(dear, "bits", Policy(epsilon=1e-3))
    assert [line["kind"] for line in ledger.lines()] == ["charge"]
    ledger.note_reply(cheap, "bits", NO_BUDGET)
    # Not even where its bits are those of the cheap one
    ledger.note_reply(dear, "bits", NO_BUDGET)
    ledger.note_reply(dear, "bits", NO_BUDGET)
    paid = [line["noise"] for line in ledger.lines() if line["kind"] == "charge"]
    assert paid == [1e5, dear.cost.noise]


# --- no fresh budget --------------------------------------------------------------------------------------------------

VERSIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "other people, nothing declared": ({"rows": range(100, 120)}, True),
    "one value edited": ({"rows": [99, *range(1, 20)]}, True),
    "other people, another cohort": ({"rows": range(100, 120), "cohort": "2027"}, False),
    "one patient of before, another cohort": (
        {"rows": [19, *range(100, 120)], "cohort": "2027"},
        True,
    ),
}


@pytest.mark.parametrize("case", VERSIONS)
def test_an_edited_file_has_no_fresh_budget(case, tmp_path):
    arrays, same = VERSIONS[case]
    before, after = known(tmp_path, "a"), known(tmp_path, "b", **arrays)
    Ledger(tmp_path).charge(message(before), NO_BUDGET)
    spent = Ledger(tmp_path).charge(message(after, 2), NO_BUDGET)
    assert spent.after == pytest.approx(steps(20 if same else 10))


def test_a_declared_cohort_goes_on_with_other_samples(tmp_path):
    before, after = (
        known(tmp_path, n, rows, cohort="2026")
        for n, rows in (("a", range(20)), ("b", range(50, 70)))
    )
    Ledger(tmp_path).charge(message(before), NO_BUDGET)
    assert Ledger(tmp_path).charge(message(after, 2), NO_BUDGET).before == pytest.approx(
        steps(10)
    )


def test_a_third_version_links_two_cohorts(tmp_path):
    """Its people are in both: what it spends counts for both, and so do theirs for it."""
    ledger = Ledger(tmp_path)
    for number, (name, rows) in enumerate(
        (("a", range(20)), ("b", range(50, 70)), ("c", range(10, 60))), 1
    ):
        spent = ledger.charge(
            message(known(tmp_path, name, rows, cohort=name), number), NO_BUDGET
        )
    assert spent.after == pytest.approx(steps(30))
    (one,) = budgets(tmp_path, NO_BUDGET)
    assert one["cohort"] == "a + b + c" and one["data"] == ["a", "b", "c"]


def test_a_ledger_that_was_changed_or_lost_lines_allows_nothing(tmp_path):
    for change in ("edited", "shortened", "no files", "deleted whole", "no data file"):
        state = tmp_path / change
        data, ledger = known(state), Ledger(state)
        for number in (1, 2):
            ledger.charge(message(data, number), NO_BUDGET)
        (file,) = ledger.folder.glob("*.jsonl")
        first, second = file.read_text().splitlines()
        if change == "edited":
            file.write_text(first.replace('"steps":10', '"steps":1') + f"\n{second}\n")
        elif change == "shortened":
            file.write_text(f"{first}\n")
        elif change == "no files":
            file.unlink()
        elif change == "deleted whole":
            file.unlink()
            (state / "budget/head.json").unlink()
        else:
            with Record(state).write() as db:
                db.execute("DELETE FROM data_files")
        refused("restore the state directory", ledger, message(replace(data, sha256="b"), 3))


def test_a_message_reads_no_earlier_line(tmp_path, monkeypatch):
    """Only where something else has changed the files: then they are verified whole, once."""
    data, ledger, read = known(tmp_path), Ledger(tmp_path), list[int]()
    ledger.charge(message(data, 1), NO_BUDGET)
    lines = Ledger.lines

    def noted(self):
        read.append(1)
        return lines(self)

    monkeypatch.setattr(Ledger, "lines", noted)
    for number in range(2, 5):
        ledger.charge(message(data, number), NO_BUDGET)
        ledger.note_reply(message(data, number), "bits", NO_BUDGET)
    assert (
        in_ledger(tmp_path, "run-1", "clinic") == [{**ANY_TOTAL, "steps": 40, "messages": 4}]
        and not read
    )
    (file,) = ledger.folder.glob("*.jsonl")
    os.utime(file)
    for number in range(5, 7):
        assert ledger.charge(message(data, number), NO_BUDGET).after == pytest.approx(
            steps(10 * number)
        )
    assert read == [1]


def test_a_message_costs_something_whatever_its_noise(tmp_path, monkeypatch):
    """A budget bounds the number of messages, and so the length of the ledger."""
    assert (
        spent_of([{**COST.fields, "noise": 1e5, "messages": 1000}], 1e-5)
        == 1000 * LEAST_EPSILON
    )
    monkeypatch.setattr(site_ledger, "LEAST_EPSILON", 0.1)
    data, ledger, loud = known(tmp_path), Ledger(tmp_path), replace(COST, noise=1e5)
    for number in (1, 2):
        assert (
            ledger.charge(message(data, number, cost=loud), Policy(epsilon=0.25)).after
            == number * 0.1
        )
    refused(
        r"its policy has epsilon = 0\.25, .* from 0\.2 to 0\.3",
        ledger,
        message(data, 3, cost=loud),
        Policy(epsilon=0.25),
    )
    assert budgets(tmp_path, NO_BUDGET)[0]["spent"] == 0.2


def test_an_older_copy_of_the_state_directory_is_found_by_the_servers_count(tmp_path):
    data, ledger = known(tmp_path), Ledger(tmp_path)
    ledger.charge(message(data, 1), NO_BUDGET)
    refused(
        r"the server has had 2 rounds of this run, and the ledger .* has 1",
        ledger,
        message(data, 3),
        attended=2,
    )
    refused("an older copy", ledger, message(data, 1), attended=1)
    ledger.charge(message(data, 2), NO_BUDGET, attended=1)


# --- crashes and other processes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Head, "write"),
        (site_ledger, "append_line"),
        (os, "fsync"),
        (site_ledger, "write_whole"),
    ],
)
def test_killed_while_it_charges(owner, name, tmp_path):
    """Once the record has it: the repeated message costs nothing, and the files get the line."""
    data = known(tmp_path)
    Ledger(tmp_path).charge(message(data, 1), NO_BUDGET)

    def dies():
        setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        Ledger(tmp_path).charge(message(data, 2), NO_BUDGET)

    assert in_fork(dies) == -signal.SIGKILL
    assert budgets(tmp_path, NO_BUDGET)[0]["spent"] == pytest.approx(steps(20))
    assert Ledger(tmp_path).charge(message(data, 2), NO_BUDGET).after == pytest.approx(
        steps(20)
    )
    assert total(tmp_path, data) == pytest.approx(steps(20))
    assert [line["round"] for line in Ledger(tmp_path).lines()] == [1, 2]


@pytest.mark.parametrize("part", [1, 200])
def test_killed_in_the_middle_of_a_line(tmp_path, part):
    """The files lack what the record has: the torn line is cut off, and written whole."""
    data, ledger = known(tmp_path), Ledger(tmp_path)
    ledger.charge(message(data, 1), NO_BUDGET)
    (file,) = ledger.folder.glob("*.jsonl")

    def dies():
        def torn(file, text):
            with file.open("ab") as end:
                end.write(text[:part])
            os.kill(os.getpid(), signal.SIGKILL)

        vars(site_ledger)["append_line"] = torn
        Ledger(tmp_path).charge(message(data, 2), NO_BUDGET)

    assert in_fork(dies) == -signal.SIGKILL and not file.read_bytes().endswith(b"\n")
    assert ledger.charge(message(data, 3), NO_BUDGET).after == pytest.approx(steps(30))
    assert not ledger.verify().faults and len(ledger.lines()) == 3


def test_a_transaction_that_is_undone_leaves_no_line(tmp_path):
    """The files are written from the record, once it has a charge."""
    data, ledger = known(tmp_path), Ledger(tmp_path)

    def undone():
        with Record(tmp_path).write():
            ledger.charge(message(data, 1), NO_BUDGET)
            raise SiteError("of something later")

    fails(SiteError, "of something later", undone)
    assert ledger.lines() == [] and not list(ledger.folder.glob("*.jsonl"))
    assert ledger.charge(message(data, 1), NO_BUDGET).before == 0


def test_two_processes_share_one_budget(tmp_path):
    """Each wants ten rounds of a budget of twelve."""
    data = known(tmp_path)
    policy = Policy(epsilon=steps(125))

    def charge(run):
        for number in range(10):
            try:
                Ledger(tmp_path).charge(message(data, number, run=run), policy)
            except SiteError as error:
                assert "its policy has epsilon" in str(error)

    both = [fork(partial(charge, run)) for run in ("one", "two")]
    assert [ended(one) for one in both] == [0, 0]
    assert len(Ledger(tmp_path).lines()) == 12 and total(tmp_path, data) == pytest.approx(
        steps(120)
    )


def test_where_nothing_can_be_written_nothing_is_charged(tmp_path):
    """A file is where the folder of the ledger would be."""
    data = known(tmp_path / "elsewhere")
    (tmp_path / "budget").write_text("")
    with pytest.raises(OSError, match="budget"):
        Ledger(tmp_path).charge(message(data), NO_BUDGET)


# --- the data file ----------------------------------------------------------------------------------------------------


@pytest.fixture
def by_process(monkeypatch):
    monkeypatch.setattr(accounting, "read_by_process", read_by_process)


def test_the_sites_own_process_counts_as_the_app_does(tmp_path, by_process):
    """Twelve training samples of five patients; one of the rows is there twice."""
    rows = [0, 0, *range(2, 20)]
    patients = {
        "patient_train": [0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4],
        "patient_val": [],
        "patient_test": range(9, 17),
    }
    numbers = {key: np.array(list(value), np.int64) for key, value in patients.items()}
    file = write_file(tmp_path / "own.npz", rows, cohort="2026", **numbers)
    found = read_by_process(file)
    assert found == describe_units(file)
    assert (found["cohort"], found["records"], found["patients"], len(found["samples"])) == (
        "2026",
        12,
        5,
        19,
    )
    data = data_file(tmp_path, "sum", "clinic", file)
    assert (data.units("record"), data.units("patient"), data.name) == (12, 5, "cohort 2026")
    assert data_file(tmp_path, "sum", "clinic", tmp_path / "gone.npz") == data  # noted


def test_patients_that_a_file_does_not_name_are_no_unit(tmp_path):
    with pytest.raises(SiteError, match=r"names no patients: silofl import --patient"):
        known(tmp_path).units("patient")


def test_a_file_that_cannot_be_read_is_one_line(tmp_path, by_process):
    (tmp_path / "own.npz").write_bytes(b"no archive")
    said = fails(
        SiteError,
        r"its data file cannot be counted: .*own\.npz: is no \.npz file",
        data_file,
        tmp_path,
        "sum",
        "clinic",
        tmp_path / "own.npz",
    )
    with Record(tmp_path).reading() as db:
        assert "\n" not in said and find_data_file(db, "sum") is None


def test_the_cohort_of_a_file(tmp_path):
    data = read_silo_file(write_file(tmp_path / "a.npz", range(20), cohort="  heart   2026 "))
    assert data.cohort == "heart 2026"
    write_silo_file(tmp_path / "b.npz", data)
    assert read_silo_file(tmp_path / "b.npz").cohort == "heart 2026"
    for cohort in (
        np.array(["a", "b"]),
        np.array(3),
        np.array("a\x1b[2J"),
        np.array("x" * 101),
    ):
        (*_, last) = check_silo_file(write_file(tmp_path / "c.npz", range(20), cohort=cohort))
        assert (
            not last.ok and last.name == "cohort" and last.detail == "cohort is no short text"
        )


# --- the rules, and what is printed -----------------------------------------------------------------------------------


def test_silofl_budget(tmp_path, capsys):
    state = tmp_path / "state"
    data, ledger = known(state, cohort="2026"), Ledger(state)
    for number in (1, 2):
        ledger.charge(message(data, number), NO_BUDGET)
    ledger.charge(message(data, run="\x1b[2J"), NO_BUDGET)
    (tmp_path / "policy.toml").write_text("epsilon = 4\n")
    assert silofl("budget", state, "--json") == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["cohort"], one["delta"], one["budget"], one["unit"]) == (
        "2026",
        1e-5,
        4.0,
        "record",
    )
    assert one["spent"] == pytest.approx(steps(30)) and one["left"] == pytest.approx(
        4 - steps(30)
    )
    assert [run["steps"] for run in one["runs"]] == [20, 10]
    assert [run["epsilon"] for run in one["runs"]] == [
        pytest.approx(steps(20)),
        pytest.approx(steps(10)),
    ]
    assert silofl("budget", state) == 0
    text = capsys.readouterr().out
    assert (
        f"spent  {steps(30):.3f}  of 4, left {4 - steps(30):.3f}" in text
        and "name of run-1, 20 steps" in text
    )
    assert "\x1b" not in text and f"last  {ledger.lines()[-1]['hash']}" in text
    (file,) = ledger.folder.glob("*.jsonl")
    file.write_text(file.read_text().replace('"steps":10', '"steps":1', 1))
    assert silofl("budget", state) == 2
    err = capsys.readouterr().err
    assert (
        err.startswith("silofl budget: the ledger ")
        and "line 1: changed" in err
        and err.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("content", "counts"),
    [
        ({"model.model": ArrayRecord({"vector": torch.zeros(3)})}, True),
        ({"metrics": MetricRecord({"received.test.loss": 0.5})}, True),
        ({"metrics": MetricRecord({"evidence.brier": [0.5]})}, True),
        ({"card": ConfigRecord({"n_train": 20, "sum": [1.0]})}, True),
        ({"card": ConfigRecord({"n_train": 20, "classes": 2})}, False),
        (
            {
                "metrics": MetricRecord({"seconds.train": 1.0}),
                "config": ConfigRecord({"round": 1}),
            },
            False,
        ),
    ],
)
def test_what_no_epsilon_covers_is_all_that_is_of_records(content, counts):
    """Without ``dp = true``: evaluations and sums too, not training alone."""
    with flower_identity():
        reply = Message(RecordDict(content), dst_node_id=1, message_type="query")
    assert any(map(is_of_records, describe_reply(reply))) == counts


@pytest.mark.parametrize("size", [0, -3, "none"])
def test_a_batch_size_that_tells_no_cost_is_refused(size, tmp_path):
    with pytest.raises(SiteError, match="no cost can be computed"):
        cost_of({"strategy": "fedavg", "dp": True, "batch-size": size}, known(tmp_path))


def test_silofl_budget_of_a_site_without_charges(tmp_path, capsys):
    assert silofl("budget", tmp_path) == 0
    assert "no run with differential privacy has cost anything here" in capsys.readouterr().out
    assert silofl("budget", tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out) == []
    assert silofl("budget", tmp_path / "none") == 2
