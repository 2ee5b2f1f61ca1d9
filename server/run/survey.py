"""Survey of the silos' data: one exchange, the answers, and the reasons of silos without an answer."""

from __future__ import annotations

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from partitions.common.errors import RunFailedError
from server.results.run_directory import RunDirectory
from server.results.survey import Surveyed
from server.run.exchange import Exchange, TimeoutPolicy
from server.run.limits import SUMMARY_BYTES, check_reply
from server.run.registration.data_summaries import SUMMARY_SECONDS
from server.run.registration.registration import Registration
from strategies.base.run_settings import RunSettings
from strategies.base.survey import ACTION, RECORD, Answer, read_answer
from strategies.base.transport.reporting import read_replies


class SurveyLoop:
    """One run of ``strategy = survey``."""

    def __init__(
        self, grid: Grid, settings: RunSettings, directory: RunDirectory | None = None
    ) -> None:
        self.grid = grid
        self.common = settings.common
        self.registration = Registration(grid, settings, directory)
        self.reporter = self.registration.reporter

    def run(self) -> Surveyed:
        """Return the answers. Raises UserError, or RunFailedError if no silo answers."""
        self.registration.register()
        names = {info.node_id: info.name for info in self.registration.silos.values()}
        policy = TimeoutPolicy(min(self.common.round_timeout, SUMMARY_SECONDS))
        exchange = Exchange(
            self.grid, policy, most=lambda _: SUMMARY_BYTES, receipts=self.registration.receipts
        )
        messages = [self._message(node) for node in names]
        replies = exchange.run(messages)
        answers, faults = read_replies(replies, names, _read_answer)
        for name, reason in faults.items():
            self.reporter.note(f"no survey of {name}: {reason}")
        late = f"no reply within {policy.timeout:g} s"
        silent = {*names.values()} - answers.keys()
        without = dict.fromkeys(silent, late)
        without |= self.registration.left_out
        without |= faults
        without = dict(sorted(without.items()))
        if not answers:
            raise RunFailedError(
                f"no silo answered the survey ({'; '.join(dict.fromkeys(without.values()))})"
            )
        self.reporter.event("survey", silos=len(answers), without=without)
        return Surveyed(dict(sorted(answers.items())), without)

    def _message(self, node: int) -> Message:
        content = RecordDict({"config": ConfigRecord({"run": self.registration.run_name})})
        kind = f"{MessageType.QUERY}.{ACTION}"
        return Message(
            content, dst_node_id=node, message_type=kind, ttl=self.common.round_timeout
        )


def _read_answer(reply: Message, silo: str) -> Answer:
    check_reply(reply.content, (RECORD,), SUMMARY_BYTES)
    return read_answer(reply.content.get(RECORD))
