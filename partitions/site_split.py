"""Division of a hospital's file into train, validation and test: fixed by its samples, independent of a run's settings.

A server that chooses the division of a table and receives its sums could solve for every record. So no seed and no
share of a run has an effect. The parts of a file are used where it has them. Otherwise samples are sorted by the
SHA-256 of their values:

* Of a file of ``x, y`` the lowest fifth is for testing, the lowest fifth of the rest for validation.
* Of a file with train and test only, the lowest 15 % of the training samples are for validation.

Equal samples are on the same side. An additional patient moves at most one other over each border, so a file may grow
without a new draw.

Where the file has patients, these are sorted in the same way, by all of their samples, and shares are of patients.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from partitions.common.errors import DataError
from partitions.patients import patient_digests
from partitions.schemes.pool import Parts, share_of
from partitions.splits import SPLITS, Array, SiloData, Split
from partitions.stored import rows_in, sample_digests

TEST_SHARE = 0.2  # of a file of ``x, y``
VAL_SHARE = 0.2  # of the rest of it
VAL_SHARE_OF_TRAIN = 0.15  # of the training samples, where the file has train and test only


def divide_parts(splits: Mapping[str, Split]) -> dict[str, tuple[str, Array | None]]:
    """Return for ``train``, ``val`` and ``test`` the split of the file and the rows in it; None: all rows.

    Raises DataError where there are too few different samples to be divided.
    """
    if "val" in splits:
        return {name: (name, None) for name in SPLITS}
    if "all" not in splits:
        whole = splits["train"]
        train, val = lowest(digests_of(whole), np.arange(len(whole)), VAL_SHARE_OF_TRAIN)
        return {"train": ("train", train), "val": ("train", val), "test": ("test", None)}
    whole = splits["all"]
    digests = digests_of(whole)
    different = len(np.unique(digests))
    if different < 3:
        what = (
            "different samples" if whole.patient is None else "patients with different samples"
        )
        raise DataError(f"has only {different} {what}, too few to divide")
    rest, test = lowest(digests, np.arange(len(whole)), TEST_SHARE)
    train, val = lowest(digests, rest, VAL_SHARE)
    return {"train": ("all", train), "val": ("all", val), "test": ("all", test)}


def lowest(digests: Array, rows: Array, share: float) -> Parts:
    """Return (the other rows, the ``share`` of ``rows`` with the lowest digests), in order.

    The first is never empty.
    """
    different, copies = np.unique(digests[rows], return_inverse=True)
    count = min(share_of(len(different), share), len(different) - 1)
    return rows[copies >= count], rows[copies < count]


def digests_of(split: Split) -> Array:
    """Return the digest that determines each sample's part, uint64 (n,): its own, or its patient's."""
    digests = sample_digests(split.x)
    return digests if split.patient is None else patient_digests(digests, split.patient)


def people_digests(digests: Array, split: Split) -> list[str]:
    """Return a text per patient, sorted: the digests of the patient's samples, from those of all samples (n,)."""
    people: dict[int, list[str]] = {}
    for digest, patient in zip(digests.tolist(), split.units.tolist(), strict=True):
        people.setdefault(patient, []).append(f"{digest:016x}")
    return sorted("+".join(sorted(samples)) for samples in people.values())


def select_rows(split: Split, rows: Array) -> Split:
    """Return these rows: copies of arrays."""
    groups = (
        None if group is None else group[rows] for group in (split.patient, split.subgroup)
    )
    return Split(rows_in(split.x, rows), rows_in(split.y, rows), *groups)


def describe_division(splits: Mapping[str, Split], data: SiloData) -> str:
    """Describe the division in words, for the hospital."""
    sizes = f"train {len(data.train)}, val {len(data.val)}, test {len(data.test)}"
    if "val" in splits:
        return f"{sizes}, as the file has it; no run can change it"
    what = "drawn from all samples" if "all" in splits else "val drawn from train"
    whole = "" if data.train.patient is None else ", patient by patient,"
    return f"{sizes}, {what}{whole} by the samples themselves; no run can change it"
