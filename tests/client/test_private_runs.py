"""Runs with differential privacy at silos that keep a budget: what is charged, refused, recorded and told.

Each silo has 40 training samples, of which a step draws a quarter; a round of one epoch is 4 steps, at delta 1e-5.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from cases import typical
from flwr.app import ArrayRecord
from representatives import seldom
from taken import silofl
from tiny import events_of, federate, random_silos, settings_of

from client.app import app
from client.protocol.methods import METHODS
from client.protocol.policy import Policy
from client.site.budget import ledger as ledgers
from client.site.budget.accounting import MessageCost, cost_of, data_file
from client.site.budget.ledger import Ledger
from client.site.message import read_message
from client.site.rules.budget import message_key
from client.site.trust.message_rules import privacy_faults, run_faults
from models.privacy.accountant import epsilon
from server.cli.main import main
from server.simulation.engine import flower_identity
from strategies import strategies
from strategies.base import privacy as training
from strategies.base.run_settings import defaults
from strategies.base.transport.payload import tensor_of

PRIVATE = {
    "dp": True,
    "batch_size": 10,
    "learning_rate": 0.1,
    "rounds": 4,
    "strategy": "fedavg",
}


def steps(count, noise=1.0):
    return epsilon(noise, 0.25, count, 1e-5)


@pytest.fixture
def files(tmp_path):
    return random_silos(tmp_path, {"a": 40, "b": 40, "c": 40})


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


def with_policy(tmp_path, text, silo="a"):
    """For ``prepare``: one silo has this policy; the others' data are public."""
    (tmp_path / "policy.toml").write_text(text)

    def prepare(grid):
        for context in grid.contexts.values():
            if context.node_config["name"] == silo:
                context.node_config["policy"] = str(tmp_path / "policy.toml")

    return prepare


def spent(run, silo, metric="epsilon"):
    return [
        row.value for row in run.rows if (row.silo, row.metric, row.split) == (silo, metric, "")
    ]


def test_a_silo_whose_budget_is_used_up_is_left_out_and_the_run_goes_on(
    files, state, tmp_path, capsys
):
    policy = with_policy(tmp_path, f"epsilon = {steps(9)}\n")
    out = tmp_path / "run"
    run = federate(files, directory=out, state_dir=state, prepare=policy, **PRIVATE)
    assert spent(run, "a") == pytest.approx([steps(4), steps(8)])
    assert spent(run, "b") == pytest.approx([steps(4 * number) for number in (1, 2, 3, 4)])
    assert spent(run, "a", "dp_steps") == [4, 8] and set(spent(run, "b", "delta")) == {1e-5}
    assert [row.round for row in run.rows if (row.silo, row.metric) == ("a", "rejected")] == [
        3,
        4,
    ]
    events = events_of(out)
    (reason,) = {event["rejected"]["a"] for event in events if event.get("rejected")}
    assert (
        reason.startswith("a refuses: its policy has epsilon = ") and "silofl budget" in reason
    )
    # As `silofl watch` shows it
    seen = [event["epsilon"] for event in events if event["event"] == "round"]
    assert [sorted(one) for one in seen] == [["a", "b", "c"]] * 2 + [["b", "c"]] * 2
    assert seen[1] == pytest.approx({"a": steps(8), "b": steps(8), "c": steps(8)})
    # A new run has no new budget
    again = federate(files, state_dir=state, prepare=policy, **PRIVATE)
    assert not spent(again, "a") and len(spent(again, "b")) == 4
    capsys.readouterr()
    assert main(f"budget {state} --policy {tmp_path}/policy.toml --json".split()) == 0
    (one,) = json.loads(capsys.readouterr().out)  # of silos with public data nothing is kept
    assert (one["cohort"], one["spent"]) == ("a", pytest.approx(steps(8)))
    assert [(run["run"], run["steps"]) for run in one["runs"]] == [("run", 8)]
    assert silofl("budget", out, "--json") == 0
    of_run = {one["cohort"]: one["spent"] for one in json.loads(capsys.readouterr().out)}
    assert of_run == pytest.approx({"a": steps(8), "b": steps(16), "c": steps(16)})


def test_a_run_without_differential_privacy_is_refused_where_there_is_a_budget(
    files, state, tmp_path
):
    plain = {**PRIVATE, "dp": False, "rounds": 1}
    for text, rule in (
        ("epsilon = 3\n", "epsilon = 3.0"),
        ("require-dp = true\n", "require-dp = true"),
    ):
        seen: list[str] = []
        policy = with_policy(tmp_path, text)

        def prepare(grid, policy=policy, seen=seen):
            def after(silo, message, reply):
                seen.extend([reply.error.reason or ""] if reply.has_error() else [])
                return reply

            policy(grid)
            grid.after = after

        federate(files, state_dir=state, prepare=prepare, **plain)
        assert set(seen) == {f"a refuses: its policy has {rule}, the run dp = false"}


def test_the_same_message_again_has_the_same_bits_and_costs_nothing(files, state, tmp_path):
    """As a server sends it that was killed in the round; and another model in the same round costs again."""
    kept = {}

    def prepare(grid):
        with_policy(tmp_path, "")(grid)

        def after(silo, message, reply):
            if silo == "a" and message.metadata.message_type == "train":
                kept["a"] = (message, grid.context_of("a"), reply)
            return reply

        grid.after = after

    federate(files, state_dir=state, prepare=prepare, **{**PRIVATE, "rounds": 2})
    message, context, reply = kept["a"]
    before = list(Ledger(state).lines())
    with flower_identity():
        again = app(message, context)
        assert (
            torch.equal(vector(again), vector(reply)) and list(Ledger(state).lines()) == before
        )
        record = ArrayRecord({"vector": torch.zeros_like(vector(message, "model.global"))})
        message.content["model.global"] = record
        other = app(message, context)
    assert not torch.equal(vector(other), vector(reply))
    new = list(Ledger(state).lines())[len(before) :]
    assert [line["round"] for line in new] == [2] and new[0]["epsilon-after"] == pytest.approx(
        steps(12)
    )


def test_a_cheap_message_that_failed_pays_for_no_dear_one(files, state, tmp_path):
    """The server has much noise charged and makes the answer fail; then it asks the same of another run with little."""
    kept = {}

    def prepare(grid):
        with_policy(tmp_path, "epsilon = 1\n")(grid)

        def before(silo, message, context):
            if silo == "a" and message.metadata.message_type == "train":
                config = message.content.config_records["config"]
                kept["a"] = message, context, dict(config)
                del config["evaluate"]

        grid.before = before

    run = federate(
        files,
        state_dir=state,
        prepare=prepare,
        **{**PRIVATE, "rounds": 1, "dp__noise_multiplier": 1e5},
    )
    assert not spent(run, "a") and [line["kind"] for line in Ledger(state).lines()] == [
        "charge"
    ]
    message, context, config = kept["a"]
    message.content.config_records["config"].update(config)
    context.run_config = {**context.run_config, "dp.noise-multiplier": 0.1, "local-epochs": 20}
    with flower_identity():
        reply = app(message, context)
    assert reply.has_error() and "its policy has epsilon = 1.0" in (reply.error.reason or "")
    assert [line["noise"] for line in Ledger(state).lines()] == [1e5]


def test_a_charge_is_bound_to_everything_that_is_released(files, state, tmp_path):
    kept = []

    def before(silo, message, context):
        if message.metadata.message_type == "train":
            kept.append((message, context))

    federate(files, state_dir=state, before=before, **{**PRIVATE, "rounds": 1})
    message, context = kept[0]
    cost = MessageCost("record", 40, 0.25, 1.0, 4, 1e-5)

    def key(sha256="a", cost=cost):
        parsed = read_message(message, context)
        vars(parsed)["cohort"] = sha256
        return message_key(parsed, cost)

    seen = [
        key(),
        key("b"),
        key(cost=replace(cost, noise=2.0)),
        key(cost=replace(cost, delta=1e-6)),
    ]
    config = message.content.config_records["config"]
    settings = dict(context.run_config)
    run_id = context.run_id
    for change in (
        {"dp.clip-norm": 9.0},
        {"learning-rate": "0.1"},
        {"rounds": 1.0},
        {"resume": True},
    ):
        context.run_config = {**settings, **change}
        seen.append(key())
    context.run_config = dict(reversed(settings.items()))
    assert key() == seen[0]
    context.run_id = run_id + 1
    seen.append(key())
    context.run_id = run_id
    told = {"run_id": "another", "round": 2, "number.mu": 0.5, "mean": [1.0]}
    for name, value in told.items():
        own = dict(config)
        config[name] = value
        seen.append(key())
        config.clear()
        config.update(own)
    assert key() == seen[0] and len(set(seen)) == len(seen)
    message.content["model.global"] = ArrayRecord(
        {"vector": torch.zeros_like(vector(message, "model.global"))}
    )
    assert key() not in seen


def vector(message, name="model.model"):
    record = message.content[name]
    assert isinstance(record, ArrayRecord)
    return tensor_of(record["vector"])


def test_a_ledger_that_cannot_be_read_ends_no_run(files, state, tmp_path):
    policy = with_policy(tmp_path, "epsilon = 50\n")
    federate(files, state_dir=state, prepare=policy, **{**PRIVATE, "rounds": 1})
    (file,) = (state / "budget").glob("*.jsonl")
    file.write_text(file.read_text().replace('"steps":4', '"steps":1'))
    run = federate(files, state_dir=state, prepare=policy, **{**PRIVATE, "rounds": 1})
    assert not spent(run, "a") and len(spent(run, "b")) == 1


def test_the_patient_as_unit(files):
    policy = Policy(privacy_unit="patient")
    run = {**defaults(), "dp": True, "strategy": "fedavg"}
    assert privacy_faults(policy, run) == [
        'its policy has privacy-unit = "patient", the run dp.unit = record'
    ]
    assert not privacy_faults(policy, {**run, "dp.unit": "patient"})
    assert privacy_faults(policy, {**run, "dp": False}) == []
    assert (
        "its policy knows no differential privacy of fedfomo"
        in run_faults(Policy(peers=True), run | {"strategy": "fedfomo"})[0]
    )


# --- the site's account is the app's ----------------------------------------------------------------------------------

METHODS_WITH_NOISE = [
    name
    for name, strategy in strategies().items()
    if strategy.info.training.dp in ("gradient", "sums")
]


def test_every_method_with_noise_is_in_the_sites_table():
    assert {name for name, fields in METHODS.items() if fields.get("dp")} == {
        *METHODS_WITH_NOISE,
        "local",
    }


@typical(METHODS_WITH_NOISE, "method")
@pytest.mark.parametrize("epochs", [seldom(1), 3])
def test_what_the_site_charges_is_what_the_app_does(
    method, epochs, files, state, tmp_path, monkeypatch
):
    """Rate, noise and steps, with a target epsilon, for each method's own number of trainings."""
    plans = []
    real = training.PrivateTraining.__init__

    def noting(self, plan, *args):
        plans.append((plan, self))
        real(self, plan, *args)

    monkeypatch.setattr(training.PrivateTraining, "__init__", noting)
    given = {
        **PRIVATE,
        "strategy": method,
        "rounds": 2,
        "local_epochs": epochs,
        "dp__target_epsilon": 3.0,
    }
    given |= {"batch_size": 12, "mlp__hidden": "8"}
    given |= {"lora_rank": 2} if method.endswith("-lora") else {}
    federate(files, state_dir=state, **given)
    data = data_file(tmp_path / "site", "sum", "a", files["a"])
    cost = cost_of(settings_of(files, **given).flat(), data)
    # Of both rounds together
    assert 2.97 < epsilon(cost.noise, cost.rate, 2 * cost.steps, cost.delta) <= 3.0
    for plan, own in plans:
        assert (plan.unit, plan.units, plan.delta) == (cost.unit, cost.units, cost.delta)
        assert (plan.sample_rate, plan.noise_multiplier) == (
            cost.rate,
            pytest.approx(cost.noise),
        )
        assert own.steps <= plan.steps == cost.steps
    assert plans and ledgers  # each silo's round
