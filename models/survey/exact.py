"""What exact sums of a hospital's rows would tell of few patients, and which rows and columns that leaves.

A sum that is not rounded tells a patient's value where all others have the same, where one outweighs them, and where
two sums differ by one patient. So a column's sums leave only where at least ``least`` patients differ from its most
frequent value and none has most of its sum of squares, in all rows and in each category of the covariates, and where
it has many values. The same holds of products with a covariate that has no categories, over all rows. Where few
patients lack a value others are left out with them: their number is a count.

Source: Hundepool et al., Statistical Disclosure Control (2012), sections 4.2 and 5.3: dominance, threshold rules and
differencing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partitions.splits import Array

FEW_VALUES = 10  # a number with so many different values or fewer is one of categories
LARGEST_SHARE = 0.5  # of a column's sum of squares about its mean, that one patient may have
ALIKE = 0.9999  # correlation with a measurement from which on a covariate is that measurement


def kept_rows(gone: Array, units: Array, order: Array, least: int) -> Array:
    """Which rows count, bool (n,): those with a value, without some patients where 1 to ``least`` - 1 lack one.

    ``gone`` (n,): missing; ``units`` (n,): patients; ``order`` (n,): a number of each patient that depends on the
    patient's data alone; the lowest are left out first.
    """
    patients, first = np.unique(units, return_index=True)
    lacking = np.isin(patients, units[gone])
    wanted = max(least - lacking.sum(), 0) if lacking.any() else 0
    others = patients[~lacking][np.argsort(order[first][~lacking], kind="stable")]
    kept: Array = ~gone & ~np.isin(units, others[:wanted])
    return kept


def is_discrete(values: Array) -> bool:
    return len(np.unique(values)) <= FEW_VALUES


def tells_of_few(values: Array, units: Array, cells: Sequence[Array], least: int, others: Sequence[Array] = ()) -> str:
    """Return why exact sums of ``values`` (n,) would tell of fewer than ``least`` patients; empty: they would not.

    ``cells``: of each category of the covariates its rows, bool (n,). ``others``: covariates without categories (n,),
    with which there are sums of products.
    """
    found = len(np.unique(values))
    if found <= FEW_VALUES:
        return f"it has {found} different values, as a category has"
    pairs = [(values[cell], values[cell], units[cell]) for cell in (np.ones(len(values), bool), *cells)]
    pairs += [(values, other, units) for other in others]
    if any(patients(who[unusual(a) & unusual(b)]) < least for a, b, who in pairs):
        return f"fewer than {least} patients have another value than its most frequent one"
    if any(outweighed(np.abs(distance(a) * distance(b)), who) for a, b, who in pairs):
        return "one patient outweighs the others"
    return ""


def unusual(values: Array) -> Array:
    """Which differ from the most frequent one, bool (n,)."""
    found, counts = np.unique(values, return_counts=True)
    different: Array = values != found[counts.argmax()]
    return different


def distance(values: Array) -> Array:
    """From their mean, float64 (n,)."""
    far: Array = values.astype(np.float64) - values.mean(dtype=np.float64)
    return far


def outweighed(parts: Array, units: Array) -> bool:
    """Return whether one patient has most of the sum of ``parts`` (n,), which are 0 or more."""
    shares = np.bincount(np.unique(units, return_inverse=True)[1], parts)
    return bool(shares.max() > LARGEST_SHARE * shares.sum())


def has_small_cells(covariates: Sequence[Sequence[Array]], units: Array, least: int) -> bool:
    """Return whether a category of a covariate, or of two at once, has fewer than ``least`` patients.

    ``covariates``: of each its categories' rows, bool (n,). An empty category counts as small.
    """
    alone = [cell for cells in covariates for cell in cells]
    pairs = [a & b for i, cells in enumerate(covariates) for a in cells for other in covariates[:i] for b in other]
    return any(patients(units[cell]) < least for cell in (*alone, *pairs))


def patients(units: Array) -> int:
    return len(np.unique(units))


def tells_label(values: Array, y: Array) -> bool:
    """Return whether a covariate (n,) gives a label (n, ...) away, in these rows: each category has one class, or its
    values lie apart for the classes, or it is a measurement in another unit.
    """
    if y.ndim > 2:  # outlines
        return False
    return any(_tells(values, label) for label in y.reshape(len(y), -1).T)


def _tells(values: Array, label: Array) -> bool:
    classes = len(np.unique(label))
    if classes < 2 or len(np.unique(values)) < 2:
        return False
    if classes > FEW_VALUES:
        return bool(abs(np.corrcoef(values, label)[0, 1]) > ALIKE)
    if is_discrete(values):
        pairs = np.stack([values.astype(np.float64), label.astype(np.float64)], 1)
        return len(np.unique(pairs, axis=0)) == len(np.unique(values))
    ordered = label[np.lexsort((label, values))]
    return int((ordered[1:] != ordered[:-1]).sum()) == classes - 1
