"""The SHA-256 of a module's source, of a network, a trainer or a data set that a hospital has of its own.

A hospital's own process loads this file, too (`client/site/trust/code.py`): it imports the standard library only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def source_sum(own: Path, top: Path) -> str:
    """Return the sum over a module's file ``own``, or over its whole package, whose top-level file is ``top``."""
    files = sorted(top.parent.rglob("*.py")) if top.name == "__init__.py" else [own]
    found = hashlib.sha256()
    for path in files:
        found.update(f"{path.relative_to(top.parent).as_posix()}\n".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
