"""Robust aggregation: the rules worked out by hand, what breaks them, and what they do in every method."""

from __future__ import annotations

import math

import pytest
import torch
from cases import CASES, OPTIONS, typical
from failing import fails
from near import near
from tiny import comparable, federate, random_silos, round_of, same, settings_of, train_replies
from two_layers import DEEP

from benchmarks.robustness import cell
from partitions.common.errors import UserError
from server.run.reporter import Progress
from strategies.base.aggregation.bounded import UpdateBounds
from strategies.base.robust import (
    breakdown_point,
    clip_step,
    find_diverging,
    geometric_median,
    krum_choice,
    krum_scores,
    median,
    outliers,
    squared_distances,
    trimmed_mean,
    units,
)
from strategies.base.settings import KRUM, RULES
from strategies.base.transport.payload import Update, array_record, decode, tensor_of


def vectors(*rows):
    return [torch.tensor(row, dtype=torch.float32) for row in rows]


def apply(rule, given, f):
    """What a rule makes of silos that count alike."""
    if rule in KRUM:
        return torch.stack([given[i] for i in krum_choice(rule, given, f)]).mean(0)
    if rule == "geometric-median":
        return geometric_median(given)
    return median(given) if rule == "median" else trimmed_mean(given, f)


# ---- The rules, by hand ---------------------------------------------------------------------------------------------


def test_trimmed_mean_by_hand():
    """f = 1 of 5. First coordinate 1 2 3 4 100: without 1 and 100 the mean is 3. Second 10 20 30 40 -500: without -500
    and 40 it is 20. f = 2 leaves the middle: 3 and 20. f = 0 is the mean: 22 and -80."""
    given = vectors([1, 10], [2, 20], [3, 30], [4, 40], [100, -500])
    assert trimmed_mean(given, 1).tolist() == [3, 20]
    assert trimmed_mean(given, 2).tolist() == [3, 20]
    assert trimmed_mean(given, 0).tolist() == [22, -80]


def test_median_by_hand():
    """Of five the middle one; of 1 2 3 100 the mean of 2 and 3, of 10 20 30 -500 that of 10 and 20."""
    given = vectors([1, 10], [2, 20], [3, 30], [100, -500])
    assert median(given).tolist() == [2.5, 15]
    assert median([*given, *vectors([4, 40])]).tolist() == [3, 20]
    assert median(given[:2]).tolist() == [1.5, 15]


def test_krum_by_hand():
    """n = 5, f = 1: the squares to the n - f - 2 = 2 nearest others of 0 1 2 4 100.

    0: 1 + 4 = 5; 1: 1 + 1 = 2; 2: 1 + 4 = 5; 4: 4 + 9 = 13; 100: 96² + 98² = 18820. Krum takes 1; Multi-Krum the four
    least, whose mean is 7/4.
    """
    given = vectors([0], [1], [2], [4], [100])
    assert krum_scores(squared_distances(given), 1) == [5, 2, 5, 13, 18820]
    assert krum_choice("krum", given, 1) == [1] and krum_choice("multi-krum", given, 1) == [
        0,
        1,
        2,
        3,
    ]
    assert apply("multi-krum", given, 1).tolist() == [1.75]


def test_geometric_median_by_hand():
    """Of the corners of a convex quadrilateral it is where the diagonals cross (Fagnano): (2, 0) of (0, 0), (10, 0),
    (2, -1), (2, 3); their mean is (3.5, 0.5). Of three numbers it is the middle one."""
    given = vectors([0, 0], [10, 0], [2, -1], [2, 3])
    near(geometric_median(given), torch.tensor([2.0, 0.0]), 1e-4)
    near(geometric_median(vectors([1], [2], [900])), torch.tensor([2.0]), 1e-3)


ALIKE = dict.fromkeys("abcd", 3)  # batches per epoch


def test_clip_by_hand():
    """Steps of length 1, 2, 3 and 500: the lower median is 2, ten times that is 20.

    (301, 400) is a step of (300, 400) from (1, 0): 20/500 of it is (12, 16), and (13, 16) is left.
    """
    norms = {"model": {"a": 1.0, "b": 2.0, "c": 3.0, "d": 500.0}}
    measures = units(norms, {"model": 50.0}, ALIKE)
    assert measures == {"model": dict.fromkeys("abcd", 2.0)}
    assert outliers(norms, measures, 10) == {"d": {"model": 250.0}}
    assert outliers(norms, measures, 250) == {}  # at the bound is within it
    (vector,), (centre,) = vectors([301, 400]), vectors([1, 0])
    assert clip_step(vector, centre, 10 / 250).tolist() == pytest.approx([13, 16])
    assert clip_step(vector - centre, None, 10 / 250).tolist() == pytest.approx([12, 16])


def test_who_has_more_samples_goes_further_and_a_still_federation_measures_nothing():
    """Of 3, 3, 3 and 12 batches the median is 3: d's bound is four times a's. Steps of 0.1 beside a model of length 50
    are less than 2 % of it, which is 1."""
    norms = {"model": dict.fromkeys("abcd", 2.0)}
    assert units(norms, {}, {**ALIKE, "d": 12})["model"] == {
        "a": 2.0,
        "b": 2.0,
        "c": 2.0,
        "d": 8.0,
    }
    # Fewer give no smaller bound
    assert units(norms, {}, {**ALIKE, "d": 1})["model"]["d"] == 2.0
    assert (
        units({"model": dict.fromkeys("abcd", 0.1)}, {"model": 50.0}, ALIKE)["model"]["a"]
        == 1.0
    )


def test_two_steps_have_no_middle():
    norms = {"model": {"a": 1.0, "b": 900.0}}
    assert outliers(norms, units(norms, {"model": 5.0}, ALIKE), 10) == {}


def test_what_explodes_is_told_by_its_step():
    """A thousand times the median step, of at least 1: models of any length that moved by 1 have not exploded."""

    def found(steps, sent, name="model"):
        norms = {name: steps}
        return find_diverging(norms, units(norms, {name: sent}, ALIKE))

    assert found({"a": 1.0, "b": 2.0, "c": 2001.0}, 5.0) == {
        "c": "the model exploded: its step of length 2e+03 is over 1000 times the others'"
    }
    assert found({"a": 1.0, "b": 2.0, "c": 2000.0}, 5.0) == {}
    assert found({"a": 1e-6, "b": 1e-6, "c": 1.0}, 5.0) == {}  # near the end of a training
    assert list(found({"a": 1e6}, 2.0, "buffers")) == ["a"]  # alone: against what it was sent


def test_coordinates_are_sorted_piece_by_piece(monkeypatch):
    given = list(torch.randn(5, 1000, generator=torch.Generator().manual_seed(1)))
    whole, squares = trimmed_mean(given, 1), squared_distances(given)
    monkeypatch.setattr("strategies.base.robust.CHUNK", 7)
    assert same(trimmed_mean(given, 1), whole)
    assert torch.allclose(squared_distances(given), squares, rtol=1e-9)


# ---- What they bear, and what breaks them ---------------------------------------------------------------------------


HONEST = [
    [1.0, -2.0],
    [1.1, -2.1],
    [0.9, -1.9],
    [1.0, -2.1],
    [1.1, -1.9],
    [0.9, -2.0],
    [1.0, -1.9],
    [1.1, -2.0],
]


@pytest.mark.parametrize("lie", [[1e6, 1e6], [-1e6, 0.0], [900.0, -900.0]])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_bears_what_it_says_and_breaks_beyond(rule, lie):
    """With as many attackers as it can bear, all at one place, it stays among the honest; with as many as there are
    honest silos and one more it is with the attackers, whatever it was told."""
    n = len(HONEST) + 3
    f = breakdown_point(rule, n, 3)
    assert f == 3
    low, high = torch.tensor(HONEST).min(0).values, torch.tensor(HONEST).max(0).values
    found = apply(rule, vectors(*HONEST, *[lie] * 3), f)
    assert bool(((found >= low - 0.3) & (found <= high + 0.3)).all()), found
    many = vectors(*HONEST, *[lie] * (len(HONEST) + 1))
    found = apply(rule, many, breakdown_point(rule, len(many), 3))
    assert float((found - torch.tensor(lie)).norm()) < 0.9 * math.hypot(*lie)
    assert float((found - torch.tensor([1.0, -2.0])).norm()) > 100


def test_f_is_lowered_to_what_the_silos_of_a_round_can_bear():
    """f < n/2, for Krum n >= 2f + 3 (Blanchard et al., proposition 1)."""
    assert [breakdown_point("trimmed-mean", n, 3) for n in (1, 2, 3, 6, 7, 12)] == [
        0,
        0,
        1,
        2,
        3,
        3,
    ]
    assert [breakdown_point("krum", n, 3) for n in (1, 2, 3, 4, 5, 8, 9, 12)] == [
        0,
        0,
        0,
        0,
        1,
        2,
        3,
        3,
    ]


@pytest.mark.parametrize("rule", RULES)
def test_one_silo_and_equal_silos_come_out_to_the_bit(rule):
    one = torch.randn(50, generator=torch.Generator().manual_seed(2))
    for n in (1, 2, 3, 7, 12):
        given = [one.clone() for _ in range(n)]
        found = (
            given[krum_choice(rule, given, 0)[0]]
            if rule in KRUM
            else apply(rule, given, breakdown_point(rule, n, 3))
        )
        assert same(found, one)


@pytest.mark.parametrize("rule", ["trimmed-mean", "multi-krum"])
def test_without_attackers_a_rule_is_the_mean(tmp_path, rule):
    """f = 0, silos of equal size: FedAvg to the bit."""
    files = random_silos(tmp_path, dict.fromkeys("abcde", 8))
    plain, robust = (
        federate(files, "fedavg", rounds=3, robust=name, robust_attackers=0)
        for name in ("none", rule)
    )
    assert same(plain.shared, robust.shared)
    assert comparable(plain.rows) == comparable(robust.rows)


# ---- In a federation ------------------------------------------------------------------------------------------------


def changed(reply, change):
    """Every vector of a reply, changed."""
    for key, record in list(reply.content.array_records.items()):
        vector = tensor_of(record["vector"])
        whole = vector.float() if vector.dtype == torch.float16 else vector
        reply.content[key] = array_record({"vector": change(whole).to(vector.dtype)})
    return reply


def attacking(change, *silos, since=1):
    """For ``prepare``: what these silos send from this round on is changed on its way."""

    def after(silo, message, reply):
        lies = (
            silo in silos
            and round_of(message) >= since
            and message.metadata.message_type == "train"
        )
        return changed(reply, change) if lies and not reply.has_error() else reply

    return lambda grid: setattr(grid, "after", after)


@pytest.fixture
def five(tmp_path):
    """Five random silos of 6 to 10 rows; Σ = 12."""
    return random_silos(tmp_path, [6, 10, 8, 7, 9])


def sent_in(run, server_round, name="model"):
    found = {silo: reply for (silo, r), reply in train_replies(run.grid) if r == server_round}
    return [decode(found[silo].content)[0].models[name].vector for silo in sorted(found)]


@pytest.mark.parametrize("wire", ["float32", "float16"])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_stands_for_fedavgs_mean(five, rule, wire):
    """d is away: the next model is the rule's of the four that were sent, counted alike, with f = 1 (Krum: 0)."""
    run = federate(
        five,
        "fedavg",
        rounds=2,
        robust=rule,
        wire_dtype=wire,
        prepare=lambda grid: grid.absent.add(("d", 1)),
    )
    given = sent_in(run, 1)
    assert len(given) == 4
    expected = apply(rule, given, 0 if rule in KRUM else 1)
    found = run.received("a", 2)
    near(found, expected, 1e-6 if wire == "float32" else 1e-3)


@pytest.mark.parametrize("rule", RULES)
def test_running_statistics_and_shared_layers_too(five, tiny_bn, rule):
    """FedPer shares the first layers of a network with BatchNorm: what travels of both is the rule's."""
    run = federate(five, "fedper", model="tiny-bn", learning_rate=0.1, rounds=2, robust=rule)
    shared, buffers = sent_in(run, 1, "shared"), sent_in(run, 1, "buffers")
    sent = run.sent_to("a", 2)
    if rule in KRUM:  # of the same silos
        taken = krum_choice(
            rule, [torch.cat(pair) for pair in zip(shared, buffers, strict=True)], 1
        )
        expected = [torch.stack([of[i] for i in taken]).mean(0) for of in (shared, buffers)]
    else:
        expected = [apply(rule, shared, 1), apply(rule, buffers, 1)]
    near(sent["global"].vector, expected[0])
    near(sent["buffers"].vector, expected[1])


@pytest.mark.parametrize("rule", ["median", "krum"])
def test_scaffolds_two_vectors(five, rule):
    """x and c: the median takes each for itself, Krum both of one silo; c moves by |S|/N of what is taken."""
    run = federate(five, "scaffold", rounds=1, robust=rule)
    models, changes = sent_in(run, 1), sent_in(run, 1, "control")
    start = run.received("a", 1)
    if rule == "krum":
        (i,) = krum_choice(
            "krum", [torch.cat([m - start, c]) for m, c in zip(models, changes, strict=True)], 1
        )
        expected = models[i], changes[i] / 5
        # The others' control variates stay
        assert sorted(run.strategy.state.numbers["counted"]) == ["abcde"[i]]
        assert {r.silo: r.value for r in run.rows if r.metric == "bounded"} == dict.fromkeys(
            set("abcde") - {"abcde"[i]}, 0.0
        )
    else:
        expected = median(models), median(changes)
    arrays = run.held
    near(arrays["global"], expected[0])
    near(arrays["control"], expected[1])


def test_fedapms_mean_is_over_all_that_it_holds(five):
    run = federate(
        five,
        "fedapm",
        rounds=1,
        robust="median",
        prepare=lambda grid: grid.absent.add(("d", 1)),
        **DEEP,
    )
    sent, start = sent_in(run, 1, "shared"), run.received("a", 1)
    near(run.shared, median([*sent, start]))


def test_fedprotos_prototypes_class_by_class(five):
    """A class's prototype is the median of those of the silos that have it; e lies about all of its own."""
    options = {"strategy": "fedproto", "rounds": 2, **DEEP}

    def lie(table):
        rows = table.view(3, -1).clone()
        rows[:, :-1] *= 1e5
        return rows.flatten()

    honest = federate(five, **options, robust="median")
    lied = federate(five, **options, robust="median", prepare=attacking(lie, "e"))
    tables = [table.view(3, -1) for table in sent_in(honest, 1, "prototypes")]
    found = honest.sent_to("a", 2)["prototypes"].vector.view(3, -1)
    for k in range(3):
        held = [table[k, :-1] for table in tables if table[k, -1] > 0]
        near(found[k, :-1], median(held))
    most = max(float(table[:, :-1].abs().max()) for table in tables)
    assert (
        float(lied.sent_to("a", 2)["prototypes"].vector.view(3, -1)[:, :-1].abs().max()) <= most
    )


# ---- Clip, the default ----------------------------------------------------------------------------------------------


def test_a_clipped_silo_counts_with_a_part_of_its_step_and_is_named(five):
    """e sends a hundred times its model in round 2: 10 median steps of it are left, about what it was sent."""
    seen: list[Progress] = []
    run = federate(
        five,
        "fedavg",
        robust="clip",
        rounds=3,
        watch=seen.append,
        prepare=lambda grid: attacking(lambda v: 100 * v, "e", since=2)(grid),
    )
    start, given = run.received("a", 2), sent_in(run, 2)
    lengths = sorted(float((v - start).norm()) for v in given)
    step = given[4] - start
    cut = start + step * (10 * lengths[2] / float(step.norm()))
    expected = sum(n / 40 * v for n, v in zip((6, 10, 8, 7, 9), [*given[:4], cut], strict=True))
    near(run.received("a", 3), torch.as_tensor(expected), 1e-4)
    assert [list(p.bounded) for p in seen][:2] == [[], ["e"]] and not any(
        p.rejected for p in seen
    )
    assert (
        "the model moved" in seen[1].bounded["e"]
        and "(robust-clip = 10)" in seen[1].bounded["e"]
    )
    (row,) = (r for r in run.rows if r.metric == "bounded" and r.round == 2)
    assert row.silo == "e" and row.value == pytest.approx(10 * lengths[2] / float(step.norm()))


def test_lengths_of_centres_that_are_made_to_be_measured(five, monkeypatch):
    """Each may get the place in memory, and so the id, of the one before: the median of 1 to 5 is 3 all the same."""
    run = federate(five, "fedfomo", rounds=1)
    lengths = dict(zip(five, (1.0, 2.0, 3.0, 4.0, 5.0), strict=True))
    monkeypatch.setattr(
        run.strategy, "centre", lambda name, update: torch.tensor([lengths[update.silo]])
    )
    updates = [Update(silo, 1, {}, {}, {}) for silo in five]
    monkeypatch.setattr(run.strategy, "sent", {})
    bounds = UpdateBounds(run.strategy)
    assert bounds._lengths(["model"], updates) == {"model": 3.0}


# Alone, a covariance of seven samples may be ten times the others'
@typical(sorted(CASES.keys() - {"pfedfda, one"}))
def test_in_every_method_the_attacker_alone_is_named(three, tiny_bn, name):
    """c sends two hundred times what it should, from round 2 on: it is bounded or left out, a and b are neither, and
    what all end with is finite. Without an attack nobody is, and the run is that without bounds to the bit."""
    settings = {**DEEP, **OPTIONS, **CASES[name][0], "rounds": 2}
    rules = ("screen" if name == "fedxgb" else "clip", "none")  # trees have no length
    honest, free = (federate(three, **settings, robust=robust) for robust in rules)
    assert not [r for r in honest.rows if r.metric in ("bounded", "rejected")]
    assert comparable(honest.rows) == comparable(free.rows)
    if not honest.strategy.info.uploads:
        return
    seen: list[Progress] = []
    run = federate(
        three, **settings, watch=seen.append, prepare=attacking(lambda v: 200 * v, "c", since=2)
    )
    for progress in seen[1:]:
        named = {**progress.rejected, **progress.bounded}
        assert set(named) <= {"c"}, named
    assert any({**p.rejected, **p.bounded} for p in seen[1:])
    assert all(bool(torch.isfinite(run.personal(silo)).all()) for silo in three)


def test_what_a_user_asks_for_and_cannot_have(three):
    for given, message in (
        ({"strategy": "apple", "robust": "median"}, "robust = median: apple takes no mean"),
        ({"strategy": "fedamp", "robust": "krum"}, "none, clip, screen are for it"),
        (
            {"strategy": "fedlp", "robust": "krum"},
            "clip, screen, trimmed-mean, median, geometric-median are for it",
        ),
        (
            {"robust": "trimmed-mean", "robust_attackers": 2},
            "needs at least 5 silos for that, here are 3",
        ),
        ({"robust": "krum"}, "needs at least 5 silos"),
        ({"robust": "kurm"}, "robust = 'kurm' (did you mean 'krum'?)"),
        ({"robust_clip": 0}, "robust-clip = 0"),
    ):
        said = fails(UserError, None, settings_of, three, **given)
        assert message in said
    # Nothing travels: nothing stands against it
    settings_of(three, strategy="local", robust="median")


@pytest.mark.exhaustive
def test_a_cell_of_the_benchmark(tmp_path):
    """APPLE, one of twelve sends a hundred times its core: it alone is left out, and the others learn. Without a bound
    its core is in everybody's mixture, and they do not."""
    bounded, free = (
        cell("apple", "x100", 1, rounds=8, evaluate_every=8, robust=rule)
        for rule in ("clip", "none")
    )
    assert float(bounded) > 60
    assert free == "stops" or float(free) < 40
