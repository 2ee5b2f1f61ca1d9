"""Exchange of messages with silos: one message to each, and the replies.

A silo may be slow, or disconnect while the others wait. Flower notices a disconnected silo after two missed heartbeats
(`client/flower/fleet.py`), and its work on the message is lost. Such a silo is treated as silent at once, or
receives its message again when it is back online (``lost-silo``). If all are gone at once, it is the server's own line:
then it waits for them, and they receive their messages again, within the round's time limit. After the quorum and half
of the silos have answered, the others' time limit is a multiple of the median time so far (``straggler-factor``). The
time of long transfers and in a site's queue (``client/flower/transfers.py``) is not included.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from logging import WARNING
from statistics import median

from flwr.app import Message
from flwr.common import log
from flwr.serverapp import Grid

from client.flower.fleet import PATIENT_SECONDS, QUEUED_SECONDS
from client.flower.grid import RuntimeGrid
from client.flower.messages import GONE, UNREACHABLE, is_error, records_of, refuse, set_sender
from client.flower.transfers import LONG_SECONDS, LostPartError
from partitions.common.memory import return_memory
from server.run.limits import OTHER_BYTES, group_id, size_of
from server.run.receipts import Receipts

POLL_SECONDS = (0.02, 0.25)  # first and longest pause between two queries for replies
PRESENCE_SECONDS = 2.0  # between two queries of the nodes that are online
DETECTED_LATE = LONG_SECONDS + 8.0  # duration of a transfer when a heartbeat first reports it
# Before the second, third and fourth attempt to push the messages
PUSH_PAUSES = (0.5, 2.0, 5.0)


@dataclass(frozen=True)
class TimeoutPolicy:
    """The limits of an exchange, in seconds."""

    timeout: float
    # A straggler's limit as a multiple of the median time of the others; 0: no limit
    factor: float = 0.0
    floor: float = 0.0  # the shortest limit for stragglers
    quorum: int = 0  # replies before the limit for stragglers applies
    resend: bool = False  # whether a silo that disconnected receives its message again
    watches: bool = False  # whether presence is checked while replies are pulled: the silos are remote processes

    def limit(self, silos: int, took: Sequence[float]) -> float:
        """Return the length of the exchange. ``took``: reply times so far; ``silos``: the number of silos."""
        if not self.factor or len(took) < max(self.quorum, (silos + 1) // 2):
            return self.timeout
        return min(self.timeout, max(self.floor, self.factor * median(took)))


@dataclass
class Exchange:
    """The messages of one exchange and their replies.

    ``answered``: the nodes that replied in the last exchange. ``most``: the maximum size of the reply to a message, in
    bytes. ``receipts``: for the silos' audit logs. ``before_pull`` is called before each query for replies.
    ``on_disconnect`` receives a node that disconnects while its reply is awaited, possibly more than once.
    ``on_transfer`` receives the progress of a long reply, and the nodes whose replies are awaited. ``on_queue``
    receives an awaited node whose work has come into its site's queue. ``on_cut`` is called when no silo is online any
    more. ``on_reply`` receives a node, and the seconds
    that its reply took.
    """

    grid: Grid
    policy: TimeoutPolicy
    _: KW_ONLY
    answered: Collection[int] = ()
    most: Callable[[Message], int] = lambda message: OTHER_BYTES
    receipts: Receipts = field(default_factory=Receipts)
    before_pull: Callable[[], object] = lambda: None
    on_disconnect: Callable[[int], object] = lambda node: None
    on_transfer: Callable[[str, Collection[int]], object] = lambda line, nodes: None
    on_queue: Callable[[int], object] = lambda node: None
    on_cut: Callable[[], object] = lambda: None
    on_reply: Callable[[int, float], object] = lambda node, seconds: None

    def __post_init__(self) -> None:
        # Whether no silo was online at some time, and at the last query
        self.cut = self.is_cut = False
        self.sent: dict[str, Message] = {}  # every message that went out, by its id
        self.waiting: set[str] = set()  # ids of those that may still be answered
        self.lost: dict[int, Message] = {}  # node -> the error that stands for its lost reply
        # The nodes that were online at the start; an unreachable node outside this set is not waited for. After a
        # repaired connection Flower lists a node as offline until its next heartbeat, even if it has replied.
        self.online: set[int] = set(self.answered)
        self.resent: set[int] = set()  # the nodes that were sent their message twice
        # The nodes that were online and, at the last query, were not
        self.offline: set[int] = set()
        # The nodes that were in a long transfer, or in a queue, at the last query
        self.busy: set[int] = set()
        self.queued: set[int] = set()
        self.moving: dict[
            int, float
        ] = {}  # seconds that nodes were in long transfers or queues
        self.seen = time.monotonic()  # the time of the last query
        self.limit = self.policy.timeout  # seconds after which the exchange ends

    def run(self, messages: Sequence[Message]) -> list[Message]:
        """Send all messages, and collect replies until all silos have answered or the limit is reached.

        Returns one reply for each silo that is not silent; an error from the SuperLink is returned as the silo's.
        """
        started = time.monotonic()
        if isinstance(self.grid, RuntimeGrid):
            self.grid.report = self._report_progress
            self.grid.until = started + self.policy.timeout
        self.before_pull()
        online: Mapping[int, str] = self._activations()
        self.online |= set(online)
        self.receipts.attach(messages)
        replies = self._push(messages)
        if self.policy.watches:
            gc.collect()  # an answer of httpx is in a cycle, with the part that was its question
            return_memory()
        took: list[float] = []
        pause, looked = POLL_SECONDS[0], started
        while self._awaits():
            self.before_pull()
            arrived, online = self._pull(online)
            for reply in arrived:
                if self._is_wanted(reply) and (answered := self._take(reply)) is not None:
                    replies.append(answered)
                    seconds = time.monotonic() - started
                    took += [] if answered.has_error() else [seconds]
                    self.on_reply(answered.metadata.src_node_id, seconds)
            now = time.monotonic()
            within = self.policy.limit(len(messages), took) + self._longest_move()
            self.limit = self.policy.timeout if self.cut else min(self.policy.timeout, within)
            if now - started > self.limit:
                break
            ends = not self._awaits() and bool(self.lost)
            if now - looked > PRESENCE_SECONDS or ends:
                looked, online = now, self._check_presence(online)
            pause = POLL_SECONDS[0] if arrived else min(pause * 1.5, POLL_SECONDS[1])
            if self._awaits():
                time.sleep(pause)
        self.receipts.take(replies)
        return [*replies, *self.lost.values()]

    def _pull(self, online: Mapping[int, str]) -> tuple[list[Message], Mapping[int, str]]:
        """Return the replies that have arrived, and the nodes that are online.

        Flower waits up to three minutes for the rest of a partial reply; presence is checked meanwhile.
        """
        ids = list(self.waiting)
        if not self.policy.watches:
            return list(self.grid.pull_messages(ids)), online
        pulled: Future[list[Message]] = Future()

        def pull() -> None:
            try:
                pulled.set_result([*map(self._join, self.grid.pull_messages(ids))])
            except BaseException as error:
                pulled.set_exception(error)

        threading.Thread(target=pull, daemon=True).start()
        while True:
            try:
                return pulled.result(PRESENCE_SECONDS), online
            except TimeoutError:
                if pulled.done():
                    raise
                online = self._check_presence(online)

    def _join(self, reply: Message) -> Message:
        """Return a reply with its arrays in one piece, but for one that is too large, and is refused later on."""
        question = self.sent.get(reply.metadata.reply_to_message_id)
        return join_arrays(reply, self.most(question) if question else 0)

    def _awaits(self) -> bool:
        """Return whether a reply may still come."""
        return bool(self.waiting or (self._resends and self.lost))

    @property
    def _resends(self) -> bool:
        """Whether lost silos are sent their messages again."""
        return self.policy.resend or self.cut

    def _longest_move(self) -> float:
        """Return the longest time that an awaited node spent in transfers and queues; it extends the limit."""
        return max(
            (self.moving.get(node, 0.0) for node in self._awaited().values()), default=0.0
        )

    def _report_progress(self, line: str) -> None:
        """Report a transfer with all awaited nodes: Flower's call does not identify the node."""
        self.on_transfer(line, {*self._awaited().values()})

    def _is_wanted(self, reply: Message) -> bool:
        """Return whether a reply is awaited, or is a valid late one from a silo that had disconnected."""
        question = reply.metadata.reply_to_message_id
        return question in self.waiting or (
            not reply.has_error()
            and question in self.sent
            and self.sent[question].metadata.dst_node_id in self.lost
        )

    def _take(self, reply: Message) -> Message | None:
        """Return the reply with the silo as its source; None if the silo will be sent its message again."""
        name = reply.metadata.reply_to_message_id
        reply = set_sender(reply, self.sent[name])
        node = reply.metadata.src_node_id
        self.waiting.discard(name)
        if is_error(reply, *UNREACHABLE):
            self.on_disconnect(node)
            if node in self.online and (self.cut or node not in self.resent):
                self.lost[node] = reply
                return None
        # Both ids of a message that was sent twice
        self.waiting -= {message_id for message_id, of in self._awaited().items() if of == node}
        self.lost.pop(node, None)
        return reply

    def _awaited(self) -> dict[str, int]:
        """Return the nodes that may still answer, by the id of their message."""
        return {name: self.sent[name].metadata.dst_node_id for name in self.waiting}

    def _activations(self) -> dict[int, str]:
        """Return the nodes that are online with their activation times; update the times in transfers and queues."""
        nodes = list(self.grid.get_nodes())
        queued = {node.node_id for node in nodes if node.heartbeat_interval == QUEUED_SECONDS}
        busy = {node.node_id for node in nodes if node.heartbeat_interval == PATIENT_SECONDS}
        busy |= queued
        awaited = {*self._awaited().values()}
        for node in sorted((queued - self.queued) & awaited):
            self.on_queue(node)
        self.queued = queued & awaited
        since, self.seen = self.seen, time.monotonic()
        for node in busy:
            self.moving[node] = self.moving.get(node, 0.0) + (
                self.seen - since if node in self.busy else DETECTED_LATE
            )
        self.busy = busy
        return {node.node_id: node.last_activated_at for node in nodes}

    def _check_presence(self, before: Mapping[int, str]) -> dict[int, str]:
        """Check whether awaited silos are online, and return all nodes seen so far with their activation times.

        A silo that has returned has lost its message. A silo that is missing in two queries has disconnected in the
        middle of its reply, and Flower still waits for the rest.
        """
        online = self._activations()
        nodes = {message.metadata.dst_node_id for message in self.sent.values()}
        was_cut = self.is_cut
        self.is_cut = bool(nodes & self.online) and not nodes & online.keys()
        if self.is_cut and not was_cut:
            self.cut = True
            self.resent.clear()
            self.on_cut()
        offline = before.keys() - online.keys()
        for name, node in sorted(self._awaited().items()):
            if node in offline & self.offline:
                self.on_disconnect(node)
            if before.get(node) and online.get(node, before[node]) != before[node]:
                self.on_disconnect(node)
                if not self._resends:
                    self.waiting.discard(name)
                lost = "it was gone for a while, and what it was at is lost"
                self.lost.setdefault(node, refuse(self.sent[name], lost, GONE))
        self.offline = offline
        if self._resends:
            back = [node for node in self.lost if node in online and node not in self.resent]
            self.resent |= set(back)
            originals = {
                message.metadata.dst_node_id: message for message in self.sent.values()
            }
            self._push([copy_of(originals[node]) for node in back])
        return {**before, **online}

    def _push(self, messages: Sequence[Message]) -> list[Message]:
        """Push the messages; return an error for each one whose node is unknown to the SuperLink.

        A failed push is repeated: if two processes push equal parts at once, one part may be missing (Flower, "the
        push session may have expired").
        """
        # Flower accepts a reply from every sender that gives the message id, which is a hash of the message. The
        # group id makes that hash unpredictable for other senders.
        for message in messages:
            message.metadata.group_id = group_id(self.most(message))
        names = self._push_all(messages)
        pushed = list(zip(names, messages, strict=True))
        self.sent |= {name: message for name, message in pushed if name}
        self.waiting |= {name for name in names if name}
        gone = "the server does not know it any more"
        return [refuse(message, gone, GONE) for name, message in pushed if not name]

    def _push_all(self, messages: Sequence[Message]) -> list[str]:
        for pause in PUSH_PAUSES:
            try:
                return list(self.grid.push_messages(messages))
            except LostPartError as error:
                log(
                    WARNING,
                    "the messages did not reach the SuperLink (%s); again in %g s",
                    error,
                    pause,
                )
                time.sleep(pause)
        return list(self.grid.push_messages(messages))


def join_arrays(reply: Message, most: int) -> Message:
    """Return a reply without the parts that it came in, which would wait with it for the other replies.

    A part may stand in an array any number of times. One that is larger than ``most`` bytes stays as it is.
    """
    if reply.has_content():
        records = [*records_of(reply.content, "Array").values()]
        for record in records if sum(map(size_of, records)) <= most else ():
            for array in record.values():
                _ = array.data
        return_memory()
    return reply


def copy_of(message: Message) -> Message:
    """Return a copy of a message for sending it again."""
    metadata = message.metadata
    return Message(
        message.content,
        dst_node_id=metadata.dst_node_id,
        message_type=metadata.message_type,
        ttl=metadata.ttl,
    )
