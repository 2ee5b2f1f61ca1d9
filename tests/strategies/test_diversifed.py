"""DiversiFed: its coefficients by hand and against autograd of L_d, the limits, a run with Adam in numpy (A4)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from mixtures import coefficients, some_models
from near import near
from tiny import federate, gradient, initial, random_silos, rows_of, same
from torch.testing import assert_close


def diversity_loss(i, w, models, tau):
    """L_d(w_i) as the paper writes it (eq. 4), the other models held fixed."""
    others = [j for j in range(len(models)) if j != i]
    distance = torch.stack([torch.sqrt(((w - models[j]) ** 2).sum()) for j in others]) / tau
    return torch.log(torch.exp(distance) / torch.exp(distance).sum()).mean()


def one_step(models, tau, step):
    """z_i = w_i - a ∇L_d(w_i) by autograd in float64 (eq. 6)."""
    moved = []
    for i, row in enumerate(models.double()):
        w = row.clone().requires_grad_()
        (grad,) = torch.autograd.grad(diversity_loss(i, w, models.double(), tau), w)
        moved.append(row - step * grad)
    return torch.stack(moved)


# ---- The server's step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("n", [3, 4, 9])
def test_the_closed_form_is_the_gradient_step(n, tau):
    models = some_models(n, scale=0.7, seed=n)
    mixed = coefficients("diversifed", models, tau=tau, step=1.5) @ models
    assert_close(mixed.double(), one_step(models, tau, 1.5), rtol=1e-5, atol=2e-6)


def test_three_models_by_hand():
    """The paper's toy example (fig. 4): w_1 = (0, 0), w_2 = (1, 0) near it, w_3 = (0, 3) far off; τ = 1/2, a = 1/4.

    d_12 = 2, d_13 = 6: softmax s = 1 / (1 + e^4) of w_2. Forces are (1/2 - softmax) / τ along unit vectors:
    z_1 = a 2 ((1/2 - s) (1, 0) - (1/2 - s) (0, 1)): towards w_2, away from w_3.
    ξ_12 = (1/2 - s) / (τ² d_12) = 2 (1/2 - s), ξ_13 = (s - 1/2) / (τ² d_13) = (2/3) (s - 1/2).
    """
    models = torch.tensor([[0.0, 0], [1, 0], [0, 3]])
    found = coefficients("diversifed", models, tau=0.5, step=0.25)
    gap = 0.5 - 1 / (1 + math.exp(4))
    expected = torch.tensor([1 - 0.25 * (2 - 2 / 3) * gap, 0.25 * 2 * gap, -0.25 * gap * 2 / 3])
    near(found[0], expected, 1e-5)
    near((found @ models)[0], torch.tensor([gap / 2, -gap / 2]), 1e-5)


def test_nearer_than_the_soft_average_attracts():
    """Lemma 1: ξ_ij > 0 where softmax_j < 1/(N-1); so the nearest attracts and the farthest repels, always."""
    models = some_models(6, seed=3)
    found = coefficients("diversifed", models)
    distance = torch.cdist(models, models)
    for i in range(6):
        others = [j for j in range(6) if j != i]
        ranked = sorted(others, key=lambda j, i=i: float(distance[i, j]))  # type: ignore[misc]
        signs = [float(found[i, j]) > 0 for j in ranked]
        assert signs[0] and not signs[-1]
        assert signs == sorted(signs, reverse=True)


@pytest.mark.parametrize("n", [1, 2])
def test_one_and_two_models_stay(n):
    """N = 2: the softmax over one distance is 1 = 1/(N-1)."""
    models = some_models(n)
    assert same(coefficients("diversifed", models) @ models, models)


@pytest.mark.parametrize("n", [3, 5, 6])
def test_equidistant_models_stay(n):
    """The corners of a simplex, wherever it lies."""
    models = torch.eye(n) * 2 + torch.linspace(-1, 1, n)
    near(coefficients("diversifed", models) @ models, models)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0, 1e4])
@pytest.mark.parametrize("tau", [0.5, 2.0])
def test_a_step_is_at_most_2_a_over_tau(tau, scale):
    """sum_j |1/(N-1) - softmax_j| <= 2, and each force acts along a unit vector, over τ.

    Far apart the softmax is one-hot: one model repels with (N-2)/(N-1), the others attract with 1/(N-1) each.
    """
    models = some_models(5, scale=scale)
    moved = (
        coefficients("diversifed", models, tau=tau, step=1.0).double() @ models.double()
    ) - models.double()
    assert bool((moved.norm(dim=1) <= 2 / tau * (1 + 1e-4) + 1e-6 * scale).all())
    if scale == 1e4:
        assert float(moved.norm(dim=1).min()) > 0.01 / tau
        found = coefficients("diversifed", models, tau=tau, step=1.0)
        force = found * torch.cdist(models, models) * tau
        assert sorted(force[0, 1:].tolist()) == pytest.approx(
            [-0.75, 0.25, 0.25, 0.25], rel=1e-3
        )


def test_twins_neither_pull_nor_push_each_other():
    """d = 0 has no direction; the third and fourth model act on the twins alike, as softmax and N say."""
    models = some_models(4)
    models[1] = models[0]
    found = coefficients("diversifed", models)
    assert bool(torch.isfinite(found).all())
    assert found[0, 1] == found[1, 0] == 0
    assert found[0, 2:].tolist() == pytest.approx(found[1, 2:].tolist())
    softmax = (torch.cdist(models, models)[0, 1:]).double().softmax(0)
    expected = [
        (1 / 3 - softmax[j - 1]) / (models[0] - models[j]).norm().double() for j in (2, 3)
    ]
    assert found[0, 2:].tolist() == pytest.approx([float(e) for e in expected], rel=1e-4)


def test_near_models_lose_no_digits():
    """Distances of 1e-3 between models of size 100: by differences, not by cancelling squares."""
    base, offsets = some_models(1, scale=100.0), some_models(4, scale=1e-3, seed=5)
    models = (base + offsets).contiguous()
    found = coefficients("diversifed", models, tau=1e-3)
    exact = (models.double()[:, None] - models.double()[None]).norm(dim=2) / 1e-3
    others = exact[0, 1:]
    expected = (1 / 3 - others.softmax(0)) / (1e-3**2 * others)
    assert found[0, 1:].tolist() == pytest.approx(expected.tolist(), rel=1e-3)


# ---- Runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["own", "received"])
def test_rounds_with_adam_in_numpy(three, start):
    """Three rounds of three Adam steps: L_ce in round 1, then + (λ/2a) ||w - z_i||², part of Adam's gradient.

    z by autograd of L_d. Adam (Kingma and Ba): m, v with 0.9 and 0.999, bias-corrected, afresh every round.
    """
    lambda_, step, tau, eta = 1.8, 1.2, 0.6, 0.05
    given = {"lambda": lambda_, "step": step, "tau": tau, "start": start}
    run = federate(
        three,
        "diversifed",
        **{f"diversifed.{k}": v for k, v in given.items()},
        rounds=3,
        local_epochs=3,
        optimizer="adam",
        learning_rate=eta,
    )
    models = np.stack([run.start()] * 3)
    for server_round in range(3):
        z = one_step(torch.from_numpy(models), tau, step).numpy() if server_round else models
        models = np.stack(
            [
                adam(
                    models[i] if start == "own" else z[i],
                    z[i],
                    lambda_ / step if server_round else 0.0,
                    file,
                    eta,
                )
                for i, file in enumerate(three.values())
            ]
        )
        if server_round < 2:
            for i, silo in enumerate(three):
                sent = run.sent_to(silo, server_round + 2)["mixture"].vector.numpy()
                expected = one_step(torch.from_numpy(models), tau, step)[i].numpy()
                near(sent, expected, 2e-4)
    for i, silo in enumerate(three):
        near(run.personal(silo), models[i], 5e-4)


def adam(w, centre, weight, file, eta):
    """Three full-batch steps on the cross-entropy plus (weight/2) ||w - centre||²."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t in range(1, 4):
        g = gradient(w, *rows_of(file)) + weight * (w - centre)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - eta * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return w


def test_two_silos_only_hold_on_to_themselves(two):
    """N = 2: z_i = w_i, sent back bit for bit; what is left is a proximal term on the silo's own last model."""
    run = federate(two, "diversifed", rounds=3, local_epochs=2, diversifed__lambda=0.7)
    for silo, file in two.items():
        w = run.start()
        for server_round in range(3):
            centre = w
            for _ in range(2):
                w = (
                    w
                    - gradient(w, *rows_of(file))
                    - (0.7 * (w - centre) if server_round else 0.0)
                )
        near(run.personal(silo), w, 1e-5)
        assert same(run.sent_to(silo, 4)["mixture"].vector, run.personal(silo))


def test_untrained_silos_with_one_start_stay(tmp_path):
    """All models identical (no training at all): 0 / 0 is left out, nothing moves."""
    files = random_silos(tmp_path, [6, 10, 8, 5])
    run = federate(files, "diversifed", rounds=3, local_epochs=0)
    start = initial(run.settings, 3, 3)
    for silo in files:
        assert same(run.personal(silo), start)
        near(run.sent_to(silo, 4)["mixture"].vector, start, 1e-5)
