"""Silos' own models that a run has collected at its end (``keep-models = reported``), kept beside its checkpoint.

    checkpoint/RUN/own/SILO/model.safetensors

``silofl evaluate --models all`` exports each one as a file with a model card.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from client.export import when, write_model
from client.exporting.model_card import checked_card
from models.layout import Layout
from partitions.common.errors import DataError, UserError
from server.results.checkpoint import load_checkpoint
from server.results.shared_model import model_card
from strategies.base.evaluation import OWN
from strategies.base.run_settings import RunSettings
from strategies.base.state import BUFFERS, State
from strategies.base.transport.payload import Payload, check_statistics, check_vector

FOLDER, FILE = "own", "model.safetensors"


def any_kept(checkpoint: Path | None) -> bool:
    """Return whether this run has collected a silo's own model."""
    return checkpoint is not None and any(checkpoint.glob(f"{FOLDER}/*/{FILE}"))


def keep_model(
    checkpoint: Path, silo: str, server_round: int, payload: Payload, layout: Layout
) -> None:
    """Store a silo's own model of this round under the name of the silo that sent it.

    Raises DataError if it is no model of the run's network.
    """
    sizes = {OWN: layout.size, **({BUFFERS: layout.buffer_size} if layout.buffer_size else {})}
    if set(payload.models) != set(sizes):
        raise DataError(
            f"the reply holds {', '.join(sorted(payload.models)) or 'nothing'}, not {', '.join(sizes)}"
        )
    vectors = {name: payload.models[name].vector for name in sizes}
    for name, vector in vectors.items():
        check_vector(name, vector, sizes[name])
    if BUFFERS in vectors:
        check_statistics(vectors[BUFFERS], layout, [slice(0, layout.buffer_size)])
    State(vectors, {"silo": silo, "round": server_round}).save(
        checkpoint / FOLDER / silo / FILE
    )


def export_kept(
    source: Path, run: RunSettings, silo: str, entry: Mapping[str, Any], out: Path
) -> bool:
    """Export a silo's collected model with its card; return whether there is one of the reported round.

    ``entry``: the run's entry in ``summary.json``. Raises UserError for a file that cannot be used.
    """
    checkpoint = source / "checkpoint" / run.run_key
    file = checkpoint / FOLDER / silo / FILE
    wanted = entry["per_silo"].get(silo, {}).get("round")
    if not file.is_file():
        return False
    try:
        kept, (state, _) = State.load(file), load_checkpoint(checkpoint)
    except DataError as error:
        raise UserError(str(error)) from None
    if state is None:
        raise UserError(f"{checkpoint} has no checkpoint, which says what the models in it are")
    if kept.numbers["round"] != wanted:  # the report changed since: the run was resumed
        return False
    card = model_card(run, state, wanted, {}, entry["rounds"])
    summary = state.numbers["cards"][silo]
    card |= {"silo": silo, "which": "reported", "snapshot": entry["reports"]}
    card |= {"when": when(entry["reports"], wanted, entry["rounds"])}
    card |= {"samples": {part: summary[f"n_{part}"] for part in ("train", "val", "test")}}
    write_model(
        out, checked_card(card, file), (kept.arrays[OWN], kept.arrays.get(BUFFERS), None)
    )
    return True
