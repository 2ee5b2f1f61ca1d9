"""Reordering of a silo's columns and label numbers, by name, to the schema that all silos agree on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from partitions.labels import ONE_CLASS, VOID
from partitions.schema import Schema, numbers_of, order_of
from partitions.splits import SiloData, Split, inputs_of, tables_of
from partitions.stored import together


def count_columns(x: Any) -> int:
    """Count the columns of all tables among the inputs."""
    return sum(own.shape[1] for own in tables_of(x).values())


def reorder_data(data: SiloData, agreed: Schema) -> SiloData:
    """Return the data with columns and labels in the agreed order, C-contiguous; ``data`` itself where none moves.

    Raises DataError where a column of one side is missing on the other, or an own label in the agreed ones.
    """
    own, one = data.schema, data.task in (*ONE_CLASS, "segmentation")
    columns = order_of(own.names, agreed.names)
    numbers = (
        numbers_of(own.labels, agreed.labels) if one else order_of(own.labels, agreed.labels)
    )
    if not columns and not numbers:
        return data
    parts = [
        Split(
            reorder_columns(split.x, columns),
            relabel(split.y, numbers, data.task),
            split.patient,
            split.subgroup,
        )
        for split in (data.train, data.val, data.test)
    ]
    features = {feature.name: feature for feature in own.features}
    schema = replace(
        own,
        features=tuple(features[name] for name in agreed.names) if columns else own.features,
        labels=agreed.labels if numbers else own.labels,
    )
    classes = max(data.classes, len(agreed.labels)) if one and numbers else data.classes
    return replace(
        data, train=parts[0], val=parts[1], test=parts[2], classes=classes, schema=schema
    )


def reorder_columns(x: Any, order: list[int]) -> Any:
    """Return inputs (n, ...) whose column j is column ``order[j]`` of ``x``, counted over all tables."""
    if not order:
        return x
    tables = tables_of(x)
    whole = np.hstack(list(tables.values()))[:, order]
    ends = np.cumsum([own.shape[1] for own in tables.values()])[:-1]
    moved = dict(
        zip(tables, map(np.ascontiguousarray, np.split(whole, ends, axis=1)), strict=True)
    )
    return together({**inputs_of(x), **moved}) if x.dtype.names else moved[""]


def relabel(y: Any, numbers: list[int], task: str) -> Any:
    """Renumber labels: class k becomes ``numbers[k]``; for other tasks column j becomes column ``numbers[j]``."""
    if not numbers:
        return y
    if task not in (*ONE_CLASS, "segmentation"):
        return np.ascontiguousarray(y[:, numbers])
    table = np.arange(max(len(numbers), VOID + 1), dtype=y.dtype)
    table[: len(numbers)] = numbers
    return table[y] if isinstance(y, np.ndarray) else y.changed(lambda read: table[read])
