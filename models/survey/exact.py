"""Disclosure checks of exact sums of a hospital's rows: which rows and columns may be in them.

An exact sum discloses a patient's value where all others have the same value, where one patient dominates it, and where
two sums differ by one patient. So a column's sums leave only under these conditions:

* It has more than :data:`FEW_VALUES` different values.
* At least ``least`` patients differ from its most frequent value, in all rows and in each category of the covariates.
* No patient has most of its sum of squares, in the same rows.

The last two also apply to products with a covariate without categories, over all rows. Where few patients lack a value,
others are left out with them, because the number of rows is itself a count.

Source: Hundepool et al., Statistical Disclosure Control (2012), sections 4.2 and 5.3: dominance, threshold rules and
differencing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partitions.splits import Array

FEW_VALUES = 10  # a number with at most so many different values is treated as categories
LARGEST_SHARE = 0.5  # of a column's sum of squares about its mean, for one patient
ALIKE = 0.9999  # a covariate with this correlation to a measurement, or more, is that measurement


def kept_rows(gone: Array, units: Array, order: Array, least: int) -> Array:
    """Return which rows are used, bool (n,): those with a value.

    Where 1 to ``least`` - 1 patients lack one, further patients are left out, up to ``least``. ``gone`` (n,): missing;
    ``units`` (n,): patients; ``order`` (n,): a number that depends on the patient's data alone; the lowest are left out
    first.
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
    """Return why exact sums of ``values`` (n,) would disclose fewer than ``least`` patients; empty: they would not.

    ``cells``: the rows of each category of the covariates, bool (n,). ``others``: covariates without categories (n,),
    for sums of products.
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
    """Return which values differ from the most frequent one, bool (n,)."""
    found, counts = np.unique(values, return_counts=True)
    different: Array = values != found[counts.argmax()]
    return different


def distance(values: Array) -> Array:
    """Return the differences of values from their mean, float64 (n,)."""
    far: Array = values.astype(np.float64) - values.mean(dtype=np.float64)
    return far


def outweighed(parts: Array, units: Array) -> bool:
    """Return whether one patient has more than :data:`LARGEST_SHARE` of the sum of ``parts`` (n,), all at least 0."""
    shares = np.bincount(np.unique(units, return_inverse=True)[1], parts)
    return bool(shares.max() > LARGEST_SHARE * shares.sum())


def has_small_cells(covariates: Sequence[Sequence[Array]], units: Array, least: int) -> bool:
    """Return whether a category of a covariate, or of two at once, has fewer than ``least`` patients.

    ``covariates``: for each, the rows of its categories, bool (n,). An empty category counts as small.
    """
    alone = [cell for cells in covariates for cell in cells]
    pairs = [a & b for i, cells in enumerate(covariates) for a in cells for other in covariates[:i] for b in other]
    return any(patients(units[cell]) < least for cell in (*alone, *pairs))


def patients(units: Array) -> int:
    return len(np.unique(units))


def tells_label(values: Array, y: Array) -> bool:
    """Return whether a covariate (n,) discloses a label (n, ...) in these rows.

    It does where each category has one class, where its values separate the classes, or where it is a measurement in
    another unit.
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
