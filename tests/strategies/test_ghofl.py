"""GH-OFL: moments and heads by hand, scikit-learn's of the pooled samples, what is withheld, and messages that lie."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from failing import fails
from near import near
from safetensors.torch import load_file
from scipy.optimize import brentq
from scipy.stats import multivariate_normal, norm
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.naive_bayes import GaussianNB
from tiny import federate, random_silos, rows_of, write_silo
from two_layers import DEEP, FC1, replies_of, sent_by

from models.flat import FlatModel
from models.initialisation import flat_model
from models.privacy.records import features_of_each
from models.samples import Samples
from partitions.common.errors import UserError
from server.results.models import export_shared
from strategies.base.privacy import PrivateTraining
from strategies.base.transport.payload import array_record, decode
from strategies.ghofl import spectrum

HEADS = ("lda", "qda", "nb")


def logits_of(run, x):
    """What the run's network makes of rows with the shared model."""
    name, options = run.settings.model_for((3,))
    model = flat_model(name, (3,), 3, options, "cpu", run.settings.head)
    model.load(run.shared)
    model.module.eval()
    with torch.no_grad():
        return model.module(torch.from_numpy(x).float()).double().numpy()


def pooled(files, run):
    """Rows, features of the seed's body in float64, and labels of all silos' samples together."""
    x, y = (np.concatenate(parts) for parts in zip(*map(rows_of, files.values()), strict=True))
    if not run.settings.models["mlp"].hidden:
        return x, x, y
    body = run.shared.double().numpy()[FC1]
    return x, np.maximum(x @ body[:12].reshape(4, 3).T + body[12:16], 0), y


@pytest.fixture
def several(tmp_path):
    return random_silos(tmp_path, [20, 34, 26])


BY_HAND = {
    # a = μ / S = (1/5, 4/5); log 1/2 - μ a / 2
    "lda": (
        [1, 0, 0, 0, 0],
        [1 / 3, 2 / 3, 2 / 3, 8 / 3, 44 / 3],
        [0.2, 0.8, math.log(0.5) - 0.1, math.log(0.5) - 1.6],
    ),
    # 1 / sqrt(S_c), μ_c, log 1/2 - log S_c / 2
    "qda": (
        [1, 0, 0, 0, 0, 0],
        [1 / 3, 2 / 3, 4 / 3, 2 / 3, 8 / 3, 40 / 3],
        [2**-0.5, 8**-0.5, 1, 4, math.log(0.5 / 2**0.5), math.log(0.5 / 8**0.5)],
    ),
    "nb": (
        [1, 0, 0, 0, 0, 0],
        [1 / 3, 2 / 3, 4 / 3, 2 / 3, 8 / 3, 40 / 3],
        [1, 0.5, 1, 4, math.log(0.5), math.log(0.25)],
    ),
}


@pytest.mark.parametrize("head", HEADS)
def test_two_silos_by_hand(tmp_path, head):
    """The network is linear, so its feature is the input. a has 0 of class 0; b has 2 of class 0, 2 and 6 of class 1.

    a sends the share 1 and sums of 0; b the shares 1/3 and 2/3, the sums 2/3 and 8/3, and of squares 4/3 and 40/3,
    44/3 together. Of the four samples, with π = (1/2, 1/2): μ = (1, 4), mean squares (2, 20), together 11. So the
    variances are v = (1, 4), with n - 1 S_c = 2/1 (1, 4) = (2, 8), and S = 4/2 (11 - 1/2 - 16/2) = 5.
    """
    files = {
        "a": write_silo(tmp_path / "a.npz", [[0]], [0]),
        "b": write_silo(tmp_path / "b.npz", [[2], [2], [6]], [0, 1, 1]),
    }
    run = federate(files, "gh-ofl", rounds=1, **{"gh-ofl.head": head})
    name = "pooled" if head == "lda" else "moments"
    for silo, expected in zip(files, BY_HAND[head], strict=False):
        near(sent_by(run, silo, 0, name), torch.tensor(expected, dtype=torch.float64))
    expected = torch.tensor(BY_HAND[head][2], dtype=torch.float64)
    near(run.sent_to("a", 2)["head"].vector, expected, 1e-5)


@pytest.mark.parametrize("shrink", [0.05, 0.6])
@pytest.mark.parametrize("network", [{}, DEEP], ids=["columns", "features"])
def test_lda_is_scikit_learns_on_the_pooled_samples(several, shrink, network):
    """That divides sums within classes by N, so 1/S is N / (N - C) times ours."""
    run = federate(several, "gh-ofl", rounds=1, **{"gh-ofl.shrink": shrink}, **network)
    x, z, y = pooled(several, run)
    known = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrink).fit(z, y)
    prior, factor = np.log(known.priors_), (len(y) - 3) / len(y)
    expected = factor * (z @ known.coef_.T + known.intercept_ - prior) + prior
    near(logits_of(run, x), expected, 2e-3)
    own = len(rows_of(several["a"])[1])
    accuracy = np.mean(expected[:own].argmax(1) == y[:own])
    assert run.values("accuracy", "a", "received")[-1] == accuracy


def test_nb_is_scikit_learns_on_the_pooled_samples(several):
    run = federate(several, "gh-ofl", rounds=1, **{"gh-ofl.head": "nb"})
    x, z, y = pooled(several, run)
    known = GaussianNB(var_smoothing=0).fit(z, y)
    expected = known.predict_joint_log_proba(z) + 3 / 2 * math.log(2 * math.pi)
    near(logits_of(run, x), expected, 1e-3)


@pytest.mark.parametrize(("shrink", "network"), [(0.0, {}), (0.3, {}), (0.1, DEEP)])
def test_qda_has_the_densities_of_the_pooled_samples(several, shrink, network):
    """scipy's, of numpy's covariances, each shrunk towards its mean variance."""
    own = {"gh-ofl.head": "qda", "gh-ofl.shrink": shrink}
    run = federate(several, "gh-ofl", rounds=1, **own, **network)
    x, z, y = pooled(several, run)
    k = z.shape[1]
    for label, logits in enumerate(logits_of(run, x).T):
        rows = z[y == label]
        s = np.cov(rows.T)
        s = (1 - shrink) * s + (shrink * np.trace(s) / k + 1e-6) * np.eye(k)
        density = multivariate_normal(rows.mean(0), s).logpdf(z) + k / 2 * math.log(2 * math.pi)
        near(logits, density + np.log(len(rows) / len(z)), 2e-3)


@pytest.mark.parametrize("head", HEADS)
def test_the_division_and_an_absent_silo(several, tmp_path, head):
    """All samples in one silo give the same head; one without a silo that is away, that of the others' samples."""
    own = {"gh-ofl.head": head, "rounds": 2, **DEEP}
    run = federate(several, "gh-ofl", absent={("c", 2)}, **own)
    heads = [run.sent_to("a", r)["head"].vector for r in (2, 3)]
    for found, silos in zip(heads, ("abc", "ab"), strict=True):
        x, y = (
            np.concatenate(parts)
            for parts in zip(*(rows_of(several[s]) for s in silos), strict=True)
        )
        one = {"one": write_silo(tmp_path / f"{silos}.npz", x, [*map(int, y)], 3)}
        alone = federate(one, "gh-ofl", **own)
        near(logits_of(run if silos == "ab" else alone, x), logits_of(alone, x), 2e-2)
        near(found, alone.sent_to("one", 2)["head"].vector, 2e-2)


def test_a_class_of_few_samples_has_the_covariance_of_all(tmp_path):
    """x = 0, 2 of class 0, 9 of class 1, none of class 2: by hand S_0 = 2; π_0 1 = 2/3 is the variance of all, and
    N / (N - C) is 3 / 1 for want of more. So S = 2 for class 1 and 2."""
    files = {"a": write_silo(tmp_path / "a.npz", [[0], [2], [9]], [0, 0, 1], classes=3)}
    run = federate(files, "gh-ofl", rounds=1, **{"gh-ofl.head": "qda"})
    roots, means, bias = run.sent_to("a", 2)["head"].vector.double().split(3)
    near(roots, torch.tensor([2.0, 2, 2], dtype=torch.float64).rsqrt(), 1e-5)
    assert means.tolist() == [1, 9, 0]
    logs = [math.log(2 / 3), math.log(1 / 3), math.log(1e-12)]
    near(bias, torch.tensor(logs, dtype=torch.float64) - math.log(2) / 2, 1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_the_own_model_and_a_newcomers(several, head):
    """The own one has the head of the own samples; a silo that is held out has that of the others."""
    own = {"gh-ofl.head": head, "rounds": 1, **DEEP}
    run = federate(several, "gh-ofl", **own)
    alone = federate({"b": several["b"]}, "gh-ofl", **own)
    near(run.personal("b"), alone.shared, 1e-2)
    held = federate(several, "gh-ofl", hold_out="c", **own)
    others = federate({s: several[s] for s in "ab"}, "gh-ofl", **own)
    assert torch.equal(held.shared, others.shared)
    assert not torch.equal(held.shared, run.shared)


def test_the_server_does_not_choose_the_body(several):
    """A server that sends more than a head: the silo takes nothing of it."""
    sent = []

    def before(silo, message, context):
        if message.metadata.message_type == "train":
            message.content["model.global"] = array_record({"vector": torch.ones(31)})
            sent.append(silo)

    plain = federate(several, "gh-ofl", rounds=1, **DEEP)
    run = federate(several, "gh-ofl", rounds=1, before=before, **DEEP)
    assert len(sent) == 3 and torch.equal(run.shared, plain.shared)


@pytest.mark.parametrize("head", HEADS)
def test_of_a_class_of_few_patients_nothing_leaves(several, tmp_path, head):
    """Class 2 has two patients: neither in its row nor in the products of all; its samples change no bit."""
    policy = tmp_path / "policy.toml"
    policy.write_text("class-means = true\nmin-cell = 3\nruns-per-day = 0\n")
    sent = []
    for value in (1.0, 50.0):
        rng = np.random.default_rng(3)
        x, y = rng.normal(size=(12, 3)), [0] * 6 + [1] * 4 + [2] * 2
        x[10:] = value
        file = write_silo(tmp_path / f"{value}.npz", x, y, classes=3)
        files = {"a": file, "b": several["b"], "c": several["c"]}
        own = {"gh-ofl.head": head, "rounds": 1}
        folders = {"directory": tmp_path / f"run-{value}", "state_dir": tmp_path / "states"}
        run = federate(files, "gh-ofl", policy=str(policy), **folders, **own)
        name = "pooled" if head == "lda" else "moments"
        sent.append(sent_by(run, "a", 0, name))
        rows = sent[-1][:12] if head == "lda" else sent[-1]
        assert not rows.view(3, -1)[2].any()
        # Multiples of three, of nine that are told
        near(rows.view(3, -1)[:, 0], torch.tensor([2 / 3, 1 / 3, 0]).double())
    assert torch.equal(*sent)


@pytest.mark.parametrize("head", HEADS)
def test_secure_sums_give_the_same_head(several, head):
    own = {"gh-ofl.head": head, "rounds": 1, **DEEP}
    plain, secure = (
        federate(several, "gh-ofl", **own, secure_aggregation=on) for on in (False, True)
    )
    x = rows_of(several["a"])[0]
    near(logits_of(plain, x), logits_of(secure, x), 2e-2)
    assert not replies_of(secure)[0][2].models


def test_a_silo_without_a_class_is_in_no_secure_sum(several, tmp_path):
    x = np.random.default_rng(3).normal(size=(8, 3))
    files = {**several, "d": write_silo(tmp_path / "d.npz", x, [0, 1] * 4, classes=3)}
    run = federate(files, "gh-ofl", rounds=1, secure_aggregation=True, **DEEP)
    assert run.rejected() == [(1, "d")]
    [refused] = [reply for _, reply in run.grid.traffic if reply.has_error()]
    assert "d: gh-ofl with secure-aggregation = true needs" in str(refused.error.reason)


@pytest.mark.parametrize(
    ("index", "value", "reason"),
    [
        (0, 1.5, "shares of its classes are not between 0 and 1"),
        (0, -0.1, "shares of its classes are not between 0 and 1"),
        (1, 1e38, "its sums are those of no samples"),
        (slice(15, None), -3.0, ""),  # a covariance with negative eigenvalues
    ],
)
def test_a_message_that_lies_stops_no_run(several, caplog, index, value, reason):
    """It is left out, unless a head of numbers follows from it."""

    def lie(silo, message, reply):
        if silo == "a" and message.metadata.message_type == "train":
            vector = decode(reply.content)[0].models["pooled"].vector.clone()
            vector[index] = value
            reply.content["model.pooled"] = array_record({"vector": vector})
        return reply

    run = federate(several, "gh-ofl", rounds=1, after=lie, **DEEP)
    assert run.rejected() == [(1, "a")] * bool(reason) and reason in caplog.text
    others = federate({silo: several[silo] for silo in "bc"}, "gh-ofl", rounds=1, **DEEP)
    assert torch.equal(run.shared, others.shared) == bool(reason)
    assert torch.isfinite(run.shared).all()


def test_a_model_of_each_head_is_exported(several, tmp_path):
    """That of ``lda`` is the plain network."""
    names = set()
    for head in HEADS:
        own = {"gh-ofl.head": head, "rounds": 1, **DEEP}
        federate(several, "gh-ofl", directory=tmp_path / head, **own)
        out = tmp_path / f"{head}.safetensors"
        card = export_shared(tmp_path / head, out, round=2)
        assert (card.silo, card.round) == (None, 2)
        names.add(tuple(sorted(load_file(out))))
    plain = ("fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight")
    assert plain in names and len(names) == 2


def test_too_many_features_are_refused(several):
    wide = {"gh-ofl.head": "lda", "mlp__hidden": "1025"}
    with pytest.raises(
        UserError, match=r"^gh-ofl.head = lda: products of 1025 features[^\n]*$"
    ):
        federate(several, "gh-ofl", rounds=1, **wide)
    federate(several, "gh-ofl", rounds=1, **{**wide, "gh-ofl.head": "nb"})


# ---- Differential privacy --------------------------------------------------------------------------------------------


def private_sums(monkeypatch, files, noise=lambda total, most: total, **changes):
    """The run, and of each silo the sum that gets noise and its bound; ``noise`` takes the place of the noise."""
    seen = []

    def noised(training, total, most):
        seen.append((total, most))
        return noise(total, most)

    monkeypatch.setattr(PrivateTraining, "noised", noised)
    changes.setdefault("state_dir", next(iter(files.values())).with_suffix(".states"))
    return federate(files, "gh-ofl", rounds=1, dp=True, **changes), seen


@pytest.mark.parametrize("head", HEADS)
def test_a_record_moves_the_sum_by_its_bound_at_most(tmp_path, monkeypatch, head):
    """C = 2. A record u C long with u <= 1 adds (1, u, products of u): in its class's row, or the products of all.

    The matrix u u' has the norm u², and so has its triangle with sqrt(2) times what is off the diagonal. The squares
    alone have at most that norm. So a record adds sqrt(1 + |u|² + |u|⁴) <= sqrt(3). (1.2, 1.6) is 2 long, u = 1; (3, 0)
    becomes (2, 0); of (0.6, 0.8) u = 1/2, so it adds sqrt(1 + 1/4 + 1/16), with its squares alone less.
    """
    rows = {"a": [[1.2, 1.6], [3.0, 0.0], [0.6, 0.8]], "b": [[0.0, -9], [1.2, 1.6], [0.0, 0]]}

    def sums(left_out, *, silo):
        files = {}
        for name, x in rows.items():
            kept = [i for i in range(3) if (name, i) != (silo, left_out)]
            file = tmp_path / f"{name}{silo}{left_out}.npz"
            files[name] = write_silo(
                file, [x[i] for i in kept], [[0, 1, 1][i] for i in kept], 2
            )
        own = {"gh-ofl.head": head, "dp__clip_norm": 2.0, "model": "linear"}
        return private_sums(monkeypatch, files, **own)[1]["ab".index(silo)]

    moved = {}
    for silo in rows:
        whole, most = sums(None, silo=silo)
        assert most == pytest.approx(3**0.5)
        for i in range(3):
            moved[silo, i] = float((whole - sums(i, silo=silo)[0]).norm())
            assert moved[silo, i] <= most + 1e-9
    assert moved["a", 1] == moved["b", 0] == pytest.approx(3**0.5)
    oblique = {"nb": (2 + 0.6**4 + 0.8**4) ** 0.5}.get(head, 3**0.5)
    assert moved["a", 0] == moved["b", 1] == pytest.approx(oblique)
    short = {"nb": 0.3**4 + 0.4**4}.get(head, 1 / 16)
    assert moved["a", 2] == pytest.approx((1 + 1 / 4 + short) ** 0.5)
    assert moved["b", 2] == pytest.approx(1)


@pytest.mark.parametrize("head", HEADS)
def test_without_noise_and_clipping_it_is_the_plain_message(
    several, tmp_path, monkeypatch, head
):
    own = {"gh-ofl.head": head, **DEEP}
    run, _ = private_sums(monkeypatch, several, dp__clip_norm=100.0, **own)
    plain = federate(several, "gh-ofl", rounds=1, **own)
    name = "pooled" if head == "lda" else "moments"
    for silo in several:
        near(sent_by(run, silo, 0, name), sent_by(plain, silo, 0, name), 1e-5)
    own |= {"secure_aggregation": True, "state_dir": tmp_path / "masked"}
    masked, _ = private_sums(monkeypatch, several, dp__clip_norm=100.0, **own)
    near(
        logits_of(plain, rows_of(several["a"])[0]),
        logits_of(masked, rows_of(several["a"])[0]),
        2e-2,
    )


def test_a_patient_counts_once(tmp_path, monkeypatch):
    """Of one with three records each counts a third: 4 patients with three records of each class."""
    file = random_silos(tmp_path, [12])["a"]
    with np.load(file) as arrays:
        named = {**arrays, "y_train": np.arange(12) % 3}
    for k, part in enumerate(("train", "val", "test")):
        named[f"patient_{part}"] = np.arange(len(named[f"y_{part}"])) // 3 + 100 * k
    np.savez(file, **named)
    _, sums = private_sums(monkeypatch, {"a": file, "b": file}, dp__unit="patient")
    near(sums[0][0][:12].view(3, 4)[:, 0], torch.full((3,), 4 / 3).double())


def test_the_noise_has_the_bound_s_scale(several, tmp_path, monkeypatch):
    differences = []
    real = PrivateTraining.noised

    def noised(training, total, most):
        noise = real(training, total, most) - total
        differences.append(noise)
        fails(AssertionError, "more than the planned 1 ", real, training, total, most)
        training.steps = 0
        assert not torch.allclose(real(training, total / 2, most) - total / 2, noise)
        return total + noise

    monkeypatch.setattr(PrivateTraining, "noised", noised)
    own = {"state_dir": tmp_path / "states", "dp__noise_multiplier": 2.5, "mlp__hidden": "100"}
    run = federate(several, "gh-ofl", rounds=1, dp=True, **own)
    for noise in differences:
        assert len(noise) == 3 * 101 + 5050
        assert float(noise.std()) == pytest.approx(2.5 * 3**0.5, rel=0.06)
        near(noise.mean(), 0.0, 0.36)
    assert len(differences) == 3 and not torch.equal(*differences[:2])
    assert torch.isfinite(run.shared).all()


def test_what_it_costs_is_one_gaussian_release(several, tmp_path):
    """Renyi divergence a / (2 σ²) at order a; and not below the exact epsilon of Balle and Wang (2018), theorem 8."""
    policy, sigma, delta = tmp_path / "policy.toml", 2.0, 1e-5
    policy.write_text("class-means = true\nruns-per-day = 0\n")
    own = {"dp": True, "dp__noise_multiplier": sigma, "state_dir": tmp_path / "states"}
    run = federate(several, "gh-ofl", rounds=1, policy=str(policy), **own)
    found = [row.value for row in run.rows if (row.silo, row.metric) == ("a", "epsilon")]
    a = np.linspace(1.01, 200, 100_000)
    least = a / (2 * sigma**2) + np.log1p(-1 / a) - np.log(delta * a) / (a - 1)
    assert found == pytest.approx([least.min()], rel=0.01)

    def exact(epsilon):
        low, high = (sign / (2 * sigma) - epsilon * sigma for sign in (-1, 1))
        return norm.cdf(high) - math.exp(epsilon) * norm.cdf(low) - delta

    assert found[0] / 1.15 < brentq(exact, 0.1, 10) <= found[0]


@pytest.mark.parametrize(
    ("rule", "changes", "reason"),
    [
        ("class-means = true", {"normalization": "silo"}, "dp = true: not with normalization"),
        ("class-means = true", {"dp__unit": "patient"}, "training samples name no patients"),
        ("class-means = true\nepsilon = 1", {"dp__noise_multiplier": 0.1}, "epsilon = 1.0"),
        ("class-means = false", {}, "class-means = false"),
    ],
)
def test_a_hospital_refuses_what_is_not_private(several, tmp_path, rule, changes, reason):
    policy = tmp_path / "policy.toml"
    policy.write_text(f"{rule}\nruns-per-day = 0\n")
    own = {"dp": True, "state_dir": tmp_path / "states", **changes}
    with pytest.raises(Exception, match=reason):
        federate(several, "gh-ofl", rounds=1, policy=str(policy), **own)


def test_the_noised_count_decides_what_leaves_of_a_class(several, tmp_path, monkeypatch):
    """Class 2 has two patients. Exactly which classes have ``min-cell`` would reveal one of them."""
    policy = tmp_path / "policy.toml"
    policy.write_text("class-means = true\nmin-cell = 3\nruns-per-day = 0\n")
    x, y = np.random.default_rng(3).normal(size=(12, 3)), [0] * 6 + [1] * 4 + [2] * 2
    files = {**several, "a": write_silo(tmp_path / "a.npz", x, y, classes=3)}
    for more in (0.0, 2.0):
        own = {"policy": str(policy), "state_dir": tmp_path / f"{more}"}
        noise = {"noise": lambda total, most, more=more: total + more}
        run, _ = private_sums(monkeypatch, files, **noise, **own)
        row = sent_by(run, "a", 0, "pooled")[:12].view(3, -1)[2]
        near(row[0], 4 / 18 if more else 0.0)
        assert bool(row.any()) == bool(more)


def test_each_record_goes_alone_and_one_without_features_adds_nothing():
    class Mixing(torch.nn.Module):
        block_names = ("out",)

        def __init__(self):
            super().__init__()
            self.out = torch.nn.Linear(2, 2)

        def forward(self, x):
            if bool((x == 7).any()):
                raise ValueError("a value of a record")
            return self.out(x / x.abs().amax(0, keepdim=True) * (3 + 1 / (x - 5)))

    x = np.array([[1, 2], [7, 1], [5, 1], [1, 1]], np.float32)
    samples = Samples(x, np.zeros(4, np.int64))
    z, some = features_of_each(FlatModel(Mixing()), samples, 2.0)
    near(some, torch.tensor([1.0, 0, 0, 1]).double())
    near(z[[1, 2]], 0.0)
    near(z.norm(dim=1)[[0, 3]], 2.0)
    near(z[3], torch.tensor([2.0, 2]).double() / 2**0.5)


def test_a_negative_eigenvalue_counts_as_0():
    """As noise makes them. Eigenvalues 3 and -1: 3 and 0, of mean 3/2; with s = 1/2 these are 9/4 and 3/4."""
    s = torch.tensor([[[1.0, 2.0], [2.0, 1.0]]]).double()
    near(spectrum(s, 0.5)[0], torch.tensor([[0.75, 2.25]]).double(), 2e-6)
