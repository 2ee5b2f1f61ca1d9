"""FedProto: two silos by hand, rounds in numpy, absent classes and silos, what is exported (B19)."""

from __future__ import annotations

import numpy as np
import pytest
from near import near
from predictions import read_csv
from tiny import SHORT, Numbers, federate, random_silos, rows_of, same, write_silo
from two_layers import DEEP, FC1, FC2, HIDDEN, deep_gradient, replies_of, sent_by

from client.export import export_model
from client.prediction.predict import predict_file

OPTIONS = {**SHORT, "learning_rate": 0.1}


def table(run):
    return run.held["prototypes"].double().numpy().reshape(-1, HIDDEN + 1)


def test_two_silos_by_hand(pair, zero_start):
    """Without hidden layers the features are the columns: a's prototype of class 0 is 2, b's of class 1 is 1.

    After round 1 the nearest of both is found by (4 x - 4, 2 x - 1), the border being 3/2; among its own class alone
    every row of a silo is right. In round 1 there is no prototype: the head, at 0, calls everything class 0.
    """
    run = federate(pair, "fedproto", rounds=1, fedproto__classes="all")
    assert run.held["prototypes"].tolist() == [2, 1, 1, 1]
    assert sent_by(run, "a", 0, "prototypes").tolist() == [2, 1, 0, 0]
    assert run.values("accuracy", "a", "received") == [1, 1]
    assert run.values("accuracy", "b", "received") == [0, 1]
    # In round 1 it knows its own class only
    assert run.personal("a").tolist() == [4, 0, -4, -1e9]
    # softmax of (4 - 4, 2 - 1) at x = 1
    assert run.values("loss", "b", "received")[1] == pytest.approx(np.log(1 + np.exp(-1)))


def features(w, x):
    return np.maximum(x @ w[FC1][: 3 * HIDDEN].reshape(HIDDEN, 3).T + w[FC1][3 * HIDDEN :], 0)


def pulled_gradient(w, x, y, centres, weight):
    """deep_gradient, and that of λ mean (z - c_y)²: dL/dz = 2 λ (z - c_y) / (B K) where c_y is known, z > 0."""
    z = features(w, x)
    dz = np.array(
        [
            2 * weight * (row - centres.get(int(c), row)) / z.size
            for row, c in zip(z, y, strict=True)
        ]
    )
    dz *= z > 0
    return deep_gradient(w, x, y) + np.concatenate(
        [(dz.T @ x).ravel(), dz.sum(0), np.zeros(FC2.stop - FC2.start)]
    )


def averaged(tables, uniform, before):
    result = dict(before)
    for c in range(3):
        having = [t[c] for t in tables if c in t]
        weights = [1 if uniform else count for _, count in having]
        if having:
            total = sum(w * mean for w, (mean, _) in zip(weights, having, strict=True))
            result[c] = np.asarray(total / sum(weights))
    return result


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("which", ["last-epoch", "all-epochs", "trained"])
def test_rounds_in_numpy(lopsided, weighting, which):
    """Four rounds of two full-batch steps in float64: features of the last step's model, of both steps', or after."""
    run = federate(
        lopsided,
        "fedproto",
        rounds=4,
        local_epochs=2,
        **DEEP,
        fedproto__lambda=0.7,
        fedproto__weighting=weighting,
        fedproto__features=which,
    )
    models = dict.fromkeys(lopsided, run.start())
    centres: dict[int, Numbers] = {}
    for _ in range(4):
        tables = []
        for silo, file in lopsided.items():
            x, y = rows_of(file)
            w, seen = models[silo], []
            for _ in range(2):
                seen.append(features(w, x))
                w = w - 0.3 * pulled_gradient(w, x, y, centres, 0.7)
            z = {
                "last-epoch": seen[-1],
                "all-epochs": (seen[0] + seen[1]) / 2,
                "trained": features(w, x),
            }[which]
            models[silo] = w
            tables.append(
                {int(c): (z[y == c].mean(0), int((y == c).sum())) for c in np.unique(y)}
            )
        centres = averaged(tables, weighting == "uniform", centres)
    for c in range(3):
        near(table(run)[c], np.append(centres[c], 1))
    for silo in lopsided:
        kept = run.kept(silo)["model"].numpy()
        near(kept, models[silo])


def test_the_share_is_one_where_silos_count_alike(lopsided):
    run = federate(lopsided, "fedproto", rounds=1, **DEEP, fedproto__weighting="uniform")
    plain = federate(lopsided, "fedproto", rounds=1, **DEEP)
    for one, expected in ((run, [1, 1, 0]), (plain, [0.6, 0.4, 0])):
        sent = sent_by(one, "a", 0, "prototypes").view(3, -1)
        assert sent[:, -1].tolist() == pytest.approx(expected)
        assert not sent[2].any()


def test_how_it_predicts_leaves_the_training_as_it_is(three):
    runs = [
        federate(
            three,
            "fedproto",
            fedproto__predict=predict,
            fedproto__classes=classes,
            **DEEP | OPTIONS,
        )
        for predict, classes in (("head", "own"), ("prototypes", "own"), ("prototypes", "all"))
    ]
    for other in runs[1:]:
        assert same(*(run.held["prototypes"] for run in (runs[0], other)))
    head, nearest = (run.personal("a") for run in runs[:2])
    assert same(head[FC1], nearest[FC1]) and not same(head[FC2], nearest[FC2])


def test_a_class_that_nobody_brings_keeps_its_prototype(lopsided):
    """b alone has class 2 and is away in round 2; a and c move the others on, and a fails in round 1."""
    runs = [
        federate(lopsided, "fedproto", rounds=rounds, **DEEP, absent={("b", 2), ("a", 1)})
        for rounds in (1, 2)
    ]
    one, two = (table(run) for run in runs)
    assert one[2] == pytest.approx(two[2], abs=0) and one[2].any()
    assert not np.allclose(one[1], two[1]) and not np.allclose(one[0], two[0])
    assert same(runs[0].kept("b")["model"], runs[1].kept("b")["model"])
    sent = {
        (r, silo): p.models["prototypes"].vector.view(3, -1)
        for r, silo, p, _ in replies_of(runs[1])
    }
    assert set(sent) == {(1, "b"), (1, "c"), (2, "a"), (2, "c")}
    expected = (5 * 0.6 * sent[2, "a"][0] + 3 * sent[2, "c"][0]) / 6
    near(two[0][:-1], expected[:-1])


@pytest.mark.parametrize("classes", ["own", "all"])
def test_the_export_finds_the_nearest_prototype(lopsided, tmp_path, classes):
    """Probabilities are the softmax of -||z - c||², by hand from the prototypes that arrived in the last round."""
    run = federate(
        lopsided,
        "fedproto",
        directory=tmp_path / "run",
        fedproto__classes=classes,
        **DEEP | OPTIONS,
    )
    export_model(tmp_path / "run", "a", "last", tmp_path / "a.safetensors")
    x = np.random.default_rng(0).normal(size=(50, 3))
    centres = run.sent_to("a", 3)["prototypes"].vector.double().numpy().reshape(3, -1)[:, :-1]
    z = features(run.kept("a")["model"].double().numpy(), x.astype(np.float32))
    p = np.exp(-np.square(z[:, None] - centres).sum(2))
    if classes == "own":
        p[:, 2] = 0
    p /= p.sum(1, keepdims=True)
    data = write_silo(tmp_path / "x.npz", x, [0] * 50, 3)
    _, label, given = read_csv(predict_file(tmp_path / "a.safetensors", data))
    assert np.allclose(given, p, atol=1e-5) and label == p.argmax(1).tolist()
    assert (2 in label) == (classes == "all")


def test_running_statistics_stay(tiny_bn, two):
    run = federate(two, "fedproto", rounds=2, model="tiny-bn")
    assert run.values("bytes_up") == [2 * 15 * 4, 2 * 15 * 4, 0]
    assert run.values("bytes_down") == [0, 2 * 15 * 4, 2 * 15 * 4]


def test_a_table_that_is_none_is_left_out(tmp_path):
    """Shares beyond 1 would outweigh everybody: that silo is left out, the others go on."""
    files = random_silos(tmp_path, [6, 10])

    def spoil(silo, message, reply):
        if silo == "a" and "model.prototypes" in reply.content:
            replies = reply.content["model.prototypes"]["vector"].tensor
            replies.view(3, -1)[0, -1] = 50.0
        return reply

    run = federate(
        files, "fedproto", rounds=1, prepare=lambda grid: setattr(grid, "after", spoil)
    )
    assert list(run.strategy.rejected) == []  # the closing exchange starts afresh
    assert [r.silo for r in run.rows if r.metric == "rejected"] == ["a"]
