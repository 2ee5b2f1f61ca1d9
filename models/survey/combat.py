"""ComBat from sums: the hospitals' differences in mean and spread of columns, without any hospital's rows.

    y_ijg = alpha_g + x_ij beta_g + gamma_ig + delta_ig e_ijg        (hospital i, row j, column g)

The estimates are functions of each hospital's number of rows, means, and sums of squares and products about these means
(:class:`Sums`). So they equal those from the pooled rows. Centred sums lose no digits where a mean is large.

* beta: least squares on covariates and an indicator per hospital, from the rows' distances to their hospital's means.
* alpha_g: the mean of the hospitals' intercepts, weighted by rows.
* sigma_g^2: the mean square of the residuals (1 / N).

The shrinkage is the parametric one: for each hospital a normal prior of gamma and an inverse gamma prior of delta, with
parameters from the moments over its columns. The two are iterated to :data:`CONVERGED`, not to the reference code's
1e-4, so that the result is the fixed point. N and n are the rows where a column has a value.

Source: Johnson, Li and Rabinovic, Adjusting batch effects in microarray expression data using empirical Bayes methods,
Biostatistics 8(1), 2007, section 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from partitions.common.errors import DataError

CONVERGED, MOST_STEPS = 1e-12, 10_000  # relative change of gamma and delta
CONSTANT = 1e-20  # share of a column's mean square below which a variance is rounding
COLLINEAR = 1e-10  # least eigenvalue of the covariates' correlations
FEWEST_ROWS = 2  # of a hospital: one has no variance
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sums:
    """Sums of one column in one hospital.

    * ``n``, ``mean``, ``square``: rows, mean, sum of squares about it.
    * ``x``, ``xx``, ``xy``: means (p,) of p covariates, sums of products about them (p, p), and with the column (p,).
    """

    n: int
    mean: float
    square: float
    x: Array
    xx: Array
    xy: Array


@dataclass(frozen=True)
class Place:
    """One hospital's ``gamma`` and ``delta`` of a column: the estimates or, after shrinkage, the values used."""

    gamma: float
    delta: float


@dataclass(frozen=True)
class Fit:
    """The fit of a column: alpha, beta (p,) and sigma of all hospitals, and each hospital's estimates."""

    alpha: float
    beta: Array
    sigma: float
    places: Mapping[str, Place]


@dataclass(frozen=True)
class Combat:
    """The fits by column, and the gamma and delta used for each hospital by column.

    ``columns``, ``silos`` and ``cells`` give the reason for each column, hospital, and pair of both that is left out.
    """

    fits: Mapping[str, Fit]
    used: Mapping[str, Mapping[str, Place]]
    columns: Mapping[str, str] = field(default_factory=dict)
    silos: Mapping[str, str] = field(default_factory=dict)
    cells: Mapping[tuple[str, str], str] = field(default_factory=dict)


def sums_of(y: npt.NDArray[Any], x: npt.NDArray[Any]) -> Sums:
    """Compute the sums of a column ``y`` (n,) and of covariates ``x`` (n, p), in float64."""
    y, x = y.astype(np.float64), x.astype(np.float64)
    mean, centre = y.mean(), x.mean(0)
    y, x = y - mean, x - centre
    return Sums(len(y), float(mean), float((y * y).sum()), centre, x.T @ x, x.T @ y)


def combat(sums: Mapping[str, Mapping[str, Sums]], shrink: bool = True) -> Combat:
    """Estimate ComBat from the hospitals' sums, by column and hospital.

    ``shrink``: whether each hospital's gamma and delta are shrunk to their mean over its columns (empirical Bayes), for
    which it needs two columns. The result names columns, hospitals and pairs of both that cannot be used. Raises
    DataError, one line, where none is left.
    """
    left: dict[str, dict[str, Sums]] = {name: dict(silos) for name, silos in sums.items()}
    cells = {
        (s, c): f"{k.n} rows have no variance" for c, own in left.items() for s, k in own.items() if k.n < FEWEST_ROWS
    }
    for silo, column in cells:
        del left[column][silo]
    columns, silos = dict[str, str](), dict[str, str]()
    fits = _fit_columns(left, columns)
    while shrink and (alone := _with_one_column(left)):
        for silo in alone:
            silos[silo] = "one column: the shrinkage compares columns; name another one, or say --no-shrink"
            for own in left.values():
                own.pop(silo, None)
        fits = _fit_columns(left, columns)
    if not left:
        raise DataError("; ".join(f"{name}: {why}" for name, why in [*columns.items(), *silos.items()]))
    return Combat(fits, _places(left, fits, cells, shrink), columns, silos, cells)


def _fit_columns(left: dict[str, dict[str, Sums]], columns: dict[str, str]) -> dict[str, Fit]:
    """Return the fit of each column. Remove a column without a fit from ``left``, with the reason in ``columns``."""
    fits: dict[str, Fit] = {}
    for name, own in list(left.items()):
        if len(own) < 2:
            columns[name] = f"{len(own)} hospitals gave it, and there is nothing to compare"
        else:
            try:
                fits[name] = fitted(own)
            except DataError as error:
                columns[name] = str(error)
        if name not in fits:
            del left[name]
    return fits


def _with_one_column(left: Mapping[str, Mapping[str, Sums]]) -> list[str]:
    """Return the hospitals that have only one column left."""
    counts = Counter(silo for own in left.values() for silo in own)
    return sorted(silo for silo, count in counts.items() if count < 2)


def _places(
    left: Mapping[str, Mapping[str, Sums]], fits: Mapping[str, Fit], cells: dict[tuple[str, str], str], shrink: bool
) -> dict[str, dict[str, Place]]:
    """Return gamma and delta of each hospital by column; add to ``cells`` the reason where they cannot be used."""
    used: dict[str, dict[str, Place]] = {}
    for silo in sorted({silo for own in left.values() for silo in own}):
        names = [name for name, own in left.items() if silo in own]
        found = [fits[name].places[silo] for name in names]
        rows = [left[name][silo].n for name in names]
        for name, place in zip(names, shrunk(found, rows) if shrink else found, strict=True):
            if place.delta > 0 and np.isfinite([place.gamma, place.delta]).all():
                used.setdefault(silo, {})[name] = place
            else:
                cells[silo, name] = "it is constant there, and cannot be given another spread"
    return used


def fitted(silos: Mapping[str, Sums]) -> Fit:
    """Fit one column by least squares.

    Raises DataError where it is constant, or covariates are constant within hospitals or follow from one another.
    """
    every = [*silos.values()]
    n = np.array([own.n for own in every], np.float64)
    beta = coefficients(np.sum([own.xx for own in every], 0), np.sum([own.xy for own in every], 0))
    rest = np.array([max(own.square - 2 * beta @ own.xy + beta @ own.xx @ beta, 0.0) for own in every])
    scale = sum(own.square + own.n * own.mean**2 for own in every)
    if rest.sum() <= CONSTANT * scale:
        raise DataError("it is constant, or says no more than the covariates: leave it out")
    intercepts = np.array([own.mean - own.x @ beta for own in every])
    alpha, sigma = float(n @ intercepts / n.sum()), float((rest.sum() / n.sum()) ** 0.5)
    gamma, delta = (intercepts - alpha) / sigma, rest / (n - 1) / sigma**2
    return Fit(alpha, beta, sigma, {s: Place(float(g), float(d)) for s, g, d in zip(silos, gamma, delta, strict=True)})


def coefficients(xx: Array, xy: Array) -> Array:
    """Return beta (p,) from the sums within hospitals. Raises DataError where covariates follow from one another."""
    if not len(xy):
        return np.zeros(0)
    size = np.sqrt(np.diag(xx))
    if not (size > 0).all() or np.linalg.eigvalsh(xx / np.outer(size, size))[0] < COLLINEAR:
        raise DataError("a covariate is constant within each hospital, or follows from the others: leave it out")
    found: Array = np.linalg.solve(xx / np.outer(size, size), xy / size) / size
    return found


def shrunk(found: list[Place], rows: list[int]) -> list[Place]:
    """Shrink a hospital's gamma and delta to their means over its columns, of which there are two or more.

    Where all its deltas are equal, the prior of delta is that point.
    """
    n, gamma = np.array(rows, np.float64), np.array([own.gamma for own in found])
    delta = np.array([own.delta for own in found])
    centre, tau = gamma.mean(), gamma.var(ddof=1)
    mean, spread = delta.mean(), delta.var(ddof=1)
    point = spread <= CONVERGED * mean**2
    a = np.inf if point else (2 * spread + mean**2) / spread
    b = np.inf if point else (mean * spread + mean**3) / spread
    own, wide = gamma, np.full_like(delta, mean) if point else delta
    for _ in range(MOST_STEPS):
        drawn = (n * tau * gamma + wide * centre) / (n * tau + wide)
        square = (n - 1) * delta + n * (gamma - drawn) ** 2
        spread_now = wide if point else (b + square / 2) / (n / 2 + a - 1)
        change = max(np.abs(drawn - own).max() / (1 + np.abs(own).max()), np.abs(spread_now / wide - 1).max())
        own, wide = drawn, spread_now
        if change <= CONVERGED:
            break
    return [Place(float(g), float(d)) for g, d in zip(own, wide, strict=True)]
