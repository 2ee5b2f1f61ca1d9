"""What leaves once, and the evidence of the model that the report shows: measured once, released as the policy allows.

The server hands out a run's numbers and chooses its settings. So an answer about a model is found again, over all runs,
in the hospital's record: by the data that it was computed from, the model's digest, and the question: statistics,
columns, bins, thresholds.

* The same question again has the same answer.
* Another question about the same model and data is refused: the two answers together would give more than each.
* Data that differ in fewer than ``min-sum-samples`` patients are refused, too: the difference would be about those few.
  All parts of the file count, for an answer may depend on training samples (survival's hazard, neighbours' votes).
* A run has evidence of one model only. Another model of the same data needs another run (``runs-per-day``).

Metrics have no question: they are of all samples of a part, and the policy alone says which leave and over how many. So
they are withheld only where the data differ in a few patients. A model that differs in one weight is another model.

A message for evidence contains no model: the silo kept the reported one (``client/reported.py``), whose score the
server has. So a server needs a round of its own to get evidence of a model that it made for one patient. Its bins come
from the policy alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message, RecordDict

from client.egress import release_evidence
from client.local_data import agreed_schema, is_own_file, open_data
from client.protocol.policy import PolicyRefusedError
from client.reported import load_reported
from client.session import ClientSession
from client.site.message import data_sha256
from client.site.record import Record, disclose
from models.evidence.measure import (
    EVIDENCE,
    Ask,
    Evidence,
    conformal_intervals,
    conformal_sets,
    evidence_of,
)
from models.evidence.subgroups import find_suppressed, subgroup_scores
from models.evidence.values import enough
from models.privacy.noise import digest_of
from models.samples import Samples
from models.tasks import Regression, Task
from partitions.common.errors import UserError
from partitions.patients import fewest_changed
from partitions.site_split import people_digests
from partitions.splits import SiloData, Split
from partitions.stored import sample_digests
from strategies.base.client import SiloClient
from strategies.base.evidence import LARGEST_VALUE
from strategies.base.transport.payload import Number


@dataclass(frozen=True)
class Question:
    """What an answer is about: digests of the data, the model and the question, and a text per patient (``people``)."""

    kind: str
    data: str
    model: str
    text: str
    people: Sequence[str]


def people_of(part: Split) -> list[str]:
    """Return a text per patient of a part of the data, sorted; per sample where the file names no patients."""
    return people_digests(
        sample_digests(np.stack([sample_digests(part.x), sample_digests(part.y)], axis=1)), part
    )


def whole_data(session: ClientSession) -> SiloData:
    """Return all parts of the silo's file, whatever the run uses of it."""
    return open_data(session.settings, session.context, whole=True)


NOTED = "SELECT answer FROM disclosed WHERE kind = 'parts' AND silo = ? AND data = ?"


def people_by_part(
    db: sqlite3.Connection, session: ClientSession, data: str
) -> list[list[str]]:
    """Return the texts of the patients in each part of the silo's file; they are noted once per version, ``data``."""
    if (noted := db.execute(NOTED, (session.name, data)).fetchone()) is None:
        noted = (json.dumps([people_of(part) for part in whole_data(session).splits]),)
        disclose(db, "parts", silo=session.name, data=data, answer=noted[0])
    parts: list[list[str]] = json.loads(noted[0])
    return parts


def groups_of(part: Split) -> list[tuple[int, str]]:
    """Return each sample's digest and subgroup, sorted; empty where the file names no subgroups."""
    if part.subgroup is None:
        return []
    return sorted(zip(sample_digests(part.x).tolist(), part.subgroup.tolist(), strict=True))


def changed_patients(now: Sequence[Sequence[str]], before: Sequence[Sequence[str]]) -> int:
    """Return the smallest number of patients by which two versions differ; of equal patients, of those in another part.

    ``now``, ``before``: the patients of each part.
    """
    together = [list(itertools.chain.from_iterable(version)) for version in (now, before)]
    moved = [fewest_changed(*parts) for parts in zip(now, before, strict=True)]
    return fewest_changed(*together) or min(filter(None, moved), default=0)


def may_measure(session: ClientSession) -> bool:
    """Note that metrics of the message's model are about to leave; return whether they may. Raises SiteError.

    They may not if metrics of this model have left from data that differ in fewer than ``min-sum-samples`` patients.
    """
    policy, silo = session.policy, session.name
    if policy.public or not session.state_dir:
        return True
    data = data_sha256(session.context.node_config)
    digest = digest_of(session.parameters)
    model = hashlib.sha256(digest + session.input_digest().encode()).hexdigest()
    with Record(Path(session.state_dir)).write() as db:
        find = "SELECT DISTINCT data FROM disclosed WHERE kind = 'metrics' AND silo = ? AND model = ?"
        before = {sha256 for (sha256,) in db.execute(find, (silo, model))}
        if data in before:
            return True
        now = people_by_part(db, session, data)
        noted = [db.execute(NOTED, (silo, version)).fetchone() for version in before]
        # By an earlier silofl: how many patients differ is not known
        if None in noted:
            return False
        changed = (changed_patients(now, json.loads(text)) for (text,) in noted)
        if any(0 < patients < policy.min_sum_samples for patients in changed):
            return False
        disclose(db, "metrics", silo=silo, data=data, model=model)
    return True


def claim_answer(session: ClientSession, question: Question) -> None:
    """Note that this answer is about to leave. Raises PolicyRefusedError where the rule refuses it, else SiteError."""
    silo = session.name
    run = str(int(session.context.run_id))
    kind, of_question = question.kind, (question.model, question.text)
    with Record(Path(session.state_dir)).write() as db:
        find = "SELECT model, question FROM disclosed WHERE kind = ? AND silo = ? AND run = ?"
        of_run = {(model, text) for model, text in db.execute(find, (kind, silo, run))}
        if of_run - {of_question}:
            raise PolicyRefusedError(
                f"{silo} refuses: {kind} leaves once per run, and this run has had that of another model, or in "
                "another way (statistics, bins, threshold)"
            )
        find = "SELECT DISTINCT question, data, people FROM disclosed WHERE kind = ? AND silo = ? AND model = ?"
        for text, data, people in db.execute(find, (kind, silo, question.model)):
            check_earlier(session, question, text, data, people)
        if not of_run:
            about = {"data": question.data, "model": question.model, "question": question.text}
            disclose(db, kind, silo=silo, run=run, people=question.people, **about)


def check_earlier(
    session: ClientSession, question: Question, text: str, data: str, people: str
) -> None:
    """Raise PolicyRefusedError if an earlier answer about the same model, and this one, would give more together."""
    if data == question.data:
        if text != question.text:
            raise PolicyRefusedError(
                f"{session.name} refuses: {question.kind} of this model has left from the same data in another way "
                "(statistics, bins, threshold)"
            )
        return
    changed = fewest_changed(question.people, people.split())
    if changed < session.policy.min_sum_samples:
        raise PolicyRefusedError(
            f"{session.name} refuses: its policy has {session.policy.line('min_sum_samples')}, and fewer patients "
            f"differ from those behind the {question.kind} of this model that has left before"
        )


COMMON = "common_threshold"  # in the second message: the hospitals' common conformal threshold


def answer_evidence(message: Message, session: ClientSession) -> RecordDict:
    """Return the reply to a message for evidence. Raises UserError if the silo has not kept that model."""
    check_asked(session)
    client, config = session.open_client(message), session.config
    client.round = int(config["round"])
    allowed = set(session.policy.metrics) & set(EVIDENCE)
    wanted, least = int(config["min_metric_samples"]), session.policy.min_metric_samples
    if session.policy.public:
        # At a hospital the run chooses no bins: two sizes would give the difference
        least = max(wanted, least)
    test, people = session.used_data.test, session.used_data.scored("test")
    # With differential privacy nothing: evidence has no mechanism of its own
    values, held = Evidence(), list[str]()
    if allowed and not client.common.dp and people >= max(wanted, least):
        if not load_reported(client, reported := config.get("reported"), session.info.reports):
            raise UserError(
                f"{client.silo.name} kept no model of round {reported!r:.20}, whose evidence is asked for"
            )
        claim_evidence(client, session, least)
        values = measure_evidence(client, session, least)
        if (
            "subgroups" in allowed
            and test.subgroup is not None
            and COMMON not in config["numbers"]
        ):
            held = find_suppressed(test.subgroup, values)
    return release_evidence(
        client, values, people, min_samples=least, policy=session.policy, suppressed=held
    )


def measure_evidence(client: SiloClient, session: ClientSession, least: int) -> Evidence:
    """Return the evidence that the message selects, of the model that the client holds."""
    data, test, task = session.used_data.test, client.silo.test, client.silo.task
    common = session.config["numbers"].get(COMMON)
    labels, network = agreed_schema(session.config).labels, client.predicting()
    if common is not None:
        thresholds = thresholds_of(common, task, test)
        if not enough(data.units, least):
            return {}
        if isinstance(task, Regression):
            return conformal_intervals(task, network, test, data.units, thresholds, labels)
        return conformal_sets(network, test, data.units, thresholds[0])
    ask = Ask(least, client.common.evidence_horizon, labels)
    values = evidence_of(task, network, test, client.silo.train, data.units, ask)
    if data.subgroup is not None:
        values |= subgroup_scores(task, network, test, data.subgroup, data.patient, least)
    return values


def thresholds_of(common: object, task: Task, test: Samples) -> list[float]:
    """Return the common threshold, one per measurement if there are several. Raises UserError if it does not fit."""
    count, most = (test.y.shape[1], LARGEST_VALUE) if isinstance(task, Regression) else (1, 1.0)
    values: Any = common if count > 1 else [common]
    fits = (
        isinstance(values, list)
        and len(values) == count
        and (isinstance(task, Regression) or task.single_label)
    )
    if not fits or not all(isinstance(v, float) and 0 <= v <= most for v in values):
        raise UserError(
            f"the server sends {common!r:.80} as the common threshold, which does not fit {task.name}"
        )
    return list(values)


def check_asked(session: ClientSession) -> None:
    """Raise UserError if a message asks for evidence that the run's settings do not have for this silo."""
    wanted = session.settings.common.evidence
    if wanted == "off" or (wanted == "auto" and is_own_file(session.context)):
        raise UserError(
            f"{session.name} refuses: the run has evidence = {wanted}, and a message asks for it"
        )


def claim_evidence(client: SiloClient, session: ClientSession, least: int) -> None:
    """Note at the hospital which evidence is about to leave, since the server chooses the whole message.

    The question is the statistics, the columns, the fewest patients behind a number, survival's horizon and, for
    coverage, the common threshold. Another bin size, for example, would reveal by subtraction what lies between the
    two. Raises PolicyRefusedError if another question was answered before.
    """
    if session.policy.public:
        return
    common: Number | None = session.config["numbers"].get(COMMON)
    state = client.state
    arrays = [state.arrays[key] for key in client.needed_to_predict if key in state.arrays]
    numbers = torch.tensor(
        [float(state.numbers[key]) for key in client.needed_to_predict if key in state.numbers]
    )
    kept = [*arrays, *([numbers] if client.needed_to_predict else [])]
    model = digest_of([client.model.vector, client.model.buffers, *kept]).hex()
    of_model = f"{session.input_digest()} {least} {client.common.evidence_horizon!r}"
    questions = {"evidence": of_model}
    if common is not None:
        questions["coverage"] = f"{of_model} {common!r}"
    if not session.state_dir:
        raise PolicyRefusedError(
            f"{session.name} refuses: it has no state-dir to remember what it gave"
        )
    with Record(Path(session.state_dir)).write() as db:
        parts = people_by_part(db, session, data_sha256(session.context.node_config))
    groups = groups_of(whole_data(session).test)
    data = hashlib.sha256(json.dumps([parts, groups]).encode()).hexdigest()
    people = [*itertools.chain.from_iterable(parts)]
    for kind, text in questions.items():
        digest = hashlib.sha256(text.encode()).hexdigest()
        claim_answer(session, Question(kind, data, model, digest, people))
