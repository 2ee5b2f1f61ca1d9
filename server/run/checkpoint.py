"""The server's checkpoint of a run: the newest, and the one before it, which counts where the newest is damaged."""

from __future__ import annotations

from pathlib import Path

from strategies.base.state import State

NEWEST, BEFORE = "server.safetensors", "server-before.safetensors"


def save_checkpoint(folder: Path, state: State) -> None:
    """Write the newest; what was the newest until now stays as the one before."""
    state.save(folder / NEWEST, keep=folder / BEFORE)


def load_checkpoint(folder: Path) -> tuple[State | None, str]:
    """The newest that can be read, None where there is none at all; and what is wrong with a newer one.

    Raises ValueError where there is one, but none can be read.
    """
    fault = ""
    for file in (folder / NEWEST, folder / BEFORE):
        if file.exists():
            try:
                return State.load(file), fault
            except ValueError as error:
                fault = fault or str(error)
    if fault:
        raise ValueError(f"{fault}; there is no other checkpoint: start the run again, with another --out")
    return None, ""
