"""The record of this silo's own models that have left: one per run, after which the run trains no further here.

Every name of a run counts. Flower's number identifies one submission: one model leaves per number, whatever run its
messages name. A model is noted under all numbers of its training, with commas, and under that of the message. A silo
stores its state under the run's own id, which stays the same when the run is resumed under another number. So a server
cannot get the model at several rounds of one training, nor the models of many trainings in one run.
"""

import hashlib
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .record import Record, disclose

KIND = "own model"
Names = tuple[str, frozenset[str]]  # the run's own id, and Flower's numbers


def number_of(run: int) -> str:
    """Return Flower's number of a run in the form that the record uses."""
    return f"{run:016x}"


def names_of(sent: Mapping[str, Any], run: int, trained: Iterable[str] = ()) -> Names:
    """Return a run's names in the record, from its message's config and Flower's number; ``trained``: earlier ones."""
    number = number_of(run)
    own = str(sent.get("run_id") or number)  # as in client/store.py
    return hashlib.sha256(own.encode()).hexdigest(), frozenset({number, *trained})


def claim(state: Any, run: Names, silo: str, data: str, model: str) -> str:
    """Note that this model is about to leave. Return why it may not, or an empty text; the same model may leave again.

    ``data``, ``model``: their SHA-256. Raises SiteError if it cannot be noted.
    """
    if not state:
        return "it has no state-dir to note that its own model leaves"
    numbers = ",".join(sorted(run[1]))
    with Record(Path(str(state))).write() as db:
        if _models(db, run, silo) - {model}:
            return "its own model leaves once per run, and another one of this run has left"
        disclose(db, KIND, silo=silo, run=run[0], data=data, model=model, question=numbers)
    return ""


def has_left(state: Any, run: Names, silo: str) -> bool:
    """Return whether a model of this silo has left in this run. Raises SiteError if the record cannot be read."""
    if not state:
        return False
    with Record(Path(str(state))).reading() as db:
        return bool(_models(db, run, silo))


def _models(db: sqlite3.Connection, run: Names, silo: str) -> set[str]:
    """Return the models of a silo that have left under one of the run's names."""
    rows = db.execute(
        "SELECT model, run, question FROM disclosed WHERE kind = ? AND silo = ?", (KIND, silo)
    )
    return {
        model for model, own, numbers in rows if own == run[0] or run[1] & {*numbers.split(",")}
    }
