"""The evidence of the model that the report shows, measured once and released as the hospital's policy allows.

The message contains no model: the silo kept the reported one (``client/reported.py``), whose score the server has. So a
server needs a round of its own to get evidence of a model that it made for one patient. Evidence is given once per
run, and in one way of a model over all runs (``client/exchange/disclosure.py``). Its bins come from the policy alone.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from flwr.app import Message, RecordDict

from client.egress import release_evidence
from client.exchange.disclosure import Question, claim, people_of
from client.local_data import agreed_schema, is_own_file
from client.reported import load_reported
from client.session import ClientSession
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
from strategies.base.client import SiloClient
from strategies.base.evidence import LARGEST_VALUE
from strategies.base.transport.payload import Number

COMMON = "common_threshold"  # in the second message: the hospitals' common conformal threshold


def answer_evidence(message: Message, session: ClientSession) -> RecordDict:
    """Return the reply to a message for evidence. Raises UserError if the silo has not kept that model."""
    check_asked(session)
    client, config = session.open_client(message), session.config
    client.round = int(config["round"])
    allowed = set(session.policy.metrics) & set(EVIDENCE)
    wanted, least = int(config["min_metric_samples"]), session.policy.min_metric_samples
    if not is_own_file(session.context) or session.policy.public:
        # At a hospital the run chooses no bins: two sizes would give the difference
        least = max(wanted, least)
    test = session.used_data.test
    # With differential privacy nothing: evidence has no mechanism of its own
    values, held = Evidence(), list[str]()
    if allowed and not client.common.dp and test.people >= max(wanted, least):
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
        client, values, test.people, min_samples=least, policy=session.policy, suppressed=held
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
    two. Raises PolicyRefusedError if another question was answered before (``client/exchange/disclosure.py``).
    """
    if not is_own_file(session.context) or session.policy.public:
        return
    common: Number | None = session.config["numbers"].get(COMMON)
    state = client.state
    arrays = [state.arrays[key] for key in client.needed_to_predict if key in state.arrays]
    numbers = torch.tensor(
        [float(state.numbers[key]) for key in client.needed_to_predict if key in state.numbers]
    )
    model = digest_of(
        [
            client.model.vector,
            client.model.buffers,
            *arrays,
            *([numbers] if client.needed_to_predict else []),
        ]
    ).hex()
    asked = f"{session.input_digest()} {least} {client.common.evidence_horizon!r}"
    people = people_of(session.used_data.test)
    claim(
        session, Question("evidence", model, hashlib.sha256(asked.encode()).hexdigest(), people)
    )
    if common is not None:
        claim(
            session,
            Question(
                "coverage",
                model,
                hashlib.sha256(f"{asked} {common!r}".encode()).hexdigest(),
                people,
            ),
        )
