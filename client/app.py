"""The ClientApp: answers each message with one reply, the same in process, under Ray and deployed.

First the wrappers of all handlers: the message's session, errors as replies, the client of a training or an evaluation.
"""

from __future__ import annotations

import contextlib
import functools
import math
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import flwr
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from client.egress import release, release_own_model, release_summary
from client.evidence import answer_evidence, may_measure
from client.faults import line_of, report
from client.flower.messages import config_of, refuse
from client.local_data import check_devices, columns_in, is_own_file, weights_file
from client.privacy.checks import check_records, claim_model, released_sums
from client.progress import OwnProgress, note_failure
from client.protocol.node import devices_in
from client.protocol.policy import PolicyRefusedError
from client.protocol.secure import OWN
from client.reported import (
    TERMS,
    card_of,
    describe_evaluated,
    describe_models,
    keep_evaluated,
    keep_reported,
    load_reported,
    note_candidate,
    untrained_model,
)
from client.session import ClientSession
from client.site.counts import claim_own_model, names_of
from client.site.gate import check_message
from client.site.message import data_sha256
from client.site.terms import read_terms, take_terms
from client.site.trust.message_rules import own_model_faults
from client.survey import answer_survey, state_columns
from models.privacy.noise import digest_of
from models.shapes import write_shape
from models.training import use_threads
from partitions.common.errors import DataError, UserError
from partitions.common.files import is_full
from partitions.common.memory import is_out_of_memory
from partitions.common.messages import OWN_MODEL
from strategies.base.client import SiloClient
from strategies.base.evidence import ACTION
from strategies.base.newcomers import NEWCOMER, evaluate_newcomer
from strategies.base.run_settings import RunSettings, parse_settings
from strategies.base.survey import ACTION as SURVEY
from strategies.base.transport.payload import Number
from strategies.base.transport.reporting import COLUMNS, SCHEMA, SECONDS, SPLITS, WITHHELD

NO_GATE = "start this silo with silofl join, silofl up or its container: nothing else checks and logs what leaves"
Handler = Callable[[Message, ClientSession], RecordDict]
Result = tuple[Sequence[Tensor], dict[str, Any]]  # the vectors to send, and the metrics
Work = Callable[[ClientSession, SiloClient], Result]


@functools.lru_cache(maxsize=4)
def settings_of(
    keys: tuple[str, ...], values: tuple[Any, ...], types: tuple[type, ...]
) -> RunSettings:
    """Parse the run's settings, once for all its messages. The types are part of the cache key, since True equals 1."""
    return parse_settings(dict(zip(keys, values, strict=True)))


def settings_in(context: Context) -> RunSettings:
    """Return the settings of the run that a message belongs to."""
    values = tuple(context.run_config.values())
    return settings_of(tuple(context.run_config), values, tuple(map(type, values)))


def answer(handler: Handler) -> Callable[[Message, Context], Message]:
    """Turn any error of a silo into an error reply with its reason, so that the federation goes on without the silo."""

    @functools.wraps(handler)
    def handle(message: Message, context: Context) -> Message:
        try:
            return Message(handler(message, open_session(message, context)), reply_to=message)
        except Exception as error:
            if (
                is_full(error) or is_out_of_memory(error)
            ) and "state-path" in context.node_config:
                # A simulation's silos share the user's disk and memory: the run fails instead of leaving silos out.
                if is_full(error):
                    raise
                raise UserError(line_of(error, batch_size_in(context))) from None
            return error_reply(error, message, context)

    return handle


def local_round(work: Work) -> Handler:
    """Return a handler that calls ``work(session, client)`` with the client's state loaded and releases the result."""

    @functools.wraps(work)
    def handle(message: Message, session: ClientSession) -> RecordDict:
        progress = OwnProgress(session, message)
        client = session.open_client(message)
        if session.group is not None and session.group.rank:
            # It only helps: the first process alone measures, saves and sends
            client.fit(session.parameters, {**session.config, "evaluate": False})
            return RecordDict()
        progress.begins()
        vectors, metrics = work(session, client)
        measured = [split for split in SPLITS if any(f".{split}." in name for name in metrics)]
        counts = {split: session.used_data.scored(split) for split in measured}
        least = session.min_samples
        if (
            least < math.inf
            and any("." in name for name in metrics.keys() - {*SECONDS})
            and not may_measure(session)
        ):
            least = math.inf
        sent = release(
            client, vectors, metrics, counts, min_samples=least, policy=session.policy
        )
        progress.ends(client.round, metrics, sent)
        return sent

    return handle


def open_session(message: Message, context: Context) -> ClientSession:
    """Return the session of a message, under the terms that the SuperNode checked it with. Raises UserError, SiteError.

    In a simulation there is no SuperNode of ours: the message is checked and charged here.
    """
    terms = take_terms(context.node_config)
    if terms is None:
        # The process of a SuperNode that is not ours
        if Path(sys.argv[0]).name == "flwr-clientapp":
            raise UserError(NO_GATE)
        terms = read_terms(context.node_config, context.run_config)
        check_message(message, context, terms)
    settings = settings_in(context)
    use_threads(
        settings.common.threads,
        settings.common.tf32,
        deterministic=settings.common.deterministic,
    )
    session = ClientSession(settings, context, terms)
    session.check_floor()
    check_devices(settings, session.data.task, devices_in(context.node_config))
    return session


def batch_size_in(context: Context) -> int | None:
    """Return the run's batch size; None where its settings themselves are the error."""
    with contextlib.suppress(UserError, DataError):
        return settings_in(context).common.batch_size
    return None


def error_reply(error: Exception, message: Message, context: Context) -> Message:
    """Return the reply with the reason why a message failed; the reason is also noted in the silo's progress."""
    reason = report(error, batch_size_in(context))
    with contextlib.suppress(UserError, DataError):  # the settings themselves may be the error
        note_failure(message, context, settings_in(context), reason)
    refusal: Message = refuse(message, reason)
    return refusal


def data_summary(session: ClientSession, *, late: bool = False) -> dict[str, Number]:
    """Return the summary for the server before round 1: counts, shape, classes, versions; never a label count.

    For tables, and for measurements to be predicted, it includes the sums from which the silos agree on the
    standardisation (``normalization = "agreed"``). ``late``: the run has started and its standardisation is fixed.
    """
    data, own_file = session.data, is_own_file(session.context)
    names = devices_in(session.context.node_config)
    # Fails here, before the first round, if the silo lacks the weights: it is then left out.
    session.settings.part(weights_file(session.settings, session.context))
    summary: dict[str, Number] = {
        "name": session.name,
        "n_train": len(data.train),
        "n_val": len(data.val),
        "n_test": len(data.test),
        "task": data.task,
        "shape": write_shape(session.seen_shape),
        "classes": data.classes,
        SCHEMA: replace(data.schema, dtype=data.dtype).text,
        "own_file": own_file,
        "simulated": not own_file,
        "device": ", ".join(names) if len(names) > 1 else str(session.device),
        "threads": torch.get_num_threads(),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, flwr {flwr.__version__}",
    }
    columns = columns_in(data)
    check_records(session.settings, session.data, session.name)
    # A held-out or late silo's sums are for no other silo; a model that is only evaluated brings its statistics.
    c = session.settings.common
    alone = late or session.name in (*c.held_out, *c.late) or not session.info.trains
    if columns is not None and c.normalization == "agreed" and not alone:
        sums, reason = released_sums(columns, data.train, session.policy, session.state_dir)
        if sums is None:
            summary[WITHHELD] = reason
        else:
            summary["sum"], summary["square_sum"] = sums
    if session.info.role.asks == "survey" and c.secure_aggregation:
        summary[COLUMNS] = state_columns(session)
    return summary


app = ClientApp()  # no annotation: Flower finds the app by reading this line


@app.query()
@answer
def query(message: Message, session: ClientSession) -> RecordDict:
    """Return the silo's data summary."""
    return release_summary(data_summary(session, late=bool(config_of(message).get("late"))))


@app.query(SURVEY)
@answer
def survey(message: Message, session: ClientSession) -> RecordDict:
    """Return statistics of the silo's columns and labels, as its policy allows."""
    return answer_survey(session, config_of(message))


@app.train()
@answer
@local_round
def train(session: ClientSession, client: SiloClient) -> Result:
    """Train one round of the run's method; the silo's state is saved before the reply is sent."""
    config, snapshot = session.config, session.info.reports
    if math.isfinite(client.silo.max_step):
        model, run = digest_of(session.parameters).hex(), int(session.context.run_id)
        claim_model(model, session.name, session.state_dir, run, config["round"])
    keep_reported(
        client.state,
        config.get("reported"),
        snapshot,
        client.needed_to_predict,
        functools.partial(untrained_model, client),
    )
    vectors, _, metrics = client.fit(session.parameters, config)
    metrics |= session.add_cost(client)
    describe_models(client, card_of(session), metrics)
    note_candidate(client, metrics, snapshot, client.state)
    session.store.save(
        client.state, client.round, to_disk=config["save"], of=config.get(OWN, "")
    )
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
        describe_evaluated(client, kept, card_of(session), closing=closing)
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
    """Return the silo's own model that the report shows, once, at the end of a run that has the setting for it.

    The message contains no model: the silo kept the reported one (``client/reported.py``), as for the evidence. What
    leaves is first noted on the hospital's disk. After that, the run's requests for another model, or for training, are
    refused (``client/site/counts.py``). The server chooses which round the report shows, and how many rounds there are.
    So it can get one model of a run, of a round of its choice.

    Raises UserError if there is no model to send. Raises PolicyRefusedError if the run's settings or the policy do not
    allow it, if the model was trained under other ones too, or if another model of the run has left.
    """
    context, sent = session.context, config_of(message)
    # `check_message` has checked this for a hospital's own data; for a simulated or public silo this is the only check.
    if faults := own_model_faults(session.policy, context.run_config, sent):
        raise PolicyRefusedError(f"{session.name} refuses: {faults[0]}")
    if not session.sends_own_model:
        raise UserError(
            f"{session.name} sends no model of its own: {session.info.name} has one for all silos"
        )
    client, config = session.open_client(message), session.config
    client.round = int(config["round"])
    if client.no_file:
        raise UserError(
            f"{session.name} sends no model of its own, that of {session.info.name}: {client.no_file}"
        )
    if session.name in config.get("own_statistics", ()):
        raise UserError(
            f"{session.name} sends no model of its own: it is used with this silo's statistics, which stay here"
        )
    if TERMS not in client.state.numbers:
        raise PolicyRefusedError(
            f"{session.name} refuses: its model was also trained without keep-models = reported, or under another study"
        )
    if not load_reported(client, wanted := config.get("reported"), session.info.reports):
        raise UserError(
            f"{session.name} kept no model of round {wanted!r:.20}, which is asked for"
        )
    if not session.policy.public:
        names = names_of(sent, int(context.run_id), client.state.numbers[TERMS]["runs"])
        model = digest_of([client.model.vector, client.model.buffers]).hex()
        data = data_sha256(context.node_config)
        if fault := claim_own_model(session.state_dir, names, session.name, data, model):
            raise PolicyRefusedError(f"{session.name} refuses: {fault}")
    return release_own_model(client)
