"""The index file of an own data set: labels, patients, subgroups and digests of all samples, and no sample.

It is an ``.npz`` like any other data file, with ``dataset``, the name MODULE:FUNCTION, in place of ``x_train``. What
reads a data file reads it: the policy's floor, the budget's units and cohort, and the audit log, which has its SHA-256.
``code`` is the SHA-256 of the source. A data set that differs from its index is refused; so a run sees one length, one
order and one set of labels.

Patients are numbers there, as in every data file. Digests are those of the index, or else of the samples as they are
read without random changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from partitions.common.errors import UserError
from partitions.labels import VOID, Fault
from partitions.npz import read_arrays, write_npz
from partitions.own.dataset import (
    OwnDataset,
    OwnFault,
    OwnPart,
    OwnSamples,
    open_own,
    resolve_name,
)
from partitions.recipes.cells import identifier
from partitions.splits import SPLITS, Array, Arrays

DIGESTS = tuple(f"digest_{split}" for split in SPLITS)
OWN_NAMES = ("dataset", "code", *DIGESTS)
ENDING = ".index.npz"
# A missing patient, as Python and pandas write it
MISSING = frozenset(("None", "NaT", "<NA>"))
REPEATED = 3  # samples of a split that are read twice


def make_index(name: str) -> Arrays:
    """Read all samples of an own data set once; return the arrays of its index. Raises UserError or DataError."""
    dataset = open_own(name)
    arrays = columns_of(dataset)
    classes = 2
    for split, part in dataset.parts.items():
        digests = []
        for row in range(part.count):
            x, y = part.sample(row, None)
            if row < REPEATED:
                again = part.sample(row, None)
                if not (np.array_equal(x, again[0]) and np.array_equal(y, again[1])):
                    raise part.fault(
                        "reads a sample differently the second time: draw from torch, NumPy, random or MONAI's "
                        "transforms, which are seeded"
                    )
            digests.append(hashlib.sha256(np.ascontiguousarray(x).data).digest()[:8])
            if "label" not in part.index:
                classes = max(classes, 1 + int(y[y != VOID].max(initial=0)))
        summed = np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)
        arrays.setdefault(f"digest_{split}", summed)
    if "label" not in dataset.parts["train"].index:
        arrays.setdefault("classes", np.array(classes))
    return arrays


def columns_of(dataset: OwnDataset) -> dict[str, Array]:
    """Return the index of an own data set as arrays, without a read of any sample."""
    arrays = {"dataset": np.array(dataset.name), "code": np.array(dataset.code)}
    arrays |= {key: np.asarray(value) for key, value in dataset.about.items()}
    outlines = "label" not in dataset.parts["train"].index
    if outlines:
        arrays.setdefault("task", np.array("segmentation"))
    numbers = patient_numbers(dataset.parts)
    for split, part in dataset.parts.items():
        if ("label" not in part.index) != outlines:
            raise part.fault("has labels in its index where other splits have none")
        for key, column in part.index.items():
            kind = {"label": "y"}.get(key, key)
            arrays[f"{kind}_{split}"] = numbers[split] if key == "patient" else column
    if str(arrays.get("task")) == "survival":
        for split in dataset.parts:
            y = arrays.pop(f"y_{split}")
            arrays |= {f"time_{split}": y[:, 0], f"event_{split}": y[:, 1].astype(np.uint8)}
    return arrays


def patient_numbers(parts: Mapping[str, OwnPart]) -> Arrays:
    """Return each split's patients as numbers from 0, the same for all spellings of an identifier."""
    known: dict[str, int] = {}
    numbers = {}
    for split, part in parts.items():
        if "patient" not in part.index:
            continue
        cells = [str(who) for who in part.index["patient"].tolist()]
        whose = [identifier(cell) for cell in cells]
        if not MISSING.isdisjoint(cells) or "" in whose:
            raise part.fault("has a sample without a patient in its index")
        numbers[split] = np.array(
            [known.setdefault(who, len(known)) for who in whose], np.int64
        )
    return numbers


def write_index(name: str, out: Path) -> None:
    """Write the index file of an own data set. Raises UserError or DataError, one line."""
    write_npz(out, make_index(name))


def as_file(data: Path, folder: Path, echo: Callable[[str], None]) -> Path:
    """Return a data file; of an own data set the index, which is made in ``folder``. Raises UserError."""
    if not (name := "" if data.exists() else resolve_name(str(data))):
        return data
    echo(f"reading all samples of {name} for its index")
    write_index(name, folder / "index.npz")
    return folder / "index.npz"


def index_file(folder: Path, name: str) -> Path:
    """Return where the index of an own data set lies that a federation file names."""
    return folder / f"{name.replace(':', '.')}{ENDING}"


def keep_index(path: Path, echo: Callable[[str], None]) -> None:
    """Make the index file of :func:`index_file` if it is not there, or the data set differs. Raises UserError."""
    module, _, function = path.name.removesuffix(ENDING).rpartition(".")
    try:
        with_samples(read_arrays(path))
    except Fault:
        echo(f"reading all samples of {module}:{function} for its index, {path}")
        write_index(f"{module}:{function}", path)


def arrays_at(path: Path) -> dict[str, Any]:
    """Return the arrays of a data file, with samples; of an own data set in a simulation (MODULE:FUNCTION), too."""
    name = "" if path.exists() else resolve_name(str(path))
    if not name:
        return with_samples(read_arrays(path))
    arrays = columns_of(open_own(name))
    if "y_train" not in arrays and "classes" not in arrays and "time_train" not in arrays:
        raise Fault(f"{name} has masks and no classes", "return their number, as 'classes': N")
    return with_samples(arrays)


def with_samples(arrays: Arrays) -> dict[str, Any]:
    """Return the arrays of a data file, those of an index file with their samples. Raises Fault where they differ."""
    if "dataset" not in arrays:
        return dict(arrays)
    name, code = (
        "".join(map(str, np.ravel(arrays.get(key, "")))) for key in ("dataset", "code")
    )
    again = f"make its index again: silofl check-data {name} --out FILE.npz"
    try:
        dataset = open_own(name)
        if dataset.code != code:
            raise OwnFault(f"{name}: its code is another than its index was made with")
        for key, column in columns_of(dataset).items():
            if key not in arrays or not np.array_equal(arrays[key].ravel(), column.ravel()):
                raise OwnFault(f"{name}: its {key} differs from the one in its index")
    except OwnFault as fault:
        raise Fault(str(fault), again) from None
    except UserError:
        raise Fault(
            f"{name} cannot be loaded here", "PYTHONPATH must say where its module is"
        ) from None
    read: dict[str, Any] = {key: a for key, a in arrays.items() if key not in OWN_NAMES}
    for split, part in dataset.parts.items():
        if f"digest_{split}" in arrays:
            part.index = {**part.index, "digest": arrays[f"digest_{split}"]}
        x = OwnSamples(part)
        # A table is standardised as a whole, and so is in memory.
        read[f"x_{split}"] = x[:] if x.ndim == 2 else x
        if "label" not in part.index:
            read[f"y_{split}"] = OwnSamples(part, 1)
    return read
