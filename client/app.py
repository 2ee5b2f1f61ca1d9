"""The ClientApp: answers each message with one reply, the same in process, under Ray and deployed."""

from __future__ import annotations

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from client.egress import release_summary
from client.evidence import answer_evidence
from client.exchange.answer import Result, answer, local_round
from client.exchange.data_summary import data_summary
from client.own_model import answer_own_model
from client.reported import (
    describe,
    describe_evaluated,
    keep_evaluated,
    keep_reported,
    note_candidate,
)
from client.session import ClientSession
from client.survey import answer_survey
from strategies.base.client import SiloClient
from strategies.base.evaluation import ACTION as OWN_MODEL
from strategies.base.evidence import ACTION
from strategies.base.newcomers import NEWCOMER, evaluate_newcomer
from strategies.base.survey import ACTION as SURVEY

app = ClientApp()  # no annotation: Flower finds the app by reading this line


@app.query()
@answer
def query(message: Message, session: ClientSession) -> RecordDict:
    """Return the silo's data summary."""
    asked = message.content.config_records.get("config")
    return release_summary(
        data_summary(session, late=asked is not None and bool(asked.get("late")))
    )


@app.query(SURVEY)
@answer
def survey(message: Message, session: ClientSession) -> RecordDict:
    """Return statistics of the silo's columns and labels, as its policy allows."""
    return answer_survey(session)


@app.train()
@answer
@local_round
def train(session: ClientSession, client: SiloClient) -> Result:
    """Train one round of the run's method; the silo's state is saved before the reply is sent."""
    config, snapshot = session.config, session.info.reports
    keep_reported(
        client.state,
        config.get("reported"),
        snapshot,
        client.needed_to_predict,
        client.untrained_model,
    )
    vectors, _, metrics = client.fit(session.parameters, config)
    metrics |= session.add_cost(client)
    describe(client, session.model_card(), metrics)
    note_candidate(client, metrics, snapshot, client.state)
    session.store.save(client.state, client.round, to_disk=config["save"])
    return vectors, metrics


@app.evaluate()
@answer
@local_round
def evaluate(session: ClientSession, client: SiloClient) -> Result:
    """Return metrics without training; the state is kept as it is, except for the model that the report will show.

    A held-out hospital is evaluated as a newcomer, and nothing is saved for it.
    """
    config = session.config
    if NEWCOMER in config:
        return [], evaluate_newcomer(client, config)
    # Changes that the method makes in order to evaluate are discarded
    kept = client.state.copy()
    _, _, metrics = client.evaluate(session.parameters, config)
    if session.info.trains and keep_evaluated(
        client, metrics, kept, session.info.reports, config
    ):
        closing = not config["personal"]
        describe_evaluated(client, kept, session.model_card(), closing=closing)
        session.store.save(
            kept, kept.numbers.get("round", 0), to_disk=config["save"] or closing
        )
    return [], metrics


@app.evaluate(ACTION)
@answer
def evidence(message: Message, session: ClientSession) -> RecordDict:
    """Return the evidence of the model that the report shows; the silo's state is unchanged."""
    return answer_evidence(message, session)


@app.evaluate(OWN_MODEL)
@answer
def own_model(message: Message, session: ClientSession) -> RecordDict:
    """Return the silo's own model that the report shows, once, at the end of a run that has the setting for it."""
    return answer_own_model(message, session)
