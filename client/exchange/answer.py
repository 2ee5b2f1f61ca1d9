"""One message in, one reply out: whether the site allows it, what it costs, and an error's reason as the reply."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict

from client.faults import report
from client.progress import note_failure
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
from partitions.common.errors import DataError, UserError
from partitions.common.files import is_full, keep_private
from partitions.units import describe_units
from strategies.base.run_settings import RunSettings, parse_settings

APP = Path(__file__).parents[1] / "app.py"
ALONE = runs_alone()  # a SuperNode of Flower's own started it: what the site's process does otherwise is done here
if ALONE:
    keep_private()
Handler = Callable[[Message, ClientSession], RecordDict]
Charged = dict[str, Any] | None  # what a message cost in the site's privacy budget


@functools.lru_cache(maxsize=4)
def settings_of(run_config: tuple[tuple[str, type, Any], ...]) -> RunSettings:
    """The run's settings, parsed once for all its messages. (With the types, for True equals 1.)"""
    return parse_settings({key: value for key, _, value in run_config})


def settings_in(context: Context) -> RunSettings:
    """The settings of the run that a message is of."""
    return settings_of(tuple((key, type(value), value) for key, value in context.run_config.items()))


def answer(handler: Handler) -> Callable[[Message, Context], Message]:
    """Turn whatever goes wrong in a silo into an error reply with its reason: the federation goes on without it."""

    @functools.wraps(handler)
    def handle(message: Message, context: Context) -> Message:
        if not ALONE:
            return reply_of(message, context)[2]
        task = task_of(message, context, own_build(APP))
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
            app = (own_build(APP),) if ALONE else ()
            counts = not os.environ.get(BY_SITE)
            study = check_message(message, context, count=counts, app=app)
            if task is not None:
                task |= take_receipt(message, context)
            charged = charge_message(message, context, study, read=describe_units) if counts else None
            settings = settings_in(context)
            use_threads(settings.common.threads)
            session = ClientSession(settings, context, study=study)
            session.check_floor()
            return study, charged, Message(handler(message, session), reply_to=message)
        except Exception as error:
            if is_full(error) and "state-path" in context.node_config:
                raise  # a simulation's silos have one disk, its user's: no silo is left out for that
            code, reason = internal("ErrorCode").CLIENT_APP_RAISED_EXCEPTION, report(error)
            with contextlib.suppress(UserError, DataError):  # the settings may be what is wrong
                note_failure(message, context, settings_in(context), reason)
            return study, charged, Message(Error(code, reason), reply_to=message)

    return handle
