"""What a SuperLink of ours knows of messages and replies: who waits, what was delivered, and how large a reply may be.

A silo's request for a message waits until there is one, ten seconds at most. So a waiting silo polls rarely and
receives its message at once.

An answer may be lost in transit together with its message, and the silo and the round would wait. But a SuperNode polls
only after it has finished its previous message. So a message that was delivered before and is not confirmed is
delivered again, a few times.

Each message carries the size limit of its reply (``server/run/limits.py``). All bytes that a silo sends in answer to it
are counted; a larger reply is discarded, and the ServerApp receives an error in its place. The ServerApp takes a reply
as soon as it has begun, and Flower then deletes message and reply while parts still arrive: so both are noted here.
"""

import gc
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..protocol.private import return_memory
from .internals import internal
from .messages import name_message, refuse
from .slots import fill_slot
from .transfers import enclose, is_whole, parts_in, tree_fault

WAIT_SECONDS = 10.0  # maximum wait for a message before an empty answer
# Between two looks at whether who waits, or a silo that is waited for, is still there; what has come wakes it at once
LOOK_SECONDS = 1.0
# Silos; each waiting one occupies one of the thousand threads that answer calls
MOST_WAITING = 500
HELD_SECONDS = 1.0  # maximum wait for a reply before an empty answer to a ServerApp
GATHER_SECONDS = 0.05  # from a query's first reply, for others to come
MOST_GIVEN = 20  # runs whose last answer is kept
MOST_NOTED = 10_000  # messages; the oldest are dropped first
MOST_LEFT = 1 << 25  # bytes of a ServerApp's calls that may wait for a search for cycles
MOST_TIMES = 5  # deliveries of a message again; a limit, as a message of a stopped run can never be confirmed


@dataclass
class PushedMessage:
    """A message that a ServerApp has pushed. ``most``: bytes of its reply; None: any number."""

    proto: Any
    most: int | None
    delivered: bool = False
    times: int = 0  # how often it was delivered again
    came: int = 0  # bytes of its reply
    reply: str = ""  # id of the last one
    session: str = ""  # in which that one's parts come
    refused: bool = False

    @property
    def node(self) -> int:
        return int(self.proto.metadata.dst_node_id)


@dataclass
class Mail:
    """The messages of all runs.

    ``most`` returns the bytes that a reply may have, by its message's group; ``too_large``: why one is refused.
    ``state``: Flower's LinkState, which keeps them; ``room``: for silos that wait.
    """

    state: Any
    most: Callable[[str], int | None]
    too_large: Callable[[int], str]
    room: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(MOST_WAITING))

    def __post_init__(self) -> None:
        self.store = self.state.object_store
        self.noted: dict[str, PushedMessage] = {}
        self.last: dict[int, tuple[str, Any]] = {}  # by node: what was delivered to it last
        self.sessions: dict[str, PushedMessage] = {}
        # By session: the parts that a ServerApp has yet to push, and the nodes whose messages lack them
        self.missing: dict[str, tuple[set[str], set[int]]] = {}
        self.news: dict[int, threading.Event] = {}  # by node: a silo that waits
        self.came = threading.Condition()  # parts of replies: for ServerApps that wait
        self.given: dict[int, Any] = {}  # by run: the last answer to its ServerApp
        self.lock = threading.Lock()
        # A reply's tree is checked and stored without another one in between
        self.trees = threading.Lock()
        self.left = 0  # bytes of a ServerApp's calls since cycles were searched for

    def note(self, request: Any, answer: Any) -> None:
        """Note the messages that a ServerApp has pushed, and wake their silos once all parts are there."""
        nodes = {proto.metadata.dst_node_id for proto in request.messages_list}
        with self.lock:
            for name, proto in zip(answer.message_ids, request.messages_list, strict=True):
                if name:
                    self.noted[name] = PushedMessage(proto, self.most(proto.metadata.group_id))
            self.missing[answer.session_id] = {*answer.objects_to_push}, nodes
            for kept in (self.noted, self.sessions, self.missing):
                while len(kept) > MOST_NOTED:
                    del kept[next(iter(kept))]
        self._note_part(answer.session_id, "")

    def _note_part(self, session: str, name: str) -> None:
        """Note that a part of a ServerApp's messages is stored."""
        with self.lock:
            parts, nodes = self.missing.get(session, ({name}, set[int]()))
            parts.discard(name)
            if not parts:
                self.missing.pop(session, None)
        for waiting in () if parts else [self.news[node] for node in nodes & self.news.keys()]:
            waiting.set()

    # --- a silo asks for a message ---

    def pull(self, request: Any, is_active: Callable[[], bool]) -> Any:
        """Return the answer to a silo that asks for a message, as soon as there is one."""
        return_memory()
        node, empty = request.node.node_id, internal("fleet_pb2").PullMessagesResponse()
        if lost := self._lost_by(node):
            return lost
        if self.room.acquire(blocking=False):
            try:
                self._wait(node, time.monotonic() + WAIT_SECONDS, is_active)
            finally:
                self.room.release()
        if not is_active():  # the caller has disconnected
            return empty
        waiting = self._waits_for(node)
        answer = internal("fleet_handlers").pull_messages(request, self.state, self.store)
        names = {message.metadata.message_id for message in answer.messages_list}
        for name in names or waiting:  # those that Flower does not give are over
            if name in self.noted:
                self.noted[name].delivered = True
        for name, tree in zip(names, answer.message_object_trees, strict=True):
            enclose(tree, self.store.get)
            self.last[node] = name, answer
        return answer

    def _wait(self, node: int, until: float, is_active: Callable[[], bool]) -> None:
        """Wait until a message to a node is whole, its caller has gone, or the time is over."""
        news = self.news.setdefault(node, threading.Event())
        while time.monotonic() < until and is_active():
            news.clear()  # first, for what comes after the look sets it again
            if self._waits_for(node):
                break
            news.wait(LOOK_SECONDS)
        self.news.pop(node, None)

    def _waits_for(self, node: int) -> list[str]:
        """Return the undelivered messages to a node, if one has all its parts: a silo waits for a missing part."""
        with self.lock:
            noted = [*self.noted.items()]
        new = [name for name, pushed in noted if pushed.node == node and not pushed.delivered]
        return [name for name in new if is_whole(name, self.store)]

    def _lost_by(self, node: int) -> Any:
        """Return the last answer to a node again, if its message is not confirmed; else None."""
        name, answer = self.last.get(node, ("", None))
        pushed = self.noted.get(name)
        if pushed is None or pushed.times >= MOST_TIMES or not self._is_stored(name):
            return None
        pushed.times += 1
        logging.getLogger("flwr").info(
            "node %d did not get message %s; it is given to it again", node, name
        )
        return answer

    def _is_stored(self, name: str) -> bool:
        """Return whether the store still has parts of a message: a silo confirms a complete one."""
        try:
            self.store.get_object_tree(name)
        except internal("NoObjectInStoreError"):
            return False
        return True

    # --- a silo replies ---

    def push(self, request: Any) -> Any:
        """Return the answer to a silo that begins a reply; of one that is too large nothing is kept."""
        metadata = request.messages_list[0].metadata
        pushed, answers = self.noted.get(metadata.reply_to_message_id), internal("fleet_pb2")
        # Flower takes a reply from each sender that names the message
        if pushed is None or pushed.node != request.node.node_id:
            return answers.PushMessagesResponse()
        if pushed.refused or self._is_too_large(pushed, request.ByteSize()):
            self.refuse(pushed)
            return answers.PushMessagesResponse()
        with self.trees:
            faults = (tree_fault(tree, self.store) for tree in request.message_object_trees)
            if not (fault := next(filter(None, faults), "")):
                answer = internal("fleet_handlers").push_messages(request, self.state)
        if fault:
            self.refuse(pushed, fault)
            return answers.PushMessagesResponse()
        pushed.reply, pushed.session = metadata.message_id, answer.session_id
        self.sessions[answer.session_id] = pushed
        for tree in request.message_object_trees[:1]:
            self.take_enclosed(metadata.run_id, tree, answer)
        self._wake_serverapps()
        return answer

    def push_object(self, request: Any) -> Any:
        """Return the answer to a silo that sends a part of a reply."""
        pushed, answers = self.sessions.get(request.session_id), internal("message_pb2")
        # Without a session id Flower uses any session that waits for this part, even another silo's
        if pushed is None or pushed.node != request.node.node_id:
            return answers.PushObjectResponse(stored=False)
        if self._is_too_large(pushed, request.ByteSize()):
            self.refuse(pushed)
            return answers.PushObjectResponse(stored=False)
        answer = internal("fleet_handlers").push_object(request, self.state)
        self._wake_serverapps()
        return answer

    def _is_too_large(self, pushed: PushedMessage, size: int) -> bool:
        """Count received bytes; return whether the reply exceeds its limit."""
        with self.lock:
            pushed.came += size
            return pushed.most is not None and pushed.came > pushed.most

    def take_enclosed(self, run: int, tree: Any, answer: Any) -> None:
        """Store the parts that came in a message's tree; the answer asks for the others."""
        parts, state, session = parts_in(tree), self.state, answer.session_id
        answer.objects_to_push[:] = [
            name
            for name in answer.objects_to_push
            if not (name in parts and state.store_object(run, session, name, parts[name]))
        ]

    def refuse(self, pushed: PushedMessage, fault: str = "") -> None:
        """Discard the received parts of a reply and store an error in its place, once; no fault: it is too large.

        A ServerApp that has begun to pull the reply waits for its parts, and goes on without the silo if none arrive.
        """
        with self.lock:
            first, pushed.refused = not pushed.refused, True
        if not first:
            return
        line = fault or self.too_large(pushed.most or 0)
        logging.getLogger("flwr").warning("node %d: %s", pushed.node, line)
        if pushed.session:
            self.state._cleanup_push_session(pushed.session, cleanup_messages=True)
        message = internal("serde").message_from_proto(pushed.proto)
        error = refuse(message, line)
        pushed.reply = name_message(error)
        run, session = (
            message.metadata.run_id,
            self.state.start_session(message.metadata.run_id),
        )
        tree = internal("inflatable_object").get_object_tree(error)
        self.state.store_message_and_object_tree(error, tree, session)
        for name, part in internal("inflatable_object").get_all_nested_objects(error).items():
            self.state.store_object(run, session, name, part.deflate())
        self._wake_serverapps()

    # --- a ServerApp ---

    def wrap(self, handlers: Any) -> None:
        """Wrap what a ServerApp calls of the Runtime API to push and pull messages and their parts.

        A query for replies waits for them. It occupies one of the forty threads that answer such calls, a second at
        most. Flower deletes a message whose reply it has given. A ServerApp asks for it again if the answer was lost,
        and would have an error: here it has the answer.
        """
        pull, push = handlers.pull_messages, handlers.push_messages
        store, load = handlers.push_object, handlers.pull_object

        def pull_messages(request: Any, state: Any, task: Any) -> Any:
            names, answer = {*request.message_ids}, self.given.get(task.run_id)
            if not (
                answer
                and names & {of.metadata.reply_to_message_id for of in answer.messages_list}
            ):
                # A ServerApp would wait for the rest of the others
                if answered := self._wait_for_replies(names):
                    request = type(request)(message_ids=answered)
                answer = pull(request, state, task)
                for tree in answer.message_object_trees:
                    enclose(tree, self.store.get)
            self.given[task.run_id] = answer
            if len(self.given) > MOST_GIVEN:
                self.given.clear()
            return answer

        def push_messages(request: Any, state: Any, task: Any) -> Any:
            answer = push(request, state, task)
            for tree in request.message_object_trees:
                self.take_enclosed(task.run_id, tree, answer)
            self.note(request, answer)
            return answer

        def push_object(request: Any, state: Any, task: Any) -> Any:
            self._search_cycles(request.ByteSize())
            answer = store(request, state, task)
            self._note_part(request.session_id, request.object_id)
            return answer

        def pull_object(request: Any, state: Any, task: Any) -> Any:
            answer = load(request, state, task)
            fill_slot(request, answer)
            return answer

        handlers.pull_messages, handlers.push_messages = pull_messages, push_messages
        handlers.push_object, handlers.pull_object = push_object, pull_object

    def _search_cycles(self, size: int) -> None:
        """Have Python search for cycles now and then: Starlette's requests, with their bodies, are in some."""
        with self.lock:
            self.left += size
            if many := self.left > MOST_LEFT:
                self.left = 0
        if many:
            gc.collect()

    def _wait_for_replies(self, names: set[str]) -> set[str]:
        """Wait until all these messages have an answer, or a while from the first one; return which have."""
        until, answered = time.monotonic() + HELD_SECONDS, set[str]()
        with self.came:
            while True:
                nodes = self.state.get_node_info(statuses=["online"])
                online = {node.node_id for node in nodes}
                new = {name for name in names - answered if self._is_answered(name, online)}
                if new and not answered:
                    until = min(until, time.monotonic() + GATHER_SECONDS)
                answered |= new
                left = until - time.monotonic()
                if answered == names or left <= 0:
                    return answered
                self.came.wait(min(left, LOOK_SECONDS))

    def _wake_serverapps(self) -> None:
        with self.came:
            self.came.notify_all()

    def _is_answered(self, name: str, online: set[int]) -> bool:
        """Return whether a message's reply is whole, or Flower has an error in its place: its silo is offline."""
        pushed = self.noted.get(name)
        if pushed is None or pushed.node not in online:
            return True
        return bool(pushed.reply) and is_whole(pushed.reply, self.store)
