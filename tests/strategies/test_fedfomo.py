"""FedFomo: weights and two rounds by hand, a run in numpy, affinity and budget, the limits (B9)."""

from __future__ import annotations

import json
import math
from typing import cast

import numpy as np
import pytest
import torch
from failing import fails
from near import near
from tiny import (
    client_of,
    comparable,
    federate,
    gradient,
    initial,
    random_silos,
    rows_of,
    same,
    settings_of,
    write_silo,
)
from two_layers import replies_of, rounds_trained

from models.initialisation import flat_model
from models.networks.mlp import MlpSettings
from models.samples import Samples
from partitions.common.errors import UserError
from strategies.base.plan import RoundPlan, SiloInfo
from strategies.base.silo import Silo
from strategies.base.state import State
from strategies.base.transport.payload import Model, model_of
from strategies.fedfomo import FedFomo, FedFomoClient

BYTES = ("round_seconds", "bytes_down", "bytes_up")
OPTIONS = {"rounds": 4, "local_epochs": 2, "batch_size": 4, "learning_rate": 0.3}


def affinity(run):
    return cast(dict[str, dict[str, float]], run.strategy.state.numbers["affinity"])


def weights_sent(run, silo):
    """Round -> the weights that this silo reported."""
    return {
        r: json.loads(cast(str, p.numbers.get("weights", "{}")))
        for r, _, p, _ in replies_of(run, silo)
    }


def hold_out(files, seed=5):
    """Give the silos validation rows that they do not train on, with any labels: others' models may do better there."""
    rng, rows = np.random.default_rng(seed), {}
    for name, file in files.items():
        with np.load(file, allow_pickle=False) as data:
            parts = dict(data)
        parts["x_val"], parts["y_val"] = (
            rng.normal(size=(9, 3)).astype(np.float32),
            rng.integers(0, 3, 9),
        )
        np.savez(file, **parts)
        rows[name] = parts["x_val"].astype(np.float64), parts["y_val"]
    return rows


# ---- By hand and in numpy --------------------------------------------------------------------------------------------


def test_four_silos_two_rounds_by_hand(tmp_path, zero_start):
    """One row each: a, c, d have x = 1, 2, 3, class 0; b has x = 1, class 1. Weights (u, -u), biases (v, -v), η = 1.

    Round 1 from 0: (u, v) = (x/2, 1/2) in a, c, d, and (-1/2, -1/2) in b. At a's row the loss is
    L(m) = log(1 + e^-m) with m = 2 (u + v): 2 with its own model, 3 with c's, 4 with d's, -2 with b's.
    ||w_c - w_a||² = 2 (1/2)², ||w_d - w_a||² = 2: ω_c = √2 (L(2) - L(3)), ω_d = (L(2) - L(4)) / √2, ω_b = 0.
    Round 2 starts from u = 1/2 + (ω_c / 2 + ω_d) / (ω_c + ω_d), v = 1/2, and takes one step of 1 / (1 + e^m).
    """
    files = {
        name: write_silo(tmp_path / f"{name}.npz", [[x]], [y])
        for name, x, y in (("a", 1, 0), ("b", 1, 1), ("c", 2, 0), ("d", 3, 0))
    }
    run = federate(files, "fedfomo", rounds=2)
    loss = [math.log(1 + math.exp(-m)) for m in range(5)]
    c, d = math.sqrt(2) * (loss[2] - loss[3]), (loss[2] - loss[4]) / math.sqrt(2)
    c, d = c / (c + d), d / (c + d)
    assert weights_sent(run, "a") == {1: {}, 2: pytest.approx({"c": c, "d": d}, abs=1e-5)}
    assert affinity(run)["a"] == pytest.approx({"a": 1, "b": 0, "c": c, "d": d}, abs=1e-5)
    u = 0.5 + c / 2 + d
    start = 2 * (u + 0.5)
    near(run.values("loss", "a", "received")[1], math.log(1 + math.exp(-start)))
    q = 1 / (1 + math.exp(start))
    near(run.personal("a"), [u + q, -u - q, 0.5 + q, -0.5 - q], 1e-5)
    # b finds nobody who helps it: (u, v) = (-1/2, -1/2) less 1 / (1 + e²).
    assert weights_sent(run, "b")[2] == {}
    q = 1 / (1 + math.exp(2))
    near(run.personal("b"), [-0.5 - q, 0.5 + q, -0.5 - q, 0.5 + q])


def cross_entropy(w, x, y):
    logits = x @ w[:9].reshape(3, 3).T + w[9:]
    return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]))


def test_rounds_of_several_steps_in_numpy(tmp_path):
    """Four rounds in float64; the validation rows are the silo's own and others than those it trains on."""
    files = random_silos(tmp_path, [6, 10, 8, 7])
    held_out = hold_out(files)
    run = federate(files, "fedfomo", rounds=4, local_epochs=2, learning_rate=0.8)
    models = dict.fromkeys(files, run.start())
    total = {i: {j: float(i == j) for j in files} for i in files}
    seen = 0
    for server_round in range(4):
        new = {}
        for silo, own in models.items():
            w, mine = own, cross_entropy(own, *held_out[silo])
            gains = (
                {
                    n: (mine - cross_entropy(other, *held_out[silo]))
                    / np.linalg.norm(other - own)
                    for n, other in models.items()
                    if n != silo
                }
                if server_round
                else {}
            )
            gains = {n: g for n, g in gains.items() if g > 0}
            for n, gain in gains.items():
                share = gain / sum(gains.values())
                w = w + share * (models[n] - own)
                total[silo][n] += float(share)
            seen += len(gains) > 1
            for _ in range(2):
                w = w - 0.8 * gradient(w, *rows_of(files[silo]))
            new[silo] = w
        models = new
    assert seen > 2
    for silo in files:
        near(run.personal(silo), models[silo], 1e-4)
        assert affinity(run)[silo] == pytest.approx(total[silo], abs=1e-4)


# ---- Limits ----------------------------------------------------------------------------------------------------------


def test_without_a_positive_weight_it_is_local(pair):
    """Two silos with opposite rows: neither model lowers the other's loss. Bit for bit, though models travel."""
    plain = federate(pair, "local", **OPTIONS)
    run = federate(pair, "fedfomo", **OPTIONS)
    assert comparable(plain.rows, without=BYTES) == comparable(run.rows, without=BYTES)
    assert affinity(run) == {"a": {"a": 1, "b": 0}, "b": {"a": 0, "b": 1}}
    for silo in pair:
        assert same(plain.personal(silo), run.personal(silo))


def test_without_a_gain_it_is_local(three, monkeypatch):
    """A gain of exactly 0 is no weight."""
    hold_out(three)
    plain = federate(three, "local", **OPTIONS)
    with_gains = federate(three, "fedfomo", **OPTIONS)
    assert not all(same(plain.personal(silo), with_gains.personal(silo)) for silo in three)
    monkeypatch.setattr(FedFomoClient, "validation_loss", lambda self, vector: 1.0)
    run = federate(three, "fedfomo", **OPTIONS)
    assert comparable(plain.rows, without=BYTES) == comparable(run.rows, without=BYTES)


def test_equal_models(three):
    """No training: all models are the initial one, every gain and norm is 0, and nothing moves."""
    run = federate(three, "fedfomo", rounds=3, local_epochs=0)
    for silo in three:
        assert same(run.personal(silo), initial(run.settings, 3, 3))
    assert affinity(run) == {i: {j: float(i == j) for j in three} for i in three}


def a_client(models, own, val=4):
    """Silo "a" in round 2, with its own last model and these received ones."""
    settings = settings_of({}, strategy="fedfomo", silos=2)
    rows, none = np.ones((4, 3), np.float32), np.zeros((0, 3), np.float32)
    samples = Samples(rows, np.zeros(4, np.int64))
    empty = Samples(none, np.zeros(0, np.int64))
    model = flat_model("mlp", (3,), 3, MlpSettings(""), "cpu")
    silo = Silo(
        "a", samples, samples if val else empty, samples, model, lambda purpose: torch.zeros(12)
    )
    client = client_of(settings, silo, State({"personal": own}), 2)
    client.models = {model_of(name): Model(vector, name) for name, vector in models.items()}
    assert isinstance(client, FedFomoClient)
    return client


def test_the_norm_is_bounded_below(monkeypatch):
    """b is 1e-7 away and gains 1e-6: 1e-6 / 1e-5 = 0.1. c is 1 away and gains 0.1, as much; d gains nothing.

    w = own + 1/2 (b - own) + 1/2 (c - own). The silo's own model, should it come too, does not count.
    """
    own, unit = torch.zeros(12), torch.eye(12)
    models = {"a": unit[5], "b": 1e-7 * unit[0], "c": unit[1], "d": unit[2]}
    client = a_client(models, own)
    losses = {0.0: 1.0, 1e-7: 1.0 - 1e-6, 1.0: 0.9}

    def loss(self, vector):
        return 1.0 if same(vector, unit[2]) else losses[round(float(vector.norm()), 9)]

    monkeypatch.setattr(FedFomoClient, "validation_loss", loss)
    mixed = client.receive()
    assert json.loads(str(client.replies["weights"])) == pytest.approx(
        {"b": 0.5, "c": 0.5}, rel=1e-5
    )
    near(mixed, 0.5e-7 * unit[0] + 0.5 * unit[1], 1e-5)
    assert same(own, torch.zeros(12))


def test_a_model_whose_loss_is_no_number_does_not_count(monkeypatch):
    client = a_client({"b": torch.ones(12), "c": torch.full((12,), 2.0)}, torch.zeros(12))
    losses = {0.0: 1.0, 1.0: math.nan, 2.0: 0.5}
    monkeypatch.setattr(
        FedFomoClient, "validation_loss", lambda self, vector: losses[float(vector[0])]
    )
    assert same(client.receive(), torch.full((12,), 2.0))
    assert json.loads(str(client.replies["weights"])) == {"c": 1.0}


def test_without_validation_data_a_silo_keeps_its_own_model():
    own = torch.ones(12)
    client = a_client({"b": torch.zeros(12)}, own, val=0)
    assert same(client.receive(), own)
    assert not client.replies


def test_a_run_without_validation_data_is_refused(three, caplog):
    """All blind: it would be Local that downloads everything. Some blind: they are named, and go on as Local."""

    def blind(*silos):
        for silo in silos:
            with np.load(three[silo]) as data:
                arrays = dict(data)
            np.savez(
                three[silo],
                **{k: v[:0] if k.endswith("_val") else v for k, v in arrays.items()},
            )

    hold_out(three)
    blind("b")
    run = federate(three, "fedfomo", **OPTIONS)
    assert "without validation data, and so without others' models: b" in caplog.text
    assert any(weights_sent(run, "a").values()) and not any(weights_sent(run, "b").values())
    blind("a", "c")
    fails(UserError, "set validation > 0", federate, three, strategy="fedfomo", **OPTIONS)


# ---- Affinity, budget, exploration -----------------------------------------------------------------------------------


@pytest.fixture
def five(tmp_path):
    files = random_silos(tmp_path, [6, 10, 8, 7, 9])
    hold_out(files)
    return files


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_the_budget_goes_to_the_highest_affinity(five, budget):
    """ε = 0: the M others of highest P_ij, P being the identity plus all weights reported so far.

    Among equal ones (at first all others) every silo has its own: no name comes first for all.
    """
    run = federate(
        five,
        "fedfomo",
        **{**OPTIONS, "rounds": 6},
        fedfomo__max_downloads=budget,
        fedfomo__epsilon=0.0,
    )
    learned = 0
    for silo in five:
        row = {n: float(n == silo) for n in five}
        reported = weights_sent(run, silo)
        for server_round in range(2, 7):
            sent = set(run.sent_to(silo, server_round))
            assert len(sent) == budget and silo not in sent
            left = set(five) - sent - {silo}
            assert min(row[n] for n in sent) >= max(row[n] for n in left)
            learned += min(row[n] for n in sent) > max(row[n] for n in left)
            for name, weight in reported[server_round].items():
                row[name] += weight
        assert affinity(run)[silo] == pytest.approx(row)
    assert learned > 0
    first = {n for silo in five for n in run.sent_to(silo, 2)}
    assert len(first) > budget + 1


def a_strategy(silos, seed=7, **changes):
    """Silos s0, s1, ... that have all sent a model, and silo s0's affinity falling from s1 on."""
    settings = settings_of({}, strategy="fedfomo", silos=silos, seed=seed, **changes)
    layout = flat_model("mlp", (3,), 3, MlpSettings(""), "cpu").layout
    strategy = FedFomo(settings.common, settings.method, layout)
    plan = RoundPlan().with_silos(
        [SiloInfo(f"s{i}", i, 5, n_val=2) for i in range(silos)], settings.common
    )
    strategy.initialise(plan, lambda purpose: torch.zeros(12))
    strategy.state.arrays |= {model_of(f"s{i}"): torch.zeros(12) for i in range(silos)}
    strategy.state.numbers["affinity"]["s0"] |= {f"s{i}": 10.0 - i for i in range(1, silos)}
    return strategy


def choices(strategy, rounds):
    result = []
    for strategy.round in rounds:
        result.append(strategy.choose_others("s0"))
    return result


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_a_download_is_random_with_probability_epsilon(epsilon):
    """One of four: the best with 1 - ε + ε/4, each other with ε/4; over 2000 draws within 4 σ (at most 75)."""
    strategy = a_strategy(
        5, fedfomo__max_downloads=1, fedfomo__epsilon=epsilon, fedfomo__epsilon_decay=1.0
    )
    drawn = [name for (name,) in choices(strategy, range(2, 2002))]
    for i in range(1, 5):
        expected = 2000 * (epsilon / 4 + (1 - epsilon) * (i == 1))
        assert abs(drawn.count(f"s{i}") - expected) <= (75 if epsilon > 0 else 0)


def test_several_downloads_are_different_silos():
    strategy = a_strategy(
        6, fedfomo__max_downloads=3, fedfomo__epsilon=0.5, fedfomo__epsilon_decay=1.0
    )
    drawn = choices(strategy, range(2, 102))
    assert all(len(set(names)) == 3 and "s0" not in names for names in drawn)
    assert len({tuple(names) for names in drawn}) > 5


def test_exploration_is_seeded_and_fades():
    """ε falls by its factor every round: 1 in round 1, 1/2 in round 2, ..., under 1e-6 from round 21 on."""
    given = {"fedfomo__max_downloads": 1, "fedfomo__epsilon": 1.0}
    first, again, other = (
        choices(a_strategy(5, seed, **given), range(2, 12)) for seed in (7, 7, 8)
    )
    assert first == again != other
    fading = choices(a_strategy(5, **given, fedfomo__epsilon_decay=0.5), range(21, 400))
    assert fading == [["s1"]] * len(fading)


# ---- Absent silos, what leaves ---------------------------------------------------------------------------------------


def test_an_absent_silos_model_and_affinities_stay(three):
    """c is away in rounds 2 and 3: the others go on with its model of round 1, and its row of P waits."""
    hold_out(three)
    run = federate(three, "fedfomo", **{**OPTIONS, "rounds": 5}, absent={("c", 2), ("c", 3)})
    assert rounds_trained(run, "c") == [1, 4, 5]
    sent = {r: run.sent_to("a", r)["c"] for r in (2, 3, 4, 5)}
    assert [sent[r].round for r in (2, 3, 4, 5)] == [1, 1, 1, 4]
    assert same(sent[2].vector, sent[4].vector) and not same(sent[4].vector, sent[5].vector)
    assert sent[2].samples == 8
    reported = weights_sent(run, "c")
    assert sum(affinity(run)["c"].values()) == pytest.approx(
        1 + sum(map(sum, map(dict.values, reported.values())))
    )


def test_a_silo_in_its_first_round_gets_nothing(three):
    run = federate(three, "fedfomo", **OPTIONS, absent={("c", 1), ("c", 2)})
    assert set(run.sent_to("c", 3)) == set()
    assert set(run.sent_to("c", 4)) == {"a", "b"}
    assert set(run.sent_to("a", 3)) == {"b"}
