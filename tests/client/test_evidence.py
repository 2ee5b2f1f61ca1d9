"""The evidence of the reported model: what it says, what a policy lets leave, and what a server cannot ask."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import typical
from failing import fails
from flwr.app import Message, MetricRecord
from predictions import read_csv
from tiny import (
    events_of,
    federate,
    one_block,
    random_silos,
    rows_of,
    small_study,
    summary_of,
    write_silo,
)

from client.app import app
from client.export import export_model
from client.prediction.predict import predict_file
from models.evidence.measure import CALIBRATION, EVIDENCE
from partitions.common.errors import DataError
from server.results.history import History
from server.results.run_directory import RunDirectory
from server.results.summary import write_summary
from server.simulation.engine import flower_identity
from strategies import strategies
from strategies.base.evidence import read_evidence
from strategies.base.transport.payload import Payload, decode, encode

SIZES = {"a": 40, "b": 30, "c": 22}
JUMPY = {"rounds": 4, "learning_rate": 20.0, "evidence": "on"}
CALM = {"learning_rate": 0.05, "batch_size": 8}
ALL = 'metrics = ["loss", "score", ' + ", ".join(f'"{word}"' for word in EVIDENCE) + "]\n"


def finished(folder, strategy, classes=2, **changes):
    """A run with its summary's entry, of silos with files of their own."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    files = random_silos(folder / "data", SIZES, classes=classes)
    run = federate(files, directory=folder / "run", strategy=strategy, **{**JUMPY, **changes})
    directory = RunDirectory(folder / "run")
    (entry,) = write_summary(
        directory, History(directory.history), run.federation.finish_run()
    )["runs"]
    return run, files, entry


def config_of(message):
    return message.content["config"]


def brier_of(model, file):
    """Of an exported model of two classes, by what ``predict`` writes (six digits)."""
    _, _, p = read_csv(predict_file(model, file))
    return float(np.mean((np.array(p)[:, 1] - rows_of(file)[1]) ** 2))


def of_one_network():
    return [
        name
        for name, s in strategies().items()
        if not s.info.role.pooled
        and name not in ("fedbn", "lp-proj", "fedntd", "knn-per")
        and not name.endswith("-lora")
    ]


@typical(of_one_network(), "method")
def test_it_is_that_of_the_reported_model(tmp_path, method):
    """Of every method for small networks: the Brier score of the model that ``export`` writes, by another way."""
    changes = {"learning_rate": 1.0, "rounds": 2} if method not in ("fedavg", "ditto") else {}
    _, files, entry = finished(tmp_path, method, **changes, **one_block(method))
    for silo, file in files.items():
        export_model(tmp_path / "run", silo, "reported", tmp_path / "m")
        assert entry["per_silo"][silo]["brier"] == pytest.approx(
            brier_of(tmp_path / "m", file), abs=1e-4
        )


def test_a_model_of_several_networks_has_the_evidence_of_their_mixture(tmp_path):
    """APFL that mixes outputs: its Brier score is of the mixture whose accuracy the report prints, by another way.

    The learning rate spoils later rounds, so the reported round is an early one, whose w and α the silo has kept.
    """
    run, files, entry = finished(tmp_path, "apfl", apfl__mix="logits", apfl__alpha=0.3)
    reported = entry["final"]["round"]
    assert reported < JUMPY["rounds"]
    alone, _, _ = finished(
        tmp_path / "once", "apfl", rounds=reported, apfl__mix="logits", apfl__alpha=0.3
    )
    for silo, file in files.items():
        arrays, alpha = run.grid.state(silo).arrays, alpha_of(alone, silo)
        x, y = rows_of(file)
        (w, b), (v, c) = matrix_of(arrays["reported.shared"]), matrix_of(arrays["reported"])
        z = (1 - alpha) * (x @ w.T + b) + alpha * (x @ v.T + c)
        p = 1 / (1 + np.exp(z[:, 0] - z[:, 1]))
        assert entry["per_silo"][silo]["brier"] == pytest.approx(
            np.mean((p - y) ** 2), abs=1e-6
        )
        assert entry["per_silo"][silo]["accuracy"] == pytest.approx(np.mean((p > 0.5) == y))
        assert not torch.equal(arrays["reported.shared"], arrays["shared"])


def alpha_of(run, silo):
    state: Any = next(
        c.state for c in run.grid.contexts.values() if c.node_config["name"] == silo
    )
    return float(json.loads(state["numbers"]["json"])["alpha"])


def matrix_of(vector):
    """Weights and bias of a linear model of three columns and two classes."""
    return vector[:6].double().numpy().reshape(2, 3), vector[6:].double().numpy()


def test_the_closing_exchange_may_have_the_reported_model(tmp_path):
    """FedAvg's last aggregate is the best on validation data here: round 3 of a run of 2 rounds."""
    _, files, entry = finished(tmp_path, "fedavg", rounds=2, learning_rate=0.5)
    assert entry["final"]["round"] == 3
    export_model(tmp_path / "run", "a", "reported", tmp_path / "m")
    assert entry["per_silo"]["a"]["brier"] == pytest.approx(
        brier_of(tmp_path / "m", files["a"]), abs=1e-4
    )


def test_a_run_asks_once_and_its_rounds_are_as_before(tmp_path):
    run, _, entry = finished(tmp_path / "with", "fedavg")
    plain, _, without = finished(tmp_path / "without", "fedavg", evidence="off")
    kinds = [m.metadata.message_type for m, _ in run.grid.traffic]
    before = [m.metadata.message_type for m, _ in plain.grid.traffic]
    # Three silos, twice: the second for the common threshold
    assert kinds == before + ["evaluate.evidence"] * 6
    assert [r.cells() for r in run.rows if r.metric != "round_seconds"] == [
        r.cells() for r in plain.rows if r.metric != "round_seconds"
    ]
    assert entry["final"] == without["final"]
    assert all(without["per_silo"]["a"][key] is None for key in CALIBRATION)
    assert without["per_silo"]["a"]["evidence"] == {}


def test_the_common_threshold_is_the_weighted_mean(tmp_path):
    run, _, entry = finished(tmp_path, "fedavg", classes=3)
    each = [v["evidence"]["conformal"] for v in entry["per_silo"].values()]
    sent = {config_of(m).get("number.common_threshold") for m, _ in run.grid.traffic[-3:]}
    assert list(sent) == pytest.approx([sum(n * q for n, q in each) / sum(n for n, _ in each)])
    for values in entry["per_silo"].values():
        n, *sets = values["evidence"]["conformal_sets"]
        assert n + values["evidence"]["conformal"][0] == values["n_test"] and len(sets) == 6


def test_hospitals_send_it_only_where_run_and_policy_say_so(tmp_path):
    """By default a run does not ask hospitals; a policy's default lets nothing of it leave; then what it lists."""
    policy = tmp_path / "policy.toml"
    policy.write_text("")
    rules = {"state_dir": tmp_path / "state", "policy": str(policy), **CALM}
    _, _, entry = finished(tmp_path / "1", "fedavg", **{**rules, "evidence": "auto"})
    assert entry["per_silo"]["a"]["brier"] is None
    _, _, entry = finished(
        tmp_path / "2", "fedavg", **rules | {"state_dir": tmp_path / "state2"}
    )
    assert all(v["brier"] is None and v["evidence"] == {} for v in entry["per_silo"].values())
    policy.write_text(
        'metrics = ["loss", "score", "brier", "reliability"]\nmin-metric-samples = 25\n'
    )
    _, _, entry = finished(
        tmp_path / "3", "fedavg", **rules | {"state_dir": tmp_path / "state3"}
    )
    silo = entry["per_silo"]
    assert (
        silo["a"]["brier"] is not None
        and silo["a"]["ece"] is None
        and set(silo["a"]["evidence"]) == {"reliability"}
    )
    # No two bins of 25
    assert np.reshape(silo["a"]["evidence"]["reliability"], (-1, 3))[:, 0].tolist() == [40.0]
    assert silo["c"]["brier"] is None and silo["c"]["evidence"] == {}  # 22 test samples


ONCE = (
    "a refuses: {} leaves once per run, and this run has had that of another model, or in another way (statistics, "
    "bins, threshold)"
)
REFUSAL, COVERAGE = ONCE.format("evidence"), ONCE.format("coverage")


def again(message, context, **changed):
    """The silo's reply to a message that it has had, with these changes."""
    payload, config = decode(message.content, torch.device("cpu"))
    threshold = changed.pop("threshold", payload.numbers.get("common_threshold"))
    numbers = {} if threshold is None else {"common_threshold": threshold}
    content = encode(Payload(payload.models, numbers), {**config, **changed})
    with flower_identity():
        return app(Message(content, 1, message.metadata.message_type), context)


def crafted(run, context):
    """Have the silo keep another model as that of the round that the report shows."""
    closing = next(m for m, _ in run.grid.traffic if m.metadata.message_type == "evaluate")
    payload, config = decode(closing.content, torch.device("cpu"))
    other = Payload(
        {name: replace(m, vector=-3 * m.vector) for name, m in payload.models.items()},
        payload.numbers,
    )
    with flower_identity():
        assert not app(Message(encode(other, dict(config)), 1, "evaluate"), context).has_error()


def asked_of_a(tmp_path, **changes):
    """A run of silos whose policy lets all evidence leave; the messages that ask for it, and the context of a."""
    policy = tmp_path / "policy.toml"
    policy.write_text(ALL + changes.pop("rules", ""))
    run, _, _ = finished(
        tmp_path,
        "fedavg",
        state_dir=tmp_path / "state",
        policy=str(policy),
        **{**CALM, **changes},
    )
    asked = [
        (m, r) for m, r in run.grid.traffic if m.metadata.message_type == "evaluate.evidence"
    ]
    return run, asked, run.grid.contexts[1]


def test_a_run_has_the_evidence_of_one_model_only(tmp_path):
    """The same message again has the same answer; another threshold, or another model of the same round, has none."""
    run, asked, context = asked_of_a(tmp_path)
    (first, reply), (sets, _) = asked[0], asked[3]
    assert dict(again(first, context).content["metrics"]) == dict(reply.content["metrics"])
    assert "kept no model of round 1" in str(again(first, context, reported=1).error.reason)
    assert again(sets, context, threshold=0.123).error.reason == COVERAGE
    crafted(run, context)
    assert again(first, context).error.reason == REFUSAL
    assert again(sets, context).error.reason == REFUSAL


def test_fifteen_runs_put_no_patient_into_a_smaller_cell(tmp_path):
    """Two bin sizes of one model give a few patients by subtraction: the policy alone chooses it, in whatever run."""
    _, asked, context = asked_of_a(tmp_path)
    answers = list[dict[str, Any]]()
    for run, size in enumerate(range(10, 25)):
        context.run_id += bool(run)  # a number that the server hands out
        reply = again(asked[0][0], context, min_metric_samples=size)
        answers.append(dict(reply.content["metrics"]))
    assert "reliability" in answers[0] and all(one == answers[0] for one in answers)


def test_a_model_has_evidence_in_one_way_over_all_runs(tmp_path):
    """Other statistics, another threshold, a policy of other bins: refused, also under another number of a run."""
    _, asked, context = asked_of_a(tmp_path)
    (first, _), (sets, _) = asked[0], asked[3]
    scale = {"mean": [0.0, 9.0, 0.0], "std": [1.0, 0.001, 1.0]}
    assert again(first, context, **scale).error.reason == REFUSAL
    context.run_id += 1
    way = "a refuses: {} of this model has left from the same data in another way (statistics, bins, threshold)"
    assert again(first, context, **scale).error.reason == way.format("evidence")
    assert again(sets, context, threshold=0.123).error.reason == way.format("coverage")
    with (tmp_path / "policy.toml").open("a") as policy:
        policy.write("min-metric-samples = 11\n")
    context.run_id += 1
    assert again(first, context).error.reason == way.format("evidence")


def test_a_file_without_one_patient_gives_nothing_about_that_one(tmp_path):
    _, asked, context = asked_of_a(tmp_path)
    file = Path(context.node_config["data"])
    x, y = rows_of(file)
    context.run_id += 1
    write_silo(file, x[1:], list(map(int, y[1:])))
    reason = str(again(asked[0][0], context).error.reason)
    assert (
        "min-sum-samples = 50, and fewer patients differ from those behind the evidence of this model"
        in reason
    )


def test_a_training_part_without_one_patient_gives_nothing_about_that_one(tmp_path):
    """Survival's hazard is of training samples, and neighbours vote: evidence depends on them, too."""
    _, asked, context = asked_of_a(tmp_path)
    file = Path(context.node_config["data"])
    with np.load(file) as stored:
        arrays = dict(stored)
    np.savez(file, **arrays | {key: arrays[key][1:] for key in ("x_train", "y_train")})
    context.run_id += 1
    few = "and fewer patients differ from those behind the evidence of this model"
    assert few in str(again(asked[0][0], context).error.reason)


def test_a_corrected_subgroup_gives_nothing_about_its_patient(tmp_path):
    groups = np.repeat(["sex f", "sex m"], (25, 15))
    policy = tmp_path / "policy.toml"
    policy.write_text('metrics = ["score", "subgroups"]\nmin-silos = 1\n')
    given = {"state_dir": tmp_path / "state", "policy": str(policy), **CALM}
    files = {"a": in_groups(tmp_path / "a.npz", groups)}
    run = federate(files, strategy="fedavg", rounds=1, evidence="on", **given)
    sent = [m for m, _ in run.grid.traffic if m.metadata.message_type == "evaluate.evidence"]
    context = run.grid.contexts[1]
    groups[0] = "sex m"
    in_groups(tmp_path / "a.npz", groups)
    context.run_id += 1
    few = "and fewer patients differ from those behind the evidence of this model"
    assert few in str(again(sent[0], context).error.reason)


def test_coverage_is_of_the_model_whose_evidence_has_left(tmp_path):
    """Of a run whose second message never came, a server does not get the coverage of another model."""

    def prepare(grid):
        def before(silo, message, context):
            if message.metadata.message_type == "evaluate.evidence":
                message.content["config"].pop("number.common_threshold", None)

        grid.before = before

    run, asked, context = asked_of_a(tmp_path, prepare=prepare)
    crafted(run, context)
    assert again(asked[0][0], context, threshold=0.5).error.reason == REFUSAL


def test_another_number_of_flowers_is_another_run_of_the_policy(tmp_path):
    """A resumed run may ask for the evidence of its new model: as one more of ``runs-per-day``."""
    run, asked, context = asked_of_a(tmp_path, rules="runs-per-day = 2\n")
    crafted(run, context)
    context.run_id += 1
    assert not again(asked[0][0], context).has_error()
    context.run_id += 1
    assert "runs-per-day = 2, and this is run 3 of" in str(
        again(asked[0][0], context).error.reason
    )


@pytest.mark.parametrize("wanted", ["off", "auto"])
def test_a_hospital_answers_no_question_that_the_run_does_not_have(tmp_path, wanted):
    """The policy sees the run's settings; a server that asks all the same gets nothing."""
    given = {"state_dir": tmp_path / "state", **CALM}
    asking, _, _ = finished(tmp_path / "1", "fedavg", **given)
    asked = next(
        m for m, _ in asking.grid.traffic if m.metadata.message_type == "evaluate.evidence"
    )
    silent, _, _ = finished(
        tmp_path / "2", "fedavg", **given | {"evidence": wanted, "state_dir": tmp_path / "2"}
    )
    with flower_identity():
        reply = app(Message(asked.content, 1, "evaluate.evidence"), silent.grid.contexts[1])
    assert (
        reply.error.reason
        == f"a refuses: the run has evidence = {wanted}, and a message asks for it"
    )


def test_a_silo_that_kept_no_such_model_is_named(tmp_path):
    def prepare(grid):
        def before(silo, message, context):
            if message.metadata.message_type == "evaluate.evidence" and silo == "a":
                content = message.content
                content["config"]["reported"] = 99

        grid.before = before

    _, _, entry = finished(tmp_path, "fedavg", prepare=prepare)
    assert (
        entry["per_silo"]["a"]["brier"] is None and entry["per_silo"]["b"]["brier"] is not None
    )
    notes = events_of(tmp_path / "run")
    assert "no evidence of a: a kept no model of round 99, whose evidence is asked for" in [
        note.get("message") for note in notes
    ]


def test_simulations_have_it_by_default(tmp_path):
    out = small_study(tmp_path / "run", "breast-cancer", silos=4, rounds=1, model="linear")
    (entry,) = summary_of(out)["runs"]
    for silo in entry["per_silo"].values():
        assert (
            None not in [silo[key] for key in CALIBRATION] and "net_benefit" in silo["evidence"]
        )


SPOILT: dict[str, dict[str, Any]] = {
    "is no evidence that is known here": {"accuracy": 0.5},
    "'brier' is out of range": {"brier": 1.5},
    "'ece' is nan": {"ece": float("nan")},
    r"'brier' is \[0.5\]": {"brier": [0.5]},
    "'reliability' is 0.5": {"reliability": 0.5},
    "'reliability' is out of range": {"reliability": [10.0, 0.5]},
    "'net_benefit' is out of range": {"net_benefit": [0.0] * 3},
    "'conformal' is out of range": {"conformal": [0.5, 0.5]},
    "'conformal_sets' is out of range": {
        "conformal_sets": [10.0, 1.1, 1.0, 1.0, 1.0, 1.0, 1.0]
    },
}


@pytest.mark.parametrize("reason", SPOILT)
def test_the_server_takes_no_nonsense(reason):
    fails(DataError, reason, read_evidence, MetricRecord(SPOILT[reason]))
    fails(DataError, "carries no evidence", read_evidence, None)


def in_groups(file, groups):
    """A silo whose three parts are the same rows, in these subgroups."""
    x = np.random.default_rng(0).normal(size=(len(groups), 3)).astype(np.float32)
    of_each = {"x": x, "y": (x[:, 0] > 0).astype(int), "subgroup": groups}
    parts = ("train", "val", "test")
    arrays: dict[str, Any] = {f"{k}_{part}": v for part in parts for k, v in of_each.items()}
    np.savez(file, classes=np.array(2), **arrays)
    return file


def test_subgroups_leave_as_the_policy_says_and_no_small_one(tmp_path):
    """a: 25 and 15 of 40; b: 27 and 3 of 30, so that neither may leave; without the word nothing leaves."""
    files = {
        name: in_groups(tmp_path / f"{name}.npz", np.repeat(["sex f", "sex m"], sizes))
        for name, sizes in {"a": (25, 15), "b": (27, 3)}.items()
    }
    policy = tmp_path / "policy.toml"
    for words, expected in (
        ('"score"', set()),
        ('"score", "subgroups"', {"subgroup.sex f", "subgroup.sex m"}),
    ):
        policy.write_text(f"metrics = [{words}]\nmin-silos = 2\n")
        folder = tmp_path / str(len(words))
        changes = {"state_dir": folder / "state", "policy": str(policy), **CALM}
        run = federate(files, strategy="fedavg", rounds=1, evidence="on", **changes)
        assert (
            set(run.federation.closing.evidence["a"]) == expected
            and run.federation.closing.evidence["b"] == {}
        )
    assert run.federation.closing.evidence["a"]["subgroup.sex f"][0] == 25  # type: ignore[index]


def test_the_site_learns_which_subgroups_were_suppressed(tmp_path, monkeypatch):
    """Their names for its audit log, without counts, and in no reply."""
    groups = np.repeat(["sex f", "sex m", "", "sex x"], (27, 12, 5, 3))
    told = []
    monkeypatch.setattr(
        "client.egress.tell_site",
        lambda records, withheld: told.append({k: set(v) for k, v in withheld.items()}),
    )
    policy = tmp_path / "policy.toml"
    policy.write_text('metrics = ["score", "subgroups"]\nmin-silos = 1\n')
    run = federate(
        {"a": in_groups(tmp_path / "a.npz", groups)},
        strategy="fedavg",
        rounds=1,
        evidence="on",
        state_dir=tmp_path / "state",
        policy=str(policy),
        **CALM,
    )
    here = {
        name for name in run.federation.closing.evidence["a"] if name.startswith("subgroup.")
    }
    held = {
        item
        for line in told
        for item in line.get("min-metric-samples", ())
        if item.startswith("subgroup.")
    }
    assert (
        "subgroup.sex x" in held
        and not held & here
        and here | held == {f"subgroup.{n}" for n in ("sex f", "sex m", "sex x")}
    )
