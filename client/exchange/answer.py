"""The wrappers of handlers: the message's session, errors as replies, the client of a training or an evaluation."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from torch import Tensor

from client.egress import release
from client.exchange.disclosure import may_measure
from client.faults import line_of, report
from client.progress import OwnProgress, note_failure
from client.session import ClientSession
from client.site.flower import internal
from client.site.messages import charge_message, check_message
from client.site.terms import read_terms, take_terms
from models.training import use_threads
from partitions.common.errors import DataError, UserError
from partitions.common.files import is_full
from partitions.common.memory import is_out_of_memory
from partitions.units import describe_units
from strategies.base.client import SiloClient
from strategies.base.run_settings import RunSettings, parse_settings
from strategies.base.transport.reporting import SECONDS, SPLITS

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
        progress.begins()
        vectors, metrics = work(session, client)
        counts = {split: getattr(session.used_data, split).people for split in SPLITS}
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
        charge_message(message, context, terms, read=describe_units)
    settings = settings_in(context)
    use_threads(
        settings.common.threads,
        settings.common.tf32,
        deterministic=settings.common.deterministic,
    )
    session = ClientSession(settings, context, terms=terms)
    session.check_floor()
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
    return Message(
        Error(internal("ErrorCode").CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message
    )
