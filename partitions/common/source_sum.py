"""The SHA-256 of a module's source, of a network, a trainer or a data set that a hospital has of its own.

A hospital's own process loads this file, too (`client/site/trust/code.py`): it imports the standard library only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def source_sum(module: str, file: Path) -> str:
    """Return the sum over ``file``, which defines ``module``, or over all modules of its package, if it is in one.

    A package needs no ``__init__.py``.
    """
    depth = module.count(".") + (file.name == "__init__.py")
    folder = file.parents[max(depth - 1, 0)]
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")) if depth else [file]:
        found.update(f"{path.relative_to(folder).as_posix()}\n".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
