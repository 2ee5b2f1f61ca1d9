"""A server that reads patients' records with legal messages: each attack without a study, and under an approved one.

The attacker is the server: it knows code, settings, seeds and how many patients there are, and sends what it likes to
one hospital. Counts are of patients read to a hundredth of a standard deviation. The table in docs/attacks.md has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from failing import fails
from flwr.app import Context, Message, RecordDict
from oracle import PATIENTS, Oracle
from scipy.stats import norm
from study_text import TEXTS
from tiny import forget_models, initial, settings_of, write_silo

from client.app import app
from client.privacy.checks import claim_model
from client.protocol.policy import PolicyRefusedError
from client.site.study import approvals
from models.training import generator
from partitions.schema import NO_SCHEMA, Schema
from server.deploy.study_draft import draft
from server.simulation.engine import flower_identity
from strategies.base.state import GLOBAL
from strategies.base.transport.payload import Model, Payload, Wire, decode, encode

Numbers = npt.NDArray[np.float64]
COLUMNS, CLASSES = 4, 2
OPEN = ["runs-per-day = 0", "max-rounds = 0", "max-messages = 0", "max-evaluations = 0"]


@pytest.fixture(autouse=True)
def identity():
    forget_models()
    with flower_identity():
        yield


class Hospital:
    """One hospital of n patients, and a server that asks it. ``study``: settings of the study that it has approved."""

    def __init__(self, folder, n, study=None, patients=None):
        folder.mkdir(exist_ok=True)
        rng = np.random.default_rng(5)
        self.x = rng.normal(size=(n, COLUMNS)) if patients is None else patients
        self.file = write_silo(
            folder / "own.npz", self.x, [i % CLASSES for i in range(len(self.x))], CLASSES
        )
        wanted = [] if study is None else ['studies = "required"']
        (folder / "policy.toml").write_text("\n".join([*OPEN, "min-silos = 1", *wanted]) + "\n")
        self.node: dict[str, Any] = {
            "name": "own",
            "data": str(self.file),
            "policy": str(folder / "policy.toml"),
        }
        self.node |= {"state-dir": str(folder / "state")}
        (folder / "state").mkdir(exist_ok=True)
        self.refusals: list[str] = []
        if study is not None:
            self.approve(study)

    def approve(self, study, name="heart", schema=""):
        run = self.settings(**{**study, "study": name}).flat()
        text = draft(name, run, texts=TEXTS, end=None, apps=["ab" * 32], schema=schema)
        approvals.record_approval(Path(self.node["state-dir"]), "own", text, "Dr. B", "", [])

    def settings(self, **given):
        return settings_of(
            {"own": self.file}, **{"strategy": "fedavg", "learning_rate": 0.1, **given}
        )

    def context(self, run=1, **given):
        return Context(run, 1, self.node, RecordDict(), self.settings(**given).flat())

    def ask(self, context, this, vector, kind="train", **more):
        """The model that comes back from this one, in round ``this``; None for a refusal."""
        config = {
            "round": this,
            "classes": CLASSES,
            "personal": False,
            "participants": 3,
            "save": True,
            "run": "r",
        }
        config |= {"evaluate": False, "min_metric_samples": 1, **more}
        model = Model(torch.tensor(vector, dtype=torch.float32))
        reply = app(Message(encode(Payload({GLOBAL: model}), config, Wire()), 1, kind), context)
        if reply.has_error():
            self.refusals.append(str(reply.error.reason))
            return None
        return decode(reply.content)[0].models["model"].vector.numpy().astype(np.float64)

    def read(self, guesses):
        """How many patients are among the guesses."""
        return (
            sum(bool((np.abs(np.asarray(guesses) - x).max(-1) < 0.01).any()) for x in self.x)
            if len(guesses)
            else 0
        )


# ---- Momentum subsets ------------------------------------------------------------------------------------------------

SUBSETS = {"batch_size": 10, "rounds": 60}


def momentum_subsets(hospital, model, **given):
    """The same model in every round, two batches of n/2: the reply weighs the first half 1 + β, the second 1.

    Which patients are in which half follows from the seed, so the rounds are a linear system for every patient's
    gradient; x = its row of weights over its bias.
    """
    n, rows, seen = len(hospital.x), [], []
    settings = hospital.settings(**SUBSETS, **given)
    context = hospital.context(**SUBSETS, **given)
    beta, rate = settings.common.momentum, settings.common.learning_rate
    for this in range(1, settings.common.rounds + 1):
        reply = hospital.ask(context, this, model)
        if reply is None:
            continue
        order = torch.randperm(
            n, generator=generator(settings.common.seed, "own", this, "train")
        ).numpy()
        weights = np.ones(n)
        weights[order[: n // 2]] += beta
        rows.append(weights / (n // 2))
        seen.append((model - reply) / rate)
    if not rows:
        return 0
    gradients = np.linalg.lstsq(np.array(rows), np.array(seen), rcond=None)[0]
    return hospital.read(gradients[:, :COLUMNS] / gradients[:, CLASSES * COLUMNS, None])


ZERO = np.zeros(CLASSES * (COLUMNS + 1))


def test_momentum_subsets(tmp_path):
    """20 of 20 with any momentum, at a rate that keeps the gradients where they were."""
    for number, momentum in enumerate((1.0, 0.9)):
        hospital = Hospital(tmp_path / str(number), 20)
        assert momentum_subsets(hospital, ZERO, momentum=momentum, learning_rate=1e-4) == 20


def test_momentum_subsets_under_a_study(tmp_path):
    """A study fixes momentum and rate; and the model of zeros is not the seed's, so no first round is answered."""
    approved = {**SUBSETS, "momentum": 0.0}
    hospital = Hospital(tmp_path / "other settings", 20, approved)
    assert (
        momentum_subsets(hospital, ZERO, momentum=1.0, learning_rate=1e-4, study="heart") == 0
    )
    assert (
        all("the study heart has" in reason for reason in hospital.refusals)
        and len(hospital.refusals) == 60
    )
    hospital = Hospital(tmp_path / "its settings", 20, approved)
    assert momentum_subsets(hospital, ZERO, momentum=0.0, study="heart") == 0
    assert "the first model is not the one that the run's seed gives" in hospital.refusals[0]


@pytest.mark.parametrize(("rate", "found"), [(0.1, 0), (1e-4, 20)])
def test_momentum_that_a_study_allows(tmp_path, rate, found):
    """What is left: with momentum and a tiny rate approved, the seed's own model in every round reads them all."""
    approved = {**SUBSETS, "momentum": 0.9, "learning_rate": rate}
    hospital = Hospital(tmp_path, 20, approved)
    seeds = initial(hospital.settings(**approved), COLUMNS, CLASSES).numpy().astype(np.float64)
    assert (
        momentum_subsets(hospital, seeds, momentum=0.9, learning_rate=rate, study="heart")
        == found
    )
    assert hospital.refusals == []


# ---- An imprint layer ------------------------------------------------------------------------------------------------

HIDDEN, MANY = 128, 40
IMPRINTED = {"mlp__hidden": str(HIDDEN), "batch_size": 1000, "rounds": 3}


def imprint(model, rows, scale=1.0):
    """The model with an imprint in its first rows: one direction h, biases quantiles of h.x, the same above each."""
    sent = model.copy()
    first = sent[: HIDDEN * COLUMNS].reshape(HIDDEN, COLUMNS)
    bias = sent[HIDDEN * COLUMNS : HIDDEN * (COLUMNS + 1)]
    above = sent[HIDDEN * (COLUMNS + 1) : -CLASSES].reshape(CLASSES, HIDDEN)
    direction = np.random.default_rng(11).normal(size=COLUMNS)
    first[:rows] = scale * direction / np.linalg.norm(direction)
    bias[:rows] = -scale * norm.ppf((np.arange(rows) + 0.5) / rows)
    above[0, :rows], above[1, :rows] = 0.01, -0.01
    return sent


def imprint_within(last, step):
    """The largest imprint that is at most ``step`` lengths away from a model: its rows may be as short as one likes."""
    for rows in range(HIDDEN, 1, -1):
        sent = imprint(last, rows, 0.02)
        if np.linalg.norm(sent - last) <= 0.999 * step * np.linalg.norm(last):
            return sent, rows
    raise AssertionError("none is so near")


def read_imprint(hospital, sent, reply, rows=HIDDEN):
    """Differences of neighbouring rows of the update: where one patient lies between two cuts, x = dW / db."""
    if reply is None:
        return 0
    change = sent - reply
    weights = change[: HIDDEN * COLUMNS].reshape(HIDDEN, COLUMNS)[:rows]
    bias = change[HIDDEN * COLUMNS : HIDDEN * (COLUMNS + 1)][:rows]
    weights = np.diff(np.vstack([weights, np.zeros(COLUMNS)]), axis=0)
    bias = np.diff(np.append(bias, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return hospital.read(weights / bias[:, None])


NOTHING = np.zeros(HIDDEN * (COLUMNS + 1 + CLASSES) + CLASSES)


def test_an_imprint_layer(tmp_path):
    """One round, one full batch."""
    hospital = Hospital(tmp_path, MANY)
    sent = imprint(NOTHING, HIDDEN)
    assert (
        read_imprint(hospital, sent, hospital.ask(hospital.context(**IMPRINTED), 1, sent)) == 29
    )


def test_an_imprint_layer_under_a_study(tmp_path):
    """Refused as a first model, and where it is far from the silo's last one."""
    hospital = Hospital(tmp_path / "first", MANY, IMPRINTED)
    context = hospital.context(**IMPRINTED, study="heart")
    assert hospital.ask(context, 1, imprint(NOTHING, HIDDEN)) is None
    assert "not the one that the run's seed gives" in hospital.refusals[0]
    hospital = Hospital(tmp_path / "later", MANY, IMPRINTED)
    context = hospital.context(**IMPRINTED, study="heart")
    seeds = initial(hospital.settings(**IMPRINTED), COLUMNS, CLASSES).numpy().astype(np.float64)
    assert hospital.ask(context, 1, seeds) is not None
    assert hospital.ask(context, 2, imprint(NOTHING, HIDDEN)) is None
    assert "further from its last one than" in hospital.refusals[0]


def test_a_study_without_a_state_directory_is_refused(tmp_path, monkeypatch):
    """What the server has chosen would be noted in whatever folder the process is in."""
    monkeypatch.chdir(tmp_path)
    fails(
        PolicyRefusedError,
        "own refuses: it has no state-dir",
        claim_model,
        "d",
        "own",
        "",
        1,
        1,
    )
    assert not [*tmp_path.iterdir()]


def test_refusals_do_not_say_where_the_silo_s_own_model_is(tmp_path):
    """Each one as a distance from a model of the server's choice gave a coordinate: now one model a round, one bit."""
    approved = {**IMPRINTED, "rounds": 9}
    hospital = Hospital(tmp_path, MANY, approved)
    context = hospital.context(**approved, study="heart")
    seeds = initial(hospital.settings(**approved), COLUMNS, CLASSES).numpy().astype(np.float64)
    assert hospital.ask(context, 1, seeds) is not None
    for times in (9.0, 3.0, 1.01):  # the last one is within the step
        assert hospital.ask(context, 2, times * seeds) is None
    assert not set("0123456789") & set(hospital.refusals[0].replace("round 2", "")[:-1])
    other = "own refuses: round 2 has come with another model before"
    assert hospital.refusals[1:] == [other, other]
    assert hospital.ask(context, 3, 1.01 * seeds) is not None


@pytest.mark.parametrize(("step", "found"), [(1.0, 38), (0.5, 11), (0.25, 0)])
def test_an_imprint_layer_within_the_step(tmp_path, step, found):
    """What is left: an imprint as near to the silo's last model as the study allows; what it reads falls with it."""
    hospital = Hospital(tmp_path, MANY, IMPRINTED)
    context = hospital.context(**IMPRINTED, study="heart")
    seeds = initial(hospital.settings(**IMPRINTED), COLUMNS, CLASSES).numpy().astype(np.float64)
    last = hospital.ask(context, 1, seeds)
    assert last is not None
    sent, rows = imprint_within(last, step)
    assert read_imprint(hospital, sent, hospital.ask(context, 2, sent), rows) == found
    assert hospital.refusals == []


# ---- Statistics of the server's own ----------------------------------------------------------------------------------

SCALED = {"batch_size": 1000, "rounds": 5, "normalization": "agreed"}
SCALED |= {"model": "mlp", "mlp__hidden": "64"}


def read_extremes(hospital, sharpness, **given):
    """One question per column, of the seed's own model: the mean below the greatest value, the deviation tiny.

    A unit whose weight of that column is positive sees that patient alone: its gradient is a multiple of the record.
    """
    context = hospital.context(**SCALED, **given)
    seeds = (
        initial(hospital.settings(**SCALED, **given), COLUMNS, CLASSES)
        .numpy()
        .astype(np.float64)
    )
    found = 0
    for column in range(COLUMNS):
        order = np.sort(hospital.x[:, column])
        mean, std = np.zeros(COLUMNS), np.ones(COLUMNS)
        mean[column], std[column] = order[-2:].mean(), sharpness
        reply = hospital.ask(context, 1, seeds, mean=mean.tolist(), std=std.tolist())
        if reply is None:
            continue
        gradient = seeds - reply
        weights = gradient[: 64 * COLUMNS].reshape(64, COLUMNS)
        bias = gradient[64 * COLUMNS :][:64]
        with np.errstate(all="ignore"):
            guesses = weights / bias[:, None] * std + mean
        found += hospital.read(guesses[np.isfinite(guesses).all(1)]) > 0
    return found, hospital.refusals


def test_statistics_that_pick_a_patient(tmp_path):
    """Read at each column's end without a study; refused in one, for what is far off, or for a second choice."""
    found, refusals = read_extremes(Hospital(tmp_path / "none", MANY), 0.01)
    assert found == COLUMNS and not refusals
    found, refusals = read_extremes(
        Hospital(tmp_path / "study", MANY, SCALED), 0.01, study="heart"
    )
    assert found == 0 and len(refusals) == COLUMNS
    # Of one choice, and without the value: others would be questions about the column's sums
    assert refusals[0].endswith("column 1 has a root mean square above 10 here")
    assert all("by other statistics before" in refusal for refusal in refusals[1:])


def test_statistics_within_the_bound(tmp_path):
    """What is left: one choice in a run, which reads one patient. Honest ones are taken in every round."""
    hospital = Hospital(tmp_path, MANY, SCALED)
    found, refusals = read_extremes(hospital, 0.3, study="heart")
    assert found == 1 and len(refusals) == COLUMNS - 1
    assert all(
        "the run has standardised tables by other statistics before" in line
        for line in refusals
    )
    honest = Hospital(tmp_path / "honest", MANY, SCALED)
    context = honest.context(**SCALED, study="heart")
    seeds = model = (
        initial(honest.settings(**SCALED, study="heart"), COLUMNS, CLASSES)
        .numpy()
        .astype(np.float64)
    )
    assert (
        honest.ask(context, 1, model) is None and "0 means for 4 columns" in honest.refusals[0]
    )
    for this in (1, 2):
        mean, std = honest.x.mean(0), 2 * honest.x.std(0)
        reply = honest.ask(context, this, model, mean=mean.tolist(), std=std.tolist())
        assert reply is not None
        model = reply
    # A second choice, though it is no server's
    own = honest.ask(context, 3, model, own_statistics=["own"])
    assert own is None and "by other statistics before" in honest.refusals[-1]
    alone = Hospital(tmp_path / "alone", MANY, SCALED)
    context = alone.context(**SCALED, study="heart")
    replies = [alone.ask(context, 1, model, own_statistics=["own"]) for model in (seeds, seeds)]
    assert all(reply is not None for reply in replies)
    assert alone.ask(context, 2, seeds, mean=mean.tolist(), std=std.tolist()) is None


# ---- The metric oracle -----------------------------------------------------------------------------------------------


def test_the_metric_oracle_under_a_study(tmp_path):
    """Without one 10 of 10 (test_extraction.py). Evaluations before the last round are not the study's; nor more."""
    (tmp_path / "policy.toml").write_text(
        "\n".join([*OPEN, "min-silos = 1", 'studies = "required"']) + "\n"
    )
    oracle = Oracle(tmp_path, str(tmp_path / "policy.toml"))
    settings = settings_of(
        {"own": tmp_path / "own.npz"}, batch_size=8, learning_rate=0.01, study="heart"
    )
    oracle.context.run_config = settings.flat()
    approvals.record_approval(
        tmp_path / "state",
        "own",
        draft("heart", settings.flat(), texts=TEXTS, end=None, apps=["ab" * 32]),
        "B",
        "",
        [],
    )
    assert (oracle.read(), oracle.asked) == (0, 0) and PATIENTS == 10
    assert "the study heart" in oracle.refusal


# ---- Differencing ----------------------------------------------------------------------------------------------------

FULL = {"batch_size": 1000, "rounds": 1}


def differencing(folder, study, names):
    """Two runs of one round, before and after one patient came: the sums of gradients differ by that patient's."""
    patients = np.random.default_rng(5).normal(size=(21, COLUMNS))
    replies, sizes, refusals = [], (20, 21), list[str]()
    for run, (size, name) in enumerate(zip(sizes, names, strict=True), 1):
        hospital = Hospital(folder, size, None, patients[:size])
        if study:
            wanted = ['studies = "required"'] if study else []
            (folder / "policy.toml").write_text(
                "\n".join([*OPEN, "min-silos = 1", *wanted]) + "\n"
            )
            if not approvals.find(Path(hospital.node["state-dir"]), name):
                hospital.approve(FULL, name)
        given = {**FULL, **({"study": name} if study else {})}
        seeds = initial(hospital.settings(**given), COLUMNS, CLASSES).numpy().astype(np.float64)
        reply = hospital.ask(hospital.context(run, **given), 1, seeds)
        refusals += hospital.refusals
        if reply is not None:
            replies.append((seeds - reply) * size)
    if len(replies) < 2:
        return 0, refusals
    gradient = replies[1] - replies[0]
    guess = gradient[:COLUMNS] / gradient[CLASSES * COLUMNS]
    return int((np.abs(guess - patients[-1]) < 0.01).all()), refusals


def test_differencing(tmp_path):
    """Read without a study; refused in one that allows one run; read again where a second study is approved."""
    assert differencing(tmp_path / "none", False, ("", "")) == (1, [])
    found, refusals = differencing(tmp_path / "one", True, ("heart", "heart"))
    assert (
        found == 0
        and "the study heart has limits.runs = 1, and this is number 2" in refusals[0]
    )
    assert differencing(tmp_path / "two", True, ("heart", "lung")) == (1, [])


# ---- More questions than were approved -------------------------------------------------------------------------------


def test_no_extra_query(tmp_path):
    """The data summary is asked for a few times in a run, for a silo may not have answered; then no more."""
    hospital = Hospital(tmp_path, 20, FULL)
    context = hospital.context(**FULL, study="heart")
    query = Message(RecordDict({}), 1, "query")
    replies = [app(query, context) for _ in range(6)]
    answered = [not reply.has_error() for reply in replies]
    assert answered == [True] * 4 + [False] * 2
    assert "the study heart has limits.queries = 4, and this is number 5" in str(
        replies[4].error.reason
    )
    seeds = initial(hospital.settings(**FULL), COLUMNS, CLASSES).numpy().astype(np.float64)
    assert hospital.ask(context, 1, seeds) is not None  # and the training goes on


def test_another_schema_than_approved(tmp_path):
    """A run whose columns are not those that were approved: refused before it trains."""
    for name, schema, answers in (
        ("other", Schema(labels=("well", "ill")), False),
        ("same", NO_SCHEMA, True),
    ):
        hospital = Hospital(tmp_path / name, 20)
        hospital.approve(FULL, schema=schema.digest)
        seeds = initial(hospital.settings(**FULL), COLUMNS, CLASSES).numpy().astype(np.float64)
        assert (
            hospital.ask(hospital.context(**FULL, study="heart"), 1, seeds) is not None
        ) == answers
        assert [
            f"the study heart has schema = {schema.digest[:16]}..." in line
            for line in hospital.refusals
        ] == [True for _ in range(not answers)]
