"""`silofl import` in tests: its options are keywords, those of a csv too, and an earlier file is no reason to stop."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partitions.importing.options import ImportOptions, Take
from partitions.importing.source import import_source
from server.cli.main import main

OF_TABLES = {field.name for field in fields(Take)}


def imported(source: Path, out: Path | None = None, **options: Any) -> Any:
    """What is made of a source; the data file lies beside it unless ``out`` says where."""
    own = {key: options.pop(key) for key in OF_TABLES & options.keys()}
    given: dict[str, Any] = {"overwrite": True} | ({"take": Take(**own)} if own else {})
    return import_source(
        source, out or source.parent / "made.npz", ImportOptions(**given | options)
    )


def refused(source: Path, *words: str, **options: Any) -> str:
    """The one line in which an import ends, which has these words; nothing is written."""
    out = source.parent / "refused.npz"
    with pytest.raises(ValueError) as caught:
        imported(source, out, **options)
    said = str(caught.value)
    assert all(part in said for part in words) and "\n" not in said, said
    assert not out.exists()
    return said


def splits_of(data: Any) -> tuple[Any, Any, Any]:
    """Samples, or their rows, for training, validation and test."""
    return data.train, data.val, data.test


def all_x(data: Any) -> Any:
    """The inputs of all samples."""
    return np.concatenate([split.x for split in splits_of(data)])


def are_apart(groups: Any, total: int) -> bool:
    """Whether no two of these sets have anything in common, and all of them have so much."""
    return sum(map(len, groups)) == len(set().union(*groups)) == total


def silofl(*words: object) -> int:
    """The exit code of a command."""
    return main([str(word) for word in words])


def write_lines(path: Path, *lines: str) -> Path:
    """The path of a text, written."""
    path.write_text("\n".join(lines))
    return path
