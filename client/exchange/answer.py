"""One message in, one reply out: whether the site allows it, what it costs, and an error's reason as the reply."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict

from client.faults import report
from client.progress import note_failure
from client.session import ClientSession
from client.site.audit_gate import (
    BY_SITE,
    describe_message,
    in_study,
    own_build,
    release_reply,
    runs_alone,
    take_receipt,
)
from client.site.flower import internal
from client.site.messages import charge_message, check_message
from models.threads import use_threads
from partitions.common.errors import DataError, UserError
from partitions.common.files import is_full, keep_private
from partitions.units import describe_units
from strategies.base.run_settings import RunSettings, parse_settings

APP = Path(__file__).parents[1] / "app.py"
ALONE = runs_alone()  # a SuperNode of Flower's own started it: what the site's process does otherwise is done here
if ALONE:
    keep_private()
Handler = Callable[[Message, ClientSession], RecordDict]


@functools.lru_cache(maxsize=4)
def settings_of(keys: tuple[str, ...], values: tuple[Any, ...], types: tuple[type, ...]) -> RunSettings:
    """The run's settings, parsed once for all its messages. (With the values' types, for True equals 1.)"""
    return parse_settings(dict(zip(keys, values, strict=True)))


def settings_in(context: Context) -> RunSettings:
    """The settings of the run that a message is of."""
    values = tuple(context.run_config.values())
    return settings_of(tuple(context.run_config), values, tuple(map(type, values)))


def answer(handler: Handler) -> Callable[[Message, Context], Message]:
    """Turn whatever goes wrong in a silo into an error reply with its reason: the federation goes on without it."""

    @functools.wraps(handler)
    def handle(message: Message, context: Context) -> Message:
        info = describe_message(message, context, own_build(APP)) if ALONE else None
        try:
            # As the site's own process did, which also counted the message, before this app was there.
            counts = not os.environ.get(BY_SITE)
            study = check_message(message, context, count=counts, app=() if info is None else (info.app,))
            if info is not None:
                info = in_study(info, study, context.node_config)
                info = replace(info, receipt=take_receipt(message, context))
            charged = charge_message(message, context, study, read=describe_units) if counts else None
            if info is not None:
                info = replace(info, charged=charged)
            settings = settings_in(context)
            use_threads(settings.common.threads)
            session = ClientSession(settings, context, study=study)
            session.check_floor()
            reply = Message(handler(message, session), reply_to=message)
        except Exception as error:
            if is_full(error) and "state-path" in context.node_config:
                raise  # a simulation's silos have one disk, its user's: no silo is left out for that
            reply = error_reply(error, message, context)
        return reply if info is None else release_reply(reply, info, message)

    return handle


def error_reply(error: Exception, message: Message, context: Context) -> Message:
    """Return the reply that says why a message could not be answered; the silo's own progress says it, too."""
    reason = report(error)
    with contextlib.suppress(UserError, DataError):  # the settings may be what is wrong
        note_failure(message, context, settings_in(context), reason)
    return Message(Error(internal("ErrorCode").CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
