"""Names and meaning of the arrays in a silo data file."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import Names, nearest, words_in
from partitions.inputs import GAP_NAMES
from partitions.labels import Fault, single_value, values_seen
from partitions.patients import PATIENT_NAMES, SUBGROUP_NAMES
from partitions.recipes.pictures import read_any
from partitions.schema import Feature, Schema, tidy
from partitions.splits import SPLITS, Array, Arrays, tables_of
from partitions.stored import OnDisk

SEVERAL_LABELS = ("multilabel", "segmentation")  # tasks of which a hospital may lack labels
LONGEST_COHORT = 100  # characters

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
    *words_in("task classes label_names feature_names feature_units feature_ranges"),
    *words_in("vocabulary recipe cohort unlabelled"),
    *PATIENT_NAMES,
    *SUBGROUP_NAMES,
    *GAP_NAMES,
)


def sort_names(arrays: Arrays) -> dict[tuple[str, str], Array]:
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
        optional = {key for key in layout if layout[key][1] == "val"}
        without = optional if optional.isdisjoint(arrays) else ()
        if missing := [key for key in layout if key not in arrays and key not in without]:
            raise Fault(f"has no {missing[0]}", f"the names are {wanted}")
        return {layout[key]: arrays[key] for key in layout if key in arrays}
    raise Fault("holds no samples", f"the names are {wanted}")


def layouts(arrays: Collection[str]) -> list[dict[str, tuple[str, str]]]:
    """Return the sets of names that a file may use, each as name -> (kind, split).

    The kind is ``x``, ``y`` or, for several inputs, ``x:image``.
    """
    sets = [OWN_NAMES, MEDMNIST_NAMES, UNSPLIT_NAMES]
    plain = {**OWN_NAMES, **MEDMNIST_NAMES, **UNSPLIT_NAMES}
    parts, whole = (
        [
            match["input"]
            for key in arrays
            if key not in plain and (match := form.fullmatch(key))
        ]
        for form in (NAMED, UNSPLIT_NAMED)
    )
    if parts:
        inputs = {
            f"x_{name}_{split}": (f"x:{name}", split)
            for name in dict.fromkeys(parts)
            for split in SPLITS
        }
        sets.insert(0, inputs | {f"y_{split}": ("y", split) for split in SPLITS})
    if len(whole) > 1 and not any(key.startswith("y_") for key in arrays):
        inputs = {f"x_{name}": (f"x:{name}", "all") for name in whole}
        sets.insert(0, inputs | {"y": ("y", "all")})
    return sets


def known_names(arrays: Collection[str]) -> Mapping[str, tuple[str, str]]:
    return ChainMap(*layouts(arrays))


def array_name(split: str, kind: str, arrays: Arrays) -> str:
    """Return the name that the file uses for this array."""
    return next(
        key
        for key, value in known_names(arrays).items()
        if value == (kind, split) and key in arrays
    )


def written_schema(schema: Schema) -> dict[str, Array]:
    """Return a file's arrays for a schema, without parts that are not stated."""
    units = [feature.unit for feature in schema.features]
    texts = {
        "label_names": schema.labels,
        "unlabelled": schema.unlabelled,
        "feature_names": schema.names,
        "feature_units": units if any(units) else (),
    }
    arrays: dict[str, Array] = {
        key: np.array(names, dtype=np.str_) for key, names in texts.items() if names
    }
    if any(feature.range for feature in schema.features):
        arrays["feature_ranges"] = np.array(
            [feature.range or (np.nan, np.nan) for feature in schema.features]
        )
    return arrays


def read_names(arrays: Arrays, key: str, count: int | None) -> Names:
    """Read the names of classes or columns, if the file has them; ``count``: their required number, if known."""
    if key not in arrays:
        return ()
    names = arrays[key]
    if names.ndim != 1 or names.dtype.kind != "U" or count not in (None, len(names)):
        raise Fault(
            f"{key} does not hold {count} texts", "save one name for each, or leave them out"
        )
    for name in names.tolist():
        if not name.isprintable():
            raise Fault(
                f"{key} holds {name[:80]!r}",
                "leave control characters out: names are shown on terminals",
            )
    return tuple(tidy(str(name)) for name in names)


def read_unlabelled(arrays: Arrays, task: str, labels: Names, ys: Mapping[str, Any]) -> Names:
    """Read which of the ``labels`` the hospital's samples are not labelled with. Raises Fault where one is."""
    if not (names := read_names(arrays, "unlabelled", None)):
        return ()
    if task not in SEVERAL_LABELS:
        raise Fault(
            f"has labels unlabelled, and its task is {task}",
            f"a hospital may lack labels of {' and '.join(SEVERAL_LABELS)} alone: leave unlabelled out",
        )
    outlines = task == "segmentation"
    if strange := [name for name in names if name not in labels[outlines:]]:
        raise Fault(
            f"has {strange[0][:40]!r} unlabelled, which is no name in label_names{' after the background' * outlines}",
            "label_names has every label of the federation, unlabelled those that no sample here can have",
        )
    if len(set(names)) == len(labels) - outlines:
        raise Fault("has all labels unlabelled", "one at least must be labelled to train")
    for split, y in ys.items():
        if name := labelled_in_spite(y, [(labels.index(name), name) for name in names]):
            raise Fault(
                f"has {name!r} unlabelled, and samples of {split} are labelled with it",
                "take it out of unlabelled, or take these labels out",
            )
    return tuple(dict.fromkeys(names))


def labelled_in_spite(y: Any, unlabelled: Sequence[tuple[int, str]]) -> str:
    """Return the first of these labels, as number and name, that a sample has; "" where none has one.

    ``y``: findings (n, L), or masks; those that stay in an own data set are checked as they are read.
    """
    if y.ndim == 2:
        has = (y >= 0).any(0)
    elif isinstance(y, OnDisk) and y.stays:
        return ""
    else:
        has = values_seen(y)
    return next((name for number, name in unlabelled if has[number]), "")


def read_cohort(arrays: Arrays) -> str:
    """Read the name of the file's cohort, "" where it states none. Raises Fault."""
    name = single_value(arrays, "cohort", "U") if "cohort" in arrays else ""
    if name is None or not name.isprintable() or len(name) > LONGEST_COHORT:
        raise Fault(
            "cohort is no short text",
            f"save a name of at most {LONGEST_COHORT} characters, or leave it out",
        )
    return tidy(name)


def read_features(arrays: Arrays, columns: int) -> tuple[Feature, ...]:
    """Read names, units and ranges of the tables' columns. Raises Fault."""
    names = read_names(arrays, "feature_names", columns)
    for key in ("feature_units", "feature_ranges"):
        if key in arrays and not names:
            raise Fault(
                f"has {key}, but no feature_names", "save the names of the columns, too"
            )
    if not names:
        return ()
    units = read_names(arrays, "feature_units", columns) or ("",) * columns
    ranges = arrays.get("feature_ranges", np.full((columns, 2), np.nan))
    if (
        ranges.shape != (columns, 2)
        or ranges.dtype.kind not in "iuf"
        or np.isnan(ranges).sum(1).tolist().count(1)
    ):
        raise Fault(
            f"feature_ranges is not of {columns} x 2 numbers",
            "save smallest and largest value of each column, or NaN for both",
        )
    stated = (
        None if np.isnan([low, high]).any() else (low, high)
        for low, high in ranges.astype(float).tolist()
    )
    return tuple(map(Feature, names, units, stated))


def read_stored_recipe(arrays: Arrays, features: Sequence[Feature]) -> str:
    """Read the file's recipe, as JSON, or "". Raises Fault for an invalid one, or one for other columns."""
    if "recipe" not in arrays:
        return ""
    again = "make the file again with `silofl import`"
    text: str | None = single_value(arrays, "recipe", "U")
    if text is None:
        raise Fault("recipe is no text", again)
    try:
        recipe = read_any(text)
    except DataError as error:
        raise Fault(str(error), again) from None
    names, columns = ([f.name for f in each] for each in (recipe.features, features))
    if names and names != columns:
        raise Fault("holds a recipe of other columns than its own", again)
    return text


def make_schema(
    features: tuple[Feature, ...],
    labels: Names,
    dtype: str = "",
    recipe: str = "",
    unlabelled: Names = (),
) -> Schema:
    """Make the schema of a file. ``recipe``: as JSON, whose settings it has. Raises Fault for invalid names."""
    try:
        inputs = read_any(recipe).settings if recipe else ()
        return Schema(features, labels, dtype, inputs=inputs, unlabelled=unlabelled)
    except ValueError as error:
        raise Fault(
            str(error), "give each column and label a name of its own, or leave the names out"
        ) from None


def check_ranges(features: Sequence[Feature], xs: Arrays) -> None:
    """Raise Fault where a column has values outside the range that the file states."""
    for split, x in xs.items():
        tables = [*tables_of(x).values()]
        columns = [column for table in tables for column in table.T]
        for feature, column in zip(features, columns, strict=False):
            low, high = feature.range or (-np.inf, np.inf)
            if outside := int(((column < low) | (column > high)).sum()):
                raise Fault(
                    f"{split} has {outside} values of {feature.name!r} outside of its range {low:g}..{high:g}",
                    "is the column in another unit? correct the values, or `feature_ranges`",
                )
