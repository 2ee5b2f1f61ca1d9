"""Secure aggregation against a server that lies: the smallest sum it can open, by brute force and by real answers.

A sum over silos opens with a self mask's secret of each of them, and the mask key of every other silo of the list. A
secret opens with t shares. Silos that collude give the server all that they hold.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from secure_ring import Ring, Symbolic, fields_of, refusing, restore, state

from client.protocol.parsed import SiteError
from client.protocol.policy import Policy
from client.protocol.secure.statements import read_statement, threshold
from client.site.record import close_records
from client.site.secure.silo import SecureSilo

COUNT = 6


def bound(count, colluders):
    """The fewest honest silos in a sum: N - f - floor((N - f)(N - t) / (t - f))."""
    t, honest = threshold(count), count - colluders
    return honest - honest * (count - t) // (t - colluders)


def test_the_table_of_the_documents():
    page = Path("docs/security.md").read_text("utf-8")
    assert Policy().secure_peers == 3  # so four is the fewest
    for count in (3, 4, 6, 9, 12, 40, 100):
        row = " | ".join(
            str(bound(count, f)) for f in range(4) if f < 2 * threshold(count) - count
        )
        assert f"| {count} | {threshold(count)} | {row} |" in page


def opened(alive, gone, t, f):
    """How many honest silos are in the sum that opens, by how many honest ones list each as alive and gone."""
    keys = [number + f >= t for number in gone]
    if all(keys) or any(
        not key and number + f < t for key, number in zip(keys, alive, strict=True)
    ):
        return None
    return keys.count(False)


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_brute_force_over_all_lies_of_a_server(count):
    """Each honest silo answers once, for any set of up to N - t silos as gone: the worst is the formula's."""
    t = threshold(count)
    for f in range(2 * t - count):
        honest = count - f
        # Which of the honest it lists as gone is all that counts of an answer
        lists = [
            set(some)
            for size in range(count - t + 1)
            for some in itertools.combinations(range(honest), size)
        ]
        worst = honest
        for answers in itertools.combinations_with_replacement(range(len(lists)), honest):
            gone = [sum(j in lists[a] for a in answers) for j in range(honest)]
            found = opened([honest - number for number in gone], gone, t, f)
            worst = worst if found is None else min(worst, found)
        assert worst == bound(count, f), (count, f)


# --- the silos' own code ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """Six silos whose vectors of round 1 have left: twice, in two attempts at the same question."""
    ring = Ring(tmp_path_factory.mktemp("ring"), COUNT, least=1)
    ring.begin()
    ring.upload(ring.vectors())
    for name in ring.names:
        shutil.copytree(ring.folder / name, ring.folder / "first" / name)
    ring.begin(1, 2)
    ring.upload(ring.vectors(), 1, 2)
    for name in ring.names:
        shutil.copytree(ring.folder / name, ring.folder / "second" / name)
    yield ring
    close_records()


SETS = st.lists(st.sets(st.integers(0, COUNT - 1), min_size=COUNT - 2), min_size=2, max_size=2)
ASKED = st.sampled_from([[0], [1], [0, 1], [1, 0], []])
# For each attempt: what silos are asked for, and up to two of them otherwise
PLANS = st.lists(
    st.tuples(ASKED, st.dictionaries(st.integers(0, COUNT - 1), ASKED, max_size=2)),
    min_size=2,
    max_size=2,
)


@settings(deadline=None, max_examples=30, suppress_health_check=[*HealthCheck])
@given(sets=SETS, plans=PLANS, colluders=st.integers(0, 3))
def test_no_lists_and_no_order_open_a_smaller_sum(sent, sets, plans, colluders):
    """In two attempts at one question: the bound holds for each, and both open the same sum or one opens none."""
    restore(sent, "first")
    server = Symbolic(sent, sent.names[:colluders])
    lists = [[sent.names[i] for i in sorted(one)] for one in sets]
    for attempt, (most, others) in enumerate(plans, 1):
        if attempt == 2:
            advance(sent)
        for number, name in enumerate(sent.names):
            for which in others.get(number, most):
                server.ask(name, attempt, lists[which])
    sums = [found for found in map(server.opens, (1, 2)) if found is not None]
    assert all(len(found) >= bound(COUNT, colluders) for found in sums)
    assert all(found == sums[0] for found in sums)


@pytest.mark.parametrize("check", ["_note", "one answer a slot"])
def test_the_symbolic_server_finds_a_check_that_is_missing(sent, check, monkeypatch):
    restore(sent, "first")
    server, whole, less = Symbolic(sent, []), sent.names, sent.names[1:]
    if check == "_note":
        monkeypatch.setattr(SecureSilo, "_note", lambda *_: None)
        for name in whole:
            server.ask(name, 1, whole)
        advance(sent)
        for name in whole:
            server.ask(name, 2, less)
        assert server.opens(1) != server.opens(2) is not None
        return
    monkeypatch.setattr(SecureSilo, "_note", lambda *_: None)
    for name in whole:
        server.ask(name, 1, whole)
    restore(sent, "first")  # as a silo would that forgets its answers
    for name in whole:
        server.ask(name, 1, less)
    with pytest.raises(AssertionError):
        server.opens(1)


def advance(ring):
    """Go on to the second attempt, with the record of what was answered in the first."""
    for name in ring.names:
        place = ring.folder / name / "secure"
        shutil.rmtree(place)
        shutil.copytree(ring.folder / "second" / name / "secure", place)


def test_the_symbolic_server_opens_the_sum_of_an_honest_round(sent):
    restore(sent, "first")
    server = Symbolic(sent, [])
    left = sent.names[1:]
    for name in left[:4]:
        server.ask(name, 1, left)
    assert server.opens(1) is None
    server.ask(left[4], 1, left)
    assert server.opens(1) == {*left}


def test_keys_of_others_and_of_other_slots_do_not_open_shares(tmp_path):
    """Shares that were sealed for another silo, or in another attempt, are no shares here."""
    ring = Ring(tmp_path, COUNT)
    ring.begin()
    old = {name: ring.offers[name]["sealed"] for name in ring.names}
    ring.begin(1, 2)
    record = ring.record(1, 2, ring.names, "clinic-01")
    swapped = {**record, "sealed": [offer["sealed"][1] for offer in ring.offers.values()]}
    assert ring.enter("clinic-01", swapped).faults == ring.names
    replayed = {**record, "sealed": [shares[0] for shares in old.values()]}
    assert ring.enter("clinic-01", replayed).faults == ring.names
    assert ring.enter("clinic-01", record).faults == []
    for bad in (None, [], [b""] * 5, ["text"] * 6, [10**12] * 6):
        said = refusing(ring.enter, "clinic-01", {**record, "sealed": bad})
        assert "no share of each silo" in said or "sealed" in said
    sealed = record["sealed"]
    signed = [*sealed[:2], bytes(64) + sealed[2][64:], *sealed[3:]]
    assert ring.enter("clinic-01", {**record, "sealed": signed}).faults == ["clinic-03"]
    for nonsense in ([b""] * 6, [b"x" * 10**6] * 6, [bytes(212)] * 6):
        assert ring.enter("clinic-01", {**record, "sealed": nonsense}).faults == ring.names
    close_records()


LISTED = st.lists(
    st.one_of(st.text(max_size=9), st.integers(), st.floats(), st.binary(max_size=200)),
    max_size=8,
)
ANY = st.one_of(
    *(st.integers(), st.floats(), st.text(max_size=9), st.binary(max_size=9), st.booleans()),
    LISTED,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[*HealthCheck])
@given(
    changes=st.dictionaries(
        st.sampled_from(["round", "attempt", "statements", "sealed", "survivors", "again"]),
        ANY,
        min_size=1,
    )
)
def test_whatever_a_server_sends_is_one_line(sent, changes):
    """Each message with some of its fields replaced: a refusal in one line, or an answer."""
    restore(sent, "first")
    name = sent.names[0]
    silo = sent.silos[name]
    whole = {**sent.sent[name], "survivors": sent.names}
    record = {**whole, **changes}
    for call in (
        silo.keys,
        silo.unmask,
        lambda record: silo.enter(record, sent.received(1), 1 / 6),
    ):
        try:
            call(record)
        except SiteError as error:
            assert "\n" not in str(error) and len(str(error)) < 600


def test_a_key_without_a_secret_is_refused(tmp_path):
    """X25519 with a point of small order would give a secret that everybody knows."""
    ring = Ring(tmp_path, COUNT)
    ring.begin()
    silo, slot = ring.silos["clinic-01"], {"round": 2, "attempt": 1}
    texts = [one.keys(slot)["statement"] for one in ring.silos.values()]
    fields = fields_of(read_statement(texts[5])) | {"seal": "00" * 32}
    zero = state(ring.nodes["clinic-06"], **fields)
    said = refusing(silo.keys, {**slot, "statements": [*texts[:5], zero]})
    assert "statement 6 of the list" in said and "an X25519 key that gives a secret" in said
    close_records()
