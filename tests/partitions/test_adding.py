"""A sum of floats has the same last bits with every Python."""

from __future__ import annotations

from partitions.common.adding import added


def test_floats_are_added_one_by_one():
    """Compensated, as by sum() from Python 3.12 on, it would be 1."""
    assert added([0.1] * 10) == 0.9999999999999999
