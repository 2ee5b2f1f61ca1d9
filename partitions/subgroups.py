"""The subgroup of each sample (sex, age band, scanner), for a hospital's scores by subgroup.

A file may hold one text per sample (``subgroup_train`` and so on, or ``subgroup`` beside ``x, y``), "" where it is not
known. The texts are the hospital's. Nothing is trained on them. A score by subgroup, with the subgroup's name, leaves
only where the hospital's policy allows it (``models/evidence/subgroups.py``).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from partitions.common.errors import DataError
from partitions.labels import Fault, keys_by_part
from partitions.splits import Array

SUBGROUP_NAMES = {"subgroup": "all", **{f"subgroup_{split}": split for split in ("train", "val", "test")}}
MOST_GROUPS = 12
LONGEST = 40  # characters of a name


def read_subgroups(arrays: Mapping[str, Array], ys: Mapping[str, Array]) -> dict[str, Array]:
    """Read each part's subgroups, text (n,); empty where the file has none. Raises Fault.

    ``ys``: the labels of each part.
    """
    wanted = keys_by_part(arrays, SUBGROUP_NAMES, ys, "one subgroup per sample and part")
    for part, key in wanted.items():
        found = arrays[key]
        if found.ndim != 1 or found.dtype.kind != "U":
            raise Fault(
                f"{key} is {found.dtype} {found.shape}", 'save texts (n,), as numpy.array(["female", "male"]) is'
            )
        if len(found) != len(ys[part]):
            raise Fault(f"{key} has {len(found)} subgroups, {part} {len(ys[part])} samples", "save one for each sample")
    check_names(name for key in wanted.values() for name in np.unique(arrays[key]))
    return {part: arrays[key] for part, key in wanted.items()}


def check_names(given: Iterable[str]) -> None:
    """Raise Fault where there are too many subgroups, or a name is too long or not printable."""
    names = sorted({str(name) for name in given} - {""})
    if len(names) > MOST_GROUPS:
        raise Fault(f"names {len(names)} subgroups", f"at most {MOST_GROUPS} can be compared: make bands of them")
    for name in names:
        if not name.isprintable() or len(name) > LONGEST or name != name.strip():
            raise Fault(f"has a subgroup {name[:80]!r}", f"name each by at most {LONGEST} printable characters")


def describe_subgroups(parts: Mapping[str, Array]) -> str:
    """Describe the number of samples of each subgroup in each part, for the hospital only."""
    found = []
    for part, groups in parts.items():
        names, counts = np.unique(groups, return_counts=True)
        each = (f"{name or 'not known'} {count}" for name, count in zip(names, counts, strict=True))
        found.append(f"{part}: {', '.join(each)}")
    return "; ".join(found)


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
        raise DataError(f"--subgroup is {option[:80]!r}; write COLUMN, or COLUMN:LIMIT,LIMIT with ascending numbers")
    return column, limits


def name_of(cell: str, column: str, limits: Sequence[float], where: str) -> str:
    """Return the subgroup of a csv's cell: ``sex female``, ``age 40 to 60``; "" for an empty cell. Raises DataError."""
    if not cell:
        return ""
    if not limits:
        return f"{column} {cell}"
    try:
        place = bisect.bisect_right(limits, float(cell))
    except ValueError:
        raise DataError(f"{where}: {column} is {cell[:LONGEST]!r}, no number, and --subgroup has bands") from None
    if place == 0:
        return f"{column} under {limits[0]:g}"
    if place == len(limits):
        return f"{column} from {limits[-1]:g}"
    return f"{column} {limits[place - 1]:g} to {limits[place]:g}"
