"""The search for a silo's states, of which a model is exported."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from client.store import RUN_FOLDER, silo_folder
from partitions.common.errors import UserError
from partitions.common.names import unknown_name

# Places of a silo's states: below a run directory; below a silo's state-dir, or one run, method or silo of it.
FOLDERS = ("checkpoint/*/silos/*", "*/*/*/*", "*/*/*", "*/*", "*", ".")


def find_states(
    source: Path, silo: str, strategy: str | None, seed: int | None, run_id: str = ""
) -> Path:
    """Return the only folder below ``source`` with this silo's states, ``.../STRATEGY-SEED/[silos/]NAME[/run-ID]``."""
    if not source.is_dir():
        raise UserError(
            f"there is no directory {source}: name a run directory, or a silo's state directory"
        )
    root = source.resolve()
    found = {
        file.parent
        for pattern in FOLDERS
        for file in root.glob(f"{pattern}/round-*.safetensors")
    }
    if not found:
        raise UserError(
            f"{source} holds no silo's state: name a run directory, or a silo's state directory"
        )
    of_silo = sorted(folder for folder in found if silo_folder(folder).name == silo)
    if not of_silo:
        known = {silo_folder(folder).name for folder in found}
        raise UserError(str(unknown_name(f"silo in {source}:", silo, known)))
    chosen = [
        folder
        for folder in of_silo
        if matches(run_key(folder), strategy, seed) and of_run(folder, run_id)
    ]
    if len(chosen) == 1:
        return chosen[0]
    twins = Counter(run_label(folder, root) for folder in (chosen or of_silo))
    names = ", ".join(distinct_label(folder, root, twins) for folder in (chosen or of_silo))
    if chosen:
        how = (
            "--run-id"
            if len(twins) == 1
            else "--strategy and --seed, or name one run's directory"
        )
        raise UserError(f"{source} holds several models of {silo}: {names}; choose with {how}")
    asked = (
        strategy,
        None if seed is None else f"seed {seed}",
        f"run-id {run_id}" if run_id else None,
    )
    wanted = " ".join(str(v) for v in asked if v is not None)
    raise UserError(f"{source} holds no model of {silo} by {wanted}; there are: {names}")


def run_key(folder: Path) -> str:
    """Return ``STRATEGY-SEED`` of a folder of states."""
    above = silo_folder(folder).parent
    return (above.parent if above.name == "silos" else above).name


def run_label(folder: Path, root: Path) -> str:
    """Return a folder's label for messages: ``RUN/STRATEGY-SEED``, with RUN only if it is below ``root``."""
    above = silo_folder(folder).parent
    parts = above.relative_to(root).parts if above.is_relative_to(root) else ()
    return "/".join(part for part in parts if part not in ("checkpoint", "silos")) or run_key(
        folder
    )


def distinct_label(folder: Path, root: Path, twins: Mapping[str, int]) -> str:
    """Return the label; if several runs share it, with the id and the time of the last state."""
    label = run_label(folder, root)
    if twins[label] == 1:
        return label
    last = max(file.stat().st_mtime for file in folder.glob("round-*.safetensors"))
    own = folder.name if RUN_FOLDER.fullmatch(folder.name) else "an earlier version's"
    return f"{label} ({own}, {time.strftime('%Y-%m-%d %H:%M', time.localtime(last))})"


def of_run(folder: Path, run_id: str) -> bool:
    """Return whether a folder of states belongs to a run whose id begins with ``run_id``."""
    return not run_id or folder.name.startswith(f"run-{run_id.removeprefix('run-')}")


def matches(key: str, strategy: str | None, seed: int | None) -> bool:
    """Return whether ``STRATEGY-SEED`` matches the wanted strategy and seed."""
    name, _, number = key.rpartition("-")
    return strategy in (None, name) and (seed is None or str(seed) == number)
