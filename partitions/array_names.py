"""Names and meaning of the arrays in a silo data file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from partitions.common.names import nearest
from partitions.inputs import GAP_NAMES
from partitions.labels import Fault
from partitions.patients import PATIENT_NAMES, SUBGROUP_NAMES
from partitions.splits import Array

SPLITS = ("train", "val", "test")

OWN_NAMES = {f"{kind}_{split}": (kind, split) for split in SPLITS for kind in ("x", "y")}

MEDMNIST_NAMES = {
    f"{split}_{word}": (kind, split)
    for split in SPLITS
    for kind, word in (("x", "images"), ("y", "labels"))
}

UNSPLIT_NAMES = {"x": ("x", "all"), "y": ("y", "all")}

NAMED = re.compile(r"x_(?P<input>\w+)_(?P<split>train|val|test)")  # of several inputs

UNSPLIT_NAMED = re.compile(r"x_(?P<input>\w+)")

EXTRA_NAMES = (
    *(
        "task",
        "classes",
        "label_names",
        "feature_names",
        "feature_units",
        "feature_ranges",
        "vocabulary",
        "recipe",
    ),
    "cohort",
    *PATIENT_NAMES,
    *SUBGROUP_NAMES,
    *GAP_NAMES,
)


def sort_names(arrays: Mapping[str, Array]) -> dict[tuple[str, str], Array]:
    """Return the arrays by (``x`` or ``y``, split). Raises Fault for unknown, mixed and missing names."""
    known = known_names(arrays)
    wanted = "x_train, y_train, x_test, y_test (and x_val, y_val), or x, y"
    for key in arrays:
        if key not in known and key not in EXTRA_NAMES:
            hint = nearest(key.lower(), [*known, *EXTRA_NAMES])
            raise Fault(
                f"has an array {key!r} of no known name{hint}", f"the names are {wanted}"
            )
    for layout in layouts(arrays):
        present = [key for key in layout if key in arrays]
        if not present:
            continue
        if strange := [key for key in arrays if key in known and key not in layout]:
            raise Fault(
                f"has both {present[0]} and {strange[0]}", f"use one set of names: {wanted}"
            )
        optional = [key for key in layout if layout[key][1] == "val"]
        needed = [
            key
            for key in layout
            if key not in optional or any(name in arrays for name in optional)
        ]
        if missing := [key for key in needed if key not in arrays]:
            raise Fault(f"has no {missing[0]}", f"the names are {wanted}")
        return {layout[key]: arrays[key] for key in layout if key in arrays}
    raise Fault("holds no samples", f"the names are {wanted}")


def layouts(arrays: Collection[str]) -> list[dict[str, tuple[str, str]]]:
    """Return the sets of names that a file may use, each as name -> (kind, split).

    The kind is ``x``, ``y`` or, for several inputs, ``x:image``.
    """
    found = [OWN_NAMES, MEDMNIST_NAMES, UNSPLIT_NAMES]
    plain = {**OWN_NAMES, **MEDMNIST_NAMES, **UNSPLIT_NAMES}
    parts = [
        match["input"] for key in arrays if key not in plain and (match := NAMED.fullmatch(key))
    ]
    if parts:
        inputs = {
            f"x_{own}_{split}": (f"x:{own}", split)
            for own in dict.fromkeys(parts)
            for split in SPLITS
        }
        found.insert(0, {**inputs, **{f"y_{split}": ("y", split) for split in SPLITS}})
    whole = [
        match["input"]
        for key in arrays
        if key not in plain and (match := UNSPLIT_NAMED.fullmatch(key))
    ]
    if len(whole) > 1 and not any(key.startswith("y_") for key in arrays):
        found.insert(
            0, {**{f"x_{own}": (f"x:{own}", "all") for own in whole}, "y": ("y", "all")}
        )
    return found


def known_names(arrays: Collection[str]) -> dict[str, tuple[str, str]]:
    return {
        key: meaning for layout in reversed(layouts(arrays)) for key, meaning in layout.items()
    }


def names_of(split: str, kind: str, arrays: Mapping[str, Array]) -> str:
    """Return the name that the file uses for this array."""
    return next(
        key
        for key, value in known_names(arrays).items()
        if value == (kind, split) and key in arrays
    )
