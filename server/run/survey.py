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
        self.receipts = self.registration.receipts

    def run(self) -> Surveyed:
        """Return the answers. Raises UserError, or RunFailedError if no silo answers."""
        self.registration.register()
        names = {info.node_id: info.name for info in self.registration.silos.values()}
        found = Surveyed(without=dict(self.registration.left_out))
        policy = TimeoutPolicy(min(self.common.round_timeout, SUMMARY_SECONDS))
        exchange = Exchange(
            self.grid, policy, most=lambda _: SUMMARY_BYTES, receipts=self.receipts
        )
        messages = [self._message(node) for node in names]
        replies = exchange.run(messages)
        answers, faults = read_replies(replies, names, _read_answer)
        found.answers.update(answers)
        found.without.update(faults)
        for name, reason in faults.items():
            self.reporter.note(f"no survey of {name}: {reason}")
        late = f"no reply within {policy.timeout:g} s"
        for name in names.values():
            if name not in found.answers:
                found.without.setdefault(name, late)
        if not found.answers:
            raise RunFailedError(
                f"no silo answered the survey ({'; '.join(dict.fromkeys(found.without.values()))})"
            )
        self.reporter.event("survey", silos=len(found.answers), without=found.without)
        return Surveyed(
            dict(sorted(found.answers.items())), dict(sorted(found.without.items()))
        )

    def _message(self, node: int) -> Message:
        config = ConfigRecord({"run": self.registration.run_name})
        content = RecordDict({"config": config})
        kind = f"{MessageType.QUERY}.{ACTION}"
        return Message(
            content, dst_node_id=node, message_type=kind, ttl=self.common.round_timeout
        )


def _read_answer(reply: Message, silo: str) -> Answer:
    check_reply(reply.content, (RECORD,), SUMMARY_BYTES)
    return read_answer(reply.content.get(RECORD))
