"""FedAMP, HeurFedAMP and what all mixing methods share: coefficients and two silos by hand, the limits (B7, B8)."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import pytest
import torch
from mixtures import EMPTY, coefficients, some_models
from near import near
from tiny import federate, gradient, initial, random_silos, rows_of, same
from torch import Tensor
from torch.testing import assert_close
from two_layers import replies_of, rounds_trained

from strategies import strategies
from strategies.base.plan import RoundPlan, SiloInfo
from strategies.base.settings import Common
from strategies.base.transport.payload import model_of
from strategies.fedamp import MixingClient, MixingStrategy, mix

MIXING = ("fedamp", "heurfedamp", "diversifed")
AS_PRINTED = ("fedamp", {"convex": False})
OPTIONS = {
    "rounds": 4,
    "local_epochs": 2,
    "batch_size": 4,
    "momentum": 0.5,
    "learning_rate": 0.3,
}


# ---- Coefficients ----------------------------------------------------------------------------------------------------


def test_fedamp_by_hand():
    """w = (0, 0), (1, 0), (0, 2): squared distances 1, 4, 5. σ = 2, a = 3: a A' = (3/2) exp(-d²/2).

    That is p = 0.910, q = 0.203, r = 0.123: p + q and p + r exceed 1: a convex combination has these
    rows divided by it.
    """
    models = torch.tensor([[0.0, 0], [1, 0], [0, 2]])
    p, q, r = (1.5 * math.exp(-d / 2) for d in (1, 4, 5))
    expected = [[1 - p - q, p, q], [p, 1 - p - r, r], [q, r, 1 - q - r]]
    found = coefficients("fedamp", models, sigma=2.0, step=3.0, convex=False)
    assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    expected[:2] = [0.0, p / (p + q), q / (p + q)], [p / (p + r), 0.0, r / (p + r)]
    found = coefficients("fedamp", models, sigma=2.0, step=3.0)
    assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_heurfedamp_by_hand():
    """w = (1, 0), (0, 3), (2, 2): cosines 0, 1/√2, 1/√2. σ = √2 log 2 makes exp(σ cos) = 1, 2, 2; ξ = 0.4."""
    models = torch.tensor([[1.0, 0], [0, 3], [2, 2]])
    found = coefficients(
        "heurfedamp", models, sigma=math.sqrt(2) * math.log(2), self_weight=0.4
    )
    expected = [[0.4, 0.2, 0.4], [0.2, 0.4, 0.4], [0.3, 0.3, 0.4]]
    assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("n", [1, 2, 3, 12])
@pytest.mark.parametrize("name, changes", [*((name, {}) for name in MIXING), AS_PRINTED])
def test_rows_sum_to_one(name, changes, n, scale):
    """Also where the own weight is far below zero: near models, a = 1000 as printed; rounding grows with the weights.

    By default FedAMP's rows are convex combinations.
    """
    found = coefficients(name, some_models(n, scale=scale), **changes)
    assert found.shape == (n, n)
    largest = float(found.abs().max())
    near(found.sum(1), torch.ones(n), 1e-6 * n * largest)
    if name == "fedamp" and not changes:
        assert float(found.min()) > -1e-6 and largest < 1 + 1e-6
    if changes and n > 1 and scale < 1:
        assert float(found.min()) < -1000


@pytest.mark.parametrize("name", MIXING)
def test_the_order_of_the_silos_does_not_matter(name):
    models, order = some_models(5), torch.tensor([3, 0, 4, 1, 2])
    changes = {"sigma": 5.0} if name != "diversifed" else {}
    plain, turned = (coefficients(name, m, **changes) for m in (models, models[order]))
    assert_close(turned, plain[order][:, order], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["fedamp", "diversifed"])
def test_moving_all_models_moves_the_mixtures(name):
    """Coefficients of differences only, with rows that sum to one. Not so HeurFedAMP's, whose angles change."""
    models, shift = some_models(5), torch.linspace(-2, 2, 7)
    changes = {"sigma": 5.0, "step": 2.0} if name == "fedamp" else {}
    plain, moved = (coefficients(name, m, **changes) @ m for m in (models, models + shift))
    assert_close(moved, plain + shift, rtol=1e-4, atol=1e-5)
    angles = [coefficients("heurfedamp", m, sigma=5.0) for m in (models, models + shift)]
    assert (angles[0] - angles[1]).abs().max() > 1e-2


@pytest.mark.parametrize("name, changes", [*((name, {}) for name in MIXING), AS_PRINTED])
def test_identical_models_stay(name, changes):
    """No 0 / 0; the mixture of equal models is that model bit for bit, also as printed, where a / σ = 10^4."""
    models = some_models(1).expand(4, -1).contiguous()
    mixed = mix(models, coefficients(name, models, **changes))
    assert all(same(u, w) for u, w in zip(mixed, models, strict=True))


@pytest.mark.parametrize("name", MIXING)
def test_the_mixture_is_the_product(name):
    """w_i + sum_j C_ij (w_j - w_i) is C W, for rows that sum to one."""
    models = some_models(5).double()
    found = coefficients(name, models, **({"sigma": 5.0} if name != "diversifed" else {}))
    near(torch.stack(mix(models, found)), found @ models, 1e-5)


@pytest.mark.parametrize("name", MIXING)
def test_adam_does_not_move_equal_models(three, name):
    """No gradient but the term's, λ (w - u_i), from the own model: exactly 0. A rounding error of 1e-8 would be a step
    of η in Adam, whose steps do not depend on the size of the gradient."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            MixingClient, "gradient", lambda self, x, y: self.model.gradient.zero_().sum()
        )
        run = federate(three, name, optimizer="adam", **{f"{name}.start": "own"}, **OPTIONS)
    start = initial(run.settings, 3, 3)
    assert all(same(run.personal(silo), start) for silo in three)


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e15])
@pytest.mark.parametrize("name", MIXING)
def test_distant_models_are_safe(name, scale):
    """exp(d) would overflow from 89 on, exp(-d²) is 0: nothing is infinite; FedAMP's u_i is then w_i bit for bit."""
    models = some_models(4, scale=scale)
    found = coefficients(name, models)
    assert bool(torch.isfinite(found).all())
    near(found.sum(1), torch.ones(4), 1e-5)
    if name == "fedamp":
        assert same(found @ models, models)


def test_heurfedamp_special_cases():
    """ξ = 1: u_i = w_i. σ = 0: ξ w_i and 1 - ξ times the mean of the others; with ξ = 1/N the plain mean."""
    models = some_models(4)
    assert same(coefficients("heurfedamp", models, self_weight=1.0), torch.eye(4))
    others = (torch.ones(4, 4) - torch.eye(4)) / 3
    found = coefficients("heurfedamp", models, sigma=0.0, self_weight=0.4)
    near(found, 0.4 * torch.eye(4) + 0.6 * others, 1e-5)
    found = coefficients("heurfedamp", models, sigma=0.0, self_weight=0.25)
    near(found @ models, models.mean(0).expand(4, -1), 1e-5)


# ---- Weights that say nothing ----------------------------------------------------------------------------------------

FIVE = {"a": 6, "b": 10, "c": 8, "d": 7, "e": 9}
ZERO, EQUAL = "with 0, their models are", "alike ("


@pytest.mark.parametrize(
    "name, settings, said",
    [
        ("fedamp", {"sigma": 1e-3}, [ZERO, "it is Local with", "fedamp.sigma near the square"]),
        (
            "fedamp",
            {"sigma": 1e6},
            [EQUAL, "it is FedAvg with", "fedamp.sigma below the square"],
        ),
        ("heurfedamp", {}, [EQUAL, "it is FedAvg with", "greater heurfedamp.sigma"]),
        (
            "heurfedamp",
            {"self-weight": 1.0},
            [ZERO, "it is Local with", "heurfedamp.self-weight below 1"],
        ),
        ("fedamp", {"sigma": 2.0}, []),
        ("heurfedamp", {"sigma": 20.0}, []),
        ("diversifed", {}, []),
    ],
)
def test_weights_that_say_nothing_are_told_once(tmp_path, name, settings, said, caplog):
    """In the first round with mixtures of others, and in one line, however many rounds it goes on."""
    files = random_silos(tmp_path, FIVE)
    federate(files, name, **{f"{name}.{k}": v for k, v in settings.items()}, **OPTIONS)
    lines = [
        r.getMessage() for r in caplog.records if "weighs all other silos" in r.getMessage()
    ]
    assert len(lines) == bool(said)
    for line in lines:
        assert line.startswith(f"round 2: {name} weighs") and all(part in line for part in said)


def test_the_distance_that_is_told_is_the_median(caplog):
    """Models at 0, 3 and 10 on a line: distances 3, 7, 10. Without weights above 0, or with equal ones; two silos
    have nothing to choose from."""
    models = torch.tensor([[0.0], [3.0], [10.0]])
    for name, settings in (
        ("fedamp", {"sigma": 0.1}),
        ("heurfedamp", {"sigma": 0.0}),
        ("fedamp", {"sigma": 50.0}),
    ):
        method = strategies()[name]
        assert issubclass(method, MixingStrategy)
        strategy = method(Common(), method.Settings(**settings), EMPTY)
        strategy.start_state(lambda _: torch.zeros(1))
        for count in (2, 3, 3):
            strategy.state.arrays = {model_of(str(i)): w for i, w in enumerate(models[:count])}
            strategy.plan = RoundPlan({str(i): cast(SiloInfo, None) for i in range(count)})
            strategy.mixtures()
    lines = [
        r.getMessage() for r in caplog.records if "weighs all other silos" in r.getMessage()
    ]
    assert len(lines) == 2
    assert all("are 7 apart (median)" in line for line in lines)


def test_a_model_of_zeros_has_no_angle():
    found = coefficients(
        "heurfedamp", torch.tensor([[0.0, 0], [1, 0], [0, 1]]), sigma=1.0, self_weight=0.5
    )
    assert found[0].tolist() == pytest.approx([0.5, 0.25, 0.25])


# ---- Runs ------------------------------------------------------------------------------------------------------------


def test_two_silos_two_rounds_by_hand(pair, zero_start):
    """Weights (u, -u), biases (v, -v), η = 1, two steps a round, λ / a = 1/2.

    A right answer has the logit m = 2 (x u + v) over a wrong one, and q = 1 / (1 + e^m): a step adds (2 q, q) in a
    (x = 2, class 0) and takes (q', q') in b (x = 1, class 1, m' = -2 (u + v)). Round 1 is plain: one step each,
    a = (1, 1/2), b = (-1/2, -1/2): ||w_a - w_b||² = 2 (9/4 + 1) = 13/2 = σ. a = σ e / 4 makes a A' = 1/4:
    u_a = 3/4 w_a + 1/4 w_b = (5/8, 1/4), u_b = (-1/8, -1/4). Round 2 has two steps, the second with the term
    (w - u_i) / 2.
    """
    step = 6.5 * math.e / 4
    given = {"fedamp__sigma": 6.5, "fedamp__step": step, "fedamp__lambda": step / 2}
    one = federate(pair, "fedamp", rounds=1, **given)
    assert one.personal("a").tolist() == [1, -1, 0.5, -0.5]
    assert one.personal("b").tolist() == [-0.5, 0.5, -0.5, 0.5]

    def first_epoch_only(self, **options):
        train(self, **options, epochs=1 if self.round == 1 else 2)

    train = MixingClient.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MixingClient, "train", first_epoch_only)
        run = federate(pair, "fedamp", rounds=2, **given)
    sent = {silo: run.sent_to(silo, 2)["mixture"].vector.tolist() for silo in pair}
    near(sent["a"], [5 / 8, -5 / 8, 1 / 4, -1 / 4])
    near(sent["b"], [-1 / 8, 1 / 8, -1 / 4, 1 / 4])
    for silo, x, sign, (u0, v0) in (
        ("a", 2, 1, (5 / 8, 1 / 4)),
        ("b", 1, -1, (-1 / 8, -1 / 4)),
    ):
        u, v = u0, v0
        for _ in range(2):
            q = 1 / (1 + math.exp(sign * 2 * (x * u + v)))
            u, v = u + sign * x * q - (u - u0) / 2, v + sign * q - (v - v0) / 2
        near(run.personal(silo), [u, -u, v, -v])


def fedamp_in_numpy(models, sigma, step):
    mixed = models.copy()
    for i, mine in enumerate(models):
        for j, other in enumerate(models):
            if j != i:
                mixed[i] += (
                    step
                    * math.exp(-float((mine - other) @ (mine - other)) / sigma)
                    / sigma
                    * (other - mine)
                )
    return mixed


def heurfedamp_in_numpy(models, sigma, own):
    mixed = own * models
    for i, mine in enumerate(models):
        scores = {
            j: math.exp(
                sigma * float(mine @ w) / float(np.linalg.norm(mine) * np.linalg.norm(w))
            )
            for j, w in enumerate(models)
            if j != i
        }
        for j, score in scores.items():
            mixed[i] += (1 - own) * score / sum(scores.values()) * models[j]
    return mixed


@pytest.mark.parametrize("start", ["received", "own"])
@pytest.mark.parametrize("name", ["fedamp", "heurfedamp"])
def test_rounds_of_several_steps_in_numpy(three, name, start):
    """Three rounds of two steps in float64; the centre is u_i for the whole round, wherever training starts."""
    options = {
        "fedamp": {"sigma": 3.0, "step": 1.2, "lambda": 0.6},
        "heurfedamp": {"sigma": 2.0, "self-weight": 0.3, "lambda": 0.5},
    }
    given = {f"{name}.{k}": v for k, v in options[name].items()} | {f"{name}.start": start}
    run = federate(three, name, rounds=3, local_epochs=2, learning_rate=0.4, **given)
    mix = (
        (lambda m: fedamp_in_numpy(m, 3.0, 1.2))
        if name == "fedamp"
        else (lambda m: heurfedamp_in_numpy(m, 2.0, 0.3))
    )
    models = np.stack([run.start()] * 3)
    for server_round in range(3):
        mixed = mix(models) if server_round else models
        for i, file in enumerate(three.values()):
            w = mixed[i] if start == "received" else models[i]
            for _ in range(2):
                pull = 0.5 * (w - mixed[i]) if server_round else 0.0
                w = w - 0.4 * (gradient(w, *rows_of(file)) + pull)
            models[i] = w
    for i, silo in enumerate(three):
        near(run.personal(silo), models[i], 1e-5)
        near(run.held[model_of(silo)], models[i], 1e-5)


@pytest.mark.parametrize("name", MIXING)
def test_where_training_starts_is_what_received_means(three, name):
    """From the mixture or from the own model; the snapshot "received" is that model, and the round starts there."""
    for start in ("received", "own"):
        options = {**OPTIONS, "local_epochs": 0, f"{name}.start": start, f"{name}.lambda": 0.0}
        still = federate(three, name, **options)
        assert (
            still.values("loss", "a", "received")[1:4]
            == still.values("loss", "a", "personal")[1:]
        )
    own = federate(three, name, **{f"{name}.start": "own"}, **OPTIONS)
    for metric in ("loss", "accuracy"):
        assert own.values(metric, "a", "received")[1:] == own.values(metric, "a", "personal")


@pytest.mark.parametrize("name", MIXING)
def test_mixtures_are_of_those_who_take_part(tmp_path, name):
    """Three of four silos a round: mixed are the drawn ones' last models; a silo in its first round gets nothing."""
    files = random_silos(tmp_path, [6, 10, 8, 5])
    run = federate(files, name, **{**OPTIONS, "rounds": 6}, participation=0.75)
    strategy = cast(MixingStrategy, run.strategy)
    trained = {silo: rounds_trained(run, silo) for silo in files}
    last: dict[str, Tensor] = {}
    checked = 0
    for server_round in range(1, 7):
        drawn = [s for s in files if server_round in trained[s]]
        known = [s for s in drawn if s in last]
        models = torch.stack([last[s] for s in known]) if known else torch.empty(0, 12)
        mixed = mix(models, strategy.coefficients(models)) if known else []
        for silo in drawn:
            sent = run.sent_to(silo, server_round)
            assert set(sent) == ({"mixture"} if silo in known else set())
            if silo in known:
                assert same(sent["mixture"].vector, mixed[known.index(silo)])
                checked += 1
        last |= {
            s: p.models["model"].vector for r, s, p, _ in replies_of(run) if r == server_round
        }
    assert checked > 10
    assert any(len(rounds) < 6 for rounds in trained.values())
    for silo, rounds in trained.items():  # an absent silo keeps its model
        if rounds:
            assert same(run.personal(silo), last[silo])
