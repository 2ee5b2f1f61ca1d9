"""The server's optimisers: two silos by hand, rounds in numpy, and where they are FedAvg or a sign (B43)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from near import near
from tiny import federate, gradient, initial, rows_of, same

ADAPTIVE = ("fedadagrad", "fedadam", "fedyogi")


def test_momentum_by_hand(pair, zero_start):
    """Two rounds of one full-batch step of 1 from 0, s = 1, b = 1/2; weights (u, -u), biases (v, -v).

    Round 1, as in test_fedavg: a at (1, 1/2), b at (-1/2, -1/2), with weights 1/4 and 3/4 D = (-1/8, -1/4), and w = D.
    Round 2, a: logit difference 2 (2 u + v) = -1, its step (2 (1 - q), 1 - q) with q = 1 / (1 + e); b: difference
    2 (u + v) = -3/4, its step -(r, r) with r = 1 / (1 + e^(3/4)). D2 = ((1 - q)/2 - 3 r/4, (1 - q)/4 - 3 r/4), and
    w = D + (D/2 + D2).
    """
    run = federate(pair, "fedavgm", rounds=2, fedavgm__momentum=0.5)
    q, r = 1 / (1 + math.e), 1 / (1 + math.exp(0.75))
    d = (-1 / 8, -1 / 4)
    d2 = ((1 - q) / 2 - 3 * r / 4, (1 - q) / 4 - 3 * r / 4)
    u, v = (1.5 * d[k] + d2[k] for k in (0, 1))
    near(run.shared, [u, -u, v, -v])


@pytest.mark.parametrize("name", ADAPTIVE)
@pytest.mark.parametrize("start", ["tau", "zero"])
def test_adaptive_steps_by_hand(pair, name, start, zero_start):
    """Round 1 with D = (-1/8, -1/4) of the weights and the biases, η = 1, b1 = b2 = 1/2, t = 1/4, v0 = 1/16 or 0.

    m = D/2. Adagrad: v = v0 + D². Adam: v = (v0 + D²)/2. Yogi: v = v0 - (D²/2) sign(v0 - D²): of the weights D² = 1/64
    is less than 1/16, so v = 1/16 - 1/128; of the biases it is equal, the sign is 0, v = 1/16. From v0 = 0: D²/2.
    """
    options = {f"{name}.server-learning-rate": 1.0, f"{name}.beta-1": 0.5, f"{name}.tau": 0.25}
    if name != "fedadagrad":
        options[f"{name}.beta-2"] = 0.5
    run = federate(pair, name, rounds=1, **options, **{f"{name}.start": start})
    v0 = 1 / 16 if start == "tau" else 0.0
    yogi = (1 / 16 - 1 / 128, 1 / 16) if v0 else (1 / 128, 1 / 32)
    found = []
    for k, d in enumerate((-1 / 8, -1 / 4)):
        v = {"fedadagrad": v0 + d * d, "fedadam": (v0 + d * d) / 2, "fedyogi": yogi[k]}[name]
        found += [d / 2 / (math.sqrt(v) + 0.25)]
    u, b = found
    near(run.shared, [u, -u, b, -b])


def moved(name, w, d, kept, t):
    """One server step in float64 with η = 0.3, b1 = b = 0.6, b2 = 0.8, t = 0.02; ``kept`` is m and v, or u."""
    if name.startswith("fedavgm"):
        kept[0] = 0.6 * kept[0] + d
        return w + 0.3 * (d + 0.6 * kept[0] if "nesterov" in name else kept[0])
    kept[0] = 0.6 * kept[0] + 0.4 * d
    if name == "fedadagrad":
        kept[1] = kept[1] + d**2
    elif name == "fedyogi":
        kept[1] = kept[1] - 0.2 * d**2 * np.sign(kept[1] - d**2)
    else:
        kept[1] = 0.8 * kept[1] + 0.2 * d**2
    corrected = name.endswith("bias")
    eta = 0.3 * (math.sqrt(1 - 0.8 ** (t + 1)) / (1 - 0.6 ** (t + 1)) if corrected else 1.0)
    return w + eta * kept[0] / (np.sqrt(kept[1]) + 0.02)


@pytest.mark.parametrize("average", ["samples", "silos"])
@pytest.mark.parametrize(
    "name", ["fedavgm", "fedavgm nesterov", *ADAPTIVE, "fedadam correct-bias"]
)
def test_rounds_in_numpy(three, name, average):
    """Five rounds of two full-batch steps; b is away in rounds 2 and 4. Flower's bias: 0.742 η in round 1 of its own
    b1 and b2, checked beside."""
    method, _, flag = name.partition(" ")
    first, second = ("momentum", "") if method == "fedavgm" else ("beta-1", "tau")
    own = {"server-learning-rate": 0.3, first: 0.6, "average": average}
    own |= {second: 0.02} if second else {}
    own |= {"beta-2": 0.8} if method in ("fedadam", "fedyogi") else {}
    own |= {flag: True} if flag else {}
    run = federate(
        three,
        method,
        rounds=5,
        local_epochs=2,
        learning_rate=0.4,
        absent={("b", 2), ("b", 4)},
        **{f"{method}.{k}": value for k, value in own.items()},
    )
    w = run.start()
    kept = [np.zeros_like(w), np.full_like(w, 0.02**2)]
    for t in range(1, 6):
        came = [s for s in three if s != "b" or t % 2]
        steps, weights = [], []
        for silo in came:
            x, y = rows_of(three[silo])
            local = w.copy()
            for _ in range(2):
                local = local - 0.4 * gradient(local, x, y)
            steps.append(local - w)
            weights.append(len(y) if average == "samples" else 1)
        d = np.average(steps, axis=0, weights=weights)
        w = moved(name, w, d, kept, t)
    near(run.shared, w, 2e-5)
    near(math.sqrt(1 - 0.99**2) / (1 - 0.9**2), 0.742, 5e-4)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_large_tau_is_fedavg(three, name):
    """b1 = 0, η = τ = 10⁶, from v = 0: m / (sqrt(v) + τ) is D/τ to 10⁻⁶ of it."""
    options = {"rounds": 3, "batch_size": 4}
    own = {"server-learning-rate": 1e6, "tau": 1e6, "beta-1": 0.0, "start": "zero"}
    plain = federate(three, "fedavg", **options)
    run = federate(three, name, **options, **{f"{name}.{k}": v for k, v in own.items()})
    near(run.shared, plain.shared, 2e-5)


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
def test_without_memory_and_tau_it_is_a_sign(three, name):
    """b1 = b2 = 0, τ = 10⁻¹², v = 0: every number moves by η = 0.03, in the direction of FedAvg's step."""
    own = {"server-learning-rate": 0.03, "tau": 1e-12, "beta-1": 0.0, "beta-2": 0.0}
    run = federate(three, name, rounds=1, **{f"{name}.{k}": v for k, v in own.items()})
    plain = federate(three, "fedavg", rounds=1)
    start = initial(run.settings, 3, 3)
    step = (plain.shared - start).sign()
    moved_by = run.shared - start
    near(moved_by, 0.03 * step)


def test_running_statistics_are_averaged(three, tiny_bn):
    """A step of a variance of 0.05 by D = -0.03 could be below 0: they are FedAvg's to the bit in round 1."""
    options = {"model": "tiny-bn", "learning_rate": 0.1, "rounds": 1}
    plain = federate(three, "fedavg", **options)
    run = federate(three, "fedadam", **options)
    assert same(plain.held["buffers"], run.held["buffers"])
