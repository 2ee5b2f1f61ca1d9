"""Groups of silos: whatever sums a server opens and combines, no fewer than a group's silos are in the result."""

from __future__ import annotations

import itertools
import shutil
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from secure_ring import Ring, Symbolic, plain_sum, refusing, restore

from client.site.parsed import SiteError
from client.site.record import close_records
from client.site.secure.statements import threshold
from partitions.common.sum_weights import groups_of, labels_of, weights_in_sum, whole


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
    assert weights_in_sum(counts, 5.0, labels) == {"a": 20, "b": 20, "c": 100, "d": 100}


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
            found = weights_in_sum({name: counts[name] for name in listed}, 5.0, labels)
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
