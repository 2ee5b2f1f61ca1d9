"""FedNova: two silos by hand, rounds in numpy with unequally many steps, its special cases and refusals (B45)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from near import near
from tiny import federate, gradient, initial, round_of, rows_of, settings_of, write_silo

from partitions.common.errors import UserError
from strategies.fednova import gradients_in


def test_two_silos_by_hand(pair, zero_start):
    """One round of batches of one, η = 1, from 0; weights (u, -u), biases (v, -v).

    a takes one step, to (1, 1/2). b's three records are equal, u = v = -s: its logit difference is -4 s, and each step
    adds 1 / (1 + e^(4 s)) to s, three times from 0. d_a = (1, 1/2), d_b = -(s, s)/3, p = (1/4, 3/4), and
    t_eff = 1/4 + 9/4 = 5/2.
    """
    run = federate(pair, "fednova", rounds=1, batch_size=1)
    s = 0.0
    for _ in range(3):
        s += 1 / (1 + math.exp(4 * s))
    u, v = (2.5 * (d / 4 - s / 4) for d in (1, 0.5))
    near(run.personal("b"), [-s, s, -s, s])
    near(run.shared, [u, -u, v, -v])


@pytest.fixture
def repeated(tmp_path):
    """Silos of one row each, 2, 7 and 5 times: every batch of a silo has the same gradient."""
    rng = np.random.default_rng(4)
    return {
        name: write_silo(
            tmp_path / f"{name}.npz", np.repeat(rng.normal(size=(1, 3)), n, 0), [k] * n, 3
        )
        for k, (name, n) in enumerate({"a": 2, "b": 7, "c": 5}.items())
    }


STEPS = {"a": 2, "b": 8, "c": 6}  # of two epochs of batches of 2


@pytest.mark.parametrize(
    "momentum, mu, decay",
    [(0.0, 0.0, 1.0), (0.6, 0.0, 0.5), (1.0, 0.0, 1.0), (0.0, 0.9, 1.0), (0.0, 0.9, 0.5)],
)
def test_rounds_of_unequally_many_steps_in_numpy(repeated, momentum, mu, decay):
    """Four rounds; b is away in round 2. a_i is found here by a recursion: the model's derivative by the gradients.

    The rate of round r is 0.2 decay^(r - 1), in the steps as in a_i.
    """
    run = federate(
        repeated,
        "fednova",
        rounds=4,
        local_epochs=2,
        batch_size=2,
        learning_rate=0.2,
        lr_decay=decay,
        momentum=momentum,
        fednova__mu=mu,
        weight_cap=0,
        absent={("b", 2)},
    )
    w = run.start()
    for r in range(1, 5):
        eta = 0.2 * decay ** (r - 1)
        came = [s for s in repeated if (s, r) != ("b", 2)]
        n = {s: len(rows_of(repeated[s])[1]) for s in came}
        total, effective = np.zeros_like(w), 0.0
        for silo in came:
            local, velocity, a, b = w.copy(), np.zeros_like(w), 0.0, 0.0
            for _ in range(STEPS[silo]):
                g = gradient(local, *rows_of(repeated[silo])) + mu * (local - w)
                velocity, b = momentum * velocity + g, momentum * b + 1 - eta * mu * a
                local, a = local - eta * velocity, a + b
            p = n[silo] / sum(n.values())
            total += p * (local - w) / a
            effective += p * (STEPS[silo] if mu else a)
        w = w + effective * total
    near(run.shared, w, 2e-5)


def test_the_weights_of_gradients_by_hand():
    """Three steps: r = 1/2 has 1 + (1 + 1/2) + (1 + 1/2 + 1/4); η μ = 1/2 has 1 + 1/2 + 1/4; r = 1 has 1 + 2 + 3."""
    assert gradients_in(3, 0.5, 0.0) == 4.25
    assert gradients_in(3, 0.0, 0.5) == 1.75
    assert gradients_in(3, 1.0, 0.0) == 6
    assert gradients_in(3, 0.0, 0.0) == 3


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equal_steps_are_fedavg(three, momentum):
    options = {"rounds": 3, "local_epochs": 4, "learning_rate": 0.2}
    plain, run = (
        federate(three, s, momentum=momentum, **options) for s in ("fedavg", "fednova")
    )
    near(run.shared, plain.shared)


def test_steps_as_many_as_samples_go_along_the_unweighted_mean(repeated):
    """Batches of one: t_i = n_i, and w moves by N sum p_i² times the step to the unweighted mean."""
    run = federate(repeated, "fednova", rounds=1, batch_size=1, learning_rate=0.1)
    start = initial(run.settings, 3, 3)
    mean = torch.stack([run.personal(silo) for silo in repeated]).mean(0)
    scale = 3 * sum((n / 14) ** 2 for n in (2, 7, 5))
    near(run.shared, start + scale * (mean - start))


def test_with_a_proximal_term_it_goes_further_than_fedprox(three):
    """Equal t = 3, η μ = 0.1: t/a with a = 1 + 0.9 + 0.81."""
    options = {"rounds": 1, "local_epochs": 3, "learning_rate": 0.2}
    prox = federate(three, "fedprox", fedprox__mu=0.5, **options)
    run = federate(three, "fednova", fednova__mu=0.5, **options)
    start = initial(run.settings, 3, 3)
    step = prox.shared - start
    near(run.shared, start + 3 / 2.71 * step)


def test_a_silo_that_counts_too_many_steps_is_left_out(three):
    """a says 10⁹ steps in round 2: with them the others' step would be 10⁸ times as long."""

    def lie(silo, message, reply):
        if silo == "a" and round_of(message) == 2 and message.metadata.message_type == "train":
            config = reply.content["config"]
            config["number.steps"] = 10**9
        return reply

    options = {"strategy": "fednova", "rounds": 2, "learning_rate": 0.2}
    run = federate(three, **options, prepare=lambda grid: setattr(grid, "after", lie))
    without = federate(three, **options, absent={("a", 2)})
    assert [(r.silo, r.round) for r in run.rows if r.metric == "rejected"] == [("a", 2)]
    assert torch.equal(run.shared, without.shared)


def test_in_the_length_of_the_step_a_silo_counts_as_its_capped_samples(repeated):
    """weight-cap = 1: b's 7 samples count as the median's 5, in p_i and in t_eff; its own step is over its 7 steps."""
    run = federate(repeated, "fednova", rounds=1, batch_size=1, learning_rate=0.1, weight_cap=1)
    start = initial(run.settings, 3, 3)
    p, t = {"a": 2 / 12, "b": 5 / 12, "c": 5 / 12}, {"a": 2, "b": 7, "c": 5}
    steps = [p[s] * (run.personal(s) - start) / t[s] for s in repeated]
    effective = (2 * 2 + 5 * 5 + 5 * 5) / 12
    near(run.shared, start + effective * torch.stack(steps).sum(0))


@pytest.mark.parametrize(
    "given", [{"optimizer": "adam"}, {"momentum": 0.5, "fednova__mu": 0.1}]
)
def test_what_has_no_weights_is_refused(three, given):
    with pytest.raises(UserError, match=r"^fednova: the weights of the gradients [^\n]*$"):
        federate(three, "fednova", rounds=1, **given)


def test_ala_is_refused(three):
    """A mixture as the start would be counted as steps."""
    with pytest.raises(UserError, match=r"^ala = true: fednova has no received model to mix"):
        settings_of(three, strategy="fednova", ala=True)
