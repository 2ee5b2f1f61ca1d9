"""ComBat from sums: by hand, and as that of the pooled rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from pooled_combat import Numbers, pooled_combat

from models.survey.combat import Combat, Place, combat, shrunk, sums_of
from partitions.common.errors import DataError
from partitions.recipes.combat import Combat as Section
from partitions.recipes.combat import Harmonised, harmonised


def of_rows(tables: Sequence[Numbers], covariates: Sequence[Numbers] | None = None, shrink: bool = True) -> Combat:
    """From each hospital's own sums alone."""
    xs = [np.zeros((len(t), 0)) for t in tables] if covariates is None else covariates
    sums = {}
    for g in range(tables[0].shape[1]):
        rows = [~np.isnan(t[:, g]) for t in tables]
        sums[f"c{g}"] = {
            f"h{i}": sums_of(t[r, g], x[r]) for i, (t, x, r) in enumerate(zip(tables, xs, rows, strict=True))
        }
    return combat(sums, shrink)


def applied(found: Combat, tables: Sequence[Numbers], covariates: Sequence[Numbers] | None = None) -> list[Numbers]:
    """Each hospital's table by the section that its recipe would have."""
    made = []
    for i, table in enumerate(tables):
        x = np.zeros((len(table), 0)) if covariates is None else covariates[i]
        names = [f"x{j}" for j in range(x.shape[1])]
        columns = [
            Harmonised(c, f.alpha, tuple(f.beta), f.sigma, found.used[f"h{i}"][c].gamma, found.used[f"h{i}"][c].delta)
            for c, f in found.fits.items()
        ]
        places = {f"c{g}": g for g in range(table.shape[1])}
        terms = {name: (table.shape[1] + j, None) for j, name in enumerate(names)}
        whole = harmonised(np.hstack([table, x]), Section("h", tuple(names), tuple(columns)), places, terms)
        made.append(whole[:, : table.shape[1]])
    return made


def pair(place: Place) -> tuple[float, float]:
    return place.gamma, place.delta


def test_two_silos_by_hand() -> None:
    """Two hospitals, one column, without shrinkage.

    A has 1, 3 (mean 2, squares about it 2), B has 7, 9, 11, 13 (mean 10, squares 9 + 1 + 1 + 9 = 20). N = 6:
    alpha = (2 * 2 + 4 * 10) / 6 = 22/3; sigma^2 = (2 + 20) / 6 = 11/3. gamma_A = (2 - 22/3) / sigma = -(16/3) / sigma,
    gamma_B = (8/3) / sigma; delta_A = 2 / 1 / (11/3) = 6/11, delta_B = 20/3 / (11/3) = 20/11. So 1 of A becomes
    (1 - 2) / sqrt(6/11) + 22/3 and 13 of B (13 - 10) / sqrt(20/11) + 22/3.
    """
    tables = [np.array([[1.0], [3.0]]), np.array([[7.0], [9.0], [11.0], [13.0]])]
    found = of_rows(tables, shrink=False)
    fit, sigma = found.fits["c0"], (11 / 3) ** 0.5
    assert (fit.alpha, fit.sigma) == pytest.approx((22 / 3, sigma))
    assert pair(found.used["h0"]["c0"]) == pytest.approx((-16 / 3 / sigma, 6 / 11))
    assert pair(found.used["h1"]["c0"]) == pytest.approx((8 / 3 / sigma, 20 / 11))
    a, b = applied(found, tables)
    assert a[0, 0] == pytest.approx(22 / 3 - (11 / 6) ** 0.5) and b[3, 0] == pytest.approx(22 / 3 + 3 * 0.55**0.5)
    assert a.mean() == pytest.approx(b.mean()) and a.var(ddof=1) == pytest.approx(b.var(ddof=1))


def test_shrinkage_by_hand() -> None:
    """One hospital, two columns of n = 4 with gamma 1, 3 and delta 1, 2.

    Prior: centre 2, t2 = (1 + 1) / 1 = 2; delta has mean 3/2 and variance 1/2, so a = (1 + 9/4) / (1/2) = 13/2 and
    b = (3/4 + 27/8) / (1/2) = 33/4. At the fixed point gamma* = (8 gamma + 2 delta*) / (8 + delta*) and delta* =
    (33/4 + (3 delta + 4 (gamma - gamma*)^2) / 2) / (2 + 13/2 - 1).
    """
    one, two = shrunk([Place(1.0, 1.0), Place(3.0, 2.0)], [4, 4])
    for own, gamma, delta in ((one, 1.0, 1.0), (two, 3.0, 2.0)):
        assert own.gamma == pytest.approx((8 * gamma + 2 * own.delta) / (8 + own.delta), abs=1e-12)
        square = 3 * delta + 4 * (gamma - own.gamma) ** 2
        assert own.delta == pytest.approx((33 / 4 + square / 2) / 7.5, abs=1e-12)
    assert 1 < one.gamma < 2 < two.gamma < 3


def hospitals(seed: int, gaps: float = 0.0, offset: float = 0.0) -> tuple[list[Numbers], list[Numbers]]:
    """Tables of five columns and two covariates in hospitals of unequal size, mean, spread and covariates."""
    rng = np.random.default_rng(seed)
    tables, covariates = [], []
    for i, n in enumerate((7, 40, 160)):
        x = np.stack([rng.normal(60 + 3 * i, 10, n), (rng.random(n) < 0.3 + 0.2 * i).astype(float)], 1)
        y = rng.normal(size=(n, 5)) * (1 + 0.5 * i) + rng.normal(size=5) * i + x @ rng.normal(size=(2, 5))
        y[rng.random(y.shape) < gaps] = np.nan
        tables.append(y + offset)
        covariates.append(x)
    return tables, covariates


@pytest.mark.parametrize("shrink", [True, False])
@pytest.mark.parametrize("with_covariates", [False, True])
@pytest.mark.parametrize("gaps", [0.0, 0.2])
def test_it_is_the_pooled_one(shrink: bool, with_covariates: bool, gaps: float) -> None:
    """To 1e-6 of a column's spread, and here far below."""
    tables, covariates = hospitals(1, gaps)
    xs = covariates if with_covariates else None
    wanted = pooled_combat(tables, xs, shrink)
    for own, pooled in zip(applied(of_rows(tables, xs, shrink), tables, xs), wanted, strict=True):
        np.testing.assert_allclose(own, pooled, rtol=0, atol=1e-9, equal_nan=True)


def test_a_large_mean_costs_no_digits() -> None:
    """Spread 1 about 1e8: plain sums of squares would keep no digit of the variance (1e16 n against n)."""
    tables, covariates = hospitals(2, offset=1e8)
    wanted = pooled_combat([t - 1e8 for t in tables], covariates)
    for own, pooled in zip(applied(of_rows(tables, covariates), tables, covariates), wanted, strict=True):
        np.testing.assert_allclose(own - 1e8, pooled, rtol=0, atol=1e-6)


def test_what_cannot_be_harmonised_is_named() -> None:
    """A constant column; a hospital with one row; then one column alone, which cannot be shrunk."""
    tables, _ = hospitals(3)
    tables[1] = tables[1][:1]
    for table in tables:
        table[:, 2] = 4.2
    found = of_rows(tables)
    assert found.columns == {"c2": "it is constant, or says no more than the covariates: leave it out"}
    assert found.cells["h1", "c0"] == "1 rows have no variance" and set(found.used) == {"h0", "h2"}
    wanted = pooled_combat([tables[0][:, [0, 1, 3, 4]], tables[2][:, [0, 1, 3, 4]]])
    assert applied(found, [tables[0]])[0][:, [0, 1, 3, 4]] == pytest.approx(wanted[0], abs=1e-9)
    with pytest.raises(DataError, match=r"h0: one column: the shrinkage compares columns; .*--no-shrink"):
        of_rows([table[:, :1] for table in tables])
    assert set(of_rows([table[:, :1] for table in tables], shrink=False).used) == {"h0", "h2"}
    with pytest.raises(DataError, match="c0: 1 hospitals gave it"):
        of_rows(tables[:2], shrink=False)


def test_a_covariate_that_is_a_hospitals_own_is_refused() -> None:
    """All patients of one hospital are women, all of the other men: the two cannot be told apart."""
    tables, _ = hospitals(4)
    own = [np.full((len(table), 1), float(i)) for i, table in enumerate(tables)]
    with pytest.raises(DataError, match="c0: a covariate is constant within each hospital"):
        of_rows(tables, own)


def test_columns_that_are_alike_have_a_prior_without_spread() -> None:
    """A column twice: every delta of a hospital is equal, so that they stay, and every gamma."""
    tables = [np.hstack([table[:, :1], table[:, :1]]) for table in hospitals(5)[0]]
    drawn, own = (of_rows(tables, shrink=shrink).used["h0"]["c0"] for shrink in (True, False))
    assert pair(drawn) == pytest.approx(pair(own))
