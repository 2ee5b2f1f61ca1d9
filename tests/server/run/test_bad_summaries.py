"""A hospital whose data summary is wrong, by mistake or on purpose: it is left out and named.

The others' run is what it is without it, at any quorum that the others make up, from the start and when it is resumed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord
from representatives import some
from tiny import comparable, federate, random_silos, round_of, rows_of, same

from client.flower.messages import CRASHED, refuse
from partitions.common.errors import UserError
from server.results.run_directory import RunDirectory
from server.results.summary import write_summary
from server.run.registration.data_summaries import SUMMARY_TRIES
from strategies.base.state import State
from strategies.base.transport.data_summary import FAR, IMPLAUSIBLE, reconcile
from strategies.base.transport.reporting import LONGEST

Spoil = Callable[[Message], object]
HONEST = {"a": 6, "b": 10, "c": 8}
OPTIONS = {"strategy": "fedavg", "normalization": "agreed"}


def says(**values):
    """These values on the summary; None: that key is not there."""

    def spoil(reply):
        summary = dict(reply.content["summary"]) | values
        reply.content["summary"] = ConfigRecord(
            {key: value for key, value in summary.items() if value is not None}
        )

    return spoil


def instead(record):
    def spoil(reply):
        reply.content["summary"] = record

    return spoil


def nothing(reply):
    del reply.content["summary"]


def times(factor):
    """The sums of the first column as in a unit that is so many times smaller."""

    def spoil(reply):
        summary = reply.content["summary"]
        says(
            sum=[summary["sum"][0] * factor, *summary["sum"][1:]],
            square_sum=[summary["square_sum"][0] * factor**2, *summary["square_sum"][1:]],
        )(reply)

    return spoil


HUGE = 2**62
# Each of these values makes a right summary a bad one.
VALUES = {
    "name": (
        *(
            None,
            "",
            " ",
            " d",
            "a ",
            "d\n",
            "\x1b[2Jd",
            "d\u202ea",
            "d\udc80",
            ["d"],
            7,
            b"d",
            "d" * 101,
        ),
        *("../d", "d\\e", "..", "=HYPERLINK(1)", "-1+d", "@d", "a"),
    ),
    "n_train": (None, 0, -8, 8.5, math.nan, math.inf, "8", True, [8], 2**31 + 1, HUGE),
    "n_val": (-1, "x" * 10**5, HUGE),
    "n_test": (-1, 1e30, []),
    "threads": (0, "many", HUGE),
    "task": ("fortune-telling", "survival", "x" * 10**6, 1, ["multiclass"]),
    "shape": (
        *(None, [], [0], [-3], [3.0], ["3"], "3", 3, [3, 1, 1, 1], [3, 3], ["tokens 3 9"]),
        *(["a 3", "b 2 2"], ["a 3", "a 3"], ["1 3", "tokens 3"], [f"a{i} 1" for i in range(9)]),
        ["a " + "9" * 5000],
    ),
    "classes": (None, 0, -3, 2.5, "3", [3], 4, 100_000, 100_001),
    "simulated": (True, "no"),
    "own_file": (False, 1),
    "device": (None, ["cpu"], "cpu\nd: 8 training samples", "\x1b[2J"),
    "versions": ("x" * 10**6, 3.11),
    "sum": (["a", "b", "c"], "abc", [math.nan, 0.0, 0.0], [0.0], [], [1e30, 0.0, 0.0]),
    "square_sum": ([math.inf, 1.0, 1.0], [1.0] * 4, None, [-1.0, 1.0, 1.0]),
    "sums_withheld": ("a\nb", "x" * 301, 1),
}
NO_SUMS = {"sum": None, "square_sum": None}
BAD = {
    "no card": nothing,
    "numbers for a card": instead(MetricRecord({"n_train": 8})),
    "an empty card": instead(ConfigRecord({})),
    "a million unknown fields' worth, and nothing else": instead(
        ConfigRecord({"x": "x" * 10**6})
    ),
    **{
        f"{key} = {value!r}"[:60]: says(**{key: value})
        for key, values in VALUES.items()
        for value in values
    },
    "a shape that is too large": says(shape=[2**31], **NO_SUMS),
    "a product that is too large": says(shape=[2**20, 2**20], **NO_SUMS),
    "another shape": says(shape=[4], sum=[0.0] * 4, square_sum=[1.0] * 4),
    "another number of dimensions": says(shape=[3, 3], **NO_SUMS),
    "a text": says(shape=["tokens 3 9"], **NO_SUMS),
    "a simulated silo": says(simulated=True, own_file=False),
    "a sum of 1e30 whose squares fit": says(sum=[1e30, 0.0, 0.0], square_sum=[1e62, 1.0, 1.0]),
    "sums beyond every number": says(sum=[1e300, 0.0, 0.0], square_sum=[1e305, 1.0, 1.0]),
    "all sums far off": says(sum=[8e14] * 3, square_sum=[1e30] * 3),
    "squares below the square of the mean": says(
        sum=[8.0, 8.0, 8.0], square_sum=[7.9, 8.0, 8.0]
    ),
    "sums in another unit still": times(1e13),
}

# Two values of each key, and what is no value of a key
OFTEN = {f"{key} = {value!r}"[:60] for key, values in VALUES.items() for value in values[:2]}
OFTEN |= {kind for kind in BAD if " = " not in kind}
RESUMED = [kind for kind in BAD if kind in OFTEN][::6]


def prepared(spoil, silo="d"):
    """The silo's summary is spoilt, every time that it is asked for."""

    def after(name, message, reply):
        if (name, message.metadata.message_type) == (silo, "query"):
            spoil(reply)
        return reply

    return lambda grid: setattr(grid, "after", after)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return random_silos(tmp_path_factory.mktemp("four"), {**HONEST, "d": 8})


@pytest.fixture(scope="module")
def without(four):
    """The run of the three honest silos."""
    return federate({name: four[name] for name in HONEST}, rounds=2, **OPTIONS)


@some("kind", BAD, OFTEN.__contains__)
def test_a_bad_summary_costs_the_others_nothing(four, without, tmp_path, kind):
    """With a quorum of three the numbers are those of a run of three, bit for bit.

    Of some kinds: round 1 without a quorum, then resumed with it. The silo is named in a printable line of at most 300
    characters in the progress and in the summary.
    """
    options = {**OPTIONS, "directory": tmp_path / "run", "prepare": prepared(BAD[kind])}
    if resumed := kind in RESUMED:
        federate(four, rounds=1, **options)
    run = federate(four, rounds=2, resume=resumed, min_silos=3, **options)
    assert comparable(run.rows) == comparable(without.rows)
    assert same(run.shared, without.shared)
    assert run.strategy.plan.numbers["mean"] == without.strategy.plan.numbers["mean"]
    assert list(run.federation.registration.left_out) in (["d"], ["node 4"])
    (reason,) = run.federation.registration.left_out.values()
    assert reason.isprintable() and 20 < len(reason) <= LONGEST
    directory = RunDirectory(tmp_path / "run")
    lines = (directory.path / "progress.jsonl").read_text().splitlines()
    written = [e for e in map(json.loads, lines) if e["event"] == "note"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", e["time"]) for e in written)
    notes = [e["message"] for e in written]
    assert (
        len(notes) == 1 + resumed
        and notes[-1] == reason
        and re.search(r"node 4|\bd\b", notes[0])
    )
    summary = write_summary(directory, run.federation.history, run.federation.finish_run())
    assert list(summary["runs"][0]["left_out"].values()) == [reason] and summary["runs"][0][
        "silos"
    ] == list(HONEST)


@pytest.mark.parametrize(
    "kind",
    ["no card", "sum = ['a', 'b', 'c']", "another shape", "all sums far off", "threads = 0"],
)
def test_a_summary_that_goes_bad_before_a_resume(four, tmp_path, kind):
    """d took part in round 1 with a right summary. The others go on as if it had failed in round 2."""
    options = {**OPTIONS, "rounds": 2}

    def fails(grid):
        grid.absent = {("d", 2)}

    whole = federate(four, prepare=fails, **options)
    place = {**options, "directory": tmp_path / "run"}
    federate(four, **{**place, "rounds": 1})
    run = federate(four, resume=True, prepare=prepared(BAD[kind]), **place)
    assert same(run.shared, whole.shared)
    assert run.strategy.plan.numbers["mean"] == whole.strategy.plan.numbers["mean"]
    assert {(r.round, r.silo) for r in run.rows if r.metric == "rejected"} == {
        (2, "d"),
        (3, "d"),
    }
    assert {
        round_of(m)
        for m, _ in run.grid.traffic
        if run.grid.name_of(m.metadata.dst_node_id) == "d"
    } == {0}


def killed(times):
    """The process of silo d dies over its summary, so many times."""
    left = [times]

    def after(name, message, reply):
        if (name, message.metadata.message_type) != ("d", "query") or not left[0]:
            return reply
        left[0] -= 1
        return refuse(message, "ClientApp process was ended by SIGKILL", CRASHED)

    return lambda grid: setattr(grid, "after", after)


def test_a_process_that_dies_over_its_summary_is_not_a_summary(four):
    """Killed, or out of memory beside another one: the silo is asked again, but not for ever."""
    run = federate(four, prepare=killed(SUMMARY_TRIES - 1), rounds=1, **OPTIONS)
    assert list(run.strategy.silos) == list(four)
    run = federate(four, prepare=killed(SUMMARY_TRIES), rounds=1, **OPTIONS)
    assert list(run.strategy.silos) == list(HONEST)
    assert "ended by SIGKILL" in run.federation.registration.left_out["node 4"]


def test_a_quorum_that_the_others_do_not_make_up(four):
    """Four are asked for in so many words: the run does not begin with three, and says whom it lacks."""
    for kind in ("name = None", "another shape"):
        with pytest.raises(UserError, match=r"node 4|d is left out"):
            federate(four, rounds=1, min_silos=4, prepare=prepared(BAD[kind]), **OPTIONS)


def test_a_silo_that_is_here_for_the_first_time_when_a_run_is_resumed(four, tmp_path):
    """It was left out at the start, and its summary is right now: it is named, and the others go on."""
    place = {**OPTIONS, "directory": tmp_path / "run"}
    federate(four, rounds=1, prepare=prepared(BAD["name = None"]), **place)
    run = federate(four, rounds=2, resume=True, **place)
    assert list(run.strategy.silos) == list(HONEST)
    assert (
        "d is here, and is none of this run's silos"
        in (tmp_path / "run/progress.jsonl").read_text()
    )


def test_unknown_fields_reach_no_checkpoint(four, tmp_path):
    """The silo takes part, and of its summary only what is on the list is kept."""
    place = {**OPTIONS, "directory": tmp_path / "run"}
    spoil = says(secret="x" * 1000, labels=[1, 2, 3], mean=[1e9, 0.0, 0.0])
    federate(four, rounds=1, prepare=prepared(spoil), **place)
    file = tmp_path / "run/checkpoint/fedavg-7/server.safetensors"
    summaries = State.load(file).numbers["cards"]
    assert set(summaries["d"]) == set(summaries["a"]) and b"secret" not in file.read_bytes()


@pytest.mark.parametrize("method", ["fedavg", "apple", "fedfomo", "player-fl"])
def test_unknown_numbers_of_a_reply_reach_no_checkpoint(four, tmp_path, method):
    def after(silo, message, reply):
        if silo == "d" and message.metadata.message_type == "train":
            config = reply.content["config"]
            config["number.secret"], config["secret"] = "x" * 100, "x" * 100
        return reply

    place = {"directory": tmp_path / "run", "strategy": method}
    run = federate(four, rounds=2, after=after, **place)
    assert not run.strategy.rejected
    files = list((tmp_path / "run/checkpoint").rglob("server.safetensors"))
    assert files and all(b"secret" not in file.read_bytes() for file in files)


# ---- Sums that differ in good faith ----------------------------------------------------------------------------------


def test_another_unit_is_named_and_standardised_by_itself(four, tmp_path):
    """A thousand times the others' values: theirs alone make the mean, the silo takes part with its own."""
    run = federate(
        four, rounds=2, directory=tmp_path / "run", prepare=prepared(times(1000.0)), **OPTIONS
    )
    assert (
        run.strategy.plan.numbers["own_statistics"] == ["d"]
        and not run.federation.registration.left_out
    )
    rows = np.concatenate([rows_of(four[name])[0] for name in HONEST])
    assert np.allclose(run.strategy.plan.numbers["mean"], rows.mean(0)) and np.allclose(
        run.strategy.plan.numbers["std"], rows.std(0)
    )
    note = (tmp_path / "run/progress.jsonl").read_text()
    assert (
        "d gives no sums of its columns: it has values in column 1 that are" in note
        and "another unit?" in note
    )


def summary(name, sums, squares, **values):
    known = {"name": name, "own_file": True, "shape": [len(sums)], "classes": 2, "n_train": 4}
    return {**known, "task": "multiclass", "sum": sums, "square_sum": squares, **values}


def test_what_is_usual_in_a_column():
    """The median of the root mean squares, without silos in which the column is 0: sqrt(4/4) = 1 and sqrt(16/4) = 2 in
    column 1, of which 1 is the lower; sqrt(36/4) = 3 alone in column 2. A silo of twice as many is no outlier."""
    summaries = [
        summary("a", [0.0, 0.0], [4.0, 0.0]),
        summary("b", [0.0, 0.0], [16.0, 0.0]),
        summary("c", [0.0, 0.0], [0.0, 36.0]),
    ]
    assert not reconcile(summaries, {}, "", sums=True).left_out
    for ratio, field in (
        (FAR * 0.99, "sum"),
        (FAR * 1.01, "sums_withheld"),
        (IMPLAUSIBLE * 1.01, ""),
    ):
        odd = summary("d", [0.0, 0.0], [0.0, 4 * (3 * ratio) ** 2])
        verdict = reconcile([*summaries, odd], {}, "", sums=True)
        assert field in verdict.summaries["d"] if field else list(verdict.left_out) == ["d"]
    assert "sum" not in reconcile(summaries, {}, "", sums=False).summaries["a"]


# ---- What holds for all ----------------------------------------------------------------------------------------------


def kinds(*values):
    return [
        {
            "name": n,
            "own_file": True,
            "task": "multiclass",
            "shape": s,
            "classes": c,
            "n_train": 1,
        }
        for n, s, c in values
    ]


def test_the_majority_and_a_tie():
    verdict = reconcile(
        kinds(("a", [4], 9), ("b", [3], 2), ("c", [3], 2), ("d", [3], 3)), {}, "", sums=True
    )
    assert (verdict.data_spec.shape, verdict.data_spec.classes, list(verdict.left_out)) == (
        (3,),
        2,
        ["a", "d"],
    )
    assert verdict.left_out["d"].startswith(
        "d is left out: it has 3 classes, most silos have 2 (`classes` in the"
    )
    tie = reconcile(
        kinds(("b", [4], 5), ("a", [3], 2), ("c", [3], 7), ("d", [4], 5)), {}, "", sums=True
    )
    assert (tie.data_spec.shape, tie.data_spec.classes, list(tie.left_out)) == (
        (3,),
        7,
        ["b", "d"],
    )


def test_the_federation_file_stands_above_the_majority(four):
    """Four classes are agreed on: d, which alone has so many, takes part, and the model has four outputs, Σ = 16."""
    run = federate(
        four, rounds=1, agreed='{"classes": 4}', prepare=prepared(says(classes=4)), **OPTIONS
    )
    assert list(run.strategy.silos) == [*HONEST, "d"] and run.strategy.layout.size == 16
    with pytest.raises(
        UserError,
        match=r"^4 silos \(a, b, c and 1 more\): is left out: it has samples of shape \(3,\), the",
    ):
        federate(four, rounds=1, agreed='{"shape": [5]}', **OPTIONS)


def test_what_holds_stays_when_a_run_is_resumed(four, tmp_path):
    """Three silos that change their minds are no majority in a run that has begun: they are left out of it."""
    place = {**OPTIONS, "directory": tmp_path / "run"}
    federate(four, rounds=1, **place)

    def after(name, message, reply):
        if name != "a" and message.metadata.message_type == "query":
            says(shape=[4], sum=[0.0] * 4, square_sum=[1.0] * 4)(reply)
        return reply

    run = federate(four, rounds=2, resume=True, after=after, **place)
    assert list(run.federation.registration.left_out) == ["b", "c", "d"]
    assert (
        "b is left out: it has samples of shape (4,), this run has (3,)"
        in run.federation.registration.left_out["b"]
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "a JSON object of task, shape, classes, samples, schema is needed here"),
        ("[1]", "a JSON object"),
        ('{"names": []}', "a JSON object"),
        ('{"shape": [0]}', "agreed: shape = [0]"),
        ('{"classes": 1.5}', "agreed: classes = 1.5"),
        ('{"samples": {"a": 0}}', "agreed: samples = {'a': 0}"),
        ('{"samples": 5}', "agreed: samples = 5"),
    ],
)
def test_what_cannot_be_agreed_on(four, text, reason):
    with pytest.raises(UserError) as caught:
        federate(four, rounds=1, agreed=text)
    assert reason in str(caught.value) and "\n" not in str(caught.value)
