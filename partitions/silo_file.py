"""One silo's data file: an ``.npz`` that is checked completely before anything is trained on it.

Arrays, under one of three sets of names:

* ``x_train, y_train[, x_val, y_val], x_test, y_test``
* MedMNIST's own: ``train_images, train_labels[, val_images, val_labels], test_images, test_labels``
* ``x, y``: split into 64 % train, 16 % val and 20 % test, by the samples themselves (``own_split.py``)

and optionally ``task`` (text), ``classes`` (a whole number; otherwise the largest label + 1), ``label_names`` (text,
one per class or output) and ``feature_names`` (text, one per column of a table). Several inputs of a sample have an
array each, ``x_image_train``, ``x_notes_train`` and so on, or ``x_image``, ``x_notes`` beside ``y``; one that a sample
lacks is all zeros there. Texts are tokens, with ``vocabulary``, how many there are.

What inputs look like says ``inputs.py``: pictures are uint8 (n, h, w) or (n, h, w, c), or float32 (n, c, h, w), for
example. Volumes have a depth before their height, and always channels: an array of four dimensions is of pictures. But
under MedMNIST's names uint8 (n, d, h, w) is of grey volumes, as its 3D sets are, where it could only be of pictures
with more than 4 channels. Labels are what their task says (``labels.py``), classes 0, 1, 2, ... for example. float64 is
read as float32. Anything else is refused. An ``x_val`` without samples says that no validation samples are wanted.
"""

from __future__ import annotations

import lzma
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from partitions.disk import write_atomically
from partitions.inputs import check_alike, describe_inputs, is_input_name, read_inputs, read_vocabulary
from partitions.labels import (
    ONE_CLASS,
    Fault,
    describe_labels,
    find_task,
    join_survival,
    read_count,
    read_labels,
    stated_task,
)
from partitions.names import nearest
from partitions.own_split import TEST_SHARE, divide_own, rows_of, say_division
from partitions.pool import hold_out
from partitions.splits import Array, Dataset, SiloData, Split, inputs_of, together

SPLITS = ("train", "val", "test")
OWN_NAMES = {f"{kind}_{split}": (kind, split) for split in SPLITS for kind in ("x", "y")}
MEDMNIST_NAMES = {
    f"{split}_{word}": (kind, split) for split in SPLITS for kind, word in (("x", "images"), ("y", "labels"))
}
UNSPLIT_NAMES = {"x": ("x", "all"), "y": ("y", "all")}
NAMED = re.compile(r"x_(?P<input>\w+)_(?P<split>train|val|test)")  # of several inputs
UNSPLIT_NAMED = re.compile(r"x_(?P<input>\w+)")
EXTRA_NAMES = ("task", "classes", "label_names", "feature_names", "vocabulary")
LARGEST_UNPACKED = 1 << 27  # bytes; a file that unpacks to more, and to so many times its own size, is a trap:
MOST_TIMES = 100


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: whether it is right, what was found, and how to mend a fault."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Contents:
    """A file's samples as they will be used, per split (train, val, test, or all), and its task and classes."""

    splits: dict[str, Split]
    classes: int
    task: str
    label_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    vocabulary: int = 0

    def divided(self) -> SiloData:
        """Its parts, as the file has them or as its samples say. ValueError where there are too few of these."""
        return divide_own(self.splits, self.classes, self.task, self.vocabulary)


def check_silo_file(path: str | Path, task: str = "auto") -> list[Check]:
    """Look at everything in a silo data file, in order, up to the first fault; last, how it is divided."""
    checks, contents = examine(Path(path), task)
    if contents is not None:
        try:
            data = contents.divided()
            checks.append(Check("split", True, say_division(contents.splits, data)))
        except ValueError as error:
            checks.append(Check("split", False, str(error), "give samples for training and for testing"))
    return checks


def read_silo_file(path: str | Path, task: str = "auto") -> SiloData:
    """Read one silo's data, divided as the file has it or as its samples say, never by a run's seed.

    Pictures come as (n, h, w, c), volumes as (n, d, h, w, c), labels as their task has them, which is ``task`` where
    the file does not say. Raises ValueError with the first fault of the file.
    """
    contents = read_contents(Path(path), task)
    try:
        return contents.divided()
    except ValueError as error:
        raise ValueError(f"{path}: {error}; give samples for training and for testing") from None


def read_dataset_file(path: str | Path, *, seed: int = 42, task: str = "auto") -> Dataset:
    """Read such a file as a whole data set, to be partitioned over silos.

    Its validation samples become training samples; a file of ``x, y`` is split 80 / 20 by seed. Arrays are
    read-only.

    Raises ValueError with the first fault of the file.
    """
    path = Path(path)
    contents = read_contents(path, task)
    splits = contents.splits
    if "all" in splits:
        rest, test = hold_out(np.arange(len(splits["all"])), TEST_SHARE, np.random.default_rng(seed))
        splits = {"train": rows_of(splits["all"], rest), "test": rows_of(splits["all"], test)}
    train = splits["train"]
    if "val" in splits:
        val = splits["val"]
        train = Split(np.concatenate([train.x, val.x]), np.concatenate([train.y, val.y]))
    for split in (train, splits["test"]):
        split.x.flags.writeable = False
        split.y.flags.writeable = False
    classes, task, vocabulary = contents.classes, contents.task, contents.vocabulary
    return Dataset(path.stem, train, splits["test"], classes, task=task, vocabulary=vocabulary)


def write_silo_file(
    path: str | Path,
    data: SiloData,
    *,
    label_names: Sequence[str] = (),
    feature_names: Sequence[str] = (),
    streams: Mapping[str, Iterable[Array]] | None = None,
) -> None:
    """Write one silo's data, atomically and uncompressed; the same data give the same bytes.

    ``val`` is always written, also without samples, so that what is read back is what was written. ``streams``: samples
    that are not in memory, by the array's name (``x_train``), one after the other; of these ``data`` has shape and type
    only.
    """
    arrays: dict[str, Array] = {}
    samples = dict(streams or {})
    for name, split in (("train", data.train), ("val", data.val), ("test", data.test)):
        for own, x in inputs_of(split.x).items():
            key = f"x_{own}_{name}" if own else f"x_{name}"
            channels_first = x.ndim > 2 and x.dtype != np.uint8
            arrays[key] = np.moveaxis(x, -1, 1) if channels_first else x
            if channels_first and key in samples:
                samples[key] = (np.moveaxis(sample, -1, 0) for sample in samples[key])
        arrays |= written_labels(name, split.y, data.task)
    if data.vocabulary:
        arrays["vocabulary"] = np.array(data.vocabulary)
    if data.task != "multiclass":
        arrays["task"] = np.array(data.task)
    if data.task in (*ONE_CLASS, "segmentation"):
        arrays["classes"] = np.array(data.classes)
    for key, names in (("label_names", label_names), ("feature_names", feature_names)):
        if names:
            arrays[key] = np.array(names, dtype=np.str_)
    write_npz(Path(path), arrays, samples)


def written_labels(part: str, y: Array, task: str) -> dict[str, Array]:
    """The labels of one part as a file has them."""
    if task == "survival":
        return {f"time_{part}": y[:, 0], f"event_{part}": y[:, 1].astype(np.uint8)}
    return {f"y_{part}": y.astype(np.int8) if task == "multilabel" else y}


def write_npz(path: Path, arrays: Mapping[str, Array], samples: Mapping[str, Iterable[Array]] | None = None) -> None:
    """Write an uncompressed ``.npz`` under a temporary name and rename it. Unlike numpy.savez, no time of day
    is in it.

    ``samples``: what is written in an array's place, one sample after the other; no more than one is in memory.
    """

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            for name, array in arrays.items():
                member = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
                with archive.open(member, "w", force_zip64=True) as out:
                    if samples and name in samples:
                        write_stream(out, array, samples[name])
                    else:
                        np.lib.format.write_array(out, np.ascontiguousarray(array), allow_pickle=False)

    write_atomically(path, write)


def write_stream(out: IO[bytes], like: Array, samples: Iterable[Array]) -> None:
    """What write_array would write of an array with these samples, which has the shape and type of ``like``."""
    np.lib.format.write_array_header_1_0(
        out, {"descr": np.lib.format.dtype_to_descr(like.dtype), "fortran_order": False, "shape": like.shape}
    )
    for sample in samples:
        out.write(sample.astype(like.dtype, copy=False).tobytes())


def read_contents(path: Path, task: str = "auto") -> Contents:
    """Read and check a file; ValueError (one line) with its first fault."""
    checks, contents = examine(path, task)
    if contents is None:
        bad = next(check for check in checks if not check.ok)
        raise ValueError(" ".join(f"{path}: {bad.detail}; {bad.fix}".split()))
    return contents


def examine(path: Path, wish: str = "auto") -> tuple[list[Check], Contents | None]:
    """Go through all checks; the contents are None if one failed. ``wish``: the task, where the file does not say."""
    checks: list[Check] = []
    name = "file"
    try:
        found = read_arrays(path)
        checks.append(Check(name, True, f"{len(found)} arrays, {path.stat().st_size / 1e6:.1f} MB"))
        name = "names"
        arrays = join_survival(found)
        named, vocabulary = sort_names(arrays), read_vocabulary(arrays)
        checks.append(Check(name, True, ", ".join(found)))
        name = "samples"
        check_samples(named)
        counts = (f"{split} {len(y)}" for (kind, split), y in named.items() if kind == "y")
        checks.append(Check(name, True, ", ".join(counts)))
        name = "inputs"
        xs = {split: read_x(split, named, arrays, vocabulary) for kind, split in named if kind == "y"}
        check_alike(xs)
        first = next(iter(xs.values()))
        features = read_names(arrays, "feature_names", first.shape[1] if first.ndim == 2 else 0)
        detail = describe_inputs(first) + (f" ({', '.join(features)})" if features else "")
        checks.append(Check(name, True, detail))
        name = "labels"
        raw = {split: y for (kind, split), y in named.items() if kind == "y"}
        task = stated_task(arrays, wish)
        if task == "auto":
            task = find_task(raw, xs, survival=arrays.keys() != found.keys())
        ys = {split: read_labels(task, names_of(split, "y", arrays), y, xs[split]) for split, y in raw.items()}
        classes = read_count(task, arrays, ys)
        label_names = read_names(arrays, "label_names", classes)
        checks.append(Check(name, True, describe_labels(task, ys, classes)))
    except Fault as fault:
        checks.append(Check(name, False, fault.detail, fault.fix))
        return checks, None
    splits = {split: Split(xs[split], ys[split]) for split in xs}
    return checks, Contents(splits, classes, task, label_names, features, vocabulary)


def read_arrays(path: Path) -> dict[str, Array]:
    """Load every array of an ``.npz`` (nothing is unpickled)."""
    make = "make one with `silofl import`, or with numpy.savez"
    try:
        if not path.exists():
            raise Fault("there is no such file", "check the path, and in a container that the folder is mounted")
        if not path.is_file():
            raise Fault("is no file", f"name the .npz file itself, or {make}")
        with path.open("rb") as file:
            start = file.read(6)
        if not start:
            raise Fault("the file is empty", make)
        if start == b"\x93NUMPY":
            raise Fault("is a single .npy array", "an .npz with inputs and labels is needed; " + make)
        if not zipfile.is_zipfile(path):
            raise Fault("is no .npz file, or is cut short", make)
        with zipfile.ZipFile(path) as archive:
            check_size(archive, path.stat().st_size)
            return {member.filename.removesuffix(".npy"): read_array(archive, member) for member in archive.infolist()}
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
        raise Fault(f"is damaged or not readable ({error})", "copy it again, or " + make) from error
    except (ValueError, OverflowError, struct.error) as error:  # of zipfile's, about its own header
        if isinstance(error, Fault):
            raise
        raise Fault(f"is damaged ({error})", "copy it again, or " + make) from error


def check_size(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse a small file that unpacks to much: before anything is unpacked."""
    unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > LARGEST_UNPACKED and unpacked > MOST_TIMES * size:
        raise Fault(
            f"would unpack to {unpacked / 1e6:.0f} MB, {unpacked / size:.0f} times its size",
            "if that is what you mean, save it uncompressed, with numpy.savez",
        )


def read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """One array, whose header is looked at first: it may not ask for more memory than the file has values for."""
    name = member.filename.removesuffix(".npy")
    again = "copy it again, or make it with `silofl import`, or with numpy.savez"
    with archive.open(member) as file:
        if file.read(6) != b"\x93NUMPY":
            raise Fault(f"holds {name!r}, which is no array", again)
    try:
        with archive.open(member) as file:
            version = np.lib.format.read_magic(file)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, dtype = read[version](file)
    except (KeyError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Fault(f"{name} is damaged ({error})", again) from error
    if dtype.hasobject:
        raise Fault(
            f"{name} is an array of Python objects, which are not read: they could run code",
            "save plain arrays of numbers",
        )
    if any(n < 0 for n in shape) or math.prod(shape) * dtype.itemsize > member.file_size:
        raise Fault(f"{name} is damaged (its header says {dtype} {shape}, more than there is)", again)
    try:
        with archive.open(member) as file:
            array: Array = np.lib.format.read_array(file, allow_pickle=False)
            return array
    except ValueError as error:
        raise Fault(f"{name} is damaged ({error})", again) from error
    except MemoryError:
        need = math.prod(shape) * dtype.itemsize / 1e9
        raise Fault(f"{name} needs {need:.1f} GB of memory, which is not here", "use a machine with more") from None


def sort_names(arrays: Mapping[str, Array]) -> dict[tuple[str, str], Array]:
    """Tell which array is what: (``x`` or ``y``, split) -> array. Unknown, mixed and missing names are
    refused.
    """
    known = known_names(arrays)
    wanted = "x_train, y_train, x_test, y_test (and x_val, y_val), or x, y"
    for key in arrays:
        if key not in known and key not in EXTRA_NAMES:
            hint = nearest(key.lower(), [*known, *EXTRA_NAMES])
            raise Fault(f"has an array {key!r} of no known name{hint}", f"the names are {wanted}")
    for layout in layouts(arrays):
        present = [key for key in layout if key in arrays]
        if not present:
            continue
        if strange := [key for key in arrays if key in known and key not in layout]:
            raise Fault(f"has both {present[0]} and {strange[0]}", f"use one set of names: {wanted}")
        optional = [key for key in layout if layout[key][1] == "val"]
        needed = [key for key in layout if key not in optional or any(name in arrays for name in optional)]
        if missing := [key for key in needed if key not in arrays]:
            raise Fault(f"has no {missing[0]}", f"the names are {wanted}")
        return {layout[key]: arrays[key] for key in layout if key in arrays}
    raise Fault("holds no samples", f"the names are {wanted}")


def layouts(arrays: Collection[str]) -> list[dict[str, tuple[str, str]]]:
    """The sets of names that a file may use: what each name means, ``x``, ``y`` or of several inputs ``x:image``."""
    found = [OWN_NAMES, MEDMNIST_NAMES, UNSPLIT_NAMES]
    plain = {**OWN_NAMES, **MEDMNIST_NAMES, **UNSPLIT_NAMES}
    parts = [match["input"] for key in arrays if key not in plain and (match := NAMED.fullmatch(key))]
    if parts:
        inputs = {f"x_{own}_{split}": (f"x:{own}", split) for own in dict.fromkeys(parts) for split in SPLITS}
        found.insert(0, {**inputs, **{f"y_{split}": ("y", split) for split in SPLITS}})
    whole = [match["input"] for key in arrays if key not in plain and (match := UNSPLIT_NAMED.fullmatch(key))]
    if len(whole) > 1 and not any(key.startswith("y_") for key in arrays):
        found.insert(0, {**{f"x_{own}": (f"x:{own}", "all") for own in whole}, "y": ("y", "all")})
    return found


def known_names(arrays: Collection[str]) -> dict[str, tuple[str, str]]:
    return {key: meaning for layout in reversed(layouts(arrays)) for key, meaning in layout.items()}


def names_of(split: str, kind: str, arrays: Mapping[str, Array]) -> str:
    """The name under which the file has this array."""
    return next(key for key, value in known_names(arrays).items() if value == (kind, split) and key in arrays)


def read_x(split: str, named: Mapping[tuple[str, str], Array], arrays: Mapping[str, Array], vocabulary: int) -> Array:
    """The inputs of a split, checked; several as one array."""
    found: dict[str, Array] = {}
    for (kind, part), x in named.items():
        if part == split and kind != "y":
            name = names_of(split, kind, arrays)
            own = kind.partition(":")[2]
            if own and not is_input_name(own):
                raise Fault(f"has an input {own!r}", "an input's name is in small letters, as `image` in x_image_train")
            found[own] = read_inputs(name, x, vocabulary)
    return together(found) if "" not in found else found[""]


def check_samples(named: Mapping[tuple[str, str], Array]) -> None:
    """Inputs and labels of a split belong together, and no split is empty (val may be)."""
    for (kind, split), x in named.items():
        if kind == "y":
            continue
        y = named["y", split]
        if x.ndim == 0 or y.ndim == 0:
            raise Fault(f"{split} has a single number where an array is wanted", "save arrays of n samples")
        if len(x) != len(y):
            raise Fault(f"{split} has {len(x)} inputs but {len(y)} labels", "save one label for each input")
        if len(y) < (3 if split == "all" else 1) and split != "val":
            few = f"only {len(y)} samples, too few to split" if split == "all" else f"no samples in {split}"
            raise Fault(f"has {few}", "give samples for training and for testing")


def read_names(arrays: Mapping[str, Array], key: str, count: int) -> tuple[str, ...]:
    """The names of classes or columns, if the file has them."""
    if key not in arrays:
        return ()
    names = arrays[key]
    if names.ndim != 1 or names.dtype.kind != "U" or len(names) != count:
        raise Fault(f"{key} does not hold {count} texts", "save one name for each, or leave them out")
    return tuple(str(name) for name in names)
