"""The record of this silo's own models that have left: one per run, after which the run trains no further here.

    STATE_DIR/own-models    a line for each: the model's SHA-256, the run's own id (SHA-256), its numbers, the silo

Every name of a run counts. Flower's number identifies one submission: one model leaves per number, whatever run its
messages name. A model is noted under all numbers of its training, with commas, and under that of the message. A silo
stores its state under the run's own id, which stays the same when the run is resumed under another number. So a server
cannot get the model at several rounds of one training, nor the models of many trainings in one run.

Standard library only, as in trust/policy.py.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .errors import SiteError
from .trust.counters import noted

FILE = "own-models"
Names = tuple[str, frozenset[str]]  # the run's own id, and Flower's numbers


def number_of(run: int) -> str:
    """Return Flower's number of a run in the form that the file uses."""
    return f"{run:016x}"


def names_of(sent: Mapping[str, Any], run: int, trained: Iterable[str] = ()) -> Names:
    """Return a run's names in the file, from its message's config and Flower's number; ``trained``: earlier numbers."""
    number = number_of(run)
    own = str(sent.get("run_id") or number)  # as in client/store.py
    return hashlib.sha256(own.encode()).hexdigest(), frozenset({number, *trained})


def claim(state: Any, run: Names, silo: str, model: str, rule: str) -> str:
    """Note that this model is about to leave. Return why it may not, or an empty text; the same model may leave again.

    ``model``: its SHA-256; ``rule``: the policy's line, for the error if the directory cannot be written.
    """

    def entry(lines: list[list[str]]) -> tuple[str, str]:
        if _models(lines, run, silo) - {model}:
            return "", "its own model leaves once per run, and another one of this run has left"
        words = [model, run[0], ",".join(sorted(run[1])), *silo.split()]
        return ("" if words in lines else " ".join(words)), ""

    return noted(state, FILE, rule, entry)


def has_left(state: Any, run: Names, silo: str) -> bool:
    """Return whether a model of this silo has left in this run. Raises SiteError if the record cannot be read."""
    file = Path(str(state)) / FILE
    if not state or not file.exists():
        return False
    try:
        lines = [line.split() for line in file.read_text("utf-8", "replace").splitlines()]
    except OSError as error:
        raise SiteError(
            f"{file} says which of its own models have left, and cannot be read: {error.strerror}"
        ) from None
    return bool(_models(lines, run, silo))


def _models(lines: list[list[str]], run: Names, silo: str) -> set[str]:
    """Return the models of a silo that have left under one of the run's names."""
    own = [words for words in lines if len(words) > 3 and words[3:] == silo.split()]
    return {words[0] for words in own if words[1] == run[0] or run[1] & {*words[2].split(",")}}
