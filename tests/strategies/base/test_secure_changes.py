"""Methods that send something else in a secure sum than without one: what their servers make of it is the same."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from flwr.app import Error, Message
from hypothesis import example, given, settings
from hypothesis import strategies as st
from near import near
from tiny import federate, random_silos, round_of, train_replies, write_silo
from two_layers import DEEP, confirmed

import strategies.fedlama
from strategies.base.aggregation.secure import add_integers
from strategies.base.aggregation.spread import COUNT, gather_sums, spread
from strategies.playerfl import PLayerFL

SECURE = {"secure_aggregation": True}
OPTIONS = {**DEEP, "rounds": 7, "local_epochs": 2, "batch_size": 4}


def disturbed(grid):
    """b is away in rounds 2 and 3; the reply of c's round 4 is lost, which the silo does not know."""

    def lose(silo, message, reply):
        lost = message.metadata.message_type == "train" and silo == "c"
        if lost and round_of(message) == 4:
            return Message(Error(1, "lost on the way"), reply_to=message)
        return reply

    grid.absent, grid.after = {("b", 2), ("b", 3)}, lose


def both(files, **changes):
    """The run without and with secure sums."""
    return (
        federate(files, **{**OPTIONS, **changes}, robust="none"),
        federate(files, **{**OPTIONS, **changes}, **SECURE),
    )


def close(plain, summed):
    for key, vector in summed.held.items():
        near(plain.held[key], vector, 2e-6)
    for silo in ("a", "b", "c"):
        near(summed.personal(silo), plain.personal(silo), 2e-6)


@pytest.mark.parametrize("own", [{}, {"personal": "none"}, {"rho": 0.0}], ids=str)
def test_fedapm_adds_steps_of_z(three, own):
    """Eq. 8 is u' = (1/m) sum_i z_i over all m, absent ones with their last z_i. With S the silos that came,

        u' = u + (1/m) sum_{i in S} (z_i' - z_i) = u + (|S|/m) mean_{i in S} (z_i' - z_i),

    if z_i is what the server counted last, and u = (1/m) sum_i z_i before: so it is at the start, where all are u.
    """
    changes = {f"fedapm__{key}": value for key, value in {"rho": 0.2, **own}.items()}
    plain, summed = both(three, strategy="fedapm", rounds=5, prepare=disturbed, **changes)
    close(plain, summed)
    assert not summed.strategy.state.z


@pytest.mark.parametrize("own", [{}, {"phi": 3, "wait": 3}, {"average": "silos"}], ids=str)
def test_fedlama_has_the_spread_of_layers(tmp_path, own, monkeypatch):
    """With c the last average, which all know, and u = sum_i p_i x_i over any silos that came,

        sum_i p_i ||x_i - u||² = sum_i p_i ||x_i - c||² - ||u - c||².

    A silo takes over what was averaged since its last counted reply, as the server picks it without secure sums.
    """
    files = random_silos(tmp_path, [6, 10, 9], columns=12, classes=2)
    seen = []
    choose = strategies.fedlama.choose_intervals

    def look(layout, excess, phi):
        seen.append(excess)
        return choose(layout, excess, phi)

    monkeypatch.setattr(strategies.fedlama, "choose_intervals", look)
    changes = {f"fedlama__{key}": value for key, value in own.items()}
    changes |= {"mlp__hidden": "8"}
    plain, summed = both(files, strategy="fedlama", prepare=disturbed, **changes)
    close(plain, summed)
    assert plain.strategy.state.numbers == summed.strategy.state.numbers
    half = len(seen) // 2
    assert half >= 1 and sum(seen[0]) > 1e-3
    for one, other in zip(seen[:half], seen[half:], strict=True):
        assert list(other) == pytest.approx(list(one), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize(
    "method, server, silos",
    [
        ("scaffold", "control", lambda of: of("control")),
        ("feddyn", "h", lambda of: of("dual")),
        ("fedapm", "global", lambda of: of("z")),
        ("fedadmm", "global", lambda of: of("primal") + of("dual") / 0.2),
    ],
)
def test_a_silo_takes_over_the_step_that_was_cut(three, method, server, silos):
    """What the server has is the mean of what silos have, if they take over what they sent.

    These are c_i, g_i, z_i, and w_i + y_i / rho. Here C cuts every step.
    """
    rho = {f"{method}__rho": 0.2} if method in ("fedapm", "fedadmm") else {}
    cut = {**OPTIONS, "rounds": 4, "learning_rate": 0.3, "secure_clip": 0.01, **SECURE}
    run = federate(three, method, **cut, **rho)

    def mean(name):
        return torch.stack([confirmed(run, silo, name) for silo in three]).mean(0)

    found = run.held[server]
    near(silos(mean), found)


def test_fedlama_sends_squares_only_where_intervals_are_adjusted(three):
    run = federate(three, "fedlama", fedlama__phi=3, **{**OPTIONS, "rounds": 4}, **SECURE)
    sizes = {
        number: reply.content.array_records["masked"]["sum"].shape[0]
        for (_, number), reply in train_replies(run.grid)
    }
    assert sizes == {1: 31, 2: 31, 3: 31 + 4 * COUNT, 4: 7}


@pytest.mark.parametrize("absent", [set(), {("b", 1)}], ids=["all", "one is away"])
@pytest.mark.parametrize("method", ["player-fl", "player-fl-random"])
def test_player_fl_has_the_mean_of_the_sensitivities(tmp_path, method, absent, monkeypatch):
    """(1/|S|) sum_{i in S} s_i: each s_i has the weight 1/N in the sum, which is divided by |S|/N.

    It is not that of the models, n_i / n. No sensitivity leaves as a number of its own.
    """
    files = random_silos(tmp_path, [6, 13, 8])
    seen = []
    decide = PLayerFL.decide

    def look(self, table):
        seen.append(table)
        return decide(self, table)

    monkeypatch.setattr(PLayerFL, "decide", look)
    own = {"strategy": method, f"{method}.combine": "mean", f"{method}.threshold": 1.2}

    def prepare(grid):
        grid.absent = absent

    plain, summed = both(files, prepare=prepare, mlp__hidden="4,5", rounds=3, **own)
    close(plain, summed)
    assert plain.strategy.state.numbers == summed.strategy.state.numbers
    singles, mean = np.array(seen[0]), seen[1]
    assert singles.shape == (3 - len(absent), 3) and len(mean) == 1
    assert mean[0] == pytest.approx(singles.mean(0).tolist(), rel=1e-5)
    for _, reply in train_replies(summed.grid):
        assert "sensitivity" not in reply.content["config"]


def test_fedproto_leaves_out_a_silo_that_has_not_every_class(tmp_path):
    """The mean of a class is over all silos of the sum: nobody has to count how many have it. What is seen of the
    silo: that a class is missing, and not which."""
    rows = np.random.default_rng(1).normal(size=(8, 3))
    labels = {
        "a": [0, 1, 2, 0, 1, 2, 0, 1],
        "b": [0, 1] * 4,
        "c": [2, 1, 0, 2, 1, 0, 2, 2],
        "d": [0, 1, 2, 2] * 2,
    }
    files = {
        silo: write_silo(tmp_path / f"{silo}.npz", rows + place, of, classes=3)
        for place, (silo, of) in enumerate(labels.items())
    }
    options = {**OPTIONS, "strategy": "fedproto", "rounds": 2}
    run = federate(files, **options, **SECURE)
    assert set(run.strategy.state.counted) == {"a", "c", "d"}
    plain = federate({k: v for k, v in files.items() if k != "b"}, **options, robust="none")
    near(run.held["prototypes"], plain.held["prototypes"], 1e-5)
    refused = [r for _, r in run.grid.traffic if r.has_error()]
    assert len(refused) == 2
    for reply in refused:
        reason = str(reply.error.reason)
        assert "b: fedproto with secure-aggregation = true needs" in reason
        assert not re.search(r"\d", reason)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 1e9), min_size=3, max_size=3), min_size=3, max_size=100),
    st.integers(0, 2**32 - 1),
)
@example([[2.0**40, 1e-17, 0.0]] * 100, 0)
def test_a_sum_of_any_magnitudes(numbers, seed):
    """Exact to N 2^-69, however large the numbers are, and nothing but the sum.

    Silos with other numbers of the same sum give the same integers, up to the rounding: no scale shows a single silo.
    """
    weights = np.random.default_rng(seed).integers(1, 5, len(numbers))
    shares = (weights / weights.sum()).tolist()
    parts = [[share * x for x in one] for share, one in zip(shares, numbers, strict=True)]

    def opened(of):
        return add_integers([spread(torch.tensor(one, dtype=torch.float64)) for one in of])

    exact = [sum(map(Fraction, column)) for column in zip(*parts, strict=True)]
    found = gather_sums(opened(parts)).tolist()
    for one, other in zip(found, exact, strict=True):
        assert abs(Fraction(one) - other) <= len(parts) * Fraction(1, 2**69) + other / 2**50
    alike = [[float(total / len(parts)) for total in exact]] * len(parts)
    difference = (opened(parts).long() - opened(alike).long() + 2**31) % 2**32 - 2**31
    scales = 2.0**-12 * 2.0 ** (20 * torch.arange(COUNT, dtype=torch.float64))
    rounding = torch.tensor([float(total) for total in exact])[:, None] * scales * 2.0**-44
    assert bool((difference.view(-1, COUNT).abs() <= len(parts) + 1 + rounding).all())
