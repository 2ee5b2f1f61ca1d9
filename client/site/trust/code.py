"""The code at this site that a run names as MODULE:FUNCTION: its source, found without running it."""

from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ..private import load_ours


def file_of(name: str) -> Path | None:
    """Return the file that defines MODULE of MODULE:FUNCTION; None where this machine has none."""
    found: Path | None = None
    search: Sequence[str] | None = None
    parts = name.partition(":")[0].split(".")
    for i in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: i + 1]), search)
        if spec is None:
            return None
        search = spec.submodule_search_locations
        found = Path(spec.origin) if spec.origin else None
    return found


def digest_of_code(name: str) -> str:
    """Return the SHA-256 of the source of MODULE (`partitions/common/source_sum.py`); empty where there is none."""
    file = file_of(name)
    if file is None:
        return ""
    shared = load_ours("partitions/common", "source_sum")
    return str(shared.source_sum(name.partition(":")[0], file))


def trainer_faults(study: str, wanted: str, run: Mapping[str, Any]) -> list[str]:
    """Return why the trainer that a run names is not the one of a study, whose source has the SHA-256 ``wanted``."""
    name = str(run.get("trainer", ""))
    if not name:
        return []
    here = digest_of_code(name)
    if here and here == wanted:
        return []
    return [
        f"the study {study} has trainer = {wanted[:16]}..., and {name[:80]} here "
        f"{f'has SHA-256 {here[:16]}...' if here else 'is missing'}"
    ]
