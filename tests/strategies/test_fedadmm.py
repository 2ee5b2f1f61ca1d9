"""FedADMM: two silos by hand, rounds in numpy with absent silos, what its special cases equal (B23)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from near import near
from tiny import federate, gradient, rows_of, same
from two_layers import confirmed, losing, replies_of, sent_by

OPTIONS = {"rounds": 5, "local_epochs": 2, "batch_size": 4, "learning_rate": 0.1}


def test_two_silos_by_hand(pair, zero_start):
    """Two rounds of one full-batch step, learning rate 1, ρ = 1/2, η = 1, from 0; weights (u, -u), biases (v, -v).

    Round 1: w_a = (1, 1/2), w_b = -(1/2, 1/2), y_i = w_i/2, Δ_i = w_i + 2 y_i = 2 w_i, so θ = (1/2, 0). Round 2 starts
    there, a: logit 2, q = 1 / (1 + e²), w_a = (1/2 + 2 q - 1/2, q - 1/4) = (2 q, q - 1/4), for y_a = (1/2, 1/4);
    b: logit 1, r = 1 / (1 + 1/e), w_b = (3/4 - r, 1/4 - r). y_i grows by (w_i - θ)/2, and
    Δ_i = (w_i - its last) + (w_i - θ) = 2 w_i - θ - last.
    """
    run = federate(pair, "fedadmm", rounds=2, fedadmm__rho=0.5)
    q, r = 1 / (1 + math.exp(2)), 1 / (1 + math.exp(-1))
    a, b = (2 * q, q - 0.25), (0.75 - r, 0.25 - r)
    change_a = (2 * a[0] - 1.5, 2 * a[1] - 0.5)
    change_b = (2 * b[0], 2 * b[1] + 0.5)
    theta = (0.5 + (change_a[0] + change_b[0]) / 2, (change_a[1] + change_b[1]) / 2)
    dual = (0.5 + (a[0] - 0.5) / 2, 0.25 + a[1] / 2)
    for (u, v), vector in (
        (a, run.personal("a")),
        (b, run.personal("b")),
        (theta, run.shared),
        (change_a, sent_by(run, "a", 1, "change")),
        (dual, confirmed(run, "a", "dual")),
    ):
        near(vector, [u, -u, v, -v])


@pytest.mark.parametrize("since", ["own", "received"])
@pytest.mark.parametrize("start", ["own", "received"])
def test_rounds_of_several_steps_in_numpy(three, start, since):
    """Five rounds of three full-batch steps, η = 0.8 and from round 4 on 0.3; b is away in round 2, a's reply of
    round 3 is left out: its w and y are those of round 2 in round 4."""
    rho, eta = 0.4, 0.3
    run = federate(
        three,
        "fedadmm",
        rounds=5,
        local_epochs=3,
        learning_rate=eta,
        fedadmm__rho=rho,
        fedadmm__eta=0.8,
        fedadmm__later=0.3,
        fedadmm__later_from=4,
        fedadmm__start=start,
        fedadmm__since=since,
        prepare=losing(("a", 3), absent=[("b", 2)]),
    )
    theta = run.start()
    own, duals = dict.fromkeys(three, theta), {silo: np.zeros_like(theta) for silo in three}
    for r in range(1, 6):
        came, changes = [s for s in three if (s, r) not in (("b", 2), ("a", 3))], []
        for silo in came:
            w = (own[silo] if start == "own" else theta).copy()
            for _ in range(3):
                w = w - eta * (
                    gradient(w, *rows_of(three[silo])) + duals[silo] + rho * (w - theta)
                )
            dual = duals[silo] + rho * (w - theta)
            before = own[silo] if since == "own" else theta
            changes.append(w + dual / rho - before - duals[silo] / rho)
            own[silo], duals[silo] = w, dual
        theta = theta + (0.3 if r >= 4 else 0.8) * np.mean(changes, axis=0)
    near(run.shared, theta)
    for silo in three:
        near(confirmed(run, silo, "dual"), duals[silo])
        near(confirmed(run, silo, "primal"), own[silo])


def test_a_full_average_is_fedapm_with_nothing_personal(three):
    """η = |S|/N, with absent silos and mini-batches: the server's θ is the mean of all z_i = w_i + y_i/ρ."""
    apart = {**OPTIONS, "rounds": 9, "participation": 0.7}  # every silo comes at least once
    ours = federate(three, "fedadmm", fedadmm__rho=0.6, fedadmm__eta=0.0, **apart)
    apm = federate(
        three,
        "fedapm",
        fedapm__personal="none",
        fedapm__rho=0.2,
        **{**apart, "learning_rate": 0.3},
    )
    mean = ours.shared
    near(mean, apm.shared, 2e-6)
    z = [
        confirmed(ours, silo, "primal") + confirmed(ours, silo, "dual") / 0.6 for silo in three
    ]
    near(mean, torch.stack(z).mean(0), 2e-6)
    for silo in three:
        near(ours.personal(silo), apm.personal(silo), 2e-6)


def test_a_lost_reply_stays_out_of_the_average(three):
    """η = |S|/N: θ is the mean of all silos' counted z_i, which a reply that was left out does not move."""
    run = federate(
        three,
        "fedadmm",
        fedadmm__rho=0.6,
        fedadmm__eta=0.0,
        **OPTIONS,
        prepare=losing(("b", 2), ("c", 5)),
    )
    z = [confirmed(run, silo, "primal") + confirmed(run, silo, "dual") / 0.6 for silo in three]
    near(run.shared, torch.stack(z).mean(0), 2e-6)
    assert not same(confirmed(run, "c", "primal"), run.personal("c"))


def test_measured_from_the_received_model_half_a_step_is_the_mean(three):
    """Δ_i = 2 (w_i - θ) for any ρ, so with η = 1/2 the server's θ is the plain mean of the w_i."""
    run = federate(
        three,
        "fedadmm",
        fedadmm__rho=0.7,
        fedadmm__eta=0.5,
        fedadmm__since="received",
        **OPTIONS,
    )
    for server_round, silo, payload, _ in replies_of(run):
        if server_round == 5:
            theta = run.received(silo, 5)
            expected = 2 * (run.personal(silo) - theta)
            near(payload.models["change"].vector, expected, 2e-6)
    mean = torch.stack([run.personal(silo) for silo in three]).mean(0)
    near(run.shared, mean, 2e-6)


def test_epochs_are_drawn(three):
    """With full batches an epoch is a step: from 1 to 4 of them, not the same in all silos."""
    run = federate(
        three,
        "fedadmm",
        rounds=1,
        local_epochs=4,
        learning_rate=0.1,
        fedadmm__random_epochs=True,
    )
    seen = set()
    for silo in three:  # round 1, where y = 0 and Δ = 2 (w - θ): which of the four is w?
        w = theta = run.received(silo, 1).double().numpy()
        sent = sent_by(run, silo, 0, "change").numpy() / 2 + theta
        distances = []
        for _ in range(4):
            w = w - 0.1 * (gradient(w, *rows_of(three[silo])) + 0.01 * (w - theta))
            distances.append(np.abs(sent - w).max())
        assert min(distances) < 1e-6
        seen.add(int(np.argmin(distances)))
    assert len(seen) > 1


@pytest.mark.parametrize("start", ["own", "received"])
def test_what_is_called_received_is_theta(three, start):
    """With start = own the silo's own model was reported under that name, and as the federation's one model."""
    run = federate(three, "fedadmm", fedadmm__rho=0.2, fedadmm__start=start, **OPTIONS)
    x, y = rows_of(three["a"])
    for r in (2, 5):
        theta = run.received("a", r).double().numpy()
        logits = x @ theta[:9].reshape(3, 3).T + theta[9:]
        loss = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y])
        near(run.values("loss", "a", "received")[r - 1], loss, 1e-5)
