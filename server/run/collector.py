"""Send a round's messages and collect the replies; report silos that disconnect, are late, or have changed data."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from flwr.app import ConfigRecord, Message, MessageType

from client.flower.messages import UNREACHABLE, is_error, refuse, set_sender
from client.protocol.secure import KEYS, START, UNMASK
from client.protocol.secure import RECORD as SECURE
from partitions.common.errors import DataError, RunFailedError
from partitions.common.messages import MASKED, OWN_MODEL_KIND
from server.results.reasons import merge_reasons
from server.run.exchange import Exchange, TimeoutPolicy
from server.run.limits import NUMBER_BYTES, OTHER_BYTES, check_reply
from server.run.registration.registration import Registration
from strategies.base.evaluation import OWN
from strategies.base.state import BUFFERS
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.reporting import SECONDS, reason_of

JUMP_SECONDS = 60.0  # smaller jumps are not reported


class ClockWatch:
    """Report jumps of the wall clock against the monotonic clock; ``note`` receives one line for each."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self.note = note
        self.offset = time.time() - time.monotonic()

    def check(self) -> None:
        """Report a jump since the last check."""
        if abs(jump := time.time() - time.monotonic() - self.offset) > JUMP_SECONDS:
            self.offset += jump
            direction = "forward" if jump > 0 else "back"
            self.note(
                f"this server's clock went {direction} by {abs(jump) / 3600:.1f} h (it was set, or the machine slept): "
                "silos that have another time are refused until it agrees with theirs"
            )


class Collector:
    """The exchanges of one run with its registered silos."""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.grid = registration.grid
        self.common = registration.common
        self.reporter = registration.reporter
        self.clock = ClockWatch(registration.reporter.note)
        # Nodes that disconnected in a round and have not answered since
        self.disconnected: set[int] = set()
        self.answered: set[int] = set()  # nodes that replied in the last exchange
        # Seconds that the silos of the last exchange had
        self.limit = self.common.round_timeout
        # Silo -> last reported number of samples, where it has changed
        self.samples: dict[str, Any] = {}

    def exchange(
        self,
        messages: Sequence[Message],
        strategy: PersonalizedStrategy,
        lost: Mapping[str, int],
    ) -> list[Message]:
        """Send messages and collect the replies; silent silos are rejected later.

        ``lost``: by silo with a lost state, the last round that the state may be from. A reply that is too large,
        or that holds records that were not requested, is replaced by an error.
        """
        for message in messages:
            if (name := self.registration.name_of(message.metadata.dst_node_id)) in lost:
                cast(ConfigRecord, message.content["config"])["state_lost"] = lost[name]
        most = size_limit(strategy)
        exchange = Exchange(
            self.grid,
            self._timeout_policy(),
            answered=self.answered,
            most=most,
            receipts=self.registration.receipts,
            before_pull=self.clock.check,
            on_disconnect=self._note_disconnected,
            on_transfer=self._report_transfer,
            on_queue=lambda node: self._note(node, "is queued at its site"),
            on_cut=self._note_cut,
            on_reply=self._report_reply,
        )
        by_node = {message.metadata.dst_node_id: message for message in messages}
        replies = []
        for reply in exchange.run(messages):
            message = by_node[reply.metadata.src_node_id]
            reply = verify_reply(
                reply, message, expected_records(message, strategy), most(message)
            )
            if reply.has_error():
                name = self.registration.name_of(reply.metadata.src_node_id)
                self.reporter.silo_fault(name, reason_of(reply.error.reason))
            replies.append(reply)
        self.limit = exchange.limit
        back = {r.metadata.src_node_id for r in replies if not is_error(r, *UNREACHABLE)}
        for node in sorted(self.disconnected & back):
            self._note(node, "is back")
        self.disconnected -= back
        self.answered = back
        return replies

    def _timeout_policy(self) -> TimeoutPolicy:
        """Return the limits of an exchange. A simulation has no stragglers: its results must not depend on time.

        An in-process grid (it has ``seconds``) computes while its replies are pulled, so presence is not watched.
        """
        c = self.common
        deployed = not self.registration.simulated
        return TimeoutPolicy(
            timeout=c.round_timeout,
            factor=c.straggler_factor if deployed else 0.0,
            floor=c.straggler_floor,
            quorum=c.min_silos,
            resend=c.lost_silo == "resend",
            watches=deployed and not hasattr(self.grid, "seconds"),
        )

    def compute_seconds(self, metrics: Iterable[Mapping[str, float]]) -> float:
        """Return the silos' compute time in seconds: of the slowest, or the sum where they share one process."""
        of_all: float | None = getattr(self.grid, "seconds", None)
        if of_all is not None:
            return of_all
        return max((sum(m.get(name, 0.0) for name in SECONDS) for m in metrics), default=0.0)

    def _report_transfer(self, line: str, nodes: Collection[int]) -> None:
        names = sorted(map(self.registration.name_of, nodes))
        self.reporter.transfer(f"{line}; waits for {', '.join(names)}" if names else line)

    def _note(self, node: int, what: str) -> None:
        self.reporter.note(f"{self.registration.name_of(node)} {what}")

    def _note_cut(self) -> None:
        seconds = self.common.round_timeout
        self.reporter.note(
            f"no silo is online, so the server's own line may be cut: waits up to round-timeout ({seconds:g} s)"
        )

    def _report_reply(self, node: int, seconds: float) -> None:
        if hasattr(self.grid, "seconds"):  # silos of this process compute one after the other
            return
        # It may still be rejected later
        self.reporter.event("reply", silo=self.registration.name_of(node), seconds=seconds)

    def _note_disconnected(self, node: int) -> None:
        """Report once that a silo has disconnected in the middle of a round."""
        if node in self.disconnected:
            return
        self.disconnected.add(node)
        then = (
            "waits for it"
            if self.common.lost_silo == "resend"
            else "the round goes on without it"
        )
        self._note(node, f"is gone; {then}")

    def reject_silent(
        self,
        strategy: PersonalizedStrategy,
        messages: Sequence[Message],
        replies: Iterable[Message],
    ) -> None:
        """Reject silos that have not replied in time."""
        answered = {r.metadata.src_node_id for r in replies}
        nodes = {m.metadata.dst_node_id for m in messages}
        for name, info in strategy.silos.items():
            if info.node_id in nodes - answered:
                shorter = (
                    " (straggler-factor, straggler-floor)"
                    if self.limit < self.common.round_timeout
                    else ""
                )
                strategy.reject(name, f"no reply within {round(self.limit, 2):g} s{shorter}")

    def note_changed_counts(
        self, strategy: PersonalizedStrategy, replies: Iterable[Message]
    ) -> None:
        """Report once each new number of training samples that differs from the silo's data summary."""
        for reply in replies:
            silo = strategy.plan.nodes.get(reply.metadata.src_node_id, "")
            if not silo or strategy.info.role.pooled or reply.has_error():
                continue
            config, known = reply.content.get("config"), strategy.silos[silo].n_train
            trained = reply.metadata.message_type == MessageType.TRAIN
            count = config.get("samples") if isinstance(config, ConfigRecord) else None
            if trained and count not in (None, self.samples.get(silo, known)):
                self.samples[silo] = count
                self.reporter.note(
                    f"{silo} says in round {strategy.round} that it has {count!r} training samples; it said {known}, "
                    f"and counts as {strategy.plan.samples[silo]}"
                )

    def check_quorum(self, strategy: PersonalizedStrategy, messages: Sequence[Message]) -> None:
        """Raise RunFailedError if fewer than ``min-silos`` updates are usable."""
        trained = {
            strategy.plan.nodes[m.metadata.dst_node_id]
            for m in messages
            if m.metadata.message_type == MessageType.TRAIN
        }
        usable = len(trained - strategy.rejected.keys())
        if usable < self.common.min_silos:
            reasons = "; ".join(merge_reasons(strategy.rejected.items()))
            raise RunFailedError(
                f"round {strategy.round}: {usable} usable updates, min-silos = {self.common.min_silos} ({reasons})"
            )


def size_limit(strategy: PersonalizedStrategy) -> Callable[[Message], int]:
    """Return a function from a message to the maximum size of its reply in bytes."""

    def most(message: Message) -> int:
        if message.metadata.message_type == OWN_MODEL_KIND:
            return OTHER_BYTES + NUMBER_BYTES * (
                strategy.layout.size + strategy.layout.buffer_size
            )
        if message.metadata.message_type != MessageType.TRAIN:
            return OTHER_BYTES
        silo = strategy.plan.nodes[message.metadata.dst_node_id]
        return OTHER_BYTES + NUMBER_BYTES * sum(
            strategy.upload_size(n, silo) for n in strategy.upload_names()
        )

    return most


def expected_records(message: Message, strategy: PersonalizedStrategy) -> set[str]:
    """Return the names of the records that the reply to a message may hold."""
    if message.metadata.message_type == OWN_MODEL_KIND:
        return {"config", *(f"model.{name}" for name in (OWN, BUFFERS))}
    trains = message.metadata.message_type == MessageType.TRAIN
    if message.metadata.message_type in (KEYS, START, UNMASK):
        return {SECURE}
    names = [f"model.{name}" for name in strategy.upload_names()]
    names = [MASKED, SECURE] if strategy.common.secure_aggregation else names
    return {"config", "metrics", *(names if trains else ())}


def verify_reply(
    reply: Message, question: Message, records: Collection[str], most: int
) -> Message:
    """Return the reply, or a one-line error if it is too large or holds records that were not requested."""
    if not reply.has_error():
        try:
            check_reply(reply.content, records, most)
        except DataError as error:
            reply = set_sender(refuse(question, str(error)), question)
    return reply
