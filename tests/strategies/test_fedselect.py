"""FedSelect: two silos by hand, rounds in numpy with growth and an absence, what no silo shares (B47)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from near import near
from tiny import federate, rows_of, settings_of
from two_layers import DEEP, deep_gradient, sent_by

from partitions.common.errors import UserError
from strategies.fedcac import unpack_bits
from strategies.fedselect import grow_mask

WEIGHTS = (slice(0, 12), slice(16, 28))  # of fc1 and fc2; the others are biases


def test_two_silos_by_hand(pair, zero_start):
    """Three rounds of one pass of one step of 1, from 0; all weights become personal after the second round.

    Rounds 1 and 2 are FedAvg's without weights: w = (1/4, 0); errors q = 1 / (1 + e) and r = 1 / (1 + e^(-1/2)), w =
    (1/4 + (2 q - r)/2, (q - r)/2) =: (u, v), which is received whole, as m_i was empty. Round 3, first the weights: a
    goes to u_a = u + 2 s with s = 1 / (1 + e^(2 (2 u + v))), then the bias with its error at (u_a, v). The weights of w
    stay, as none shares them; the bias is the mean.
    """
    own = {"passes": 1, "every": 1, "share": 1.0, "limit": 1.0}
    run = federate(pair, "fedselect", rounds=3, **{f"fedselect.{k}": x for k, x in own.items()})
    q, r = 1 / (1 + math.e), 1 / (1 + math.exp(-0.5))
    u, v = 0.25 + (2 * q - r) / 2, (q - r) / 2
    u_a = u + 2 / (1 + math.exp(2 * (2 * u + v)))
    v_a = v + 1 / (1 + math.exp(2 * (2 * u_a + v)))
    u_b = u - 1 / (1 + math.exp(-2 * (u + v)))
    v_b = v - 1 / (1 + math.exp(-2 * (u_b + v)))
    mean = (v_a + v_b) / 2
    near(run.personal("a"), [u_a, -u_a, v_a, -v_a])
    near(run.personal("b"), [u_b, -u_b, v_b, -v_b])
    near(run.shared, [u, -u, mean, -mean])
    # What is sent in the places of personal weights is the server's own number.
    sent = sent_by(run, "a", -1)
    near(sent[:2], [u, -u])


@pytest.mark.parametrize("average", ["silos", "samples"])
def test_rounds_in_numpy(three, average):
    """Six rounds of two passes of one full batch each; m_i grows after rounds 3 and 5; b is away in round 3."""
    eta, share = 0.3, 0.3
    own = {"passes": 2, "every": 2, "share": share, "limit": 0.4, "average": average}
    run = federate(
        three,
        "fedselect",
        rounds=6,
        **{**DEEP, "learning_rate": eta},
        **{f"fedselect.{k}": x for k, x in own.items()},
        absent={("b", 3)},
    )
    w = run.received("a", 1).double().numpy()
    model, snapshot = dict.fromkeys(three, w), dict.fromkeys(three, w)
    mask = dict.fromkeys(three, np.zeros(31, bool))
    taken = dict(mask)
    for r in range(1, 7):
        total, count = np.zeros(31), np.zeros(31)
        for silo in three:
            if (silo, r) == ("b", 3):
                continue
            x, y = rows_of(three[silo])
            v = np.where(taken[silo], model[silo], w)
            for _ in range(2):
                v = v - eta * deep_gradient(v, x, y) * mask[silo]
                v = v - eta * deep_gradient(v, x, y) * ~mask[silo]
            model[silo] = v
            weight = len(y) if average == "samples" else 1
            total += weight * v * ~mask[silo]
            count += weight * ~mask[silo]
            taken[silo] = mask[silo]
            if r in (3, 5):
                more = mask[silo].copy()
                for part in WEIGHTS:
                    free = np.flatnonzero(~mask[silo][part])
                    if 1 - len(free) / 12 <= 0.4:
                        change = np.abs(v - snapshot[silo])[part][free]
                        more[
                            part.start + free[np.argsort(-change)[: int(share * len(free))]]
                        ] = 1
                mask[silo], snapshot[silo] = more, v
        w = np.where(count > 0, total / np.maximum(count, 1), w)
    near(run.shared, w, 1e-5)
    for silo in three:
        near(run.personal(silo), model[silo], 1e-5)
        kept = unpack_bits(run.kept(silo)["personal-mask"], 31).numpy()
        assert (kept == mask[silo]).all() and kept.sum() == (6 if silo == "b" else 10)


def test_the_personal_part_overshoots_its_limit(two):
    """25 % of the rest: 25, 43.8, 57.8, 68.4, 76.3 and 82.2 %, then it stays; rounded down."""
    run = federate(two, "fedselect", rounds=1, model="mlp", mlp__hidden="250")
    layout = run.strategy.layout
    mask = torch.zeros(layout.size, dtype=torch.bool)
    change = torch.randn(layout.size, generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(8):
        mask = grow_mask(layout, mask, change, 0.25, 0.8)
        found.append(float(mask[:750].float().mean()))
    near(found, [0.25, 0.438, 0.578, 0.684, 0.763, 0.822, 0.822, 0.822], 5e-3)
    assert not mask[750:1000].any()


def test_weight_decay_would_move_what_is_fixed(two):
    with pytest.raises(UserError, match=r"^weight-decay = 0.1: fedselect holds [^\n]*= 0$"):
        federate(two, "fedselect", rounds=1, weight_decay=0.1)
    with pytest.raises(UserError, match="dp = true: not with fedselect"):
        settings_of(two, strategy="fedselect", dp=True)
