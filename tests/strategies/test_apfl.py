"""APFL: two silos by hand, a run in numpy, the limits of α, parameters and logits (B6)."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from near import near
from tiny import SHORT, federate, gradient, initial, rows_of, same
from two_layers import rounds_trained, snapshot_rows, waits

OPTIONS = {**SHORT, "momentum": 0.9, "lr_decay": 0.9, "learning_rate": 0.3, "mlp__hidden": "4"}


def alpha_of(run, silo):
    context = run.grid.context_of(silo)
    return float(json.loads(str(context.state["numbers"]["json"]))["alpha"])


# ---- By hand and in numpy --------------------------------------------------------------------------------------------


def test_two_silos_two_rounds_by_hand(pair, zero_start):
    """η = 1/4, α = 1/2, one step a round; weights (u, -u), biases (v, -v), all of them 0 at first.

    Round 1: w_a = (1/4, 1/8), w_b = (-1/8, -1/8), mean (-1/32, -1/16); the private ones take half a step:
    a (1/8, 1/16), b (-1/16, -1/16). v - w is 0, so α stays.
    Round 2, a: v̄ = (1/8 - 1/32, 1/16 - 1/16) / 2 = (3/64, 0), logit 2 · 2 · 3/64, q = 1 / (1 + e^(3/16)).
    v - w = (5/32, 1/8) and ∇f = -(2 q, q), each twice: α = 1/2 + (1/4) (2) (2 · 5/32 + 1/8) q = 1/2 + 7 q / 32.
    v = (1/8 + q/4, 1/16 + q/8), with the α from before. w has the logit -2 (1/16 + 1/16), p = 1 / (1 + e^(-1/4)):
    w = (-1/32 + p/2, -1/16 + p/4). Personal: α v + (1 - α) w with the new α.
    """
    run = federate(pair, "apfl", rounds=2, learning_rate=0.25)
    q, p = 1 / (1 + math.exp(3 / 16)), 1 / (1 + math.exp(-1 / 4))
    alpha = 0.5 + 7 * q / 32
    near(alpha_of(run, "a"), alpha)
    private = run.kept("a")["private"]
    u, v = 1 / 8 + q / 4, 1 / 16 + q / 8
    near(private, [u, -u, v, -v])
    u = alpha * u + (1 - alpha) * (-1 / 32 + p / 2)
    v = alpha * v + (1 - alpha) * (-1 / 16 + p / 4)
    near(run.personal("a"), [u, -u, v, -v])


@pytest.mark.parametrize("adapt", ["round", "batch", "never"])
def test_rounds_of_several_steps_in_numpy(two, adapt):
    """Three rounds of three steps in float64, momentum on both; α moves once a round, at every step, or never."""
    eta = 0.6
    run = federate(
        two,
        "apfl",
        rounds=3,
        local_epochs=3,
        learning_rate=eta,
        momentum=0.5,
        lr_decay=0.9,
        apfl__alpha=0.3,
        apfl__adapt=adapt,
    )
    w = run.start()
    private, alphas, mixed = dict.fromkeys(two, w), dict.fromkeys(two, 0.3), {}
    for r in range(3):
        step, total = eta * 0.9**r, np.zeros_like(w)
        for silo, file in two.items():
            x, y = rows_of(file)
            local, v, alpha = w.copy(), private[silo].copy(), alphas[silo]
            speed_w, speed_v = np.zeros_like(w), np.zeros_like(w)
            for k in range(3):
                g = gradient(alpha * v + (1 - alpha) * local, x, y)
                speed_w = 0.5 * speed_w + gradient(local, x, y)
                speed_v = 0.5 * speed_v + alpha * g
                if adapt == "batch" or (adapt == "round" and k == 0):
                    alpha = float(np.clip(alpha - step * (v - local) @ g, 0, 1))
                local, v = local - step * speed_w, v - step * speed_v
            private[silo], alphas[silo], mixed[silo] = v, alpha, alpha * v + (1 - alpha) * local
            total += len(y) / 16 * local
        w = total
    near(run.shared, w, 1e-5)
    for silo in two:
        near(alpha_of(run, silo), alphas[silo], 1e-5)
        assert (alphas[silo] == 0.3) == (adapt == "never")
        near(run.personal(silo), mixed[silo], 1e-5)


# ---- Limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", ["parameters", "logits"])
def test_alpha_zero_is_the_local_copy_of_fedavg(three, mix):
    """Fixed at 0, v̄ = w_i bit for bit, and v stays the initial model."""
    plain = federate(three, "fedavg", **OPTIONS)
    run = federate(
        three, "apfl", apfl__alpha=0.0, apfl__adapt="never", apfl__mix=mix, **OPTIONS
    )
    logits = mix == "logits"  # its loss is taken of outputs that were added up
    assert snapshot_rows(plain, "personal", without_training=logits) == snapshot_rows(
        run, "personal", without_training=logits
    )
    for silo in three:
        assert same(run.kept(silo)["private"], initial(run.settings, 3, 3))


@pytest.mark.parametrize("mix", ["parameters", "logits"])
def test_alpha_one_is_local(three, mix):
    """Fixed at 1, v̄ = v: bit for bit for parameters, up to rounding where logits are mixed."""
    plain = federate(three, "local", **OPTIONS)
    run = federate(
        three, "apfl", apfl__alpha=1.0, apfl__adapt="never", apfl__mix=mix, **OPTIONS
    )
    if mix == "parameters":
        assert snapshot_rows(plain, "personal") == snapshot_rows(run, "personal")
    for silo in three:
        near(plain.personal(silo), run.personal(silo))


def test_batch_norm_of_both_models(three, tiny_bn):
    """w's passes alone move the statistics that travel, v̄'s those that stay: FedAvg's, and at α = 1 Local's."""
    options = {**OPTIONS, "model": "tiny-bn", "learning_rate": 0.1}
    fedavg, local = (federate(three, name, **options) for name in ("fedavg", "local"))
    for mix in ("parameters", "logits"):
        run = federate(
            three, "apfl", apfl__alpha=1.0, apfl__adapt="never", apfl__mix=mix, **options
        )
        assert snapshot_rows(fedavg, "received") == snapshot_rows(run, "received")
        assert same(fedavg.held["buffers"], run.held["buffers"])
        if mix == "parameters":
            assert snapshot_rows(local, "personal") == snapshot_rows(run, "personal")
        for silo in three:
            ours, theirs = (r.kept(silo)["personal.buffers"] for r in (run, local))
            near(ours, theirs, 1e-5)


@pytest.mark.parametrize("mix", ["parameters", "logits"])
def test_alpha_is_clipped(three, mix):
    """However large the step: 0 or 1 after the first steps of a huge one."""
    options = {**OPTIONS, "learning_rate": 50.0, "momentum": 0.0, "rounds": 2}
    run = federate(three, "apfl", apfl__adapt="batch", apfl__mix=mix, **options)
    alphas = [alpha_of(run, silo) for silo in three]
    assert all(0 <= alpha <= 1 for alpha in alphas)
    assert {0.0, 1.0} & set(alphas)


# ---- Parameters and logits -------------------------------------------------------------------------------------------


def test_for_a_linear_model_both_mixtures_are_one(three):
    """Outputs of α v + (1 - α) w are α times v's and 1 - α times w's; so are all gradients, and α's course."""
    options = {**OPTIONS, "mlp__hidden": "", "apfl__adapt": "batch", "rounds": 4}
    one, other = (
        federate(three, "apfl", apfl__mix=mix, **options) for mix in ("parameters", "logits")
    )
    for silo in three:
        near(alpha_of(one, silo), alpha_of(other, silo), 1e-5)
        assert alpha_of(one, silo) != 0.5
        ours, theirs = (run.kept(silo)["private"] for run in (one, other))
        near(ours, theirs, 1e-5)
        for split in ("test", "train"):
            losses = [run.values("loss", silo, "personal", split) for run in (one, other)]
            near(losses[0], losses[1], 1e-5)


def test_for_a_deep_model_they_are_two(three):
    one, other = (
        federate(three, "apfl", apfl__mix=mix, **OPTIONS) for mix in ("parameters", "logits")
    )
    assert one.values("loss", "a", "personal") != pytest.approx(
        other.values("loss", "a", "personal"), abs=1e-5
    )


def test_mixed_logits_are_those_of_both_networks(three):
    """The personal metrics by numpy, from v, w_i and α as the silo keeps them."""
    run = federate(three, "apfl", apfl__mix="logits", apfl__adapt="batch", **OPTIONS)
    for silo, file in three.items():
        x, y = rows_of(file)
        kept, alpha = run.kept(silo), alpha_of(run, silo)

        def outputs(w, x=x):
            w = w.double().numpy()
            return (
                np.maximum(x @ w[:12].reshape(4, 3).T + w[12:16], 0) @ w[16:28].reshape(3, 4).T
                + w[28:]
            )

        z = alpha * outputs(kept["private"]) + (1 - alpha) * outputs(kept["shared"])
        loss = float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]))
        near(run.values("loss", silo, "personal")[-1], loss, 1e-5)
        assert same(run.personal(silo), kept["private"])


# ---- Absent silos, what leaves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", ["parameters", "logits"])
def test_an_absent_silo_keeps_both(three, mix):
    """One of three silos a round: whoever is not drawn reports its last personal model, mixture and all."""
    run = federate(three, "apfl", apfl__mix=mix, **{**OPTIONS, "rounds": 5}, participation=0.5)
    assert any(
        r > min(rounds_trained(run, silo), default=5)
        for silo in three
        for r in waits(run, silo)
    )
