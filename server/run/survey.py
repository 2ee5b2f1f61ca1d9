"""Survey of the silos' data: one exchange, the answers, and the reasons of silos without an answer."""

from __future__ import annotations

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from partitions.common.errors import RunFailedError
from server.results.reasons import merge_reasons
from server.results.run_directory import RunDirectory
from server.results.survey import Surveyed
from server.run.exchange import Exchange, TimeoutPolicy
from server.run.limits import SUMMARY_BYTES, check_reply
from server.run.registration.data_summaries import SUMMARY_SECONDS
from server.run.registration.registration import Registration
from strategies.base.run_settings import RunSettings
from strategies.base.survey import ACTION, RECORD, Answer, read_answer
from strategies.base.transport.reporting import read_replies


def survey_silos(
    grid: Grid, settings: RunSettings, directory: RunDirectory | None = None
) -> Surveyed:
    """Return the silos' answers. Raises UserError, or RunFailedError if no silo answers."""
    registration, timeout = (
        Registration(grid, settings, directory),
        settings.common.round_timeout,
    )
    registration.register()
    names = {info.node_id: info.name for info in registration.silos.values()}
    policy = TimeoutPolicy(min(timeout, SUMMARY_SECONDS))
    exchange = Exchange(
        grid, policy, most=lambda _: SUMMARY_BYTES, receipts=registration.receipts
    )
    messages = [
        Message(
            RecordDict({"config": ConfigRecord({"run": registration.run_name})}),
            dst_node_id=node,
            message_type=f"{MessageType.QUERY}.{ACTION}",
            ttl=timeout,
        )
        for node in names
    ]
    answers, faults = read_replies(exchange.run(messages), names, _read_answer)
    registration.reporter.note_reasons(faults.items(), "no survey of ")
    silent = {*names.values()} - answers.keys()
    late = dict.fromkeys(silent, f"no reply within {policy.timeout:g} s")
    without = dict(sorted({**late, **registration.left_out, **faults}.items()))
    if not answers:
        raise RunFailedError(
            f"no silo answered the survey ({'; '.join(merge_reasons(without.items()))})"
        )
    registration.reporter.event("survey", silos=len(answers), without=without)
    return Surveyed(dict(sorted(answers.items())), without)


def _read_answer(reply: Message, silo: str) -> Answer:
    check_reply(reply.content, (RECORD,), SUMMARY_BYTES)
    return read_answer(reply.content.get(RECORD))
