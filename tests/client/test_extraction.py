"""What the settings of a run, and crafted models, read out of a hospital: each attack with the rule off, and with it.

The attacker is the server. It knows the code, the settings, and how many patients there are.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from failing import fails
from flwr.app import Message, RecordDict
from oracle import BITS, COLUMNS, PATIENTS, Oracle
from tiny import federate, random_silos, rows_of, train_replies
from torch import nn

from client.app import app
from client.site.terms import GIVEN, read_terms, written_terms
from models.metrics import loss_function
from partitions.common.errors import UserError
from server.report.write import write_report
from server.results.run_directory import RunDirectory
from server.results.summary import write_summary
from strategies.base.state import GLOBAL
from strategies.base.transport.payload import Model, Payload, Wire, decode, encode

Numbers = npt.NDArray[np.float64]
CLASSES = 3

pytestmark = pytest.mark.usefixtures("identity")


def rules(folder, *lines):
    file = folder / "policy.toml"
    file.write_text("\n".join(["runs-per-day = 0", *lines]) + "\n")
    return str(file)


# ---- One patient per reply -------------------------------------------------------------------------------------------

SIZES = {"a": 20, "b": 20, "c": 20}
ERASING = {"batch_size": 19, "learning_rate": 1.0, "weight_decay": 1.0, "rounds": 4}


def erase(folder, *policy, **settings):
    """A run whose steps forget all earlier ones, and whose last batch is one patient."""
    files = random_silos(folder, SIZES)
    asked = {"strategy": "fedavg", **ERASING, **settings}
    return federate(files, policy=rules(folder, *policy), state_dir=folder / "states", **asked)


def patients_read(run, folder):
    """Of each reply, whether x = W_row / b_row is a patient of that silo: the reply is -lr (p - e_y) (x, 1)."""
    found = []
    for (silo, _), reply in train_replies(run.grid):
        vector = decode(reply.content)[0].models["model"].vector.numpy().astype(np.float64)
        weights, bias = vector[:-CLASSES].reshape(CLASSES, -1), vector[-CLASSES:]
        row = int(np.abs(bias).argmax())
        guess = weights[row] / bias[row]
        x, _ = rows_of(folder / f"{silo}.npz")
        found.append(bool(np.abs(x - guess).max(1).min() < 1e-4))
    return found


def test_the_last_batch_of_one_patient(tmp_path):
    """Every reply was one patient, exactly. With the rule on batches alone, no reply is."""
    before = patients_read(erase(tmp_path, "min-batch-size = 1", "max-decay = 1"), tmp_path)
    assert len(before) == 12 and all(before)


def test_no_reply_is_of_one_patient(tmp_path):
    after = patients_read(erase(tmp_path, "max-decay = 1"), tmp_path)
    assert len(after) == 12 and not any(after)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "the run learning-rate x weight-decay = 1"),
        (
            {"strategy": "fedprox", "fedprox__mu": 1.0, "weight_decay": 0.0},
            "the run learning-rate x fedprox.mu = 1",
        ),
        (
            {"learning_rate": 0.1, "weight_decay": 10.0},
            "the run learning-rate x weight-decay = 1",
        ),
    ],
    ids=["weight decay", "proximal term", "another product"],
)
def test_steps_that_forget_the_earlier_ones_are_refused(tmp_path, settings, said):
    fails(ValueError, f"its policy has max-decay = 0.1, {said}", erase, tmp_path, **settings)


def test_a_proximal_weight_that_the_servers_message_raises(tmp_path, caplog):
    """FedDyn multiplies α by a number of the server's: at 0.05 x 2.8 a step replaces 14 % of silo a's model."""
    files = random_silos(tmp_path, {"a": 20, "b": 50, "c": 98})
    given = {
        "strategy": "feddyn",
        "feddyn__weights": "samples",
        "feddyn__alpha": 0.05,
        "rounds": 1,
    }
    run = federate(
        files, policy=rules(tmp_path), state_dir=tmp_path / "states", batch_size=8, **given
    )
    assert [silo for (silo, _), _ in train_replies(run.grid)] == ["b", "c"]
    assert "a: max-decay = 0.1, and learning rate x proximal weight = 0.14" in caplog.text


def test_a_run_that_asks_for_it_has_the_same_numbers_with_and_without_the_sites_rule(tmp_path):
    """min-batch-size = 8 in a simulation is what a hospital's default policy does: the same models bit for bit."""
    runs = []
    for name, policy, least in (
        ("open", "public", 8),
        ("site", rules(tmp_path, "max-decay = 1"), 1),
    ):
        folder = tmp_path / name
        folder.mkdir()
        files = random_silos(folder, SIZES)
        runs.append(
            federate(
                files,
                policy=policy,
                state_dir=folder / "states",
                min_batch_size=least,
                **ERASING,
            )
        )
    vectors = [
        [decode(r.content)[0].models["model"].vector for _, r in train_replies(run.grid)]
        for run in runs
    ]
    assert len(vectors[0]) == 12 and all(
        torch.equal(a, b) for a, b in zip(*vectors, strict=True)
    )


def test_fewer_patients_than_a_batch_may_have(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"c refuses: its policy has min-batch-size = 25, its training part has fewer samples",
    ):
        erase(tmp_path, "min-batch-size = 25", "max-decay = 1", batch_size=30)


def test_a_part_of_the_training_part_that_is_smaller_than_a_batch_may_be(tmp_path):
    """ALA learns its weights on a share of the patients, which the run chooses: 10 % of 20 are two."""
    given = {"strategy": "fedala", "fedala__sample_percent": 10.0, "rounds": 2}
    with pytest.raises(
        RuntimeError, match=r"min-batch-size = 8, and there are 2 samples to train with"
    ):
        erase(tmp_path, batch_size=19, weight_decay=0.0, **given)


# ---- A loss that looks at one patient --------------------------------------------------------------------------------


def nearest_patient(loss, y):
    """How near the first layer's gradient over its bias's, of the best unit, comes to a record of the batch.

    In lengths of a record; the network is fresh, as in an honest first round. The best of ten starts: a server has as
    many rounds.
    """
    found = []
    for seed in range(10):
        torch.manual_seed(seed)
        x = torch.randn(len(y), 10)
        network = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
        weights, bias = torch.autograd.grad(loss(network(x), y), list(network.parameters())[:2])
        guesses = weights[bias != 0] / bias[bias != 0, None]
        found.append(float(torch.cdist(guesses, x).min() / x.norm(dim=1).mean()))
    return min(found)


def test_a_focal_loss_that_sees_the_worst_sample_alone(tmp_path):
    """Of 120 patients in one batch one was read to four digits, with an untouched model and settings alone."""
    y = torch.arange(120) % 2
    assert nearest_patient(loss_function("focal", 50.0), y) < 0.02
    assert nearest_patient(loss_function("focal", 5.0), y) > 0.2
    with pytest.raises(UserError, match=r"focal-gamma = 5.5 is out of range: at most 5"):
        erase(tmp_path, loss="focal", focal_gamma=5.5)


def test_a_balanced_loss_that_sees_the_rarest_class_alone(tmp_path):
    """FedRoD's, with one ill patient among 119 others: p_c ~ n_c^γ exp(z_c)."""
    y = torch.zeros(120, dtype=torch.long)
    y[7] = 1

    def loss(gamma):
        return lambda z, y: nn.functional.cross_entropy(
            z + gamma * torch.tensor([119.0, 1.0]).log(), y
        )

    assert nearest_patient(loss(3.0), y) < 0.02 and nearest_patient(loss(1.0), y) > 0.1
    with pytest.raises(UserError, match=r"fedrod.gamma = 3.0 is out of range: at most 1"):
        erase(tmp_path, strategy="fedrod", fedrod__gamma=3.0)


# ---- lp-proj that sends as good as everything ------------------------------------------------------------------------


@pytest.mark.parametrize("dimension", [11, 2, 1])
def test_a_projection_to_nearly_all_numbers_counts_as_the_whole_model(tmp_path, dimension):
    """12 parameters: from 1 % on, d numbers tell of them what the policy keeps here."""
    given = {"strategy": "lp-proj", "lp_proj__dimension": dimension, "weight_decay": 0.0}
    given = {key.replace("lp_proj", "lp-proj"): value for key, value in given.items()}
    with pytest.raises(
        RuntimeError, match=f"would send {dimension} numbers of a model of 12: 1% count as all"
    ):
        erase(tmp_path, "whole-model = false", **given)


def test_a_projection_to_few_numbers_is_none(tmp_path):
    given = {
        "strategy": "lp-proj",
        "lp-proj__dimension": 5,
        "weight_decay": 0.0,
        "mlp__hidden": "100",
    }
    # 703 parameters
    assert not erase(tmp_path, "whole-model = false", **given).strategy.rejected


# ---- The metric oracle -----------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_the_metric_oracle(tmp_path):
    """Where evaluations are not counted, the task's score alone gives every test patient: the number is what counts."""
    oracle = Oracle(tmp_path, rules(tmp_path, "max-evaluations = 0", "max-messages = 0"))
    assert (oracle.read(), oracle.asked) == (PATIENTS, (2 + PATIENTS * BITS) * COLUMNS)


def test_evaluations_are_counted(tmp_path):
    oracle = Oracle(tmp_path, rules(tmp_path))
    assert (oracle.read(), oracle.asked) == (0, 50)
    assert (
        oracle.refusal
        == "own refuses: its policy has max-evaluations = 50, and this is number 51 of run 1"
    )


def test_evaluations_obey_the_floor(tmp_path):
    oracle = Oracle(tmp_path, rules(tmp_path, "floor = 11"))
    oracle.read()
    few = "its training part has fewer patients"  # and not how many
    assert oracle.refusal == f"own refuses: its policy has floor = 11, {few}"


def test_metrics_that_leave_without_a_file(tmp_path):
    """The loss and the task's score; every other metric where the policy lists it, and of public data."""
    seen = []
    for lines in ((), ('metrics = ["macro_f1"]',), None):
        oracle = Oracle(tmp_path, "public" if lines is None else rules(tmp_path, *lines))
        config = {"round": 1, "classes": 2, "personal": False, "min_metric_samples": 1}
        content = encode(Payload({GLOBAL: Model(torch.zeros(2 * COLUMNS + 2))}), config, Wire())
        metrics = app(Message(content, 1, "evaluate"), oracle.context).content["metrics"]
        seen.append(
            {name.rpartition(".")[2] for name in metrics if not name.startswith("seconds")}
        )
    assert seen[:2] == [{"loss", "accuracy"}, {"macro_f1"}]
    assert {"loss", "accuracy", "macro_f1", "auc"} <= seen[2]


# ---- More rounds, or messages, than a run may have -------------------------------------------------------------------


def test_rounds_are_counted_whatever_the_run_says(tmp_path):
    """The run says two rounds, and the server sends a third; under another run's number the count is another one."""
    run = erase(tmp_path, "max-rounds = 2", "max-decay = 1", rounds=2)
    message, _ = next(
        pair for pair in run.grid.traffic if pair[0].metadata.message_type == "train"
    )
    context = run.grid.context_of("a")
    reply = app(message, context)
    assert (
        reply.error.reason
        == "a refuses: its policy has max-rounds = 2, and this is number 3 of run 1"
    )
    with pytest.raises(ValueError, match=r"its policy has max-rounds = 2, the run rounds = 3"):
        erase(tmp_path, "max-rounds = 2", "max-decay = 1", rounds=3)


def test_messages_of_every_kind_count(tmp_path):
    oracle = Oracle(tmp_path, rules(tmp_path, "max-messages = 3"))
    query = Message(RecordDict({}), 1, "query")
    for reply in itertools.islice((app(query, oracle.context) for _ in itertools.count()), 3):
        assert not reply.has_error()
    oracle.read()
    assert (
        oracle.refusal
        == "own refuses: its policy has max-messages = 3, and this is number 4 of run 1"
    )
    oracle.context.run_id = 2
    assert not app(query, oracle.context).has_error()


def test_what_the_sites_own_process_has_counted_the_app_does_not(tmp_path):
    """It passes the terms on, under which it has checked and counted the message."""
    oracle = Oracle(tmp_path, rules(tmp_path, "max-messages = 1"))
    given = written_terms(read_terms(oracle.context.node_config, oracle.context.run_config))
    for _ in range(3):
        oracle.context.node_config[GIVEN] = given
        assert not app(Message(RecordDict({}), 1, "query"), oracle.context).has_error()
    record = Path(str(oracle.context.node_config["state-dir"]), "record.sqlite")
    assert not record.exists()
    # As simulated
    assert (
        not app(Message(RecordDict({}), 1, "query"), oracle.context).has_error()
        and record.exists()
    )


def test_a_report_of_runs_whose_other_metrics_stay(tmp_path):
    """Loss and score are enough for it: what stays is missing, and nothing stands in its place."""
    files = random_silos(tmp_path, SIZES)
    out = tmp_path / "run"
    given = {"strategy": "fedavg", "batch_size": 8, "rounds": 2, "min_metric_samples": 1}
    run = federate(
        files, policy=rules(tmp_path), state_dir=tmp_path / "states", directory=out, **given
    )
    with RunDirectory.open(out, run.settings.flat(), resume=True) as directory:
        summary = write_summary(directory, run.federation.history, run.federation.finish_run())
    write_report(out)
    (of_run,) = summary["runs"]
    assert of_run["final"]["accuracy_mean"] > 0 and of_run["final"]["macro_f1_mean"] is None
    assert "withheld" not in (out / "report.html").read_text()
