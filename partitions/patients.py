"""Patients and subgroups of samples, read from a data file; every division keeps a patient's samples together.

A file may hold one number per sample (``patient_train`` and so on, or ``patient`` beside ``x, y``). Samples with equal
numbers are of one patient. The numbers have no other meaning, and are renumbered on reading. They stay in the silo: no
message to the server contains them or their count.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from partitions.common.errors import DataError
from partitions.labels import Fault, keys_by_part, names_by_part
from partitions.splits import Array, Arrays, Dataset

PATIENT_NAMES = names_by_part("patient")


def arrays_by_part(
    arrays: Arrays, names: Mapping[str, str], ys: Arrays, kinds: str, what: str, fix: str
) -> Arrays:
    """Return each part's array of one value per sample, (n,); empty where the file has none. Raises Fault.

    ``kinds``: of its dtype; ``what``: what a value is; ``fix``: how such an array is saved.
    """
    wanted = keys_by_part(arrays, names, ys, f"one {what} per sample and part")
    for part, key in wanted.items():
        array = arrays[key]
        if array.ndim != 1 or array.dtype.kind not in kinds:
            raise Fault(f"{key} is {array.dtype} {array.shape}", fix)
        if len(array) != len(ys[part]):
            raise Fault(
                f"{key} has {len(array)} {what}s, {part} {len(ys[part])} samples",
                "save one for each sample",
            )
    return {part: arrays[key] for part, key in wanted.items()}


def read_patients(arrays: Arrays, ys: Arrays) -> Arrays:
    """Return each part's patients, int64 (n,), numbered from 0 over all parts; empty where the file has none.

    ``ys``: the labels of each part of the file. Raises Fault.
    """
    fix = "save whole numbers (n,), as numpy.unique(ids, return_inverse=True)[1] makes them: no identifiers"
    parts_read = arrays_by_part(arrays, PATIENT_NAMES, ys, "iu", "patient", fix)
    if not parts_read:
        return {}
    # uint64 wraps around, so that different numbers stay different
    pooled = np.concatenate([part_read.astype(np.int64) for part_read in parts_read.values()])
    numbers = np.unique(pooled, return_inverse=True)[1].astype(np.int64)
    ends = np.cumsum([*map(len, parts_read.values())])
    parts = dict(zip(parts_read, np.split(numbers, ends[:-1]), strict=True))
    several = sum(len(np.unique(part)) for part in parts.values()) - len(np.unique(numbers))
    if several:
        raise Fault(
            f"{several} patients are in more than one part",
            "put all of a patient's samples into one part of the file",
        )
    return parts


def describe_patients(parts: Arrays) -> str:
    """Describe the number of patients in each part, for the hospital only."""
    return ", ".join(f"{part} {len(np.unique(patients))}" for part, patients in parts.items())


def patient_digests(digests: Array, patients: Array) -> Array:
    """Return for each sample its patient's digest, uint64 (n,): the sum of the patient's digests modulo 2^64."""
    _, numbers = np.unique(patients, return_inverse=True)
    sums = np.zeros(numbers.max(initial=-1) + 1, np.uint64)
    np.add.at(sums, numbers, digests)
    return sums[numbers]


def fewest_changed(now: Sequence[str], before: Sequence[str]) -> int:
    """Return the smallest number of patients by which two versions of data can differ.

    Each has a text per patient (:func:`partitions.site_split.people_digests`). Samples are compared, so that no
    patient is new because a file names its patients now. A patient whose record was corrected is in both versions, and
    counts once. A patient who left and another who came count once together.
    """
    versions = [[person.split("+") for person in version] for version in (now, before)]
    came, gone = (Counter(itertools.chain.from_iterable(people)) for people in versions)
    return max(_holders(versions[0], came - gone), _holders(versions[1], gone - came))


def _holders(people: Sequence[Sequence[str]], samples: Counter[str]) -> int:
    """Return how many patients hold these samples, of equal samples the patients with the most of them."""
    held = [mine for person in people if (mine := Counter(person) & samples)]
    count, left = 0, Counter(samples)
    for mine in sorted(held, key=Counter.total, reverse=True):
        if taken := mine & left:
            count += 1
            left.subtract(taken)
    return count


def rows_of_patients(dataset: Dataset) -> list[Array] | None:
    """Return the rows (train followed by test) of each patient, training patients first; None without patients."""
    if dataset.train.patient is None or dataset.test.patient is None:
        return None
    rows, offset = list[Array](), 0
    for part in (dataset.train.patient, dataset.test.patient):
        _, counts = np.unique(part, return_counts=True)
        rows += np.split(np.argsort(part, kind="stable") + offset, np.cumsum(counts)[:-1])
        offset = len(part)
    return rows


def most_frequent(labels: Array, rows: Sequence[Array]) -> Array:
    """Return each patient's most frequent class, the lowest in a tie, int64 (patients,)."""
    return np.array([np.bincount(labels[chosen]).argmax() for chosen in rows], np.int64)


# The subgroup of each sample (sex, age band, scanner), for a hospital's scores by subgroup: one text per sample
# (``subgroup_train`` and so on, or ``subgroup`` beside ``x, y``), "" where it is not known. The texts are the
# hospital's. Nothing is trained on them. A score by subgroup, with the subgroup's name,
# leaves only where the hospital's policy allows it (``models/evidence/subgroups.py``).


SUBGROUP_NAMES = names_by_part("subgroup")
MOST_GROUPS = 12
LONGEST = 40  # characters of a name


def read_subgroups(arrays: Arrays, ys: Arrays) -> Arrays:
    """Read each part's subgroups, text (n,); empty where the file has none. Raises Fault.

    ``ys``: the labels of each part.
    """
    fix = 'save texts (n,), as numpy.array(["female", "male"]) is'
    groups = arrays_by_part(arrays, SUBGROUP_NAMES, ys, "U", "subgroup", fix)
    check_names(name for group in groups.values() for name in np.unique(group))
    return groups


def check_names(subgroups: Iterable[str]) -> None:
    """Raise Fault where there are too many subgroups, or a name is too long or not printable."""
    names = sorted({str(name) for name in subgroups} - {""})
    if len(names) > MOST_GROUPS:
        raise Fault(
            f"names {len(names)} subgroups",
            f"at most {MOST_GROUPS} can be compared: make bands of them",
        )
    for name in names:
        if not name.isprintable() or len(name) > LONGEST or name != name.strip():
            raise Fault(
                f"has a subgroup {name[:80]!r}",
                f"name each by at most {LONGEST} printable characters",
            )


def describe_subgroups(parts: Arrays) -> str:
    """Describe the number of samples of each subgroup in each part, for the hospital only."""
    lines = []
    for part, groups in parts.items():
        counts = sorted(Counter(groups.tolist()).items())
        each = ", ".join(f"{name or 'not known'} {count}" for name, count in counts)
        lines.append(f"{part}: {each}")
    return "; ".join(lines)


def parse_column(option: str) -> tuple[str, tuple[float, ...]]:
    """Return the column and the limits of its bands: ``sex``, ``age:40,60,80``. Raises DataError."""
    column, colon, text = option.partition(":")
    if not colon:
        return column, ()
    try:
        limits = tuple(float(part) for part in text.split(","))
    except ValueError:
        limits = ()
    if not column or not limits or list(limits) != sorted(set(limits)):
        raise DataError(
            f"--subgroup is {option[:80]!r}; write COLUMN, or COLUMN:LIMIT,LIMIT with ascending numbers"
        )
    return column, limits


def subgroup_name(cell: str, column: str, limits: Sequence[float], where: str) -> str:
    """Return the subgroup of a csv's cell: ``sex female``, ``age 40 to 60``; "" for an empty cell. Raises DataError."""
    if not cell:
        return ""
    if not limits:
        return f"{column} {cell}"
    try:
        place = bisect.bisect_right(limits, float(cell))
    except ValueError:
        raise DataError(
            f"{where}: {column} is {cell[:LONGEST]!r}, no number, and --subgroup has bands"
        ) from None
    if place == 0:
        return f"{column} under {limits[0]:g}"
    if place == len(limits):
        return f"{column} from {limits[-1]:g}"
    return f"{column} {limits[place - 1]:g} to {limits[place]:g}"
