"""Groups of silos: whatever sums a server opens and combines, no fewer than a group's silos are in the result."""

from __future__ import annotations

import itertools
import shutil
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from secure_ring import Ring, Symbolic, plain_sum, refusing, restore

from client.protocol.parsed import SiteError
from client.protocol.secure.statements import threshold
from client.site.record import close_records
from partitions.common.sum_weights import (
    comparison_fault,
    groups_of,
    labels_of,
    weights_in_sum,
    whole,
)


def test_the_groups_are_in_the_order_of_names():
    assert groups_of("gfedcba", 3) == [["a", "b", "c"], ["d", "e", "f", "g"]]
    assert groups_of("abcdef", 3) == [["a", "b", "c"], ["d", "e", "f"]]
    assert groups_of("ba", 1) == [["a"], ["b"]] and groups_of("ab", 3) == []
    labels = labels_of([["a", "b"], ["c", "d", "e"]])
    assert whole("dbaec", labels) == [*"abcde"] and whole("abcd", labels) == ["a", "b"]
    assert whole("acde", labels) == [*"cde"] and whole("x", labels) == []


def test_the_silos_of_a_group_weigh_the_same():
    labels = labels_of(["ab", "cd"])
    counts = {"a": 10, "b": 31, "c": 900, "d": 100}
    assert weights_in_sum("samples", counts, 5.0, labels) == {
        "a": 20,
        "b": 20,
        "c": 100,
        "d": 100,
    }


def rank(rows):
    left, found = [[*map(Fraction, row)] for row in rows], 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((row for row in left if row[column]), None)
        if pivot is None:
            continue
        left.remove(pivot)
        left = [
            [a - row[column] / pivot[column] * b for a, b in zip(row, pivot, strict=True)]
            for row in left
        ]
        found += 1
    return found


def fewest(rows, most):
    """The fewest silos in a linear combination of sums that is not 0, or ``most`` + 1."""
    silos = range(len(rows[0]))
    for size in range(1, most + 1):
        for some in itertools.combinations(silos, size):
            # Without these silos' columns a combination of the rows vanishes
            if rank([[row[i] for i in silos if i not in some] for row in rows]) < rank(rows):
                return size
    return most + 1


@st.composite
def opened(draw):
    """The sums that silos may answer for: whole groups, more than two thirds, equal weights or those of samples."""
    count, group = draw(st.integers(3, 9)), draw(st.integers(1, 3))
    names = [f"s{number}" for number in range(count)]
    groups = groups_of(names, group)
    labels = labels_of(groups)
    counts = {name: draw(st.integers(1, 500)) for name in names}
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        # The list, and those of it that survive
        listed = draw(st.lists(st.sampled_from(names), unique=True, min_size=threshold(count)))
        listed = whole(listed, labels)
        alive = draw(st.sets(st.sampled_from(range(len(groups)))))
        inside = {name for number in alive for name in groups[number]} & {*listed}
        if len(inside) < threshold(count):
            continue
        found = dict.fromkeys(listed, 1)
        if draw(st.booleans()):
            found = weights_in_sum(
                "samples", {name: counts[name] for name in listed}, 5.0, labels
            )
        rows.append([found[name] if name in inside else 0 for name in names])
    return group, rows


@settings(deadline=None, max_examples=150, suppress_health_check=[*HealthCheck])
@given(opened())
def test_no_combination_of_sums_has_fewer_silos_than_a_group(sums):
    group, rows = sums
    assert not rows or fewest(rows, group - 1) >= group


def test_the_search_finds_a_combination_that_shows_fewer():
    """Sums of parts of groups; and weights that differ within a group, which two ways of weighing show."""
    assert fewest([[1, 1, 1, 1], [1, 1, 1, 0]], 2) == 1
    assert fewest([[1, 1, 1, 1], [5, 5, 5, 9]], 2) == 1
    assert fewest([[1, 1, 1, 1], [1, 1, 0, 0]], 2) == 2


# --- the silos' own code ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Eight silos in four groups of two, whose vectors of round 1 have left. Six must be in a sum."""
    ring = Ring(tmp_path_factory.mktemp("ring"), 8, group=2)
    ring.begin()
    ring.masked, ring.following = ring.upload(ring.vectors())  # type: ignore[attr-defined]
    for name in ring.names:
        shutil.copytree(ring.folder / name, ring.folder / "first" / name)
    yield ring
    close_records()


PART = "the list has a part of a group of silos"


def test_a_group_is_in_a_sum_as_a_whole_or_not(pairs):
    """One silo of the last group is gone: the other's vector has come, and is left out, too."""
    restore(pairs, "first")
    first, vectors, six = pairs.silos["clinic-01"], pairs.vectors(), pairs.names[:6]
    slot = {"round": 1, "attempt": 1}
    for part in (pairs.names[:7], pairs.names[1:], [*pairs.names[:5], "clinic-07"]):
        assert PART in refusing(first.unmask, {**slot, "survivors": part})
    masked = pairs.masked
    total, _ = pairs.open(masked, six)
    assert (total == plain_sum(vectors, six)).all()


def test_a_list_has_whole_groups(pairs):
    restore(pairs, "first")
    first, seven = pairs.silos["clinic-01"], pairs.names[:7]
    slot = {"round": 1, "attempt": 2}
    texts = [pairs.silos[name].keys(slot)["statement"] for name in seven]
    assert PART in refusing(first.keys, {**slot, "statements": texts})
    restore(pairs, "first")
    assert PART in refusing(pairs.enter, "clinic-01", pairs.record(1, 1, seven, "clinic-01"))


@settings(deadline=None, max_examples=6, suppress_health_check=[*HealthCheck])
@given(
    alive=st.lists(st.sets(st.integers(0, 3), min_size=3), min_size=8, max_size=8),
    colluders=st.sets(st.integers(0, 7), max_size=2),
)
def test_a_server_that_lies_opens_whole_groups_too(pairs, alive, colluders):
    """Other groups are named as alive to each silo: what opens has all honest silos of a group, or none."""
    restore(pairs, "first")
    bad = [pairs.names[number] for number in colluders]
    server = Symbolic(pairs, bad)
    for name, groups in zip(pairs.names, alive, strict=True):
        server.ask(name, 1, [one for number in sorted(groups) for one in pairs.groups[number]])
    for group in pairs.groups:
        honest = {*group} - {*bad}
        assert honest & (server.opens(1) or set()) in (honest, set())


def test_a_study_of_fewer_silos_than_a_group_opens_nothing(tmp_path):
    ring = Ring(tmp_path, 3, group=4)
    with pytest.raises(SiteError, match=PART):
        ring.begin()
    close_records()


# --- sums of groups, opened one by one --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def threes(tmp_path_factory):
    """Nine silos in three groups that mask among their own, and a tenth and eleventh in the last group."""
    ring = Ring(tmp_path_factory.mktemp("ring"), 11, group=3, robust="groups")
    ring.begin()
    ring.masked, ring.following = ring.upload(ring.vectors())  # type: ignore[attr-defined]
    for name in ring.names:
        shutil.copytree(ring.folder / name, ring.folder / "first" / name)
    yield ring
    close_records()


def test_each_groups_sum_opens_and_no_other(threes):
    """A silo of the first group is gone: the two others' sums open, and no sum of parts of groups is plain."""
    restore(threes, "first")
    vectors, left = threes.vectors(), threes.names[3:]
    sums, false = threes.open(threes.masked, left)
    assert not false and sums.keys() == {"clinic-04", "clinic-07"}
    for group in threes.groups[1:]:
        assert (sums[group[0]] == plain_sum(vectors, group)).all()
    slot = {"round": 1, "attempt": 1}
    for part in (threes.names[1:], threes.names[:10], [*threes.names[:8], *threes.names[9:]]):
        assert PART in refusing(threes.silos["clinic-05"].unmask, {**slot, "survivors": part})


def test_masks_of_groups_cancel_within_each(threes):
    """What the two masked vectors of one group lack to be plain is in the third; other groups have no part in it."""
    restore(threes, "first")
    vectors, (group, *_) = threes.vectors(), threes.groups
    sums, _ = threes.open(threes.masked, threes.names)
    assert (sums[group[0]] == plain_sum(vectors, group)).all()
    for size in (1, 2):
        for some in itertools.combinations(threes.names, size):
            assert (plain_sum(threes.masked, some) != plain_sum(vectors, some)).any()


def test_a_silo_answers_with_enough_peers_in_its_own_group_alone(tmp_path):
    """Groups of three have two others: a policy that wants three refuses, though twelve are in the list."""
    ring = Ring(tmp_path, 12, least=3, group=3, robust="groups")
    line = r"secure-peers = 3, and the sum of its group 2 besides this silo"
    with pytest.raises(SiteError, match=line):
        ring.begin()
    close_records()


def test_a_silo_in_no_group_that_survives_gives_no_answer(threes):
    restore(threes, "first")
    left = {"round": 1, "attempt": 1, "survivors": threes.names[3:]}
    assert "the sum of its group 0 besides" in refusing(threes.silos["clinic-01"].unmask, left)


def test_one_model_is_summed_in_one_grouping_over_all_runs(threes):
    """The same eleven silos and model in another run: as a whole, or in other groups, no sum opens any more.

    Its own group again does.
    """
    restore(threes, "first")
    threes.open(threes.masked, threes.names)
    shown = []
    for run, group, robust in (("8", 3, "none"), ("9", 5, "groups"), ("10", 3, "groups")):
        other = Ring(threes.folder, 11, group=group, robust=robust)
        other.nodes, other.peers = threes.nodes, threes.peers
        other.silos = {name: other.silo(name, run) for name in other.names}
        other.begin()
        other.upload(other.vectors())
        last = other.silos["clinic-11"]
        slot = {"round": 1, "attempt": 1, "survivors": other.names}
        try:
            last.unmask(slot)
            shown.append(run)
        except SiteError as error:
            assert "was summed over other silos before" in str(error)
    assert shown == ["10"]


@settings(deadline=None, max_examples=6, suppress_health_check=[*HealthCheck])
@given(
    alive=st.lists(st.sets(st.integers(0, 2), min_size=2), min_size=11, max_size=11),
    colluders=st.sets(st.integers(0, 10), max_size=3),
)
def test_no_lie_opens_less_than_the_honest_silos_of_a_group(threes, alive, colluders):
    """Masks of both kinds of one silo are never known, so what opens has all honest silos of a group, or none."""
    restore(threes, "first")
    bad = [threes.names[number] for number in colluders]
    server = Symbolic(threes, bad)
    for name, groups in zip(threes.names, alive, strict=True):
        server.ask(name, 1, [one for number in sorted(groups) for one in threes.groups[number]])
    for group in threes.groups:
        honest = {*group} - {*bad}
        inside = {name for name in honest if not server.knows(1, name, "s")}
        if inside and all(server.knows(1, name, "b") for name in inside):
            assert inside == honest
        assert not any(
            server.knows(1, name, "b") and server.knows(1, name, "s") for name in honest
        )


def test_comparing_needs_three_groups_of_three():
    assert comparison_fault(9, 3) == "" and comparison_fault(17, 5) == ""
    for silos, size in ((8, 3), (12, 2), (12, 5), (100, 1)):
        assert f"here are {silos // size} of {size}" in comparison_fault(silos, size)
