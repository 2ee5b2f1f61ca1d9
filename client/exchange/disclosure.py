"""The one rule for what leaves once: remembered over all runs by data, model and question, in the hospital's record.

The server hands out a run's numbers and chooses its settings. So an answer about a model is found again by the data
that it was computed from, the model's digest, and the question: statistics, columns, bins, thresholds.

* The same question again has the same answer.
* Another question about the same model and data is refused: the two answers together would give more than each.
* Data that differ in fewer than ``min-sum-samples`` patients are refused, too: the difference would be about those few.
* A run has answers about one model only. Another model of the same data needs another run (``runs-per-day``).

A model that differs in one weight is another model.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from client.session import ClientSession
from client.site.record import Record, disclose
from client.site.trust.policy import PolicyRefusedError
from partitions.patients import fewest_changed, patient_digests
from partitions.site_split import sample_digests
from partitions.splits import Split


@dataclass(frozen=True)
class Question:
    """What an answer is about. ``people``: a digest per patient of the data; ``asked``: the digest of the question."""

    kind: str
    model: str
    asked: str
    people: Sequence[str]

    @property
    def data(self) -> str:
        """Return the digest of the data."""
        return hashlib.sha256("\n".join(self.people).encode()).hexdigest()


def people_of(part: Split) -> list[str]:
    """Return a digest per patient of a part of the data, sorted; per sample where the file names no patients."""
    digests = sample_digests(np.stack([sample_digests(part.x), sample_digests(part.y)], axis=1))
    if part.patient is not None and len(digests):
        digests = patient_digests(digests, part.patient)[np.unique(part.patient, return_index=True)[1]]
    return sorted(f"{digest:016x}" for digest in digests.tolist())


def claim(session: ClientSession, question: Question) -> None:
    """Note that this answer is about to leave. Raises PolicyRefusedError where the rule refuses it, else SiteError."""
    state, silo, run = session.context.node_config.get("state-dir"), session.name, str(int(session.context.run_id))
    if not state:
        raise PolicyRefusedError(f"{silo} refuses: it has no state-dir to remember what it gave")
    kind, own = question.kind, (question.model, question.asked)
    with Record(Path(str(state))).writing() as db:
        find = "SELECT model, question FROM disclosed WHERE kind = ? AND silo = ? AND run = ?"
        of_run = {(model, asked) for model, asked in db.execute(find, (kind, silo, run))}
        if of_run - {own}:
            raise PolicyRefusedError(
                f"{silo} refuses: {kind} leaves once per run, and this run has had that of another model, or in "
                "another way (statistics, bins, threshold)"
            )
        find = "SELECT DISTINCT question, data, people FROM disclosed WHERE kind = ? AND silo = ? AND model = ?"
        for asked, data, people in db.execute(find, (kind, silo, question.model)):
            check_earlier(session, question, asked, data, people)
        if not of_run:
            about = {"data": question.data, "model": question.model, "question": question.asked}
            disclose(db, kind, silo=silo, run=run, people=question.people, **about)


def check_earlier(session: ClientSession, question: Question, asked: str, data: str, people: str) -> None:
    """Raise PolicyRefusedError if an earlier answer about the same model, and this one, would give more together."""
    if data == question.data:
        if asked != question.asked:
            raise PolicyRefusedError(
                f"{session.name} refuses: {question.kind} of this model has left from the same data in another way "
                "(statistics, bins, threshold)"
            )
        return
    changed = fewest_changed(Counter(question.people), Counter(people.split()))
    if changed < session.policy.min_sum_samples:
        raise PolicyRefusedError(
            f"{session.name} refuses: its policy has {session.policy.line('min_sum_samples')}, and fewer patients "
            f"differ from those behind the {question.kind} of this model that has left before"
        )
