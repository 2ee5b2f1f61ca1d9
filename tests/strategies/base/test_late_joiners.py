"""A hospital that joins a run as it goes on, for every method: as declared, and without a trace in earlier rounds."""

from __future__ import annotations

import json
import re

import pytest
import torch
from cases import CASES, OPTIONS, WITH_ALA, typical
from near import near
from tiny import comparable, federate, random_silos, round_of, same, simulated
from torch.testing import assert_close
from two_layers import DEEP

from partitions.common.errors import UserError
from strategies import strategies
from strategies.apple import Apple, AppleServerState
from strategies.base.state import State
from strategies.feddyn import DynServerState
from strategies.pfedla import LaSettings, first_hypernetwork, grow_hypernetwork, layer_weights
from strategies.scaffold import ScaffoldServerState

LATE, FIRST = "b", 3
ALONE = ("local", "fedproto", "fedfomo", "gh-ofl")  # the others' models need not change for it
EVERY = CASES | WITH_ALA
CODED = {"wire_dtype": "int8"}


@pytest.fixture
def four(tmp_path):
    return random_silos(tmp_path, {"a": 6, LATE: 10, "c": 8, "d": 7})


def run_with(files, settings, **changes):
    given = {
        **DEEP,
        **OPTIONS,
        **settings,
        "rounds": 4,
        "late_joiners": f"{LATE}={FIRST}",
        **changes,
    }
    return federate(files, **given)


def before(run):
    return comparable([r for r in run.rows if r.round < FIRST], without=("round_seconds",))


@typical(EVERY)
def test_a_late_joiner_takes_part_from_its_round_on(four, name, tiny_bn):
    """Earlier rounds are bit for bit those of a federation without it; then all train, and none is left out."""
    settings = EVERY[name][0]
    assert strategies()[settings["strategy"]].info.late in ("starts", "grows")
    run = run_with(four, settings)
    sent = [m for m, _ in run.grid.traffic if run.grid.name_of(m.metadata.dst_node_id) == LATE]
    kinds = [(round_of(m), m.metadata.message_type.partition(".")[0]) for m in sent]
    assert kinds[:4] == [(0, "query"), (3, "train"), (4, "train"), (5, "evaluate")]
    assert not any(r.metric == "rejected" for r in run.rows)
    assert [(r.round, r.silo) for r in run.rows if r.metric == "joined"] == [(FIRST, LATE)]
    scored = {
        (r.silo, r.round) for r in run.rows if r.snapshot == "personal" and r.split == "test"
    }
    assert scored >= {(silo, r) for silo in four for r in (3, 4)} and (LATE, 2) not in scored
    assert all(torch.isfinite(run.personal(silo)).all() for silo in four)
    without = run_with({n: f for n, f in four.items() if n != LATE}, settings, late_joiners="")
    assert before(run) == before(without)
    assert (
        all(not same(run.personal(n), without.personal(n)) for n in ("a", "c"))
        or settings["strategy"] in ALONE
    )


def test_methods_that_cannot_take_one_say_why(four):
    refusing = {name for name, method in strategies().items() if not method.info.late}
    assert refusing == {"pooled"}
    with pytest.raises(
        UserError, match="late-joiners = b=3: not with pooled: its one model trains on all"
    ):
        run_with(four, {"strategy": "pooled"})


@pytest.mark.parametrize("rule", ["median", "screen"])
def test_with_a_robust_rule_and_a_codec(four, rule):
    run = run_with(four, {"strategy": "fedavg"}, robust=rule, **CODED)
    assert not any(r.metric == "rejected" for r in run.rows)
    assert {r.silo for r in run.rows if r.round == 4 and r.snapshot == "personal"} == set(four)


def test_scaffold_keeps_its_invariant(four):
    """c is the mean of the c_i, of which the newcomer's is 0, before and after it trains."""
    run = run_with(four, {"strategy": "scaffold"}, rounds=4)
    counted = [run.kept(n) for n in four]
    kept = [a["proposed.control"] if "proposed.control" in a else a["control"] for a in counted]
    state = run.strategy.state
    assert isinstance(state, ScaffoldServerState)
    assert_close(state.control, torch.stack(kept).mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_feddyn_keeps_its_invariant(four, weights):
    """h is the mean of the g_i, weighed by N n_i / n where losses are weighed by samples."""
    run = run_with(
        four,
        {"strategy": "feddyn", "feddyn.alpha": 0.2, "feddyn.weights": weights},
        weight_cap=0,
    )
    counts = {n: run.strategy.silos[n].n_train for n in four}
    total, dual = sum(counts.values()), torch.zeros(31)
    for name in four:
        arrays = run.kept(name)
        g = arrays["proposed.dual"] if "proposed.dual" in arrays else arrays["dual"]
        dual += g * (counts[name] / total if weights == "samples" else 1 / len(four))
    state = run.strategy.state
    assert isinstance(state, DynServerState)
    assert_close(state.h, dual, rtol=1e-5, atol=1e-6)


def test_apple_s_vectors_grow_as_p_0_does(four):
    """With eta2 = 0 every p_i is p_0 of all four silos, in the order of their names, and rows before have a 0."""
    frozen = {"strategy": "apple", "apple.dr-learning-rate": 0.0, "apple.mu": 0.0}
    run = run_with(four, frozen, weight_cap=0)
    shares = torch.tensor(
        [run.strategy.silos[n].n_train for n in sorted(four)], dtype=torch.float32
    )
    for name in four:
        near(run.kept(name)["dr"], shares / shares.sum(), 1e-5)
    history = run.kept("a")["dr_history"]
    assert history.shape == (5, 4) and history[:3, 1].eq(0).all() and history[3:, 1].gt(0).all()
    relationships = Apple.read_relationships({n: whole_state(run, n) for n in four})
    assert relationships is not None and relationships.values.shape[1:] == (4, 4)


def whole_state(run, name):
    context = run.grid.context_of(name)
    return State(run.kept(name), json.loads(str(context.state["numbers"]["json"])))


def test_apple_s_budget_sends_the_newcomer_s_core_beside(four):
    run = run_with(four, {"strategy": "apple", "apple.max-downloads": 1})
    assert isinstance(run.strategy.state, AppleServerState)
    assert set(run.sent_to("a", 3)) > {LATE} and len(run.sent_to("a", 3)) <= 2
    assert len(run.sent_to("a", 4)) == 1


def test_a_hypernetwork_grows_and_keeps_what_it_has():
    """The others' scores are as they were: with the newcomer's at 0, the weights of the others too."""
    s = LaSettings(embedding=5, hidden=6)
    rng = torch.Generator().manual_seed(0)
    phi, fresh = (first_hypernetwork(s, 2, n, rng) for n in (3, 4))
    made = grow_hypernetwork(phi, fresh, s, 2, 4, place=1)
    muted = grow_hypernetwork(phi, torch.zeros_like(fresh), s, 2, 4, place=1)
    old, new = layer_weights(phi, s, 2, 3), layer_weights(muted, s, 2, 4)
    rows = old.sum(1) > 0
    near(new[:, [0, 2, 3]][rows], old[rows], 1e-5)
    assert new[rows][:, 1].eq(0).all() and made.shape == fresh.shape


def test_a_copying_method_starts_from_the_received_model(four):
    """Ditto without epochs keeps what its personal model starts from: w for the late one, the seed's for the others."""
    run = run_with(four, {"strategy": "ditto"}, local_epochs=0)
    received = run.received(LATE, 3)
    assert same(run.personal(LATE), received)


@pytest.mark.parametrize(
    "value, message",
    [
        ("b", "any, or NAME=ROUND"),
        ("b=x", "any, or NAME=ROUND"),
        ("b=3,b=4", "each name once"),
        ("b=1", "joins in round 1, of 2 to 4"),
        ("b=5", "joins in round 5, of 2 to 4"),
        ("a=2,b=2,c=2,d=2", "none would be left to begin"),
    ],
)
def test_what_makes_no_sense_is_refused(four, value, message):
    with pytest.raises(UserError, match=re.escape(message)):
        run_with(four, {"strategy": "fedavg"}, late_joiners=value)


def test_a_simulation_knows_its_silos():
    with pytest.raises(UserError, match="there is no silo 'hospital-09'"):
        simulated(late_joiners="hospital-09=2", rounds=2)


def test_it_is_not_both_held_out_and_late(four):
    with pytest.raises(UserError, match="hold-out = b has b too"):
        run_with(four, {"strategy": "fedavg"}, hold_out=LATE)
