"""Which of many combinations `make test` runs; `make test-all` runs the others, too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def seldom(*values: Any) -> Any:
    """One of the cases of ``pytest.mark.parametrize``: `make test-all` runs it."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def some(
    argument: str, cases: Iterable[Any], often: Callable[[Any], bool]
) -> pytest.MarkDecorator:
    """A test for each case; what is not run often is exhaustive."""
    return pytest.mark.parametrize(
        argument, [case if often(case) else seldom(case) for case in cases]
    )


def sampled(argument: str, cases: Iterable[Any], each: int) -> pytest.MarkDecorator:
    """A test for each case, of which every second, third, ... is run often."""
    chosen = list(cases)[::each]
    return some(argument, cases, lambda case: case in chosen)


def product(**columns: Sequence[Any]) -> pytest.MarkDecorator:
    """A test for each combination, of which as many are run often as show each value of each column."""
    most = max(map(len, columns.values()))
    often = {tuple(i % len(values) for values in columns.values()) for i in range(most)}
    combinations = itertools.product(*(range(len(values)) for values in columns.values()))
    cases = (
        (places, [values[i] for i, values in zip(places, columns.values(), strict=True)])
        for places in combinations
    )
    return pytest.mark.parametrize(
        tuple(columns), [case if places in often else seldom(*case) for places, case in cases]
    )
