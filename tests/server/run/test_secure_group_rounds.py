"""Masked rounds over groups of silos (``secure-group``): a group is in a round's sum as a whole, or not at all."""

from __future__ import annotations

import hashlib

import pytest
from representatives import seldom
from secured import SECURE, Secured, absent, close, go, kinds
from tiny import federate, random_silos, same

from client.protocol.envelope import seal, unseal
from client.protocol.keys import load_key
from client.protocol.secure import KEYS, START, UNMASK
from client.site.record import close_records
from partitions.common.errors import UserError

PAIRS = {"secure_group": 2}
GROUPS = ["ab", "cd", "efg"]


@pytest.fixture(autouse=True)
def _records():
    yield
    close_records()


@pytest.fixture
def seven(tmp_path):
    """Seven silos, of which five are needed for a sum: two of a group may be gone."""
    sizes = {"a": 6, "b": 21, "c": 8, "d": 7, "e": 9, "f": 15, "g": 12}
    return random_silos(tmp_path, sizes)


def test_masked_and_unmasked_bits_are_the_same(seven, tmp_path):
    masked = go(seven, tmp_path, Secured(tmp_path, seven, groups=GROUPS), **PAIRS)
    plain = go(seven, tmp_path, None, **PAIRS)
    assert same(masked.strategy.state.model, plain.strategy.state.model)
    other = federate(seven, state_dir=tmp_path / "other", rounds=3, **SECURE)
    assert not same(plain.strategy.state.model, other.strategy.state.model)
    assert masked.values("secure_silos") == [7, 7, 7]


@pytest.mark.parametrize(
    "kind, on_the_way, missed",
    [
        ("train", "gone", {2}),
        seldom("train", "lost", {2}),
        (UNMASK, "lost", set[int]()),
        seldom(KEYS, "gone", {1}),
        seldom(START, "gone", {1}),
    ],
)
def test_the_group_of_a_silo_that_vanishes_is_left_out(
    seven, tmp_path, kind, on_the_way, missed
):
    """And it is back in the next round."""
    secured = Secured(tmp_path, seven, groups=GROUPS)
    once = 1 if kind in (KEYS, START) else 2
    setattr(secured, on_the_way, lambda *of: of == ("a", kind, once))
    masked = go(seven, tmp_path, secured, **PAIRS)
    plain = go(seven, tmp_path, absent(missed, "a"), **PAIRS)
    close(masked, plain)
    assert masked.values("secure_silos") == plain.values("secure_silos")
    assert masked.values("secure_silos") == [7 - 2 * (r in missed) for r in range(1, 4)]
    assert masked.values("secure_attempts") == [1, 1, 1]


@pytest.mark.exhaustive
def test_the_group_of_a_silo_that_stays_away_is_asked_no_more(seven, tmp_path):
    secured = Secured(tmp_path, seven, groups=GROUPS)

    def leave(silo, kind, number):
        if number == 2 and kind == "train":
            secured.offline = {"a"}
        return silo in secured.offline

    secured.gone = leave
    masked = go(seven, tmp_path, secured, **PAIRS)
    close(masked, go(seven, tmp_path, absent({2, 3}, "a"), **PAIRS))
    assert masked.values("secure_silos") == [7, 5, 5] and kinds(secured, KEYS) == [1]
    assert ("b", "train", 3) not in secured.asked


def test_the_study_makes_the_groups(seven, tmp_path):
    """One of its silos has not come to the run, so the silo that is in its group is in no sum."""
    secured = Secured(tmp_path, seven, groups=["ab", "cd", "ef", ["g", "north"]])
    masked = go(seven, tmp_path, secured, **PAIRS)
    assert masked.values("secure_silos") == [6, 6, 6]


def test_a_silo_that_states_a_group_of_itself_loses_its_group(seven, tmp_path):
    secured = Secured(tmp_path, seven, groups=GROUPS)

    def lie(silo, kind, number, reply):
        if (silo, kind) == ("a", KEYS):
            record = reply.content.config_records["secure"]
            fields, _ = unseal("silofl secure 1", "statement", str(record["statement"]))
            fields |= {"group": hashlib.sha256(b"a").hexdigest()}
            key = load_key(tmp_path / "a.key")
            record["statement"] = seal("silofl secure 1", "statement", fields, key)

    secured.change = lie
    assert go(seven, tmp_path, secured, **PAIRS).values("secure_silos") == [5, 5, 5]


def test_fewer_silos_than_a_group_are_refused(seven, tmp_path):
    line = r"^secure-group = 8: needs at least so many silos that train, here are 7$"
    with pytest.raises(UserError, match=line):
        go(seven, tmp_path, None, secure_group=8)
    with pytest.raises(UserError, match=r"^secure-group = 2: it needs secure-aggregation"):
        go(seven, tmp_path, None, secure_group=2, secure_aggregation=False)
