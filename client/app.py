"""The ClientApp: one message in, one reply out, the same in process, under Ray and deployed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from client.egress import release, release_summary
from client.evidence.answer import answer_evidence
from client.faults import report
from client.progress import OwnProgress
from client.reported import describe, keep_evaluated, keep_reported, note_candidate
from client.session import ClientSession
from client.site.audit_gate import (
    BY_SITE,
    in_budget,
    in_study,
    own_build,
    release_reply,
    runs_alone,
    take_receipt,
    task_of,
)
from client.site.flower import internal
from client.site.messages import charge_message, check_message
from client.site.study.protocol import Study
from models.threads import use_threads
from partitions.common.files import is_full, keep_private
from partitions.units import describe_units
from strategies.base.newcomer.client import NEWCOMER, evaluate_newcomer
from strategies.base.run_settings import RunSettings, parse_settings
from strategies.base.schema.evidence import ACTION

app = ClientApp()  # no annotation: Flower finds the app by reading this line
ALONE = runs_alone()  # a SuperNode of Flower's own started it: what the site's process does otherwise is done here
if ALONE:
    keep_private()
Handler = Callable[[Message, ClientSession], RecordDict]
Charged = dict[str, Any] | None  # what a message cost in the site's privacy budget


@functools.lru_cache(maxsize=4)
def settings_of(run_config: tuple[tuple[str, type, Any], ...]) -> RunSettings:
    """The run's settings, parsed once for all its messages. (With the types, for True equals 1.)"""
    return parse_settings({key: value for key, _, value in run_config})


def answer(handler: Handler) -> Callable[[Message, Context], Message]:
    """Turn whatever goes wrong in a silo into an error reply with its reason: the federation goes on without it."""

    @functools.wraps(handler)
    def handle(message: Message, context: Context) -> Message:
        if not ALONE:
            return reply_of(message, context)[2]
        task = task_of(message, context, own_build(Path(__file__)))
        study, charged, reply = reply_of(message, context, task)
        task = in_budget(in_study(task, study, context.node_config), charged)
        released: Message = release_reply(reply, task, message)
        return released

    def reply_of(
        message: Message, context: Context, task: dict[str, Any] | None = None
    ) -> tuple[Study | None, Charged, Message]:
        study, charged = None, None
        try:
            # As the site's own process did, which also counted the message, before this app was there.
            app = (own_build(Path(__file__)),) if ALONE else ()
            counts = not os.environ.get(BY_SITE)
            study = check_message(message, context, count=counts, app=app)
            if task is not None:
                task |= take_receipt(message, context)
            charged = charge_message(message, context, study, read=describe_units) if counts else None
            settings = settings_of(tuple((k, type(v), v) for k, v in context.run_config.items()))
            use_threads(settings.common.threads)
            content = handler(message, ClientSession(settings, context, study=study))
            return study, charged, Message(content, reply_to=message)
        except Exception as error:
            if is_full(error) and "state-path" in context.node_config:
                raise  # a simulation's silos have one disk, its user's: no silo is left out for that
            code = internal("ErrorCode").CLIENT_APP_RAISED_EXCEPTION
            return study, charged, Message(Error(code, report(error)), reply_to=message)

    return handle


@app.query()
@answer
def query(message: Message, session: ClientSession) -> RecordDict:
    """The silo's data summary."""
    session.check_floor()
    return release_summary(session.data_summary())


@app.train()
@answer
def train(message: Message, session: ClientSession) -> RecordDict:
    """One round of the run's method in this silo; its state is saved before the reply leaves."""
    session.check_floor()
    session.check_trains()
    progress = OwnProgress(session, message)
    client, parameters, config = session.open_client(message)
    progress.begins(config["round"], closing=False)
    snapshot = session.info.reports
    keep_reported(client.state, config.get("reported"), snapshot, client.untrained())
    vectors, _, metrics = client.fit(parameters, config)
    metrics |= session.add_cost(client)
    describe(client, session.model_card(), metrics)
    note_candidate(client, metrics, snapshot, client.state)
    session.save(client.state, client.round, to_disk=config["save"])
    sent = release(client, vectors, metrics, min_samples=session.least_samples, policy=session.policy)
    progress.ends(client.round, metrics, sent, closing=False)
    return sent


@app.evaluate()
@answer
def evaluate(message: Message, session: ClientSession) -> RecordDict:
    """Metrics without training; the silo's state stays as it is, but for the model that the report will show.

    A hospital that the run holds out is evaluated as a newcomer, and keeps nothing.
    """
    session.check_floor()
    progress = OwnProgress(session, message)
    client, parameters, config = session.open_client(message)
    if NEWCOMER in config or not session.info.trains:
        metrics = evaluate_newcomer(client, config) if NEWCOMER in config else client.evaluate(parameters, config)[2]
        return release(client, [], metrics, min_samples=session.least_samples, policy=session.policy)
    closing = not config["personal"]
    progress.begins(config["round"], closing=closing)
    kept = client.state.copy()  # whatever the method changes to evaluate a model is not kept
    _, _, metrics = client.evaluate(parameters, config)
    if keep_evaluated(client, metrics, kept, session.info.reports, config):
        kept.numbers.setdefault("model", session.model_card())  # where it has not trained yet
        if closing:  # after the last round, which may be an earlier one than was planned
            kept.numbers["model"] = {**kept.numbers["model"], "rounds": client.round - 1}
        to_disk = config["save"] or closing
        session.save(kept, kept.numbers.get("round", 0), to_disk=to_disk)
    sent = release(client, [], metrics, min_samples=session.least_samples, policy=session.policy)
    progress.ends(client.round, metrics, sent, closing=closing)
    return sent


@app.evaluate(ACTION)
@answer
def evidence(message: Message, session: ClientSession) -> RecordDict:
    """The evidence of the model that the report shows; the silo's state stays as it is."""
    session.check_floor()
    return answer_evidence(message, session)
