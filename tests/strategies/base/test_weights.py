"""What a silo counts in a mean: its samples, as agreed, or as it says and at most so many times the median."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from cases import CASES, ONE_OF_EACH, OPTIONS, typical
from flwr.app import ConfigRecord
from tiny import (
    comparable,
    federate,
    notes,
    random_silos,
    round_of,
    same,
    settings_of,
    simulated,
    train_replies,
)
from two_layers import DEEP

from models.standardisation import agreed_statistics
from partitions.common.errors import UserError
from server.results.summary import run_summary
from strategies.base.robust import weighted_mean
from strategies.base.transport.data_summary import sample_weights
from strategies.base.transport.payload import decode

LIE = 2**31


def saying(silo, *kinds, when=lambda m: True, **values):
    """For ``prepare``: the silo says these values, on its summary (``query``) or in its replies (``train``)."""

    def after(name, message, reply):
        kind = message.metadata.message_type
        if name == silo and kind in kinds and when(message):
            record = "summary" if kind == "query" else "config"
            reply.content[record] = ConfigRecord({**reply.content[record], **values})
        return reply

    return lambda grid: setattr(grid, "after", after)


def test_the_cap_by_hand():
    """The lower median of 6, 8, 10, 900 is 8; of two silos it is the smaller one's. An agreed number is not capped."""
    assert sample_weights({"a": 6, "b": 10, "c": 8, "d": 900}, 5.0) == {
        "a": 6,
        "b": 10,
        "c": 8,
        "d": 40,
    }
    assert sample_weights({"a": 6, "b": LIE}, 2.5) == {"a": 6, "b": 15}
    assert sample_weights({"a": 6, "b": LIE}, 0.0) == {"a": 6, "b": LIE}
    assert (
        sample_weights({"a": 6, "b": 10, "c": 8, "d": LIE}, 5.0, {"d": 300, "x": 1})["d"] == 300
    )
    assert sample_weights({"a": 0, "b": 0, "c": 3, "d": 100}, 5.0) == {
        "a": 0,
        "b": 0,
        "c": 3,
        "d": 15,
    }
    assert sample_weights({"a": 1}, 5.0) == {"a": 1} and sample_weights({}, 5.0) == {}


@typical(ONE_OF_EACH, "method")
def test_every_method_weighs_by_what_counts(three, method, tiny_bn):
    """c says that it has 2^31 samples; it counts as 5 · 10. The state is, bit for bit, that of a federation in which
    c is honest and 50 are agreed: no method has a number of samples from anywhere else."""
    options = {**DEEP, **OPTIONS, **CASES[ONE_OF_EACH[method]][0], "rounds": 2}
    lied = federate(three, prepare=saying("c", "query", n_train=LIE), **options)
    agreed = federate(three, agreed='{"samples": {"c": 50}}', **options)
    assert (
        lied.strategy.plan.samples == agreed.strategy.plan.samples == {"a": 6, "b": 10, "c": 50}
    )
    ours, theirs = lied.strategy.state, agreed.strategy.state
    assert ours.numbers == theirs.numbers and ours.arrays.keys() == theirs.arrays.keys()
    assert all(same(ours.arrays[key], theirs.arrays[key]) for key in ours.arrays)
    for silo in three:
        assert same(lied.personal(silo), agreed.personal(silo))


@pytest.mark.parametrize("cap, counts", [(5.0, 50), (2.0, 20), (0.0, LIE)])
def test_a_lie_counts_no_more_than_the_cap(three, tmp_path, cap, counts):
    """By hand: the mean of what the three have sent."""
    lie = saying("c", "query", "train", n_train=LIE, samples=LIE)
    run = federate(
        three, "fedavg", rounds=2, weight_cap=cap, directory=tmp_path / "run", prepare=lie
    )
    sent = {
        key: decode(r.content)[0].models["model"].vector for key, r in train_replies(run.grid)
    }
    expected = weighted_mean([sent[silo, 1] for silo in "abc"], [6, 10, counts])
    assert same(run.received("a", 2), expected)
    told = (
        f"c's {LIE} training samples count as {counts}, so that no hospital outweighs the others: "
        f"at most {cap:g} times the median (weight-cap)"
    )
    assert notes(tmp_path / "run") == ([told] if cap else [])


def test_nobody_above_the_cap_is_as_without_one(three):
    runs = [federate(three, "fedavg", rounds=2, weight_cap=cap) for cap in (5.0, 0.0)]
    assert comparable(runs[0].rows) == comparable(runs[1].rows)
    with pytest.raises(UserError, match=r"weight-cap = 0\.5: at least 1, or 0 for none"):
        settings_of(three, weight_cap=0.5)


def test_what_is_agreed_stands_above_what_a_silo_says(three, tmp_path):
    options = {"strategy": "fedavg", "rounds": 1, "agreed": '{"samples": {"b": 7}}'}
    run = federate(three, directory=tmp_path / "run", **options)
    assert run.strategy.plan.samples == {"a": 6, "b": 7, "c": 8}
    assert notes(tmp_path / "run") == ["b's 10 training samples count as 7, as agreed"]


def test_the_statistics_of_tables_are_weighed_alike():
    """a: one value 2, counts as 1. b: four values of mean 6 and mean square 40, counts as 1: mean 4, variance
    (4 + 40) / 2 - 16 = 6."""
    summaries = [
        {"name": "a", "n_train": 1, "sum": [2.0], "square_sum": [4.0]},
        {"name": "b", "n_train": 4, "sum": [24.0], "square_sum": [160.0]},
    ]
    assert agreed_statistics(summaries, {"a": 1, "b": 1}) == {"mean": [4.0], "std": [6.0**0.5]}
    assert agreed_statistics(summaries, {"a": 1, "b": 4}) == agreed_statistics(summaries)


def test_the_weighted_mean_of_the_summary_is_capped(three):
    """c says that it has 2^31 test samples; it counts as 50 of 66 there."""
    run = federate(three, "fedavg", rounds=1, prepare=saying("c", "query", n_test=LIE))
    history, finished = run.federation.history, run.federation.finish_run()
    uncapped = run_summary(history, replace(finished, weight_cap=0.0))
    accuracy = {n: v["accuracy"] for n, v in uncapped["per_silo"].items()}
    expected = (6 * accuracy["a"] + 10 * accuracy["b"] + 50 * accuracy["c"]) / 66
    assert finished.weight_cap == 5.0
    assert run_summary(history, finished)["final"]["accuracy_weighted"] == pytest.approx(
        expected, rel=1e-12
    )


# ---- Numbers that change ---------------------------------------------------------------------------------------------


def test_another_number_in_a_round_is_named_once(three, tmp_path):
    """It counts as on the summary all the same; text for a number is shown as what it is."""
    plain = federate(three, "fedavg", rounds=3)
    for said, shown in ((LIE, str(LIE)), ("\x1b[2J" + "9" * 500, r"'\x1b[2J999")):
        place = tmp_path / str(len(shown))
        late = saying("c", "train", when=lambda m: round_of(m) > 1, samples=said)
        run = federate(three, "fedavg", rounds=3, directory=place, prepare=late)
        assert comparable(run.rows) == comparable(plain.rows)
        (note,) = notes(place)
        assert (
            note.startswith(f"c says in round 2 that it has {shown}")
            and note.isprintable()
            and len(note) <= 300
        )


def test_another_number_in_a_resumed_run_is_named(three, tmp_path):
    options = {"strategy": "fedavg", "directory": tmp_path / "run"}
    federate(three, rounds=1, **options)
    run = federate(
        three, rounds=2, resume=True, prepare=saying("c", "query", n_train=9), **options
    )
    assert run.strategy.plan.samples["c"] == 9
    first = notes(tmp_path / "run")[0]
    assert first == "c has 9 training samples now, and said 8 before"


def test_another_number_in_the_next_run_of_a_study_is_named(tmp_path):
    """A file that has grown between two methods: their comparison is no longer one of methods alone."""
    (tmp_path / "grown").mkdir()
    files = random_silos(tmp_path, [6, 10, 8])
    grown = random_silos(tmp_path / "grown", [6, 10, 9])
    options = {"silos": 3, "rounds": 1, "mlp.hidden": "", "directory": tmp_path / "run"}
    (tmp_path / "run").mkdir()
    loop = simulated(files, strategy="local", **options)
    assert loop.directory is not None and loop.directory.sample_counts() == {
        "a": 6,
        "b": 10,
        "c": 8,
    }
    with (tmp_path / "run/progress.jsonl").open("a") as file:
        file.write('{"event": "silos", "samp')  # a crash cut it off
        file.write("\n")
    simulated(grown, strategy="fedavg", **options)
    assert "c has 9 training samples now, and said 8 before" in notes_of_whole_lines(
        tmp_path / "run"
    )


def test_a_simulation_draws_anew_with_every_seed(tmp_path):
    for seed in (1, 2):
        loop = simulated(
            silos=3,
            rounds=1,
            partition="dirichlet",
            strategy="local",
            seed=seed,
            directory=tmp_path,
        )
        assert loop.directory is not None and loop.directory.sample_counts() == {}
    assert notes_of_whole_lines(tmp_path) == []


def notes_of_whole_lines(directory):
    lines = (directory / "progress.jsonl").read_text().splitlines()
    return [json.loads(line)["message"] for line in lines if '"event": "note"' in line]
