"""What the rules of kinds keep at a hospital: each attack on means per class, and on sums of columns, and what is left.

The silos are the real app on files of their own; the attacker reads the messages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny import federate, write_silo
from two_layers import replies_of

from client.site.record import Record
from models.standardisation import rounded_sums
from partitions.npz import write_npz
from strategies.base.transport.payload import decode

pytestmark = pytest.mark.usefixtures("identity")

CLASSES, ALONE, COLUMNS = 23, 20, 4  # classes 3 and up have one patient each
FEW = 2  # the class of forty records of three patients
# Where a message has the rows of the classes, without and with a number beside each mean
MEANS = {
    "fedproto": "prototypes",
    "fedgh": "prototypes",
    "fedpac": "prototypes",
    "pfedfda": "gaussians",
    "gh-ofl": "pooled",
}


@pytest.fixture
def five(tmp_path):
    """Five hospitals: two classes of forty patients, one of three patients, and twenty of one patient."""
    files = {}
    y = np.r_[np.repeat([0, 1, FEW], 40), np.arange(3, CLASSES)]
    patient = np.r_[np.arange(80), 80 + np.arange(40) % 3, 100 + np.arange(ALONE)]
    for seed, name in enumerate("abcde"):
        x = np.random.default_rng(seed).normal(size=(len(y), COLUMNS)).astype(np.float32) + 2
        arrays = {"x_train": x, "y_train": y, "patient_train": patient}
        for i, part in enumerate(("val", "test")):
            arrays |= {f"x_{part}": x[:20], f"y_{part}": y[:20]}
            arrays[f"patient_{part}"] = np.arange(20) + 1000 * (1 + i)
        files[name] = tmp_path / f"{name}.npz"
        write_npz(files[name], {**arrays, "classes": np.array(CLASSES)})
    return files


def of_classes(payload, method):
    """The rows (C, K) of a message's classes, and each class's mark."""
    sent = payload.models[MEANS[method]].vector
    if method == "pfedfda":
        return sent[: CLASSES * COLUMNS].view(CLASSES, COLUMNS), None
    table = sent[: CLASSES * (COLUMNS + 1)].view(CLASSES, COLUMNS + 1)
    if method == "gh-ofl":
        return table[:, 1:] / table[:, :1].clamp(min=1e-9), table[:, 0]
    return table[:, :-1], table[:, -1]


def attacked(files, tmp_path, method, *rules):
    policy = tmp_path / "policy.toml"
    policy.write_text("\n".join(["class-means = true", "runs-per-day = 0", *rules]) + "\n")
    own = {"fedgh.min-count": 1} if method == "fedgh" else {}
    return federate(
        files,
        method,
        policy=str(policy),
        directory=tmp_path / "run",
        state_dir=tmp_path / "states",
        rounds=2,
        batch_size=32,
        learning_rate=0.01,
        **own,
    )


def read_alone(run, files, method):
    """Patients of classes of their own whose record round 1's message has; without a hidden layer features are inputs.

    pFedFDA's row is a mixture: on the line from what the server sent to the record.
    """
    found = 0
    for server_round, silo, payload, _ in replies_of(run):
        if server_round > 1:
            continue
        x, rows = (
            torch.from_numpy(np.load(files[silo])["x_train"]),
            of_classes(payload, method)[0],
        )
        for k in range(3, CLASSES):
            own = x[120 + k - 3]
            if method == "pfedfda":
                came = run.sent[silo].view(CLASSES, COLUMNS)[k]
                moved, wanted = rows[k] - came, own - came
                close = (
                    float(moved.norm()) > 0.01
                    and float(torch.cosine_similarity(moved, wanted, 0)) > 0.9999
                )
            else:
                close = torch.allclose(rows[k], own, atol=1e-5)
            found += close
    return found


@pytest.mark.parametrize("method", MEANS)
def test_classes_of_one_patient(five, tmp_path, method):
    """Without the rule every such patient's record left exactly; the run's own min-count changes nothing."""
    run = attacked(five, tmp_path, method, "min-cell = 1")
    run.sent = sent_gaussians(run)
    assert read_alone(run, five, method) == 5 * ALONE


@pytest.mark.parametrize("method", MEANS)
def test_classes_of_few_patients_stay(five, tmp_path, method):
    """By default: none of a class of one patient, nor of forty records of three; other means leave."""
    run = attacked(five, tmp_path, method)
    run.sent = sent_gaussians(run)
    assert read_alone(run, five, method) == 0
    replies = replies_of(run)
    assert len(replies) == 10
    for server_round, silo, payload, _ in replies:
        rows, marks = of_classes(payload, method)
        x = torch.from_numpy(np.load(five[silo])["x_train"])
        if marks is None:
            if server_round == 1:
                assert torch.equal(rows[FEW:], run.sent[silo].view(CLASSES, COLUMNS)[FEW:])
            continue
        assert not rows[FEW:].any() and not marks[FEW:].any()
        assert torch.allclose(
            rows[:2], torch.stack([x[:40].mean(0), x[40:80].mean(0)]), atol=1e-5
        )
        # Shares of what is told, in multiples of min-cell: what is withheld is no remainder
        assert marks[:2].tolist() == ([1.0, 1.0] if method == "fedgh" else [0.5, 0.5])


def sent_gaussians(run):
    """By silo, the means that the message of round 1 brought."""
    found = {}
    for message, _ in run.grid.traffic:
        if message.metadata.message_type == "train":
            payload, config = decode(message.content)
            silo = run.grid.name_of(message.metadata.dst_node_id)
            if config["round"] == 1 and "gaussians" in payload.models:
                found[silo] = payload.models["gaussians"].vector[: CLASSES * COLUMNS]
    return found


# ---- Sums of columns -------------------------------------------------------------------------------------------------

VERSIONS = 10
TOLD = ("peers = true", "runs-per-day = 0", "min-silos = 1")


def rdn(tmp_path, policy, n, version=0, **changes):
    """FedRDN's run over three hospitals, of which ``a`` has ``n`` patients of the seventy, who come one by one."""
    files = {}
    for seed, name in enumerate("abc"):
        x = np.random.default_rng(seed).normal(size=(70, COLUMNS)) * [15, 1, 40, 0.3] + [
            60,
            170,
            200,
            1,
        ]
        rows = x[: n if name == "a" else 70]
        files[name] = write_silo(
            tmp_path / f"{name}.npz", rows, [i % 2 for i in range(len(rows))]
        )

    def prepare(grid):
        for context in grid.contexts.values():
            context.run_id = 1 + version

    return federate(
        files,
        "fedrdn",
        policy=policy,
        prepare=prepare,
        directory=tmp_path / f"run-{version}",
        state_dir=tmp_path / "states",
        **{"rounds": 2, "batch_size": 32, "learning_rate": 1e-4, **changes},
    )


def told(tmp_path, *rules):
    (tmp_path / "policy.toml").write_text("\n".join(rules) + "\n")
    return str(tmp_path / "policy.toml")


def pairs_of(run, silo="a"):
    return [
        payload.models["inputs"].vector.double().view(2, -1)
        for *_, payload, _ in replies_of(run, silo)
    ]


@pytest.mark.parametrize(("rules", "found"), [((), VERSIONS), (TOLD, 0)])
def test_sums_of_ten_versions_of_a_file(tmp_path, rules, found):
    """The patient who came, of the difference of two means times their numbers: ten of ten, of public data."""
    policy, means = told(tmp_path, *rules) if rules else "public", {}
    for version in range(VERSIONS + 1):
        run = rdn(tmp_path, policy, 60 + version, version, rounds=1)
        for pair in pairs_of(run):
            means[60 + version] = pair[0] * (60 + version)
    x = torch.from_numpy(np.load(tmp_path / "a.npz")["x_train"]).double()
    came = {n: means[n + 1] - means[n] for n in means if n + 1 in means}
    read = [n for n, difference in came.items() if torch.allclose(difference, x[n], atol=0.02)]
    assert len(read) == found
    # The first version's sums leave; those of the next ones wait for fifty other patients
    assert len(means) == (1 if found == 0 else VERSIONS + 1)


@pytest.mark.parametrize("normalization", ["none", "agreed", "silo"])
def test_one_release_serves_both_summary_and_method(tmp_path, normalization):
    """What FedRDN sends is the pair of the released sums, as the run standardises; a second run sends the same one."""
    policy = told(tmp_path, *TOLD)
    first, again = (
        rdn(tmp_path, policy, 70, version, normalization=normalization) for version in (0, 1)
    )
    pairs = [*pairs_of(first), *pairs_of(again)]
    assert len(pairs) == 4 and all(torch.equal(pair, pairs[0]) for pair in pairs)
    x = np.load(tmp_path / "a.npz")["x_train"].astype(np.float64)
    if normalization == "silo":
        assert pairs[0].tolist() == [[0.0] * COLUMNS, [1.0] * COLUMNS]
        return
    total, square = (np.array(s) / len(x) for s in rounded_sums(x))
    mean, spread = total, np.sqrt(square - total**2)
    numbers = first.strategy.plan.numbers
    if normalization == "agreed":
        mean, spread = (mean - numbers["mean"]) / numbers["std"], spread / numbers["std"]
    assert np.allclose(pairs[0][0], mean, rtol=1e-5, atol=1e-6) and np.allclose(
        pairs[0][1], spread, rtol=1e-5
    )
    exact = (
        (x.mean(0) - numbers["mean"]) / numbers["std"]
        if normalization == "agreed"
        else x.mean(0)
    )
    assert not np.allclose(pairs[0][0], exact, rtol=1e-4, atol=1e-4)
    with Record(tmp_path / "states").reading() as db:  # the three hospitals share one
        (rows,) = db.execute("SELECT count(*) FROM disclosed WHERE kind = 'sums'").fetchone()
    assert rows == 3


def test_sums_of_pictures(tmp_path):
    """Of pictures they are sums over patients of each picture's mean and root mean square, as rounded."""
    policy, files = told(tmp_path, *TOLD), {}
    for seed, name in enumerate("abc"):
        x = np.random.default_rng(seed).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
        arrays: dict[str, Any] = {f"x_{part}": x for part in ("train", "val", "test")}
        arrays |= {f"y_{part}": np.arange(60) % 2 for part in ("train", "val", "test")}
        write_npz(tmp_path / f"{name}.npz", {**arrays, "classes": np.array(2)})
        files[name] = tmp_path / f"{name}.npz"
    run = federate(
        files,
        "fedrdn",
        policy=policy,
        directory=tmp_path / "run",
        state_dir=tmp_path / "states",
        rounds=2,
        batch_size=32,
        learning_rate=0.01,
        model="small-cnn",
    )
    first, second = pairs_of(run)
    assert torch.equal(first, second) and first.shape == (2, 3)
    x = (np.load(files["a"])["x_train"] / 255 - 0.5) / 0.5
    assert np.allclose(first[0], x.mean((0, 1, 2)), atol=0.1)
    assert np.allclose(first[1], x.std((0, 1, 2)), atol=0.2)
    assert not np.allclose(first[0], x.mean((0, 1, 2)), atol=1e-4)


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        (
            ("sums = false", *TOLD),
            "sums = false, the run strategy = fedrdn, which sends mean and deviation",
        ),
        (
            TOLD[1:],
            "peers = false, the run strategy = fedrdn, which hands these to other hospitals",
        ),
        (
            (*TOLD, "min-sum-samples = 71"),
            "min-sum-samples = 71, its training part has fewer patients, and fedrdn sends sums",
        ),
    ],
)
def test_where_no_sums_are_released_none_leave(tmp_path, rules, reason):
    with pytest.raises((RuntimeError, ValueError), match=f"refuses: its policy has {reason}"):
        rdn(tmp_path, told(tmp_path, *rules), 70)
