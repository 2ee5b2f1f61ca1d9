"""The inputs of a silo's data file: checks, and conversion to the stored form.

| inputs | in the file | stored as |
|---|---|---|
| pictures | uint8 (n, h, w) or (n, h, w, c), or numbers (n, c, h, w) | (n, h, w, c) |
| volumes | uint8 (n, d, h, w, c), or numbers (n, c, d, h, w) | (n, d, h, w, c) |
| signals | numbers (n, c, t) | (n, t, c) |
| texts | whole numbers (n, t), tokens | int32 (n, t) |
| tables | float32 (n, columns) | float32 (n, columns) |
| several | one array each, ``x_image_train``, ``x_notes_train`` | a structured array (n,), a field each |

Numbers are float32, float16 or int16; each is stored in its type, and becomes float32 in a batch. float64 is stored as
float32.

``gaps_train`` and so on, or ``gaps`` beside ``x, y``, are the missing values of a table before they were filled:
booleans (n, columns), true where the hospital's csv had no value. ``silofl import`` writes them where there are any.
Nothing is trained on them: a survey leaves filled values out, and reports the count of missing ones
(``models/evidence/survey.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from keyword import iskeyword
from typing import Any

import numpy as np

from partitions.common.errors import DataError
from partitions.labels import (
    ONE_CLASS,
    VOID,
    Fault,
    check_precision,
    keys_by_part,
    names_by_part,
    single_value,
)
from partitions.schema import Schema, few
from partitions.splits import Array, Arrays, SiloData, inputs_of, tables_of
from partitions.stored import CHECKED, OnDisk, in_batches, together

MOST_TOKENS = 1 << 28  # largest vocabulary
NUMBERS = (np.float32, np.float16, np.int16)  # types of inputs besides bytes and tokens
MEDMNIST = ("train_images", "val_images", "test_images")
FORMS = (
    "pictures are uint8 (n, h, w[, c]) or float32, float16 or int16 (n, c, h, w), volumes uint8 (n, d, h, w, c) or "
    "float32, float16 or int16 (n, c, d, h, w), signals (n, c, t), tables float32 (n, d), texts whole numbers (n, t) "
    "with `vocabulary`"
)


def read_inputs(name: str, x: Array, vocabulary: int) -> Any:
    """Check the file's array of this name, and convert it to the stored form. Raises Fault.

    A mapped array becomes samples on disk (``stored.py``); a table is always in memory. ``vocabulary``: the number of
    tokens, if the file states it.
    """
    if isinstance(x, OnDisk):
        return x
    dtype = np.dtype(np.float32) if x.dtype == np.float64 else x.dtype
    if dtype == np.uint8:
        view = _view_bytes(name, x)
    elif dtype in NUMBERS and not (x.ndim == 2 and dtype == np.int16):
        view = _view_numbers(name, x, dtype)
    elif dtype.kind in "iu" and x.ndim == 2 and vocabulary:
        view, dtype = x, np.dtype(np.int32)
        _check_tokens(name, x, vocabulary)
    else:
        raise Fault(f"{name} is {x.dtype}", f"{FORMS}; a table must be saved as float32")
    if 0 in x.shape[1:]:
        raise Fault(f"{name} is {x.shape}: its samples are empty", FORMS)
    for i, column in enumerate(x.T if x.ndim == 2 and x.dtype == np.float64 else ()):
        check_precision(f"column {i + 1} of {name}", column)
    if isinstance(x, np.memmap) and not (view.ndim == 2 and dtype == np.float32):
        return OnDisk([np.asarray(view)], dtype)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(view, dtype)


def _view_bytes(name: str, x: Array) -> Array:
    if x.ndim not in (3, 4, 5):
        raise Fault(f"{name} is uint8 {x.shape}", f"{FORMS}; a table must be saved as float32")
    grey = x.ndim == 3 or (x.ndim == 4 and min(x.shape[1], x.shape[3]) > 4 and name in MEDMNIST)
    x = x[..., np.newaxis] if grey else x
    if x.shape[-1] > 4 >= x.shape[1]:
        last = "volumes are (n, d, h, w, c)" if x.ndim == 5 else "pictures are (n, h, w, c)"
        raise Fault(
            f"{name} is {x.shape}, with its channels first", f"uint8 {last}: transpose them"
        )
    return x


def _view_numbers(name: str, x: Array, dtype: np.dtype[Any]) -> Array:
    if x.ndim not in (2, 3, 4, 5) or (x.ndim == 2 and dtype == np.float16):
        raise Fault(f"{name} is {dtype} {x.shape}", FORMS)
    if x.ndim > 3 and x.shape[1] > 4 >= x.shape[-1]:
        first = "volumes are (n, c, d, h, w)" if x.ndim == 5 else "pictures are (n, c, h, w)"
        raise Fault(
            f"{name} is {x.shape}, with its channels last", f"{dtype} {first}: transpose them"
        )
    _check_finite(name, x, dtype)
    return np.moveaxis(x, 1, -1) if x.ndim > 2 else x


def _check_finite(name: str, x: Array, dtype: np.dtype[Any]) -> None:
    done = 0
    for part in in_batches(x, CHECKED) if dtype.kind == "f" else ():
        with np.errstate(over="ignore"):
            finite = np.isfinite(part.astype(dtype, copy=False))
        if not finite.all():
            row = done + int(finite.all(axis=tuple(range(1, x.ndim))).argmin())
            raise Fault(
                f"{name} has a value that is no finite number, first in sample {row}",
                "fill or drop such samples",
            )
        done += len(part)


def _check_tokens(name: str, x: Array, vocabulary: int) -> None:
    done = 0
    for part in in_batches(x):
        if part.size and (part.min() < 0 or part.max() >= vocabulary):
            outside = ((part < 0) | (part >= vocabulary)).any(axis=1)
            row = done + int(outside.argmax())
            raise Fault(
                f"{name} has a token outside of 0..{vocabulary - 1}, first in sample {row}",
                "`vocabulary` is how many tokens there are, with 0, which stands for no word",
            )
        done += len(part)


def vocabulary_size(arrays: Arrays) -> int:
    """Return the vocabulary's size that the file states; 0 where it has no texts."""
    if "vocabulary" not in arrays:
        return 0
    stated: int = single_value(arrays, "vocabulary", "iu") or 0
    if not 1 <= stated <= MOST_TOKENS:
        raise Fault(
            f"vocabulary is no whole number up to {MOST_TOKENS}",
            "save how many tokens there are, with 0",
        )
    return stated


def is_input_name(name: object) -> bool:
    """Return whether one of several inputs may have this name: a field of a named tuple, in lower case."""
    right = isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name)
    return bool(right) and not iskeyword(str(name)) and name != "tokens"


def check_same_form(xs: Mapping[str, Any]) -> None:
    """Raise Fault unless all splits hold samples of one shape and type."""
    first, reference = next(iter(xs.items()))
    for split, x in xs.items():
        if (x.dtype, x.shape[1:]) != (reference.dtype, reference.shape[1:]):
            raise Fault(
                f"{split} has {describe_inputs(x)}, but {first} has {describe_inputs(reference)}",
                "all samples must have the same shape and type",
            )


def describe_inputs(x: Any) -> str:
    """Describe the samples in words."""
    return "; ".join(
        f"{name}: {_describe(part)}" if name else _describe(part)
        for name, part in inputs_of(x).items()
    )


def _describe(x: Any) -> str:
    if x.dtype == np.int32:
        return f"texts of up to {x.shape[1]} tokens"
    if x.ndim == 2:
        return f"a table of {x.shape[1]} columns, {x.dtype}"
    channels = f"{x.shape[-1]} channel{'s' * (x.shape[-1] > 1)}"
    if x.ndim == 3:
        hint = "; pictures are float32 (n, c, h, w), with c = 1 where they are grey"
        return f"signals of {channels}, {x.shape[1]} steps, {x.dtype}{hint * (x.shape[2] > 16)}"
    kind, size = "volumes" if x.ndim == 5 else "pictures", " x ".join(map(str, x.shape[1:-1]))
    hint = f"; volumes are {'(n, d, h, w, c)' if x.dtype == np.uint8 else '(n, c, d, h, w)'}"
    hint *= x.ndim == 4 and x.shape[-1] > 4
    return f"{kind} of {size}, {channels}, {x.dtype}{hint}"


# Missing values


GAP_NAMES = names_by_part("gaps")


def read_gaps(arrays: Arrays, xs: Arrays) -> Arrays:
    """Read each part's gaps, bool (n, columns); empty without gaps. ``xs``: each part's inputs. Raises Fault."""
    wanted = keys_by_part(arrays, GAP_NAMES, xs, "save the gaps of each part")
    for part, key in wanted.items():
        flags, shape = arrays[key], (len(xs[part]), count_columns(xs[part]))
        if flags.dtype != np.bool_ or flags.shape != shape:
            raise Fault(
                f"{key} is {flags.dtype} {flags.shape}",
                f"save booleans {shape}, or leave the gaps out",
            )
    return {part: arrays[key] for part, key in wanted.items()}


# Order of columns and label numbers, by name, as in the schema that all silos agree on


def count_columns(x: Any) -> int:
    """Count the columns of all tables among the inputs."""
    return sum(table.shape[1] for table in tables_of(x).values())


def reorder_data(data: SiloData, agreed: Schema) -> SiloData:
    """Return the data with columns and labels in the agreed order, C-contiguous; ``data`` itself where none moves.

    Raises DataError where a column of one side is missing on the other, an own label in the agreed ones, or an outline
    of theirs in the own.
    """
    current, by_class = data.schema, data.task in (*ONE_CLASS, "segmentation")
    columns = order_of(current.names, agreed.names)
    numbers = (numbers_of if by_class else order_of)(current.labels, agreed.labels)
    missing = [name for name in agreed.labels if current.labels and name not in current.labels]
    if missing and data.task == "segmentation":  # they would count as background
        raise DataError(
            f"no outlines named {few(missing)}: name them in `label_names` and, where none are drawn, in `unlabelled` "
            "(silofl import --unlabelled)"
        )
    if not columns and not numbers:
        return data
    train, val, test = (
        replace(
            split, x=reorder_columns(split.x, columns), y=relabel(split.y, numbers, data.task)
        )
        for split in data.splits
    )
    features = {feature.name: feature for feature in current.features}
    schema = replace(
        current,
        features=tuple(features[name] for name in agreed.names)
        if columns
        else current.features,
        labels=agreed.labels if numbers else current.labels,
    )
    classes = max(data.classes, len(agreed.labels)) if by_class and numbers else data.classes
    return replace(data, train=train, val=val, test=test, classes=classes, schema=schema)


def order_of(names: Sequence[str], agreed: Sequence[str]) -> list[int]:
    """Return for each agreed name its index in ``names``; empty for the same order, or where one side has no names.

    Raises DataError where a name is missing.
    """
    if not names or not agreed or tuple(names) == tuple(agreed):
        return []
    place = {name: i for i, name in enumerate(names)}
    if set(place) != set(agreed):
        foreign, missing = (
            few([name for name in a if name not in set(b)])
            for a, b in ((names, agreed), (agreed, names))
        )
        raise DataError(f"it has {foreign or 'nothing'} where {missing or 'nothing'} is wanted")
    return [place[name] for name in agreed]


def numbers_of(labels: Sequence[str], agreed: Sequence[str]) -> list[int]:
    """Return for each own label its number among the agreed ones; empty for equal numbers, or without names.

    Raises DataError where a name is missing there.
    """
    if not labels or not agreed or tuple(agreed[: len(labels)]) == tuple(labels):
        return []
    number = {name: i for i, name in enumerate(agreed)}
    if foreign := [name for name in labels if name not in number]:
        raise DataError(f"there is no label {few(foreign)} among {few(agreed)}")
    return [number[name] for name in labels]


def reorder_columns(x: Any, order: list[int]) -> Any:
    """Return inputs (n, ...) whose column j is column ``order[j]`` of ``x``, counted over all tables."""
    if not order:
        return x
    tables = tables_of(x)
    whole, at, moved = np.hstack(list(tables.values()))[:, order], 0, inputs_of(x)
    for name, table in tables.items():
        moved[name] = np.ascontiguousarray(whole[:, at : at + table.shape[1]])
        at += table.shape[1]
    return together(moved) if x.dtype.names else moved[""]


def relabel(y: Any, numbers: list[int], task: str) -> Any:
    """Renumber labels: class k becomes ``numbers[k]``; for other tasks column j becomes column ``numbers[j]``."""
    if not numbers:
        return y
    if task not in (*ONE_CLASS, "segmentation"):
        return np.ascontiguousarray(y[:, numbers])
    table = np.arange(max(len(numbers), VOID + 1), dtype=y.dtype)
    table[: len(numbers)] = numbers
    return table[y] if isinstance(y, np.ndarray) else y.map_values(lambda read: table[read])
