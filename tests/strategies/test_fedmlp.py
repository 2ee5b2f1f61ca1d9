"""FedMLP: labels, means and thresholds of two silos by hand, rounds in float64, and where it is FedAvg."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from failing import fails
from hospitals import NETWORKS, hospital_files, partly_labelled
from near import near
from resuming import assert_resumes
from tiny import federate, same
from two_layers import DEEP, network, replies_of, sent_by, start_at

from partitions.npz import write_npz
from strategies.fedmlp import FedMLPClient, most_alike

STILL = {"learning_rate": 1e-30, "normalization": "none"}
A = [[2, 0], [4, 0], [0, 1], [0, 3]], [[0, 0], [1, 0], [1, 1], [0, 1]]
B = [[1, 0], [3, 1], [1, 2], [0, 1], [5, 1], [2, 1]], [0, 1, 1, 0, 0, 1]
PICTURES = {**NETWORKS["multilabel"], "batch_size": 16, "learning_rate": 0.1}
TABLE = "prototypes"
SHARES = (0.6, 0.9)  # τ0, τ1
SURE = {"fedmlp__absent": 1.0, "fedmlp__present": 1.0, "fedmlp__adapt": False}
LOOSE = {"low": 0.45, "high": 0.5}


def hospital(file, x, y, **arrays):
    """A file whose training rows are its validation and test rows too."""
    arrays["y"], arrays["x"] = labels, _ = np.array(y, np.int8), np.array(x, np.float32)
    for key in ("x", "y"):
        values = arrays.pop(key)
        arrays |= {f"{key}_{part}": values for part in ("train", "val", "test")}
    names = arrays["label_names"] = np.array(["oedema", "mass", "effusion"][: labels.shape[1]])
    if (lacking := (labels < 0).all(0)).any():
        arrays["unlabelled"] = names[lacking]
    write_npz(file, arrays)
    return file


@pytest.fixture
def two(tmp_path):
    """Two columns and findings; b does not label the second one."""
    y = [[first, -1] for first in B[1]]
    return {"a": hospital(tmp_path / "a.npz", *A), "b": hospital(tmp_path / "b.npz", B[0], y)}


def start(monkeypatch):
    """Output 1 is (x0 - x1) / 2; without a hidden layer the features are the columns."""
    start_at(monkeypatch, [0.3, 0.1, 0.5, -0.5, 0.2, 0])


def rows(vector):
    return vector.view(4, 3).tolist()


@pytest.mark.parametrize(
    ("own", "added"),
    [
        # floor(1/3 4) = 1 of four in round 2, floor(1/3 3) of three in round 3; floor(1/3 2) = 0 of two get 1
        ({"absent": 1, "present": 1}, [[0], [0, 4]]),
        # floor(0.75 4) = 3, and of one floor(0.75) = 0; floor(0.5 2) = 1 of two, then floor(0.5) = 0 of one
        ({"absent": 0.75, "present": 0.5, "adapt": False}, [[0, 1, 4, 3]] * 2),
    ],
)
def test_two_silos_by_hand(two, monkeypatch, own, added):
    """Nothing learns. Means of a without and with finding 0: (2, 0), (0, 3) -> (1, 1.5) and (4, 0), (0, 1) -> (2, 0.5).

    Of b (1, 0), (0, 1), (5, 1) -> (2, 2/3) and (3, 1), (1, 2), (2, 1) -> (2, 4/3). With 4 and 6 samples their means are
    (1.6, 1) and (2, 1). Finding 1 is a's alone: (3, 0) and (0, 2). There, b has outputs 0.5, 1, -0.5, -0.5, 2, 0.5; of
    |output| > log(0.7 / 0.3) = 0.85 are two of six: d = 1/3. a lacks nothing, so d of finding 0 stays 1.

    Then s = (x0 - x1) / |x|: 1, 0.63, -0.45, -1, 0.78, 0.45. Those with s >= 0, from the largest: 0, 4, 1, 5; from the
    smallest of the others: 3, 2.
    """
    start(monkeypatch)
    options = {f"fedmlp__{key}": value for key, value in own.items()}
    run = federate(two, "fedmlp", rounds=3, **STILL, **options)
    of_a = [[1, 1.5, 1], [2, 0.5, 1], [3, 0, 1], [0, 2, 1]], [-1, -1]
    of_b = [[2, 2 / 3, 1], [2, 4 / 3, 1], [0, 0, 0], [0, 0, 0]], [-1, 1 / 3]
    # In every round: an added label is for training alone
    for _, silo, payload, _ in replies_of(run):
        table, learned = of_a if silo == "a" else of_b
        near(rows(payload.models[TABLE].vector), table)
        near(payload.numbers["learned"], learned)
    near(rows(run.held[TABLE]), [[1.6, 1, 1], [2, 1, 1], [3, 0, 1], [0, 2, 1]])
    near(run.strategy.state.numbers["learned"], [1, 1 / 3])
    for rounds, where in zip((2, 3), added, strict=True):
        labels = federate(two, "fedmlp", rounds=rounds, **STILL, **options).kept("b")["labels"]
        expected = np.full((6, 2), -1)
        expected[where, 1] = [int(i == 3) for i in where]
        assert labels.tolist() == expected.tolist()
    assert "labels" not in run.kept("a")


def findings_silos(folder):
    """Three columns and findings; a labels all, b lacks the last and one label, c the first and the last."""
    rng = np.random.default_rng(5)
    rule, files = rng.normal(size=(3, 3)), {}
    for name, n, lacks in (("a", 14, ()), ("b", 12, (2,)), ("c", 9, (0, 2))):
        x = rng.normal(size=(n, 3))
        y = (x @ rule > 0.2).astype(int)
        y[:, list(lacks)] = -1
        y[: name == "b", 1] = -1
        files[name] = hospital(folder / f"{name}.npz", x, y)
    return files


def parts_of(file):
    with np.load(file) as data:
        return torch.from_numpy(data["x_train"]).double(), torch.from_numpy(data["y_train"])


def written_loss(w, x, y, teacher, lacks):
    """Of probabilities; λ is 3."""
    p, taught = (torch.sigmoid(network(v, x)[1]) for v in (w, teacher))
    loss = -torch.where(y == 1, p, 1 - p).log()[y >= 0].mean()
    rest = (y < 0)[:, lacks]
    return loss + 3 * ((p - taught) ** 2)[:, lacks][rest].mean() if rest.any() else loss


def with_labels(h, y, lacks, centres, learned):
    """The labels with those that a round adds."""
    y = y.clone()
    for c in lacks:
        like = [F.cosine_similarity(h, centres[c, v][None]) for v in (0, 1)]
        s, free = like[0] - like[1], y[:, c] < 0
        for value, sign in ((0, -1), (1, 1)):
            side = [i for i in range(len(y)) if free[i] and (s[i] < 0) == bool(value)]
            side.sort(key=[sign * float(v) for v in s].__getitem__)
            y[side[: int(learned[c] * SHARES[value] * len(side) + 1e-9)], c] = value
    return y


def trained(w, x, y, lacks):
    v = w
    for _ in range(2):
        v = v.detach().requires_grad_()
        v = v - 0.3 * torch.autograd.grad(written_loss(v, x, y, w, lacks), v)[0]
    return v.detach()


def told(v, x, y, lacks):
    """What a silo tells: of each finding its share of sure samples, or the means without and with it."""
    h, o = network(v, x)
    p = torch.sigmoid(o)
    sure = {c: float(((p[:, c] < 0.45) | (p[:, c] > 0.5)).double().mean()) for c in lacks}
    has = [(c, value) for c in range(3) for value in (0, 1) if (y[:, c] == value).any()]
    return sure | {(c, value): h[y[:, c] == value].mean(0) for c, value in has}


def mean(pairs):
    return sum(n * value for n, value in pairs) / sum(n for n, _ in pairs)


def test_rounds_in_float64(tmp_path):
    """Four rounds of two full-batch steps; in round 2 the warm-up ends, and c is away in round 3."""
    own = {"warm_up": 0.5, "lambda": 3.0, "absent": SHARES[0], "present": SHARES[1]} | LOOSE
    options = {f"fedmlp__{key}": value for key, value in own.items()} | DEEP
    files, away = findings_silos(tmp_path), ("c", 3)
    run = federate(files, "fedmlp", rounds=4, local_epochs=2, absent={away}, **options)
    data, w = (
        {silo: parts_of(file) for silo, file in files.items()},
        run.received("a", 1).double(),
    )
    known: dict[Any, Any] = dict.fromkeys(range(3), 1.0)
    labels = {silo: y for silo, (_, y) in data.items()}
    for server_round in range(1, 5):
        assert (TABLE in run.sent_to("a", server_round)) == (server_round > 2)
        ends = {}
        for silo, (x, y) in data.items():
            if (silo, server_round) == away:
                continue
            lacks = [c for c in range(3) if (y[:, c] < 0).all()]
            if server_round > 2:
                labels[silo] = with_labels(network(w, x)[0], labels[silo], lacks, known, known)
            v = trained(w, x, labels[silo], lacks)
            ends[silo] = len(y), v, told(v, x, y, lacks) if server_round > 1 else {}
        w = mean([(n, v) for n, v, _ in ends.values()])
        for key in {key for *_, of in ends.values() for key in of}:
            known[key] = mean([(n, of[key]) for n, _, of in ends.values() if key in of])
    near(run.shared, w, 1e-5)
    near(run.strategy.state.numbers["learned"], [known[c] for c in range(3)])
    means = torch.stack([known[c, value] for c in range(3) for value in (0, 1)])
    near(run.held[TABLE].view(6, 5)[:, :4], means, 1e-5)
    for silo, c in (("b", 2), ("c", 0)):
        found = run.kept(silo)["labels"][:, c].tolist()
        assert found == labels[silo][:, c].tolist()
        assert {*found} == {-1, 0, 1}


@pytest.mark.parametrize(
    ("files", "task", "own"),
    [
        *((hospital_files, task, {}) for task in ("multilabel", "ordinal", "survival")),
        (partly_labelled, "multilabel", {"lambda": 0.0, "absent": 0.0, "present": 0.0}),
    ],
)
def test_the_model_is_fedavgs(tmp_path, files, task, own):
    """Where all label everything, of other tasks, and without teacher and labels. Of other tasks no means leave."""
    options = {**PICTURES, **NETWORKS[task], "rounds": 3, "normalization": "agreed"}
    plain = federate(files(tmp_path, task), "fedavg", **options)
    options |= {f"fedmlp__{key}": value for key, value in own.items()}
    run = federate(files(tmp_path, task), "fedmlp", **options)
    assert same(plain.shared, run.shared)
    assert (TABLE in run.held) == (task == "multilabel")


def test_the_floor_is_that_of_the_exact_product():
    assert len(most_alike(torch.ones(100), torch.arange(100), 0.57)) == 57


@pytest.mark.parametrize("learned", [[0.5], [0.5, 1.5], [0.5, -2.0], 0.5], ids=repr)
def test_a_silo_with_strange_numbers_is_left_out(two, learned):
    def after(silo, message, reply):
        if silo == "a" and message.metadata.message_type == "train":
            reply.content["config"]["number.learned"] = learned
        return reply

    run = federate(two, "fedmlp", rounds=1, **STILL, after=after)
    assert run.rejected() == [(1, "a")] and not run.held[TABLE][6:].any()


def test_means_of_few_patients_stay(two, tmp_path, identity, monkeypatch):
    """a's two records with finding 0 are one patient's. A mean of theirs that is planted is refused."""
    first = {"train": 0, "val": 9, "test": 19}
    people = {f"patient_{part}": [i, i + 1, i + 1, i + 2] for part, i in first.items()}
    hospital(two["a"], *A, **people)
    policy = tmp_path / "policy.toml"
    policy.write_text(
        "class-means = true\nmin-cell = 2\nfloor = 1\nmin-silos = 2\nmin-batch-size = 1"
    )
    own = {"rounds": 1, "policy": str(policy), "state_dir": tmp_path / "states", **STILL}
    run = federate(two, "fedmlp", directory=tmp_path / "run", **own)
    for silo, marks in (("a", [1, 0, 1, 1]), ("b", [1, 1, 0, 0])):
        table = sent_by(run, silo, 0, TABLE).view(4, 3)
        assert table[:, 2].tolist() == marks == table.any(1).int().tolist()
    told = FedMLPClient.means
    monkeypatch.setattr(FedMLPClient, "means", lambda self: told(self) + 1)
    why = "min-cell = 2, and 'prototypes' has means of classes"
    fails(RuntimeError, why, federate, two, "fedmlp", directory=tmp_path / "other", **own)


def test_an_unseen_hospital_gets_the_model(tmp_path):
    """It lacks a finding, and neither trains nor sends; the others' run is that of a federation without it."""
    files, options = partly_labelled(tmp_path, "multilabel"), {**PICTURES, **SURE, "rounds": 2}
    run = federate(files, "fedmlp", hold_out="south", **options)
    files.pop("south")
    assert same(run.shared, federate(files, "fedmlp", **options).shared)
    scores = [run.values("auc", "south", of) for of in ("zero_shot", "personalised")]
    assert scores[0] == scores[1] != [] and not replies_of(run, "south")


def test_a_resumed_run_keeps_added_labels(tmp_path):
    files = findings_silos(tmp_path)
    run = assert_resumes(files, tmp_path, 2, strategy="fedmlp", rounds=4, **DEEP, **SURE)
    assert (run.kept("b")["labels"] >= 0).any()
