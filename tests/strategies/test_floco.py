"""Floco: places in the simplex and a round by hand, rounds in double precision, and its one corner (B37)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from near import near
from tiny import Numbers, federate, initial, random_silos, rows_of, same, write_silo
from two_layers import DEEP, deep_gradient, rounds_trained

from strategies.floco import FlocoClient, energy, silo_points


def test_places_on_a_line_by_hand():
    """Scores are (x, 0) with x = -2, 0 and 2, and β (1 + x/ζ, 1 - x/ζ) / 2, or a corner from |x| = ζ on.

    With ζ <= 1 < 2 two silos are at corners and the middle one is between: no other ζ spreads them wider.
    """
    steps = torch.tensor([[3.0, 1.0], [5.0, 1.0], [7.0, 1.0]]).double()
    places = silo_points(steps, 2)
    assert places.tolist() == [[0, 1], pytest.approx([0.5, 0.5]), [1, 0]]
    assert silo_points(steps[:1], 3).tolist() == [pytest.approx([1 / 3] * 3)]


def test_two_silos_by_hand(tmp_path, monkeypatch, zero_start):
    """One step of 1 from 0 at α = (3/4, 1/4), x = 1: with g = p - share of classes, dW_m = α_m g and db = g.

    a has class 0 alone, g = (-2/3, 1/3, 1/3); b has 1 and 2 alike, g = (1/3, -1/6, -1/6). The mean is
    (-1/6, 1/12, 1/12). Steps received - sent are g times α: their axis is (1, -1/2, -1/2) times α, as its largest entry
    is positive, so b has the larger score and the first corner.
    """
    files = {
        "a": write_silo(tmp_path / "a.npz", [[1], [1]], [0, 0], 3),
        "b": write_silo(tmp_path / "b.npz", [[1], [1]], [1, 2], 3),
    }
    monkeypatch.setattr(FlocoClient, "draw_point", lambda self: torch.tensor([0.75, 0.25]))
    run = federate(files, "floco", rounds=1, floco__corners=2, floco__tau=1)
    mean = np.array([-1 / 6, 1 / 12, 1 / 12])
    expected = np.concatenate([-0.75 * mean, -0.25 * mean, -mean])
    near(run.shared, expected)
    assert run.sent_to("a", 2)["point"].vector.tolist() == [0, 1]
    assert run.sent_to("b", 2)["point"].vector.tolist() == [1, 0]
    assert run.personal("a")[-2:].tolist() == [0.5, 0.5]


def places(steps):
    """α of two corners: axes from the covariance, the nearest point by bisection, the energy by loops."""
    apart = steps - steps.mean(0)
    axes = np.linalg.eigh(apart.T @ apart)[1][:, ::-1][:, :2]
    axes *= np.sign(axes[np.abs(axes).argmax(0), [0, 1]])
    scores, best, least = apart @ axes, steps[:, :2], np.inf
    for size in np.linspace(1e-4, 1, 1000):
        low, high = scores.max(1) - size, scores.max(1)
        for _ in range(60):
            middle = (low + high) / 2
            above = np.maximum(scores - middle[:, None], 0).sum(1) > size
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        found = np.maximum(scores - low[:, None], 0) / size
        pairs = [(i, j) for i in range(len(found)) for j in range(i)]
        value = sum(1 / max(((found[i] - found[j]) ** 2).sum(), 1e-8) for i, j in pairs)
        if value < least * (1 - 1e-9):
            best, least = found, value
    return best


def head_at(w, point):
    """The plain network of w = (body, two corners, bias) at a point."""
    corners = w[16:40].reshape(2, 12)
    return np.concatenate([w[:16], point @ corners, w[40:43]])


@pytest.mark.parametrize("away", ["", "b"])
def test_rounds_in_numpy(three, monkeypatch, away):
    """Four rounds of two full-batch steps, regions after two; ``away`` is absent then, and stays without one."""
    drawn: dict[tuple[str, int], list[Numbers]] = {}
    draw = FlocoClient.draw_point

    def recorded(self):
        point = draw(self)
        drawn.setdefault((self.silo.name, self.round), []).append(point.double().numpy())
        return point

    monkeypatch.setattr(FlocoClient, "draw_point", recorded)
    own = {"floco.corners": 2, "floco.tau": 2, "floco.rho": 0.2}
    run = federate(three, "floco", rounds=4, local_epochs=2, **own, absent={(away, 2)}, **DEEP)
    w = run.received("a", 1).double().numpy()
    plain = initial(run.settings, 3, 3)
    assert same(torch.from_numpy(w[:28]).float(), plain[:28])
    middle = np.full(2, 0.5)
    points = dict.fromkeys(three, middle)
    for r in range(1, 5):
        ends, present = [], [silo for silo in three if (silo, r) != (away, 2)]
        for silo in present:
            x, y = rows_of(three[silo])
            end = w.copy()
            assert len(drawn[silo, r]) == 2
            for point in drawn[silo, r]:
                assert r <= 2 or silo == away or abs(point - points[silo]).sum() <= 0.2 + 1e-6
                assert point.sum() == pytest.approx(1, abs=1e-6) or r > 2
                g = deep_gradient(head_at(end, point), x, y)
                end -= 0.3 * np.concatenate([g[:16], np.outer(point, g[16:28]).ravel(), g[28:]])
            ends.append(end)
            if r == 4:
                expected = np.concatenate([end, points[silo]])
                near(run.personal(silo), expected, 1e-4)
        if r == 2:
            steps = np.array([w - end for end in ends])[:, 16:40]
            points |= dict(zip(present, places(steps), strict=True))
        weights = [len(rows_of(three[silo])[1]) for silo in present]
        w = np.average(ends, axis=0, weights=weights)
        for silo in three.keys() - {away if r == 1 else ""}:
            sent = run.sent_to(silo, r + 1)
            assert ("point" in sent) == (r >= 2 and silo != away)
            if "point" in sent:
                near(sent["point"].vector, points[silo], 1e-4)
    near(run.shared, w, 1e-4)


def test_all_silos_train_in_the_round_of_the_regions(tmp_path):
    files = random_silos(tmp_path, dict.fromkeys("abcd", 6))
    run = federate(files, "floco", rounds=3, participation=0.25, floco__tau=2, **DEEP)
    trained = [rounds_trained(run, silo) for silo in files]
    assert all(2 in rounds for rounds in trained)
    assert sorted(r for rounds in trained for r in rounds) == [1, 2, 2, 2, 2, 3]
    assert {len(run.sent_to(silo, 4)["point"].vector) for silo in files} == {10}


def test_the_energy_of_points_by_hand():
    """Distances of 5, 10 and 5, as of (0, 0), (3, 4) and (6, 8): 1/25 + 1/100 + 1/25."""
    points = torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]]).double()
    assert energy(points) == pytest.approx(0.09)
