"""Which of this silo's own models have left, run by run: one in a run, and the run trains no further here.

    STATE_DIR/own-models    a line for each: the model's SHA-256, the run's own id (SHA-256), its numbers, the silo

Each name counts. A number of Flower's is of one submission: whatever the messages in it call the run, one model leaves.
A model is noted under all numbers of its training, with commas, and under that of the message. The run's own id is what
a silo keeps its state by, and stays when the run is resumed under another number. So a server cannot take the model at
several rounds of one training, nor those of many trainings in one run.

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
    """Flower's number of a run as it is written here."""
    return f"{run:016x}"


def names_of(sent: Mapping[str, Any], run: int, trained: Iterable[str] = ()) -> Names:
    """A run's names in the file, by the config of its message and Flower's number; ``trained``: earlier numbers."""
    number = number_of(run)
    own = str(sent.get("run_id") or number)  # as client/store.py has it
    return hashlib.sha256(own.encode()).hexdigest(), frozenset({number, *trained})


def claim(state: Any, run: Names, silo: str, model: str, rule: str) -> str:
    """Note that this model is about to leave; why it may not, or nothing. One that has left may leave again.

    ``model``: its SHA-256; ``rule``: the policy's line, for a directory in which nothing can be noted.
    """

    def entry(lines: list[list[str]]) -> tuple[str, str]:
        if _models(lines, run, silo) - {model}:
            return "", "its own model leaves once per run, and another one of this run has left"
        words = [model, run[0], ",".join(sorted(run[1])), *silo.split()]
        return ("" if words in lines else " ".join(words)), ""

    return noted(state, FILE, rule, entry)


def has_left(state: Any, run: Names, silo: str) -> bool:
    """Return whether a model of this silo has left in this run. Raises SiteError where that cannot be read."""
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
    """The models of a silo that have left under one of the run's names."""
    own = [words for words in lines if len(words) > 3 and words[3:] == silo.split()]
    return {words[0] for words in own if words[1] == run[0] or run[1] & {*words[2].split(",")}}
