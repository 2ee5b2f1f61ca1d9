"""One message to each of some silos, and what they answer: the round loop's only way to the silos.

A silo may be slow, and it may go away while the others wait. Flower knows that a silo is gone once it has not heard
from it for two heartbeats (`client/site/supernode.py`), and what the silo was at is lost then. A silo that is gone, or
was and is back, counts as silent at once, or gets its message once more when it is back (``lost-silo``). And once the
quorum and half of the silos have answered, the others have a multiple of the time that those took
(``straggler-factor``), not the whole time of the round; that of long transfers (`client/site/transfers.py`) does not
count.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from logging import WARNING
from statistics import median

from flwr.app import Error, Message
from flwr.common import log
from flwr.serverapp import Grid

from client.site.flower import internal
from client.site.transfers import LONG_SECONDS, PATIENT_SECONDS, watch_pulls

POLL_SECONDS = (0.02, 0.25)  # first and longest pause between two looks for replies
LOOK_SECONDS = 2.0  # between two looks at who is here
TOLD_LATE = LONG_SECONDS + 8.0  # a transfer has lasted for so long when it is seen: until a heartbeat says so
PUSH_PAUSES = (0.5, 2.0, 5.0)  # before the second, third and fourth try to hand the messages over
CODES = internal("ErrorCode")
UNREACHABLE = (CODES.NODE_UNAVAILABLE, CODES.MESSAGE_UNAVAILABLE, CODES.REPLY_MESSAGE_UNAVAILABLE)
CRASHED = CODES.CLIENT_APP_CRASHED  # the silo is there, the process that had the message is not


@dataclass(frozen=True)
class Patience:
    """How long silos are waited for, in seconds."""

    timeout: float
    factor: float = 0.0  # a silo has so many times the median of those that have answered; 0: nobody is hurried
    floor: float = 0.0  # nobody has less
    quorum: int = 0  # nobody is hurried before so many have answered
    resend: bool = False  # whether a silo that was gone gets its message again
    looks: bool = False  # whether the silos are looked after while their replies come: they are processes elsewhere

    def limit(self, asked: int, took: Sequence[float]) -> float:
        """When the exchange ends, counted from its start: ``took``, of those that have answered, of ``asked`` silos."""
        if not self.factor or len(took) < max(self.quorum, (asked + 1) // 2):
            return self.timeout
        return min(self.timeout, max(self.floor, self.factor * median(took)))


class Exchange:
    """A round's messages and their replies.

    ``gone`` is told, perhaps again, of a node that is gone while it is waited for; ``each`` is called before the
    SuperLink is asked for replies, every time; ``moves`` hears how far a long reply is, and which nodes are waited for.
    ``answered`` are the nodes of which the last exchange has a reply.
    """

    def __init__(
        self,
        grid: Grid,
        patience: Patience,
        gone: Callable[[int], object] = lambda node: None,
        each: Callable[[], object] = lambda: None,
        answered: Collection[int] = (),
        moves: Callable[[str, Collection[int]], object] = lambda line, nodes: None,
    ) -> None:
        self.grid, self.patience, self.gone, self.each, self.moves = grid, patience, gone, each, moves
        self.sent: dict[str, Message] = {}  # every message that went out, by its id
        self.waiting: set[str] = set()  # ids of those that may still be answered
        self.lost: dict[int, Message] = {}  # by node: the error that its absence made of its message
        # The nodes that were here when it began: for others nobody waits. One whose line was mended a moment ago, and
        # that has replied, counts as away until its next sign of life.
        self.here: set[int] = set(answered)
        self.again: set[int] = set()  # the nodes that have got their message twice
        self.absent: set[int] = set()  # the nodes that were here and, at the last look, were not
        self.busy: set[int] = set()  # the nodes that were in a long transfer at the last look
        self.moving: dict[int, float] = {}  # seconds that nodes were in long transfers
        self.seen = time.monotonic()  # when it was last looked
        self.limit = patience.timeout  # seconds after which the exchange ends

    def run(self, messages: Sequence[Message]) -> list[Message]:
        """Send all, and collect until all have answered or the time is up.

        Returns one reply per silo that is not silent, from that silo: the SuperLink signs errors of its own itself.
        """
        started = time.monotonic()
        if self.patience.looks:
            watch_pulls(internal("http_grid"), "receiving a reply", self._tell_progress)
        self.each()
        here: Mapping[int, str] = self._activations()
        self.here |= set(here)
        replies = self._push(messages)
        took: list[float] = []
        pause, looked = POLL_SECONDS[0], started
        while self._hopes():
            self.each()
            arrived, here = self._pull(here)
            for reply in arrived:
                if self._is_wanted(reply) and (answered := self._take(reply)) is not None:
                    replies.append(answered)
                    took += [] if answered.has_error() else [time.monotonic() - started]
            now = time.monotonic()
            self.limit = min(self.patience.timeout, self.patience.limit(len(messages), took) + self._moving())
            if now - started > self.limit:
                break
            if now - looked > LOOK_SECONDS:
                looked, here = now, self._look(here)
            pause = POLL_SECONDS[0] if arrived else min(pause * 1.5, POLL_SECONDS[1])
            if self._hopes():
                time.sleep(pause)
        return [*replies, *self.lost.values()]

    def _pull(self, here: Mapping[int, str]) -> tuple[list[Message], Mapping[int, str]]:
        """The replies that are there; and who is here, where there was time to look.

        Flower waits up to three minutes for the rest of a reply that has begun: meanwhile somebody has to look.
        """
        if not self.patience.looks:
            return list(self.grid.pull_messages(list(self.waiting))), here
        pulled: Future[list[Message]] = Future()
        asked = list(self.waiting)

        def pull() -> None:
            try:
                pulled.set_result(list(self.grid.pull_messages(asked)))
            except BaseException as error:
                pulled.set_exception(error)

        threading.Thread(target=pull, daemon=True).start()
        while True:
            try:
                return pulled.result(LOOK_SECONDS), here
            except TimeoutError:
                if pulled.done():
                    raise
                here = self._look(here)

    def _hopes(self) -> bool:
        """Whether an answer may still come."""
        return bool(self.waiting or (self.patience.resend and self.lost))

    def _moving(self) -> float:
        """The longest that one who is waited for was in long transfers: nobody is hurried for the time on its line."""
        return max((self.moving.get(self.sent[n].metadata.dst_node_id, 0.0) for n in self.waiting), default=0.0)

    def _tell_progress(self, line: str) -> None:
        """Flower's call does not say whose reply it is at."""
        self.moves(line, {self.sent[name].metadata.dst_node_id for name in self.waiting})

    def _is_wanted(self, reply: Message) -> bool:
        """Whether it is waited for, or is of a silo that was gone for a while and has got it through all the same."""
        asked = reply.metadata.reply_to_message_id
        return asked in self.waiting or (
            not reply.has_error() and asked in self.sent and self.sent[asked].metadata.dst_node_id in self.lost
        )

    def _take(self, reply: Message) -> Message | None:
        """What the reply comes to; None where its silo gets another chance."""
        name = reply.metadata.reply_to_message_id
        reply = answers(reply, self.sent)
        node = reply.metadata.src_node_id
        self.waiting.discard(name)
        if reply.has_error() and reply.error.code in UNREACHABLE:
            self.gone(node)
            if self.patience.resend and node in self.here and node not in self.again:
                self.lost[node] = reply
                return None
        self.waiting -= self._ids(node)  # where it had its message twice
        self.lost.pop(node, None)
        return reply

    def _ids(self, node: int) -> set[str]:
        return {name for name in self.waiting if self.sent[name].metadata.dst_node_id == node}

    def _activations(self) -> dict[int, str]:
        """Who is here, by node, and since when."""
        nodes = list(self.grid.get_nodes())
        busy = {node.node_id for node in nodes if node.heartbeat_interval == PATIENT_SECONDS}
        since, self.seen = self.seen, time.monotonic()
        for node in busy:
            self.moving[node] = self.moving.get(node, 0.0) + (self.seen - since if node in self.busy else TOLD_LATE)
        self.busy = busy
        return {node.node_id: node.last_activated_at for node in nodes}

    def _look(self, before: Mapping[int, str]) -> dict[int, str]:
        """Look after the silos that are waited for.

        One that is back does not know of its message any more; one that is missing twice went away in the middle of its
        reply, for whose rest Flower still waits.
        """
        here = self._activations()
        absent = before.keys() - here.keys()
        for name in sorted(self.waiting):
            node = self.sent[name].metadata.dst_node_id
            if node in absent & self.absent:
                self.gone(node)
            if before.get(node) and here.get(node, before[node]) != before[node]:
                self.gone(node)
                if not self.patience.resend:
                    self.waiting.discard(name)
                lost = Error(CODES.NODE_UNAVAILABLE, "it was gone for a while, and what it was at is lost")
                self.lost.setdefault(node, Message(lost, reply_to=self.sent[name]))
        self.absent = absent
        if self.patience.resend:
            back = [node for node in self.lost if node in here and node not in self.again]
            self.again |= set(back)
            originals = {message.metadata.dst_node_id: message for message in self.sent.values()}
            self._push([copy_of(originals[node]) for node in back])
        return {**before, **here}

    def _push(self, messages: Sequence[Message]) -> list[Message]:
        """Hand the messages over; returns an error for each whose node the server does not know.

        Where two processes hand over equal parts at once, one may be missing (Flower 1.39, "the push session may have
        expired"): then once more.
        """
        # Flower takes a reply from whoever names the message it is to. That name is a hash of the message, in which
        # this is what nobody else can know.
        for message in messages:
            message.metadata.group_id = secrets.token_hex(16)
        names = self._handed_over(messages)
        pushed = list(zip(names, messages, strict=True))
        self.sent |= {name: message for name, message in pushed if name}
        self.waiting |= {name for name in names if name}
        gone = Error(CODES.NODE_UNAVAILABLE, "the server does not know it any more")
        return [Message(gone, reply_to=message) for name, message in pushed if not name]

    def _handed_over(self, messages: Sequence[Message]) -> list[str]:
        for pause in PUSH_PAUSES:
            try:
                return list(self.grid.push_messages(messages))
            except internal("ObjectPushError") as error:
                log(WARNING, "the messages did not reach the SuperLink (%s); again in %g s", error, pause)
                time.sleep(pause)
        return list(self.grid.push_messages(messages))


def answers(reply: Message, sent: Mapping[str, Message]) -> Message:
    """The reply as one of the silo that was asked, to what it was asked: the SuperLink signs its own errors itself."""
    asked = sent[reply.metadata.reply_to_message_id].metadata
    reply.metadata.__dict__ |= {"_src_node_id": asked.dst_node_id, "_message_type": asked.message_type}
    return reply


def copy_of(message: Message) -> Message:
    """The same message, to go out once more."""
    asked = message.metadata
    return Message(message.content, dst_node_id=asked.dst_node_id, message_type=asked.message_type, ttl=asked.ttl)
