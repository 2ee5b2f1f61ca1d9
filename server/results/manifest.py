"""Output of a partition: one data file per silo and the manifest."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from partitions.common.errors import DataError
from partitions.common.files import file_sum, fresh_folder, make_folder
from partitions.labels import ONE_CLASS
from partitions.schemes.registry import PARTITIONS, SiloIndices, partition, silo_data
from partitions.silo_file import write_silo_file
from partitions.splits import Array, Dataset

MANIFEST = "manifest.json"


def describe_partition(
    dataset: Dataset,
    silos: Sequence[SiloIndices],
    *,
    name: str,
    seed: int,
    settings: Any = None,
) -> dict[str, Any]:
    """Return the content of `manifest.json` for a partition, without files and checksums.

    ``{dataset, partition, seed, settings, task, classes, silos: [{name[, origin], n_train, n_val, n_test,
    labels}]}`` with ``labels`` = {split: {class: samples}}, classes without samples left out, if samples have a class.
    """
    entries: list[dict[str, Any]] = []
    for silo in silos:
        splits = {"train": silo.train, "val": silo.val, "test": silo.test}
        entry: dict[str, Any] = {"name": silo.name}
        if silo.origin:
            entry["origin"] = silo.origin
        entry |= {f"n_{split}": len(indices) for split, indices in splits.items()}
        if dataset.task in ONE_CLASS:
            entry["labels"] = {
                split: count_labels(dataset.labels[indices])
                for split, indices in splits.items()
            }
        entries.append(entry)
    return {
        "dataset": dataset.name,
        "partition": name,
        "seed": seed,
        "settings": {
            f"{name}.{key.replace('_', '-')}": value
            for key, value in dataclasses.asdict(
                settings or PARTITIONS[name].settings()
            ).items()
        },
        "task": dataset.task,
        "classes": dataset.classes,
        "silos": entries,
    }


def count_labels(labels: Array) -> dict[str, int]:
    """Count the samples of each class that occurs."""
    values, counts = np.unique(labels, return_counts=True)
    return {str(value): int(count) for value, count in zip(values, counts, strict=True)}


def write_partition(
    dataset: Dataset,
    name: str,
    out_dir: str | Path,
    *,
    silos: int,
    seed: int,
    settings: Any = None,
    validation: float = -1.0,
) -> dict[str, Any]:
    """Partition a data set and write ``hospital-01.npz``, ... and ``manifest.json``; return the manifest.

    It is written beside ``out_dir`` and renamed, so that all of it appears at once. An earlier partition in ``out_dir``
    is replaced.

    Raises DataError if ``out_dir`` holds anything else, or if the partition is not possible (see
    `partition`).
    """
    out = Path(out_dir).resolve()
    refuse_other_content(out)
    indices = partition(
        dataset, name, silos=silos, seed=seed, settings=settings, validation=validation
    )
    manifest = describe_partition(dataset, indices, name=name, seed=seed, settings=settings)
    manifest["settings"] |= {} if validation < 0 else {"validation": validation}
    temporary: Path | None = None
    try:
        make_folder(out.parent)
        temporary = fresh_folder(out)
        for silo, entry in zip(indices, manifest["silos"], strict=True):
            path = temporary / f"{silo.name}.npz"
            write_silo_file(path, silo_data(dataset, silo))
            entry |= {"file": path.name, "sha256": file_sum(path)}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
        if out.exists():
            replaced = temporary.with_suffix(".old")
            out.rename(replaced)
            temporary.rename(out)
            shutil.rmtree(replaced)
        else:
            temporary.rename(out)
    except OSError as error:
        raise DataError(f"{out} cannot be written ({error.strerror or error})") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a partition; empty if there is no valid one."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        return manifest if all(part["file"] for part in manifest["silos"]) else {}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def refuse_other_content(out: Path) -> None:
    """Raise DataError unless the directory is absent, empty, or holds an earlier partition and nothing else."""
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"{out} is a file; name a directory for the partition")
    manifest = read_manifest(out)
    expected = {MANIFEST, *(silo["file"] for silo in manifest["silos"])} if manifest else ()
    if other := sorted(path.name for path in out.iterdir() if path.name not in expected):
        raise DataError(
            f"{out} holds something else ({other[0]}); name a new or empty directory"
        )


def label_counts(manifest: Mapping[str, Any]) -> Array:
    """Return the number of training samples of each class and silo (classes, silos), with those for validation."""
    counts = np.zeros((int(manifest["classes"]), len(manifest["silos"])), int)
    for column, silo in enumerate(manifest["silos"]):
        for split in ("train", "val"):
            for label, count in silo["labels"][split].items():
                counts[int(label), column] += count
    return counts
