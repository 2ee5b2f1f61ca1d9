"""Early stopping: a run ends once its mean validation score has not become better, and is a finished run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from resuming import Crash, assert_equal, crash_after, interrupted
from tiny import comparable, events_of, federate, round_of, settings_of

from client.export import export_model
from partitions.common.errors import UserError
from server.report.write import write_report
from server.results.history import Chosen, History, mean
from server.results.models import export_shared
from server.results.run_directory import RunDirectory
from server.results.summary import values_by_round, write_summary
from strategies.base.run_settings import parse_settings

OPTIONS = {"rounds": 16, "patience": 3, "learning_rate": 0.5, "batch_size": 4}


def validation_means(run):
    """The mean validation score by round, computed from the whole history."""
    values = values_by_round(run.rows, "val", run.strategy.info.reports)
    return {number: mean(of) for number, of in values.items()}


def last_by_hand(means, patience, min_delta=0.0):
    """The round after which a run ends: the first with ``patience`` rounds behind it since the last better one."""
    best, since = -1.0, 0
    for number, score in means.items():
        if score > best + min_delta:
            best, since = score, number
        elif number - since >= patience:
            return number
    raise AssertionError("it would not have stopped")


@pytest.mark.parametrize("method", ["fedavg", "fedala", "apple"])
def test_the_run_ends_when_the_validation_score_says_so(three, tmp_path, method):
    """Its rounds are those of the run without patience, bit for bit, and the closing exchange follows the last."""
    # APPLE's λ depends on the planned rounds, which both have.
    stopped = federate(three, directory=tmp_path / "early", strategy=method, **OPTIONS)
    whole = federate(
        three, directory=tmp_path / "whole", strategy=method, **{**OPTIONS, "patience": 0}
    )
    means = validation_means(whole)
    last = last_by_hand({n: m for n, m in means.items() if n <= 16}, 3)
    assert last < 16
    assert stopped.federation.last == last
    assert {round_of(m) for m, _ in stopped.grid.traffic} == {0, *range(1, last + 2)}
    until = [[r for r in run.rows if r.round <= last] for run in (stopped, whole)]
    assert comparable(until[0]) == comparable(until[1])
    closing = [r for r in stopped.rows if r.round == last + 1 and r.snapshot]
    theirs = [r for r in whole.rows if r.round == last + 1 and r.snapshot == "received"]
    assert {r.snapshot for r in closing} == {"received"}
    assert comparable(closing) == comparable(theirs)


def test_a_smaller_gain_than_min_delta_counts_as_none(three):
    means = validation_means(federate(three, strategy="fedavg", **{**OPTIONS, "patience": 0}))
    last = {delta: last_by_hand(means, 3, delta) for delta in (0.0, 0.2)}
    assert last[0.2] < last[0.0]
    run = federate(three, strategy="fedavg", min_delta=0.2, **OPTIONS)
    assert run.federation.last == last[0.2]


def test_rounds_between_evaluations_do_not_end_a_run(three):
    """Evaluated every other round: patience counts rounds, and the run ends at an evaluated one."""
    options = {**OPTIONS, "evaluate_every": 2}
    means = validation_means(federate(three, strategy="fedavg", **{**options, "patience": 0}))
    last = last_by_hand({n: m for n, m in means.items() if n <= 16}, 3)
    run = federate(three, strategy="fedavg", **options)
    assert (run.federation.last, last % 2) == (last, 0)


def test_test_data_change_nothing(three, tmp_path):
    """Other test labels: the same last round, and the same rows but those of test data."""
    other = {}
    for name, file in three.items():
        with np.load(file) as data:
            arrays = dict(data)
        arrays["y_test"] = (arrays["y_test"] + 1) % int(arrays["classes"])
        other[name] = tmp_path / f"other-{name}.npz"
        np.savez(other[name], **arrays)
    runs = [federate(files, strategy="apple", **OPTIONS) for files in (three, other)]
    kept = [comparable([r for r in run.rows if r.split != "test"]) for run in runs]
    assert kept[0] == kept[1]
    assert comparable(runs[0].rows) != comparable(runs[1].rows)
    assert runs[0].federation.last == runs[1].federation.last < 16


@pytest.mark.parametrize("method", ["fedavg", "apple"])
def test_resume_before_and_at_the_stop(three, tmp_path, method):
    """Killed in the middle, and killed right before the closing exchange, with checkpoints of every fourth round."""
    options = {**OPTIONS, "strategy": method, "checkpoint_every": 4}
    whole = federate(three, directory=tmp_path / "whole", **options)
    last = whole.federation.last
    for place in (last - 1, last):
        parts = tmp_path / f"parts-{place}"
        interrupted(three, parts, watch=crash_after(place), **options)
        resumed = federate(three, directory=parts, resume=True, **options)
        assert resumed.federation.last == last
        assert_equal(whole, resumed, (tmp_path / "whole", parts))
    again = federate(three, directory=parts, resume=True, **options)
    assert {round_of(m) for m, _ in again.grid.traffic} == {0, last + 1}
    assert_equal(whole, again, (tmp_path / "whole", parts))


def test_a_stopped_run_goes_on_without_patience(three, tmp_path):
    """It becomes the run that was never stopped."""
    options = {**OPTIONS, "rounds": 12, "strategy": "fedala"}
    whole = federate(three, directory=tmp_path / "whole", **{**options, "patience": 0})
    stopped = federate(three, directory=tmp_path / "parts", **options)
    assert stopped.federation.last < 12
    resumed = federate(
        three, directory=tmp_path / "parts", resume=True, **{**options, "patience": 0}
    )
    assert_equal(whole, resumed, (tmp_path / "whole", tmp_path / "parts"))


def test_a_damaged_state_at_the_closing_exchange(three, tmp_path):
    """The run goes back, repeats its rounds, and stops where it would have stopped."""
    options = {**OPTIONS, "strategy": "fedala"}
    whole = federate(three, directory=tmp_path / "whole", state_dir=tmp_path / "ws", **options)
    last = whole.federation.last

    def damage(grid):
        done: list[str] = []

        def before(silo, message, context):
            if silo == "b" and round_of(message) == last + 1 and not done:
                done.append(silo)
                newest = max((tmp_path / "ps").rglob(f"b/**/round-{last:06d}.safetensors"))
                newest.write_bytes(newest.read_bytes()[:100])

        grid.before = before

    run = federate(
        three,
        directory=tmp_path / "parts",
        state_dir=tmp_path / "ps",
        prepare=damage,
        **options,
    )
    assert run.federation.last == last
    assert comparable(run.rows) == comparable(whole.rows)
    assert sum(round_of(m) == last for m, _ in run.grid.traffic) == 6  # three silos, twice


@pytest.mark.parametrize("method", ["fedavg", "apple"])
def test_it_is_a_finished_run(three, tmp_path, method):
    """Summary, report, and the models that export gives are those of a run of so many rounds."""
    directory = tmp_path / "run"
    run = federate(three, directory=directory, strategy=method, **OPTIONS)
    last = run.federation.last
    summary = write_summary(
        RunDirectory(directory), History(directory / "history.csv"), run.federation.finish_run()
    )
    [entry] = summary["runs"]
    assert entry["rounds"] == last
    since = last_better(run)
    assert entry["stopped"] == {"since": since, "planned": 16, "patience": 3, "min_delta": 0.0}
    page = write_report(directory).read_text()
    assert f"stopped after round {last} of 16" in page
    # It is no fault
    assert "stopped after round" not in page.replace(f"stopped after round {last} of 16", "")
    card = export_model(directory, "a", "reported", tmp_path / "a.safetensors")
    assert card.round == entry["final"]["round"] == run.federation.recorder.chosen.round
    newest = export_model(directory, "a", "last", tmp_path / "last.safetensors")
    assert newest.round == last
    if method == "fedavg":
        shared = export_shared(directory, tmp_path / "shared.safetensors", round=last + 1)
        assert shared.when == f"received after round {last}, the last"
    events = events_of(directory)
    [told] = [event for event in events if event["event"] == "stopped"]
    assert (told["after"], told["rounds"], told["since"]) == (last, 16, since)


def last_better(run):
    means = validation_means(run)
    best = max(score for number, score in means.items() if number <= run.federation.last)
    return next(number for number, score in means.items() if score == best)


def test_the_silo_says_received_after_the_last_round(three, tmp_path):
    """The closing exchange gave the best model: the silo's card calls it that of the last round, not of the 16th."""
    options = {"patience": 1, "min_delta": 0.9, "learning_rate": 0.1}
    run = federate(
        three, directory=tmp_path / "run", strategy="fedavg", **{**OPTIONS, **options}
    )
    last = run.federation.last
    assert last == 2  # nothing is better by 0.9
    directory = RunDirectory(tmp_path / "run")
    summary = write_summary(directory, History(directory.history), run.federation.finish_run())
    chosen = summary["runs"][0]["final"]["round"]
    card = export_model(
        tmp_path / "run", "a", "reported", tmp_path / "a.safetensors", round=chosen
    )
    assert chosen == last + 1
    assert card.when == f"received after round {last}, the last"


def test_without_validation_data_it_is_refused(tmp_path, three):
    files = {}
    for name, file in three.items():
        with np.load(file) as data:
            arrays = {key: value for key, value in data.items() if not key.endswith("_val")}
        files[name] = tmp_path / f"other-{name}.npz"
        np.savez(files[name], **arrays)
    with pytest.raises(UserError, match="patience = 3: no silo has a part for validation"):
        federate(files, strategy="fedavg", validation=0, **OPTIONS)


def test_settings_that_could_never_stop_a_run_are_refused():
    with pytest.raises(
        UserError, match="patience = 2: nothing is evaluated with evaluate-every = 0"
    ):
        parse_settings({"patience": 2, "evaluate-every": 0})
    with pytest.raises(
        UserError, match=r"min-delta = 0\.01 is of early stopping: it needs patience"
    ):
        parse_settings({"min-delta": 0.01})


def test_silos_that_keep_their_scores_to_themselves_are_named_once(three, tmp_path):
    """Every split has fewer samples than metrics need: there is nothing to stop by, and the log says so."""
    options = {**OPTIONS, "rounds": 6, "min_metric_samples": 1000}
    run = federate(three, directory=tmp_path / "run", strategy="fedavg", **options)
    assert run.federation.last == 6
    lines = (tmp_path / "run/progress.jsonl").read_text().splitlines()
    assert sum("no silo has reported a validation score" in line for line in lines) == 1


def test_a_power_cut_leaves_all_states_of_the_last_round(three, tmp_path):
    """With rare checkpoints the round that ends the run is saved all the same, by server and silos."""
    options = {**OPTIONS, "strategy": "local", "checkpoint_every": 1000}
    with pytest.raises(Crash):
        federate(
            three,
            directory=tmp_path / "run",
            watch=crash_after(last_of(three, options)),
            **options,
        )
    resumed = federate(three, directory=tmp_path / "run", resume=True, **options)
    assert {round_of(m) for m, _ in resumed.grid.traffic} == {0, resumed.federation.last + 1}


def last_of(files, options):
    return federate(files, **options).federation.last


def test_a_silo_that_joins_late_does_not_look_like_progress():
    """Its first score counts in the rounds before it, too: means are compared over the same silos."""
    settings = settings_of({"a": Path("a"), "b": Path("b")}, patience=2)
    assert settings.common.patience == 2
    followed = Chosen("personal", "accuracy")
    for number, scores in enumerate(
        [{"a": 0.5}, {"a": 0.5, "b": 0.9}, {"a": 0.4, "b": 0.9}], start=1
    ):
        followed.add(row(number, silo, value) for silo, value in scores.items())
    assert (followed.round, followed.evaluated) == (1, 3)


def row(number, silo, value):
    from server.results.history import Row

    return Row("fedavg", 1, number, silo, "val", "personal", "accuracy", value, 10)
