"""The one rule for what leaves once: remembered over all runs by data, model and question, in the hospital's record.

The server hands out a run's numbers and chooses its settings. So an answer about a model is found again by the data
that it was computed from, the model's digest, and the question: statistics, columns, bins, thresholds.

* The same question again has the same answer.
* Another question about the same model and data is refused: the two answers together would give more than each.
* Data that differ in fewer than ``min-sum-samples`` patients are refused, too: the difference would be about those few.
* A run has evidence of one model only. Another model of the same data needs another run (``runs-per-day``).

Metrics have no question: they are of all samples of a part, and the policy alone says which leave and over how many. So
they are withheld only where the data differ in a few patients. A model that differs in one weight is another model.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from client.local_data import is_own_file
from client.session import ClientSession
from client.site.audit_gate import cohort_of
from client.site.record import Record, disclose
from client.site.trust.policy import PolicyRefusedError
from models.privacy.noise import digest_of
from partitions.patients import fewest_changed
from partitions.site_split import people_digests
from partitions.splits import Split
from partitions.stored import sample_digests


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
    return people_digests(
        sample_digests(np.stack([sample_digests(part.x), sample_digests(part.y)], axis=1)), part
    )


def may_measure(session: ClientSession) -> bool:
    """Note that metrics of the message's model are about to leave; return whether they may. Raises SiteError.

    They may not if metrics of this model have left from data that differ in fewer than ``min-sum-samples`` patients.
    """
    context, policy, silo = session.context, session.policy, session.name
    state = context.node_config.get("state-dir")
    if not is_own_file(context) or policy.public or not state:
        return True
    data = cohort_of(context.node_config)
    found = digest_of(session.parameters)
    model = hashlib.sha256(found + session.input_digest().encode()).hexdigest()
    with Record(Path(str(state))).write() as db:
        find = "SELECT DISTINCT data FROM disclosed WHERE kind = 'metrics' AND silo = ? AND model = ?"
        before = {sha256 for (sha256,) in db.execute(find, (silo, model))}
        if data in before:
            return True
        find = "SELECT people FROM disclosed WHERE kind = 'people' AND silo = ? AND model = '' AND data = ?"
        if db.execute(find, (silo, data)).fetchone() is None:
            parts = (session.data.train, session.data.val, session.data.test)
            disclose(
                db,
                "people",
                silo=silo,
                data=data,
                people=[one for part in parts for one in people_of(part)],
            )
        people = {
            one: Counter(db.execute(find, (silo, one)).fetchone()[0].split())
            for one in (data, *sorted(before))
        }
        if any(
            0 < fewest_changed(people[data], people[one]) < policy.min_sum_samples
            for one in before
        ):
            return False
        disclose(db, "metrics", silo=silo, data=data, model=model)
    return True


def claim(session: ClientSession, question: Question) -> None:
    """Note that this answer is about to leave. Raises PolicyRefusedError where the rule refuses it, else SiteError."""
    state = session.context.node_config.get("state-dir")
    silo = session.name
    run = str(int(session.context.run_id))
    if not state:
        raise PolicyRefusedError(
            f"{silo} refuses: it has no state-dir to remember what it gave"
        )
    kind, own = question.kind, (question.model, question.asked)
    with Record(Path(str(state))).write() as db:
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


def check_earlier(
    session: ClientSession, question: Question, asked: str, data: str, people: str
) -> None:
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
