"""kNN-Per: votes by hand and in numpy, FedAvg's model, the limits of λ, k and scale, and no file of it (B35)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tiny import SHORT, federate, rows_of, same, write_silo
from two_layers import DEEP, FC1, FC2, snapshot_rows

from client.export import export_model

OPTIONS = {**SHORT, "momentum": 0.9}


def test_a_vote_by_hand(tmp_path, zero_start):
    """Samples at 0 and 3, one of each class; w = 0, so the softmax is 1/2. K = 1 and a scale of 9: s = 1 and 1/e.

    The own class has v = 1 / (1 + 1/e), and h = v/2 + 1/4; the loss is -log h at both.
    """
    files = {n: write_silo(tmp_path / f"{n}.npz", [[0], [3]], [0, 1]) for n in "ab"}
    own = {"knn-per.share": 0.5, "knn-per.scale": 9.0}
    run = federate(files, "knn-per", rounds=1, **own)
    v = 1 / (1 + math.exp(-1))
    assert run.values("loss", "a", "personal") == pytest.approx([-math.log(v / 2 + 0.25)])


def test_rounds_in_numpy(three):
    """The metrics of every round: squared distances of features, votes of three, λ by the grid."""
    run = federate(three, "knn-per", **{"knn-per.neighbours": 3}, **OPTIONS, **DEEP)
    for r in (1, 2, 3):
        w = run.received("a", r).double().numpy()
        for silo, file in three.items():
            x, y = rows_of(file)
            z = np.maximum(x @ w[FC1][:12].reshape(4, 3).T + w[FC1][12:], 0)
            p = np.exp(z @ w[FC2][:12].reshape(3, 4).T + w[FC2][12:])
            p /= p.sum(1, keepdims=True)
            d = ((z[:, None] - z[None]) ** 2).sum(2)
            v = np.zeros_like(p)
            for i, row in enumerate(d):
                for j in np.argsort(row, kind="stable")[:3]:
                    v[i, y[j]] += np.exp(-row[j] / 4)
            v /= v.sum(1, keepdims=True)
            mixed = [n / 100 * v + (1 - n / 100) * p for n in range(101)]
            best = max(mixed, key=lambda h: float((h.argmax(1) == y).mean()))
            loss = -np.log(best[np.arange(len(y)), y].clip(1e-12)).mean()
            assert run.values("loss", silo, "personal")[r - 1] == pytest.approx(loss, rel=1e-4)


def test_without_votes_it_is_what_fedavg_receives(three):
    """No samples that vote, or λ = 0: round t's personal model predicts as the one that arrived in round t."""
    for own in ({"knn-per.share": 0.0}, {"knn-per.capacity": 0.0}):
        run = federate(three, "knn-per", **own, **OPTIONS, **DEEP)
        received = [row for row in snapshot_rows(run, "received") if row[1] != "4"]
        own_rows = snapshot_rows(run, "personal", without_training=True)

        def key(row):
            return [cell for cell in row if cell not in ("received", "personal")]

        assert sorted(map(key, own_rows)) == sorted(map(key, received))
        assert all(same(run.personal(s), run.received(s, 3)) for s in three)


def test_the_nearest_alone_and_all_alike(three):
    """λ = 1: with k = 1 each training sample has its label; with all and a large scale the classes' shares remain."""
    own = {"knn-per.share": 1.0, "knn-per.neighbours": 1}
    run = federate(three, "knn-per", **own, **OPTIONS, **DEEP)
    assert run.values("accuracy", "a", "personal") == [1.0] * 3
    own |= {"knn-per.neighbours": 1000, "knn-per.scale": 1e12}
    run = federate(three, "knn-per", **own, **OPTIONS, **DEEP)
    shares = np.bincount(rows_of(three["a"])[1]) / len(rows_of(three["a"])[1])
    entropy = -sum(p * math.log(p) for p in shares if p)
    assert run.values("loss", "a", "personal") == pytest.approx([entropy] * 3, rel=1e-5)


def test_votes_with_logits_as_its_code(three):
    run = federate(three, "knn-per", **{"knn-per.mix": "logits"}, **OPTIONS, **DEEP)
    plain = federate(three, "knn-per", **OPTIONS, **DEEP)
    assert run.values("loss", "a", "personal") != plain.values("loss", "a", "personal")
    assert same(run.shared, plain.shared)


def test_no_file_holds_features_of_samples(tmp_path, three):
    federate(three, "knn-per", directory=tmp_path / "run", **OPTIONS, **DEEP)
    for which in ("reported", "last"):
        with pytest.raises(ValueError, match="it would hold the features of training samples"):
            export_model(tmp_path / "run", "a", which, tmp_path / "m")
    assert not (tmp_path / "m").exists()
