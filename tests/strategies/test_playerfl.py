"""PLayer-FL and PLayer-FL-Random: sensitivities and cuts by hand, the runs in numpy, the equivalences (A5)."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
from tiny import SHORT, comparable, federate, initial, rows_of, same
from two_layers import DEEP, FC1, FC2, deep_gradient, replies_of, start_at

from strategies.base.robust import weighted_mean
from strategies.base.transport.payload import decode
from strategies.playerfl import PLayerClient, PLayerFL, PLayerSettings, choose_cut, random_cut

SLIDES = {"player-fl.ratio": "cumulative", "player-fl.combine": "mean"}
OPTIONS = {**DEEP, **SHORT, "momentum": 0.5}
BYTES = ("round_seconds", "bytes_down", "bytes_up")
# Three columns, hidden layers of 4 and 5, three classes: fc1 of 16, fc2 of 25, fc3 of 18 scalars.
THREE_LAYERS = {**OPTIONS, "mlp__hidden": "4,5"}


def cut_of(run):
    return int(run.strategy.state.numbers["cut"])


def force(monkeypatch, cut):
    """Whatever the sensitivities say, the cut decided after round 1 is this one."""
    monkeypatch.setattr(PLayerFL, "decide", lambda self, sensitivities: cut)


# ---- The sensitivity -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold, cut", [(1.2, 1), (1.3, 2)])
def test_two_silos_by_hand(pair, threshold, cut, monkeypatch):
    """One column, one hidden unit, two classes; s = 1, t = 0, c = (1/2, -1/2), d = (1, 1); no training (0 epochs).

    a (x = 2, class 0): h = 2, z = (2, 0), q = 1 / (1 + e²), p - e = (-q, q). dL/dc = (-2 q, 2 q), dL/dh = -q,
    dL/ds = -2 q. Without biases s_1 = (1 · 2 q)² = 4 q², s_2 = mean (q², q²) = q².
    b (x = 1, class 1): h = 1, z = (3/2, 1/2), r = 1 / (1 + 1/e): dL/dc = (r, -r), dL/ds = r: s_1 = r², s_2 = r²/4.
    In both, and so in their mean, F_2 / F_1 = 5/4. The biases would change it: θ g = (-q, q) there, s_2 = q².
    """
    start_at(monkeypatch, [1, 0, 0.5, -0.5, 1, 1])
    options = {"mlp__hidden": "1", "local_epochs": 0, "rounds": 2}
    run = federate(pair, "player-fl", **{"player-fl.threshold": threshold, **SLIDES}, **options)
    q, r = 1 / (1 + math.exp(2)), 1 / (1 + math.exp(-1))
    sent = [payload.numbers for _, _, payload, _ in replies_of(run)]
    assert sent[0]["sensitivity"] == pytest.approx([4 * q * q, q * q], rel=1e-5)
    assert sent[1]["sensitivity"] == pytest.approx([r * r, r * r / 4], rel=1e-5)
    assert not sent[2] and not sent[3]
    assert cut_of(run) == cut


def test_of_an_embedding_the_mean_of_its_tokens_rows_counts(tmp_path, monkeypatch):
    """fastText of width 1, tokens 0, 1, 2 = 0, 1, 3, fc1 = 1, fc2 = (1/2, -1/2), no biases; one text of two each.

    a (1 and no word, class 0): mean 1/2, z = (1/4, -1/4), q = 1 / (1 + e^(1/2)), p - e = (-q, q).
    dL/dfc2 = (-q, q) / 2, dL/dh = -q, dL/dfc1 = -q / 2, and token 1 gets -q / 2. The rows (1, 0) have the mean 1/2,
    their gradients -q / 4: s = (q² / 64, q² / 4, q² / 16). b (2 and 2, class 1): mean 3, r = 1 / (1 + e^-3),
    dL/dfc2 = (3 r, -3 r), dL/dh = r, dL/dfc1 = 3 r, token 2 gets r / 2 twice: s = (9 r², 9 r², 9 r² / 4).
    """
    files = {}
    for name, text, label in (("a", [1, 0], 0), ("b", [2, 2], 1)):
        rows: dict[str, Any] = {
            f"x_{split}": np.array([text]) for split in ("train", "val", "test")
        }
        rows |= {f"y_{split}": np.array([label]) for split in ("train", "val", "test")}
        files[name] = tmp_path / f"{name}.npz"
        np.savez(files[name], classes=np.array(2), vocabulary=np.array(3), **rows)
    start_at(monkeypatch, [0, 1, 3, 1, 0, 0.5, -0.5, 0, 0])
    options: dict[str, Any] = {
        "model": "fasttext",
        "fasttext__width": 1,
        "local_epochs": 0,
        "rounds": 1,
    }
    run = federate(files, "player-fl", **options)
    q, r = 1 / (1 + math.exp(0.5)), 1 / (1 + math.exp(-3))
    sent = [payload.numbers["sensitivity"] for _, _, payload, _ in replies_of(run)]
    assert sent[0] == pytest.approx([q * q / 64, q * q / 4, q * q / 16], rel=1e-5)
    assert sent[1] == pytest.approx([9 * r * r, 9 * r * r, 9 * r * r / 4], rel=1e-5)


def test_the_sensitivity_is_that_of_the_locally_trained_model(three):
    """After round 1's epochs and before aggregation, in numpy; the gradient of many batches is nearly the full one.

    It is the mean gradient that is squared: the mean of the batches' squares would be larger by their variance.
    """
    run = federate(
        three, "player-fl", **{"player-fl.batches": 1000}, **{**OPTIONS, "rounds": 1}
    )
    for _, silo, payload, _ in replies_of(run):
        w = payload.models["shared"].vector.double().numpy()
        squares = (w * deep_gradient(w, *rows_of(three[silo]))) ** 2
        expected = [squares[:12].mean(), squares[16:28].mean()]
        assert payload.numbers["sensitivity"] == pytest.approx(expected, rel=0.2)
        assert not same(payload.models["shared"].vector, initial(run.settings, 3, 3))


def test_a_layer_without_gradient_adds_nothing(pair, monkeypatch):
    """t = -9: the hidden unit is off, only the last bias has a gradient, and biases do not count."""
    start_at(monkeypatch, [1, -9, 0.5, -0.5, 1, 1])
    run = federate(pair, "player-fl", mlp__hidden="1", local_epochs=0, rounds=1)
    assert [p.numbers["sensitivity"] for _, _, p, _ in replies_of(run)] == [[0.0, 0.0]] * 2
    assert cut_of(run) == 2


@pytest.mark.parametrize("cut, travel", [(1, 0), (2, 8), (3, 8)])
def test_the_statistics_below_the_cut_travel(three, cut, travel, tiny_bn, monkeypatch):
    """fc1, norm, fc2: all of them in round 1, then those of shared layers; the server cuts its mean of round 1."""
    force(monkeypatch, cut)
    run = federate(
        three, "player-fl", model="tiny-bn", rounds=3, batch_size=4, learning_rate=0.1
    )
    sizes = {
        r: len(p.models["buffers"].vector) if "buffers" in p.models else 0
        for r, _, p, _ in replies_of(run)
    }
    assert sizes == {1: 8, 2: travel, 3: travel}
    sent = run.sent_to("a", 2).get("buffers")
    assert (sent is not None) == (travel > 0)
    if travel:
        first = [p.models["buffers"].vector for r, _, p, _ in replies_of(run) if r == 1]
        assert sent is not None and same(sent.vector, weighted_mean(first, [6, 10, 8]))


# ---- The cut ---------------------------------------------------------------------------------------------------------


def settings(**changes):
    """The slides' rule as it can be read word for word, unless said."""
    return PLayerSettings(**{"ratio": "cumulative", "combine": "mean", **changes})


def test_the_default_compares_layers_and_their_medians():
    """s = (1, 1.5, 9), (1, 9, 9), (1, 1.5, 2): medians (1, 1.5, 9), so 1.5 <= 2 < 6: behind layer 2.

    The slides' reading compares F of the means: (1, 4, 6.7), so 1 -> 5 > 2: behind layer 1.
    """
    table = [[1.0, 1.5, 9.0], [1.0, 9.0, 9.0], [1.0, 1.5, 2.0]]
    assert choose_cut(table, PLayerSettings()) == 2
    assert choose_cut(table, settings()) == 1


@pytest.mark.parametrize(
    "changes, cut",
    [
        ({}, 3),
        ({"threshold": 1.4}, 1),
        ({"threshold": 1.3}, 1),
        ({"threshold": 5.0}, 4),
        ({"threshold": 5.0, "without_cut": "all-but-last"}, 3),
        ({"ratio": "layer"}, 2),
        ({"ratio": "layer", "threshold": 5.0}, 3),
        ({"ratio": "layer", "threshold": 0.4}, 1),
        ({"combine": "median"}, 4),
        ({"combine": "median", "threshold": 1.6}, 2),
    ],
)
def test_cuts_by_hand(changes, cut):
    """Three silos, four layers. Means s = (2, 1, 3, 24), F = (2, 3, 6, 30): ratios 1.5, 2, 5; of s: 0.5, 3, 8.

    "Above t" is strict: t = 2 passes the ratio 2, t = 5 the ratio 5. Medians s = (2, 1, 3, 4), F = (2, 3, 6, 10):
    ratios 1.5, 2, 1.67.
    """
    table = [[1, 1, 2, 4], [2, 1, 3, 4], [3, 1, 4, 64]]
    assert choose_cut(table, settings(**changes)) == cut


@pytest.mark.parametrize("ratio", ["cumulative", "layer"])
@pytest.mark.parametrize("combine", ["mean", "median"])
def test_the_cut_has_no_scale(ratio, combine):
    """All F times a constant (a power of two, so that no rounding decides): the same cut, at every threshold.

    So the sum over silos in place of their mean gives the same cut too, as three times or twice the mean would.
    """
    rng = np.random.default_rng(0)
    cuts = set()
    for _ in range(50):
        table = rng.lognormal(sigma=3, size=(4, 5))
        chosen = settings(ratio=ratio, combine=combine, threshold=float(rng.uniform(1, 4)))
        cut = choose_cut(table.tolist(), chosen)
        cuts.add(cut)
        for scale in (2.0**-40, 4.0, 2.0**40):
            assert choose_cut((table * scale).tolist(), chosen) == cut
        if combine == "mean":
            assert choose_cut([table.sum(0).tolist()], chosen) == cut
    assert len(cuts) >= 4


@pytest.mark.parametrize(
    "table, ratio, cut",
    [
        ([[1, 0, 5]], "cumulative", 2),  # F = (1, 1, 6): a layer without gradient adds 0
        ([[1, 0, 5]], "layer", 2),  # 0 / 1, then 5 / 0
        ([[0, 0, 0]], "cumulative", 3),
        ([[0, 0, 0]], "layer", 3),  # 0 / 0 is no ratio
        ([[0, 2, 0]], "cumulative", 1),  # 2 / 0
        ([[1, 0, 0]], "cumulative", 3),
        ([[4]], "cumulative", 1),
    ],
)
def test_cuts_at_zero(table, ratio, cut):
    assert choose_cut(table, settings(ratio=ratio)) == cut


def test_cumulative_sensitivities_do_not_fall():
    """F_{l+1} / F_l is at least 1, for no s_l is negative: t below 1 always cuts behind the first layer."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        table = rng.lognormal(sigma=4, size=(3, 4)).tolist()
        assert choose_cut(table, settings(threshold=0.999)) == 1


# ---- The run ---------------------------------------------------------------------------------------------------------


def test_rounds_of_several_steps_in_numpy(two, monkeypatch):
    """Round 1 trains all layers from the common start; then fc1 is the mean and fc2 goes on in its silo.

    FedPer with the cut known from the start: round 1 is the same, for all start alike. Momentum starts afresh.
    """
    force(monkeypatch, 1)
    run = federate(two, "player-fl", rounds=3, local_epochs=2, momentum=0.5, **DEEP)
    w = dict.fromkeys(two, run.start())
    u = w["a"][FC1]
    for _ in range(3):
        total = np.zeros_like(u)
        for silo, file in two.items():
            x, y = rows_of(file)
            local = np.concatenate([u, w[silo][FC2]])
            velocity = np.zeros_like(local)
            for _ in range(2):
                velocity = 0.5 * velocity + deep_gradient(local, x, y)
                local = local - 0.3 * velocity
            w[silo] = local
            total += len(y) / 16 * local[FC1]
        u = total
    run.ends_near(u, w, 1e-5)


def test_nothing_federated_is_local(three, monkeypatch):
    """l* = 0 after round 1: bit for bit. What round 1 sent up is not handed out again."""
    force(monkeypatch, 0)
    plain = federate(three, "local", **OPTIONS)
    run = federate(three, "player-fl", **OPTIONS)
    assert comparable(plain.rows, without=BYTES) == comparable(run.rows, without=BYTES)
    assert run.values("bytes_down") == [3 * 4 * 31, 0, 0, 0]
    for silo in three:
        assert same(plain.personal(silo), run.personal(silo))


@pytest.mark.parametrize("decided", [False, True])
@pytest.mark.parametrize("cut", [1, 2])
def test_a_shallow_cut_is_fedper(three, cut, decided, monkeypatch):
    """l* = L - 1 (and L - 2, two layers personal): bit for bit; decided at run time, but for round 1's bytes."""
    if decided:
        force(monkeypatch, cut)
    plain = federate(three, "fedper", fedper__layers=3 - cut, **THREE_LAYERS)
    run = federate(
        three, "player-fl", **{"player-fl.cut": 0 if decided else cut}, **THREE_LAYERS
    )
    without = BYTES if decided else BYTES[:1]
    assert comparable(plain.rows, without=without) == comparable(run.rows, without=without)
    assert same(plain.shared, run.shared)
    for silo in three:
        assert same(plain.personal(silo), run.personal(silo))


@pytest.mark.parametrize("cut, size", [(0, 0), (1, 16), (2, 41), (3, 59)])
def test_bytes_are_the_stated_units(three, cut, size, monkeypatch):
    """Σ = 59 both ways in round 1, then Σ_s; every silo hears the same cut, and L numbers go up once."""
    force(monkeypatch, cut)
    run = federate(three, "player-fl", **THREE_LAYERS)
    assert run.values("bytes_up") == [3 * 4 * 59, 3 * 4 * size, 3 * 4 * size, 0]
    assert run.values("bytes_down") == [3 * 4 * 59, *[3 * 4 * size] * 3]
    for server_round, _, payload, _ in replies_of(run):
        assert set(payload.numbers) == ({"sensitivity"} if server_round == 1 else set())
        if server_round == 1:
            assert len(cast(list[float], payload.numbers["sensitivity"])) == 3
    heard = [
        (m.content["config"]["round"], decode(m.content)[0].numbers["cut"])
        for m, _ in run.grid.traffic
        if m.metadata.message_type == "train"
    ]
    assert set(heard) == {(1, -1), (2, cut), (3, cut)}


def test_a_silo_absent_in_round_1_lacks_its_vote_and_no_more(three, monkeypatch):
    """The others' sensitivities decide; it comes in with the shared layers and the initial model's personal ones."""
    received = {}
    measure = PLayerClient.measure

    def recorded(self, snapshot, vector, *splits):
        if snapshot == "received":
            received[self.silo.name, self.round] = vector.clone()
        return measure(self, snapshot, vector, *splits)

    monkeypatch.setattr(PLayerClient, "measure", recorded)
    run = federate(
        three,
        "player-fl",
        **{"player-fl.threshold": 1.05, **SLIDES},
        **{**THREE_LAYERS, "rounds": 2},
        absent={("c", 1)},
    )
    votes = [
        cast(list[float], p.numbers["sensitivity"]) for r, _, p, _ in replies_of(run) if r == 1
    ]
    assert len(votes) == 2
    assert cut_of(run) == choose_cut(votes, settings(threshold=1.05)) in (1, 2)
    shared = {1: 16, 2: 41}[cut_of(run)]
    expected = initial(run.settings, 3, 3)
    expected[:shared] = run.received("c", 2)
    assert same(received["c", 2], expected)
    assert not same(received["a", 2][shared:], expected[shared:])


def test_with_ala_the_old_local_model_is_that_of_the_last_round(three):
    """Round 1 sends whole models, later rounds parts: ALA's Θ_i must not stay that of round 1."""
    ala = {"ala": True, "fedala__eta": 0.5, "fedala__max_epochs": 2}
    run = federate(three, "player-fl", **{"player-fl.threshold": 1.0}, **ala, **OPTIONS)
    per = federate(three, "fedper", **ala, **OPTIONS)
    assert cut_of(run) == 1
    assert comparable(run.rows, without=BYTES) == comparable(per.rows, without=BYTES)


# ---- PLayer-FL-Random ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [1, 2, 3, 9])
def test_a_fixed_cut_is_the_one_that_random_avoids(three, fixed):
    """Three layers: of {1, 2} what is left, as if PLayer-FL had decided ``fixed``; known from round 1 on."""
    run = federate(three, "player-fl-random", **{"player-fl-random.cut": fixed}, **THREE_LAYERS)
    assert (
        cut_of(run)
        == random_cut(3, min(fixed, 3), run.settings.common.seed)
        in {1, 2} - {fixed}
    )
    other = federate(three, "player-fl", **{"player-fl.cut": cut_of(run)}, **THREE_LAYERS)
    assert comparable(run.rows) == comparable(other.rows)


def test_random_cuts_are_uniform_over_what_is_left():
    """Never the cut of PLayer-FL, never all L; each of the others about equally often over 600 seeds (4 σ = 46)."""
    for taken in (1, 3, 5):
        drawn = [random_cut(5, taken, seed) for seed in range(600)]
        left = {1, 2, 3, 4} - {taken}
        assert set(drawn) == left
        for cut in left:
            assert abs(drawn.count(cut) - 600 / len(left)) < 47
        assert drawn[:5] == [random_cut(5, taken, seed) for seed in range(5)]


@pytest.mark.parametrize("layers, taken", [(1, 1), (2, 1)])
def test_where_no_cut_is_left_it_is_player_fls(layers, taken):
    assert random_cut(layers, taken, 0) == taken


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_a_random_run_cuts_elsewhere(three, seed):
    options = {**THREE_LAYERS, "mlp__hidden": "4,4,4,4", "seed": seed}
    chosen, random = (
        federate(three, name, **{f"{name}.threshold": 1.2}, **options)
        for name in ("player-fl", "player-fl-random")
    )
    assert cut_of(random) not in (cut_of(chosen), 5)
    assert cut_of(random) in (1, 2, 3, 4)
    # Round 1 is PLayer-FL's, and what follows FedPer's with that cut.
    without = (*BYTES,)
    first = [[r for r in run.rows if r.round == 1] for run in (chosen, random)]
    assert comparable(first[0], without=without) == comparable(first[1], without=without)
    fixed = federate(three, "player-fl", **{"player-fl.cut": cut_of(random)}, **options)
    assert comparable(fixed.rows, without=without) == comparable(random.rows, without=without)
