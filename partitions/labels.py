"""Labels in a data file, for each task: their arrays, their allowed values, and the stored form.

| task | in the file | stored as |
|---|---|---|
| multiclass, ordinal | whole numbers (n,) or (n, 1), from 0 | int64 (n,) |
| multilabel | 0, 1 or -1 (unknown), (n, L) | float32 (n, L) |
| regression | numbers (n,) or (n, k) | float32 (n, k) |
| survival | ``time_*`` (n,) and ``event_*`` (n,), 1 or 0 (censored), in place of ``y_*`` | float32 (n, 2) |
| segmentation | whole numbers (n, [d,] h, w) beside pictures or volumes of that size, 255: ignored | uint8 |

A file may name its ``task`` (a text); otherwise the caller may. Without either, the task follows from the arrays:

* times and events mean survival;
* masks of the pictures' size mean segmentation;
* one number per sample means classes where all are whole, otherwise measurements;
* several numbers per sample mean findings where all are 0, 1 or -1, otherwise measurements.

``ordinal`` must be named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import nearest
from partitions.common.parsed import shorten
from partitions.common.precision import merged_in_float32
from partitions.splits import SPLITS, VOID, Array, Arrays
from partitions.stored import OnDisk, in_batches

TASKS = ("multiclass", "ordinal", "multilabel", "regression", "survival", "segmentation")
ONE_CLASS = ("multiclass", "ordinal")  # every sample has one class
MOST_CLASSES = 100_000  # a larger label is refused as a mistake
MOST_PRESENT = 100  # classes; of more, none is looked for in each part
SAVE = "where other hospitals have more classes, save classes=numpy.array(N), the number of all"


class Fault(DataError):
    """A fault of a file (``detail``), and how to mend it (``fix``)."""

    def __init__(self, detail: str, fix: str) -> None:
        super().__init__(detail, fix)
        self.detail, self.fix = detail, fix


def names_by_part(kind: str) -> dict[str, str]:
    """Return the names of a kind of arrays beside ``x, y``, or beside ``x_train`` and so on, each with its part."""
    return {kind: "all", **{f"{kind}_{part}": part for part in SPLITS}}


def keys_by_part(
    arrays: Arrays, names: Mapping[str, str], parts: Collection[str], fix: str
) -> dict[str, str]:
    """Return the array's name for each part, for a kind of arrays that a file has for every part or not at all.

    ``names``: the kind's array names, each with its part. Empty where the file has none of them. Raises Fault where a
    part has no array, or an array no part.
    """
    present = [key for key in names if key in arrays]
    if not present:
        return {}
    wanted = {part: key for key, part in names.items() if part in parts}
    for key in (*wanted.values(), *present):
        if key not in arrays or key not in wanted.values():
            lacks = f"has {present[0]}, but no {key}"
            has = lacks if key not in arrays else f"has {key}, but no such samples"
            raise Fault(has, f"{fix}: {', '.join(wanted.values())}")
    return wanted


def join_survival(arrays: Arrays) -> Arrays:
    """Return the arrays with ``y_train`` (n, 2) in place of ``time_train`` and ``event_train``, and so on."""
    joined = dict(arrays)
    for part in ("", "_train", "_val", "_test"):
        time, event, y = f"time{part}", f"event{part}", f"y{part}"
        if time not in arrays and event not in arrays:
            continue
        for there, other in ((time, event), (event, time)):
            if there not in arrays:
                fix = "survival needs both: time, and event 1 or 0 (censored)"
                raise Fault(f"has {other}, but no {there}", fix)
        if y in arrays:
            raise Fault(f"has both {y} and {time}", "labels are one or the other")
        t, e = (arrays[name].reshape(-1) for name in (time, event))
        if len(t) != len(e):
            raise Fault(
                f"{time} holds {len(t)} times, {event} {len(e)} events",
                "save one of each for a sample",
            )
        if t.dtype.kind not in "iuf" or not np.isfinite(t).all() or (len(t) and t.min() < 0):
            raise Fault(
                f"{time} is not of finite numbers from 0 on",
                "times count from when a patient was first seen",
            )
        if e.dtype.kind not in "iubf" or not np.isin(e, (0, 1)).all():
            fix = "1: the event took place then; 0: not known (censored)"
            raise Fault(f"{event} is not of 0 and 1", fix)
        check_precision(time, t)
        del joined[time], joined[event]
        joined[y] = np.column_stack([t, e]).astype(np.float32)
    return joined


def single_value(arrays: Arrays, key: str, kinds: str) -> Any:
    """Return the only value of an array whose type is of these kinds; None for any other array."""
    stated = arrays[key]
    return stated.item() if stated.size == 1 and stated.dtype.kind in kinds else None


def stated_task(arrays: Arrays, wanted: str) -> str:
    """Return the task that the file states, or else ``wanted``, which may be "auto"."""
    if "task" not in arrays:
        return wanted
    task = single_value(arrays, "task", "U") or "?"
    if task not in TASKS:
        raise Fault(
            f"task is {shorten(task)}, none of {', '.join(TASKS)}{nearest(task, TASKS)}",
            "save task=numpy.array('multiclass'), which two classes are too, or another of these",
        )
    if wanted not in ("auto", task):
        raise Fault(
            f"says that its task is {task}, and not {wanted}",
            f"run with task={task}, or leave task out",
        )
    return task


def find_task(ys: Arrays, xs: Arrays, survival: bool) -> str:
    """Return the task that follows from the arrays of labels and inputs."""
    if survival:
        return "survival"
    parts, x = list(ys.values()), next(iter(xs.values()))
    if all(y.ndim > 2 for y in parts) and x.ndim > 2:
        return "segmentation"
    if all(y.ndim == 2 and y.shape[1] > 1 for y in parts):
        return (
            "multilabel" if all(np.isin(y, (-1, 0, 1)).all() for y in parts) else "regression"
        )
    measured = all(y.dtype.kind == "f" for y in parts) and not all(_whole(y) for y in parts)
    return "regression" if measured else "multiclass"


def _whole(y: Array) -> bool:
    return bool((np.isfinite(y) & (np.rint(y) == y)).all())


def read_labels(task: str, name: str, y: Array, x: Any) -> Any:
    """Check labels, and convert them to the stored form; ``x`` are their inputs. Raises Fault."""
    if task in ONE_CLASS:
        return read_classes(name, y)
    if task == "segmentation":
        return _read_masks(name, y, x)
    y = y[:, np.newaxis] if y.ndim == 1 else y
    if y.ndim != 2 or y.dtype.kind not in "iubf":
        wanted = {
            "multilabel": "(n, L) of 0 and 1",
            "regression": "numbers (n,) or (n, k)",
            "survival": "time_*, event_*",
        }
        raise Fault(f"{name} is {y.dtype} {y.shape}", f"labels of {task} are {wanted[task]}")
    if task == "survival" and y.shape[1] != 2:
        raise Fault(
            f"{name} is {y.shape}",
            "survival needs time_train and event_train in place of y_train, and so on",
        )
    if not np.isfinite(y.astype(np.float64)).all():
        row = int(np.flatnonzero(~np.isfinite(y).all(axis=1))[0])
        raise Fault(
            f"{name} has a label that is no finite number, first in sample {row}",
            "fill or drop such samples",
        )
    if task == "multilabel" and not np.isin(y, (-1, 0, 1)).all():
        raise Fault(
            f"{name} has labels besides 0, 1 and -1 (not known)",
            "save one column of 0 and 1 for each finding",
        )
    with np.errstate(over="ignore"):
        kept = y.astype(np.float32)
    if not np.isfinite(kept).all():
        raise Fault(f"{name} has a label beyond what float32 holds", "save it in a larger unit")
    for column in y.T:
        check_precision(name, column)
    return kept


def check_precision(name: str, values: Array) -> None:
    """Raise Fault where float32 makes different values of a column, (n,), one."""
    text, refused = merged_in_float32(name, values)
    if refused:
        raise Fault(
            text,
            "leave an identifier out; save a time from a later day on, or in a larger unit",
        )


def read_classes(name: str, y: Array) -> Array:
    """Check classes, and convert them to int64 (n,). Raises Fault."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise Fault(
            f"{name} is {y.shape}",
            "give one label per sample, (n,); several are (n, L) in all parts",
        )
    if y.dtype.kind not in "iubf":
        raise Fault(
            f"{name} is {y.dtype}",
            "labels are whole numbers 0, 1, 2, ...; `silofl import` numbers text labels",
        )
    if y.dtype.kind == "f" and not _whole(y):
        raise Fault(
            f"{name} has labels that are no whole numbers",
            "labels are whole numbers 0, 1, 2, ...",
        )
    if len(y) and y.min() < 0:
        raise Fault(f"{name} has a label {int(y.min())}", "labels count from 0")
    if len(y) and y.max() >= MOST_CLASSES:
        raise Fault(
            f"{name} has a label {y.max():.15g}",
            "labels are class numbers 0, 1, 2, ..., not codes",
        )
    return y.astype(np.int64)


def _read_masks(name: str, y: Array, x: Any) -> Any:
    if x.ndim < 4:
        what = "a table, which has" if x.ndim == 2 else "no pictures, and have"
        raise Fault(
            f"{name} is {y.shape}",
            f"the samples are {what} no outlines: save one label for each",
        )
    if y.shape != x.shape[:-1]:
        wanted = f"a mask has a class for each pixel of its picture: {x.shape[:-1]} here"
        hint = (
            "; volumes have channels, too: save x as (n, d, h, w, 1)"
            if y.ndim == x.ndim == 4
            else ""
        )
        raise Fault(f"{name} is {y.shape}", wanted + hint)
    if isinstance(y, OnDisk) and y.stays:
        return y  # checked when its index was made, and when it is read
    if y.dtype.kind not in "iub" or any(
        part.size and (part.min() < 0 or part.max() > VOID) for part in in_batches(y)
    ):
        raise Fault(
            f"{name} is {y.dtype}, or has values that are no classes",
            "0 is the background, then 1, 2, ... 254; 255 does not count",
        )
    return OnDisk([np.asarray(y)], np.uint8) if isinstance(y, np.memmap) else y.astype(np.uint8)


def read_count(task: str, arrays: Arrays, ys: Mapping[str, Any]) -> int:
    """Return the number of classes (as stated, or the largest label + 1), findings or measurements; 1 for survival."""
    if task == "survival":
        return 1
    if task in ("multilabel", "regression"):
        widths = {y.shape[1] for y in ys.values()}
        if len(widths) > 1:
            raise Fault(
                f"has {' and '.join(map(str, sorted(widths)))} labels per sample",
                "all parts have the same labels",
            )
        return _stated_count(arrays, widths.pop(), exactly=True)
    if any(isinstance(y, OnDisk) and y.stays for y in ys.values()):
        return _stated_count(arrays, 2)
    if task == "segmentation":
        seen = {split: values_seen(y) for split, y in ys.items()}
        if "classes" not in arrays:
            check_masks(np.any([*seen.values()], axis=0))
        most = {k: np.flatnonzero(values[:VOID]).max(initial=0) for k, values in seen.items()}
    else:
        most = {split: y.max() for split, y in ys.items() if len(y)}
    largest = int(max(most.values()))
    classes = _stated_count(arrays, largest + 1 if task in ONE_CLASS else max(largest + 1, 2))
    if task in ONE_CLASS and "classes" not in arrays:
        check_classes(ys)
    if largest >= classes:
        raise Fault(
            f"{max(most, key=most.__getitem__)} has a label {largest} where classes is {classes}",
            "labels are 0 .. classes - 1",
        )
    return classes


def check_classes(ys: Arrays) -> None:
    """Raise Fault for one class alone or for gaps between classes, where the file does not state their number."""
    classes = np.unique(np.concatenate([y for y in ys.values() if len(y)])).tolist()
    if len(classes) == 1:
        raise Fault(f"has one class alone, {classes[0]}", f"there must be two or more; {SAVE}")
    if len(classes) != classes[-1] + 1:
        raise Fault(
            f"has labels {short_numbers(classes)}, which leave numbers out",
            f"number classes 0, 1, 2, ...; or, {SAVE}",
        )


def values_of_mask(mask: Array) -> Array:
    """Return which values a mask has, bool (256,)."""
    return np.asarray(np.bincount(mask.ravel(), minlength=VOID + 1) > 0)


def values_seen(masks: Any) -> Array:
    """Return which values any of the masks has, bool (256,)."""
    seen = np.zeros(VOID + 1, bool)
    for part in in_batches(masks):
        for mask in part:
            seen |= values_of_mask(mask)
    return seen


def check_masks(seen: Array) -> None:
    """Raise Fault where masks without a stated number of classes leave numbers out, or have no class besides 0.

    ``seen``: which values they have, bool (256,).
    """
    classes = np.flatnonzero(seen[:VOID]).tolist()
    if max(classes, default=0) == 0:
        what = "0 and 255 alone, and 255 does not count" if seen[VOID] else "0 alone"
        raise Fault(f"has masks of {what}", f"what is drawn has class 1, 2, ...; {SAVE}")
    if missing := sorted({*range(1, classes[-1])} - {*classes}):
        raise Fault(
            f"has masks with values {short_numbers(classes)}, but no {short_numbers(missing)}",
            f"number classes 0, 1, 2, ...; or, {SAVE}",
        )


def presence(task: str, y: Array, classes: int) -> Array | None:
    """Return which classes, findings or events samples have, bool (n, k); None for measurements or many classes.

    ``y``: labels in their stored form, or which values each mask has, bool (n, 256). All masks have the background.
    """
    if task == "regression" or classes > MOST_PRESENT:
        return None
    if task in ONE_CLASS:
        return np.asarray(np.equal.outer(y, np.arange(classes)))
    if task != "segmentation":
        return np.asarray(y[:, -classes:] == 1)  # of survival the event
    seen = y if y.dtype == bool else np.array([values_of_mask(mask) for mask in y])
    return np.asarray(seen[:, :classes] | (np.arange(classes) == 0))


def short_numbers(numbers: Sequence[int]) -> str:
    """Return up to ten numbers as text for a message."""
    return ", ".join(map(str, numbers[:10])) + ", ..." * (len(numbers) > 10)


def _stated_count(arrays: Arrays, count: int, *, exactly: bool = False) -> int:
    if "classes" not in arrays:
        return count
    classes: int = single_value(arrays, "classes", "iu") or 0
    if classes < 1:
        raise Fault(
            "classes is no positive whole number",
            "save for example classes=numpy.array(2), or leave it out",
        )
    if classes > MOST_CLASSES:
        raise Fault(
            f"classes is {classes}", f"it is the number of classes, at most {MOST_CLASSES}"
        )
    if exactly and classes != count:
        raise Fault(
            f"classes is {classes}, where each sample has {count} labels", "leave classes out"
        )
    return classes


def describe_labels(task: str, ys: Arrays, classes: int) -> str:
    """Describe the labels in words and, for a few classes, the number of samples of each."""
    if task in ONE_CLASS:
        kind = f"{classes} {'classes' if task == 'multiclass' else 'grades (ordinal)'}"
        if classes > 20:
            return kind
        counts = (
            f"{split} {np.bincount(y, minlength=classes).tolist()}" for split, y in ys.items()
        )
        alone = "; there is ONE class here"
        alone *= len(np.unique(np.concatenate(list(ys.values())))) == 1
        return f"{kind}; samples of each: {', '.join(counts)}{alone}"
    if task == "multilabel":
        counts = (f"{split} {(y == 1).sum(0).tolist()}" for split, y in ys.items())
        each = f"; samples with each: {', '.join(counts)}" * (classes <= 20)
        return f"{classes} findings (multilabel){each}"
    if task == "survival":
        counts = (f"{split} {int(y[:, 1].sum())}" for split, y in ys.items())
        return f"times and events (survival); events: {', '.join(counts)}"
    if task == "segmentation":
        return f"masks of {classes} classes, 0 the background (segmentation)"
    return f"{classes} measurement{'s' * (classes > 1)} per sample (regression)"
