"""Sums of groups under masks, compared as silos are (``secure-robust = groups``): a liar does not make the model."""

from __future__ import annotations

import pytest
import torch
from failing import fails
from representatives import sampled
from secured import SECURE, Secured, absent, close, go
from tiny import federate, random_silos, same, settings_of

from client.site.record import close_records
from partitions.common.errors import RunFailedError, UserError
from server.run.checkpoints import Checkpoints
from strategies.base.aggregation.secure import scale
from strategies.base.transport.payload import array_record, tensor_of

THREES = {"secure_group": 3, "secure_robust": "groups"}
TRIPLES = ["abc", "def", "ghi", "jkl"]


@pytest.fixture(autouse=True)
def _records():
    yield
    close_records()


@pytest.fixture
def nine(tmp_path):
    return random_silos(tmp_path, [8] * 9)


@pytest.fixture
def twelve(tmp_path):
    return random_silos(tmp_path, [8, 12, 9, 7, 15, 11, 6, 10, 13, 14, 9, 8])


def sending(steps, clip):
    """For ``prepare``: silos whose steps are these multiples of (1, ..., 1), by the letter of their group's first."""

    def prepare(grid):
        def after(silo, message, reply):
            if message.metadata.message_type == "train":
                config = message.content.config_records["config"]
                unit = scale(int(config["participants"]), clip) * float(config["secure_share"])
                size = len(tensor_of(reply.content["masked"]["sum"]))
                integers = torch.full((size,), round(unit * steps.get(silo, 1.0)))
                changed = array_record({"sum": integers.int().view(torch.uint32)})
                reply.content["masked"] = changed
            return reply

        grid.after = after

    return prepare


@pytest.mark.parametrize(
    "robust, moved",
    [("screen", 1.0), ("median", 1.0), ("clip", -7 / 3), ("geometric-median", 1.0)],
)
def test_three_groups_by_hand(nine, robust, moved):
    """All send e = (1, ..., 1), but i sends -29 e: the groups' means are e, e and (1 + 1 - 29) e / 3 = -9 e.

    screen: f = 1 of three groups, nine silos are enough to exclude one; g = e, and -9 e opposes it, so that e is left.
    clip: 9 lengths of the median step are within τ = 10, so (1 + 1 - 9) e / 3.
    """
    changes = {**SECURE, **THREES, "secure_clip": 64.0, "robust": robust, "rounds": 1}
    run = federate(nine, prepare=sending({"i": -29.0}, 64.0), **changes)
    step = run.strategy.state.model - run.strategy.initial("")
    torch.testing.assert_close(step, torch.full_like(step, moved), rtol=0, atol=1e-4)
    out = {row.silo: row.value for row in run.rows if row.metric == "bounded"}
    assert out == ({"g": 0.0, "h": 0.0, "i": 0.0} if robust == "screen" else {})
    # A hospital does not know what became of its group's sum: its state goes on
    assert run.values("secure_silos") == [9]


def test_honest_groups_are_their_mean(nine):
    """Nothing is bounded, so that it is the mean of one sum, up to the rounding."""
    run = federate(nine, rounds=3, **SECURE, **THREES)
    close(run, federate(nine, rounds=3, **SECURE, secure_group=3))
    assert not run.strategy.bounded


def test_one_group_of_nonsense_is_left_out_and_the_round_counts(nine):
    """Longer than C: (1 + 1 + 250) e / 3 has the length 84 sqrt(12), and C is 64."""
    changes = {**SECURE, **THREES, "secure_clip": 64.0, "rounds": 1}
    run = federate(nine, prepare=sending({"a": 250.0}, 64.0), **changes)
    assert {silo for _, silo in run.rejected()} == {*"abc"}
    step = run.strategy.state.model - run.strategy.initial("")
    torch.testing.assert_close(step, torch.ones_like(step), rtol=0, atol=1e-4)
    nonsense = sending(dict.fromkeys("adg", 250.0), 64.0)
    with pytest.raises(RunFailedError, match="the round number 3 in a row"):
        federate(nine, prepare=nonsense, **{**changes, "rounds": 3})


@sampled("method", ["fedavg", "scaffold", "fedlama"], 3)
def test_masked_and_unmasked_bits_are_the_same(twelve, tmp_path, method):
    """Also where a group is excluded: j sends the contrary of what it should, and more."""

    def lie(grid):
        def after(silo, message, reply):
            if (silo, message.metadata.message_type) == ("j", "train"):
                integers = tensor_of(reply.content["masked"]["sum"]).view(torch.int32)
                changed = array_record({"sum": (integers * -9).view(torch.uint32)})
                reply.content["masked"] = changed
            return reply

        grid.after = after

    secured = Secured(tmp_path, twelve, groups=TRIPLES, robust="groups")

    def prepare(grid):
        lie(grid)
        secured(grid)

    changes = {**THREES, "strategy": method}
    state = {"rounds": 3, **SECURE, **changes}
    masked = federate(twelve, state_dir=tmp_path / "masked", prepare=prepare, **state)
    plain = federate(twelve, state_dir=tmp_path / "plain", prepare=lie, **state)
    assert same(masked.strategy.state.model, plain.strategy.state.model)
    assert masked.values("secure_silos") == plain.values("secure_silos") == [12, 12, 12]
    bounded = {row.silo for row in masked.rows if row.metric == "bounded"}
    assert bounded >= {*"jkl"} and bounded == {
        row.silo for row in plain.rows if row.metric == "bounded"
    }


@pytest.mark.exhaustive
def test_a_group_that_lost_a_silo_counts_not_at_all(twelve, tmp_path):
    secured = Secured(tmp_path, twelve, groups=TRIPLES, robust="groups")
    secured.gone = lambda *of: of == ("e", "train", 2)
    masked = go(twelve, tmp_path, secured, **THREES)
    plain = go(twelve, tmp_path, absent({2}, "e"), **THREES)
    close(masked, plain)
    assert masked.values("secure_silos") == plain.values("secure_silos") == [12, 9, 12]


def test_two_groups_are_not_compared(nine):
    """Of three one is not whole: which of two lies, nothing shows."""
    run = federate(nine, rounds=2, prepare=absent({2}, "e"), **SECURE, **THREES)
    first = federate(nine, rounds=1, **SECURE, **THREES)
    assert same(run.strategy.state.model, first.strategy.state.model)


class KilledError(Exception):
    """The server ends here."""


@pytest.mark.exhaustive
def test_a_server_killed_once_it_has_opened_the_sums(twelve, tmp_path, monkeypatch):
    """The resume ends that round by the sums on the disk, and no silo trains in it again."""
    save = Checkpoints.save

    def die(self, state, strategy, *of):
        if strategy.round == 2:
            raise KilledError
        save(self, state, strategy, *of)

    (tmp_path / "killed").mkdir()
    secured = Secured(tmp_path / "killed", twelve, groups=TRIPLES, robust="groups")
    given = {**THREES, "directory": tmp_path / "killed" / "run"}
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(Checkpoints, "save", die)
        go(twelve, tmp_path / "killed", secured, **given)
    before, secured.run = len(secured.asked), 2
    resumed = go(twelve, tmp_path / "killed", secured, **given, resume=True)
    trained = {number for _, kind, number in secured.asked[before:] if kind == "train"}
    plain = go(twelve, tmp_path, None, **THREES)
    assert trained == {3} and same(resumed.strategy.state.model, plain.strategy.state.model)


def test_what_is_refused(nine):
    def said(**changes):
        return fails(UserError, None, settings_of, nine, **{**SECURE, **changes})

    assert (
        "needs at least 3 groups of at least 3 silos that train (secure-group), here are 4 of 2"
        in said(secure_robust="groups", secure_group=2)
    )
    assert "here are 9 of 1" in said(secure_robust="groups")
    assert "here are 2 of 4" in said(secure_robust="groups", secure_group=4)
    assert "compare nothing" in said(**THREES, robust="none")
    assert "or secure-robust = groups" in said(robust="median")
    assert said(**THREES, robust="multi-krum") == (
        "robust-attackers = 1: multi-krum needs at least 5 groups of silos for that, here are 3"
    )
    line = "secure-robust = groups: it needs secure-aggregation = true"
    assert said(secure_aggregation=False, secure_robust="groups") == line
