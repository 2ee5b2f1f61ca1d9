"""The code at this site that a run names as MODULE:FUNCTION: its source, found without running it."""

import zipfile
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
        found = None
        if spec.origin:
            found = Path(spec.origin)
    return found


def digest_of_code(name: str) -> str:
    """Return the SHA-256 of the source of MODULE (`partitions/common/source_sum.py`); empty where there is none."""
    file = file_of(name)
    if file is None:
        return ""
    module = name.partition(":")[0]
    shared = load_ours("partitions/common", "source_sum")
    return str(shared.source_sum(module, file))


def code_of_data(path: Path) -> str:
    """Return the SHA-256 of an own data set's source, as its index file has it (`partitions/own`); empty: no index."""
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            return str(file["code"].item())
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
        return ""


def dataset_faults(study: str, datasets: Mapping[str, str], silo: str, data: Path) -> list[str]:
    """Return why the silo's data are not those of a study, which has each silo's own data set by its source."""
    if not datasets:
        return []
    wanted = datasets.get(silo, "")
    here = code_of_data(data)
    if wanted == here:
        return []
    found = "a data file"
    if here:
        found = f"an own data set with SHA-256 {here[:16]}..."
    asked = f"no {silo}"
    if wanted:
        asked = f"{silo} = {wanted[:16]}..."
    return [f"the study {study} has in [datasets] {asked}, and the data here are {found}"]


def trainer_faults(study: str, wanted: str, run: Mapping[str, Any]) -> list[str]:
    """Return why the trainer that a run names is not the one of a study, whose source has the SHA-256 ``wanted``."""
    name = str(run.get("trainer", ""))
    if not name:
        return []
    here = digest_of_code(name)
    if here and here == wanted:
        return []
    found = "is missing"
    if here:
        found = f"has SHA-256 {here[:16]}..."
    asked = f"the study {study} has trainer = {wanted[:16]}..."
    return [f"{asked}, and {name[:80]} here {found}"]
