"""FedPAC: the combination by hand, rounds in numpy, FedRep without it, absent classes and silos, the export (B33)."""

from __future__ import annotations

import numpy as np
import pytest
from near import near
from tiny import SHORT, Numbers, federate, random_silos, rows_of, same
from two_layers import DEEP, FC1, FC2, HIDDEN, deep_gradient, replies_of, sent_by

from client.export import export_model
from strategies.fedpac import combination, on_simplex

OPTIONS = {**DEEP, **SHORT, "momentum": 0.9}


# ---- The combination of heads --------------------------------------------------------------------------------------


def weights(h, v):
    return np.array([combination(h @ h.T, v, i) for i in range(len(v))])


def test_two_silos_combine_by_hand():
    """D_1 = (0, 0; 0, d²): a² V_1 + (1 - a)² (V_2 + d²) is least at a = (V_2 + d²) / (V_1 + V_2 + d²)."""
    h, v = np.array([[1.0, 0, 2], [0, 2.0, 0]]), np.array([3.0, 5.0])
    d = 1 + 4 + 4
    own = [(v[1 - i] + d) / (v.sum() + d) for i in (0, 1)]
    assert weights(h, v) == pytest.approx(
        np.array([[own[0], 1 - own[0]], [1 - own[1], own[1]]])
    )


def test_special_cases_of_the_combination():
    """All H equal: 1/V_j, normalised. V near 0 with different H: the own head. One silo: 1."""
    v, rng = np.array([1.0, 2.0, 4.0]), np.random.default_rng(0)
    assert weights(np.ones((3, 5)), v) == pytest.approx(
        np.tile(np.array([4, 2, 1]) / 7, (3, 1))
    )
    assert weights(np.ones((3, 5)), np.full(3, 2.0)) == pytest.approx(np.full((3, 3), 1 / 3))
    assert weights(rng.normal(size=(3, 5)), np.full(3, 1e-9)) == pytest.approx(np.eye(3))
    assert weights(rng.normal(size=(1, 5)), np.ones(1)).tolist() == [[1]]
    # Nothing to choose by
    assert weights(np.ones((2, 5)), np.zeros(2)).sum(1) == pytest.approx([1, 1])


def test_heads_that_are_nearly_equal_beside_large_ones():
    """Distances are differences of large products: rounding leaves a matrix that is not quite semidefinite."""
    rng = np.random.default_rng(1)
    found = weights(1e6 + 1e-6 * rng.normal(size=(12, 5)), np.zeros(12))
    assert np.isfinite(found).all() and found.sum(1) == pytest.approx(np.ones(12))


def test_small_coefficients_are_none():
    """10⁴ apart, V = 1: the other's share is 1 / (2 + d²) < 10⁻³, so it is 0 and the own is 1."""
    assert weights(np.array([[0.0], [100.0]]), np.ones(2)).tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("n, rank", [(2, 1), (3, 30), (7, 4), (20, 1), (20, 30)])
def test_the_optimum_on_the_simplex(n, rank):
    """Its conditions: on the support the grad is a' P a, elsewhere not lower; and against projected gradients."""
    rng = np.random.default_rng(n + rank)
    root = rng.normal(size=(n, rank))
    p = root @ root.T + np.diag(rng.uniform(0.01, 1, n))
    a = on_simplex(p)
    assert a.sum() == pytest.approx(1) and a.min() >= 0
    grad, level = p @ a, a @ p @ a
    assert grad[a > 0] == pytest.approx(level, rel=1e-8) and grad.min() >= level - 1e-9
    b = np.full(n, 1 / n)
    for _ in range(20000):
        b = b - p @ b / np.linalg.eigvalsh(p)[-1]
        u = np.sort(b)[::-1]
        k = np.arange(1, n + 1)
        rho = k[u - (u.cumsum() - 1) / k > 0][-1]
        b = np.maximum(b - (u[:rho].sum() - 1) / rho, 0)
    near(a, b, 1e-5)


# ---- Rounds --------------------------------------------------------------------------------------------------------


def features(w, x):
    return np.maximum(x @ w[FC1][: 3 * HIDDEN].reshape(HIDDEN, 3).T + w[FC1][3 * HIDDEN :], 0)


def body_gradient(w, x, y, targets, weight):
    """Of CE + λ mean (z - t_y)² with respect to fc1: dL/dz = 2 λ (z - t_y) / (B K) where z > 0."""
    z = features(w, x)
    dz = np.array(
        [2 * weight * (row - targets[int(c)]) / z.size for row, c in zip(z, y, strict=True)]
    ) * (z > 0)
    return deep_gradient(w, x, y)[FC1] + np.concatenate([(dz.T @ x).ravel(), dz.sum(0)])


def class_means(z, y):
    return {int(c): z[y == c].mean(0) for c in np.unique(y)}


def test_rounds_in_numpy(lopsided):
    """Four rounds in float64: two head steps of 0.2, three body steps of 0.3. For N = 3 the quadratic programme is
    solved by trying every support."""
    lambda_ = 0.7
    run = federate(
        lopsided,
        "fedpac",
        rounds=4,
        local_epochs=3,
        **DEEP,
        fedpac__lambda=lambda_,
        fedpac__head_epochs=2,
        fedpac__head_learning_rate=0.2,
    )
    w0 = run.start()
    body, heads = w0[FC1], dict.fromkeys(lopsided, w0[FC2])
    centres: dict[int, Numbers] = {}
    for _ in range(4):
        h, v, sent, means, counts = [], [], [], [], []
        for silo, file in lopsided.items():
            x, y = rows_of(file)
            w = np.concatenate([body, heads[silo]])
            z = features(w, x)
            mu, p = class_means(z, y), np.bincount(y, minlength=3) / len(y)
            h.append(np.concatenate([p[c] * mu.get(c, np.zeros(HIDDEN)) for c in range(3)]))
            squares = sum(p[c] * np.square(z[y == c]).sum(1).mean() for c in mu)
            v.append((squares - np.square(h[-1]).sum()) / len(y))
            for _ in range(2):
                w[FC2] -= 0.2 * deep_gradient(w, x, y)[FC2]
            targets = {c: centres.get(c, mu[c]) for c in mu}
            for _ in range(3):
                w[FC1] -= 0.3 * body_gradient(w, x, y, targets, lambda_ if centres else 0.0)
            sent.append(w)
            means.append(class_means(features(w, x), y))
            counts.append(np.bincount(y, minlength=3))
        body = sum(c.sum() / 15 * w[FC1] for c, w in zip(counts, sent, strict=True))
        centres = {
            k: sum(c[k] * m[k] for c, m in zip(counts, means, strict=True) if k in m)
            / sum(c[k] for c in counts)
            for k in range(3)
        }
        for i, silo in enumerate(lopsided):
            d = np.array([h[i] - other for other in h])
            alpha = by_every_support(np.diag(v) + d @ d.T)
            alpha = np.where(alpha < 1e-3, 0, alpha)
            heads[silo] = sum(
                a * w[FC2] for a, w in zip(alpha / alpha.sum(), sent, strict=True)
            )
    state = run.held
    near(state["global"][FC1], body)
    for k in range(3):
        near(state["prototypes"].view(3, -1)[k], [*centres[k], 1])
    for i, silo in enumerate(lopsided):
        near(state[f"head.{silo}"], heads[silo], 2e-6)
        near(run.personal(silo), sent[i], 2e-6)
        numbers = replies_of(run, silo)[-1][2].numbers
        near(numbers["variance"], v[i])
    assert not np.allclose(heads["a"], sent[0][FC2], atol=1e-3)


def by_every_support(p):
    best, found = np.inf, np.zeros(3)
    for bits in range(1, 8):
        on = [k for k in range(3) if bits >> k & 1]
        a = np.zeros(3)
        a[on] = np.linalg.solve(p[np.ix_(on, on)], np.ones(len(on)))
        a /= a.sum()
        if a.min() >= 0 and a @ p @ a < best:
            best, found = float(a @ p @ a), a
    return found


def test_without_mixing_and_alignment_it_is_fedrep(three):
    off = {"fedpac__mix": False, "fedpac__lambda": 0.0, "fedpac__head_learning_rate": 0.0}
    run = federate(three, "fedpac", **off, **OPTIONS)
    plain = federate(three, "fedrep", fedrep__head_epochs=1, fedrep__body_epochs=2, **OPTIONS)
    assert same(run.shared[FC1], plain.shared)
    for silo in three:
        assert same(run.personal(silo), plain.personal(silo))
        assert run.values("loss", silo, "received") == plain.values("loss", silo, "received")
    for part in off:  # and each of them does something
        other = federate(
            three, "fedpac", **{k: x for k, x in off.items() if k != part}, **OPTIONS
        )
        assert not same(other.personal("a"), plain.personal("a"))


def test_alignment_begins_in_round_2(three):
    runs = [
        federate(three, "fedpac", fedpac__lambda=weight, **OPTIONS) for weight in (0.0, 5.0)
    ]
    first, second = ([sent_by(run, "a", r) for run in runs] for r in (0, 1))
    assert same(*first) and not same(*second)


def test_small_classes_stay_untold(lopsided):
    """a's class 1 has two samples: with min-count 3 neither its mean nor its share leaves the silo."""
    run = federate(lopsided, "fedpac", fedpac__min_count=3, **OPTIONS)
    for _, silo, payload, _ in replies_of(run):
        table = payload.models["prototypes"].vector.view(3, -1)
        statistics = payload.models["statistics"].vector.view(3, -1)
        told = {"a": [0], "b": [1, 2], "c": [0]}[silo]
        for k in range(3):
            assert bool(table[k].any()) == bool(table[k, -1] > 0) == (k in told)
            assert bool(statistics[k].any()) <= (k in told)


def test_an_absent_silo_keeps_its_head(three):
    """Round 2 mixes the heads of b and c alone; a has its own of round 1 afterwards, with the new body."""
    runs = [
        federate(three, "fedpac", **{**OPTIONS, "rounds": rounds}, absent={("a", 2)})
        for rounds in (1, 2)
    ]
    one, two = (run.held for run in runs)
    assert same(one["head.a"], two["head.a"]) and not same(one["head.b"], two["head.b"])
    closing = runs[1].received("a", 3)
    assert same(closing[FC2], one["head.a"]) and same(closing[FC1], two["global"][FC1])
    b, c = (replies_of(runs[1], silo)[1][2].models["model"].vector[FC2] for silo in "bc")
    share = (two["head.b"] - c) @ (b - c) / (b - c).square().sum()
    assert 0 <= float(share) <= 1 + 1e-6
    near(two["head.b"], c + share * (b - c), 1e-5)


@pytest.mark.parametrize("value", [float("nan"), -1.0, "much"])
def test_a_variance_that_is_none_is_left_out(tmp_path, value):
    def spoil(silo, message, reply):
        if silo == "a" and "number.variance" in reply.content.get("config", {}):
            reply.content["config"]["number.variance"] = value
        return reply

    files = random_silos(tmp_path, [6, 10])
    run = federate(
        files, "fedpac", rounds=1, prepare=lambda grid: setattr(grid, "after", spoil)
    )
    assert [r.silo for r in run.rows if r.metric == "rejected"] == ["a"]


def test_the_export_is_plain(three, tmp_path):
    federate(three, "fedpac", directory=tmp_path / "run", **OPTIONS)
    assert (
        export_model(tmp_path / "run", "b", "last", tmp_path / "b.safetensors").model.head
        is None
    )
