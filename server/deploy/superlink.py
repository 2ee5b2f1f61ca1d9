"""`flower-superlink` with long polling: a silo's request for a message waits until there is one.

Flower's SuperLink (1.39) answers at once, mostly without a message. A silo polls four times a second during a run, and
each request is signed, verified, and searches all messages of the run. Here the answer waits until a message is
complete, ten seconds at most. So a waiting silo polls rarely and receives its message at once. Any SuperNode can use
this; silofl's polls again without a pause (`Clock` in ``client/site/runtime/supernode.py``).

An answer may be lost in transit together with its message, and the silo and the round would wait. But a SuperNode polls
only after it has finished its previous message. So messages that were delivered before and are not confirmed are
delivered again, a few times.

Each message carries the size limit of its reply (``server/run/limits.py``). Received bytes are counted; a larger reply
is discarded, and the ServerApp receives an error in its place. No single call may be larger than :data:`MOST_CALL`:
gRPC refuses it by its length prefix.

Run as ``python -P -m server.deploy.superlink`` with the arguments of `flower-superlink`.
"""

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from client.flower.internals import internal
from client.flower.transfers import enclose, is_whole, parts_in
from partitions.common.memory import return_memory
from server.run.calls import take_confirmations
from server.run.handover import write_into_slots
from server.run.limits import most_bytes, too_large

WAIT_SECONDS = 10.0  # maximum wait for a message before an empty answer
# Between two checks, for a silo and for a ServerApp, which read this process's memory only
LOOK_SECONDS, LOOK_AT_REPLIES_SECONDS = 0.05, 0.01
# Silos; each waiting one occupies one of the thousand threads that answer calls
MOST_WAITING = 500
HELD_SECONDS = 1.0  # maximum wait for a reply before an empty answer to a ServerApp
GATHER_SECONDS = 0.05  # from a query's first reply, for others to come
MOST_GIVEN = 20  # runs whose last answer is kept
MOST_CALL = 1 << 26  # bytes; Flower moves arrays in parts of 5 MiB
MOST_COUNTED = 1000  # messages whose reply bytes are counted; the oldest are dropped first
MOST_TIMES = 5  # deliveries of a message again; a limit, as a message of a stopped run can never be confirmed

Pull = Callable[[Any, Any, Any], Any]


def in_place_of(command: Sequence[str]) -> list[str]:
    """Return the command line of this SuperLink for one that begins with `flower-superlink`."""
    return [sys.executable, "-P", "-m", "server.deploy.superlink", *command[1:]]


def main() -> None:
    """Start Flower's SuperLink with long polling in `PullMessages` and with size limits."""
    servicer = internal("FleetServicer")
    servicer.PullMessages = wait_for_messages(servicer.PullMessages)
    ReplyBounds().install(servicer)
    handlers = internal("runtime_handlers")
    enclose_parts(handlers)
    take_confirmations(handlers)
    write_into_slots(handlers)
    internal("superlink_server").GRPC_MAX_MESSAGE_LENGTH = MOST_CALL
    sys.argv[0] = "flower-superlink"
    internal("flower_superlink")()


def wait_for_messages(pull: Pull, most: int = MOST_WAITING) -> Pull:
    """Return ``pull``, a servicer's method, delayed until there is a message or :data:`WAIT_SECONDS` are over."""
    room = threading.BoundedSemaphore(most)
    times: Counter[str] = Counter()

    def pull_messages(servicer: Any, request: Any, context: Any) -> Any:
        return_memory()
        state = servicer.state_factory.state()
        store = servicer.objectstore_factory.store()
        node = request.node.node_id
        # Only with messages in memory: silofl uses no database, and each check would be a query there.
        if hasattr(state, "message_ins_store") and room.acquire(blocking=False):
            try:
                give_again(state, store, node, times)
                until = time.monotonic() + WAIT_SECONDS
                while (
                    time.monotonic() < until
                    and context.is_active()
                    and not has_message(state, store, node)
                ):
                    time.sleep(LOOK_SECONDS)
            finally:
                room.release()
        if not context.is_active():  # the caller has disconnected
            return internal("PullMessagesResponse")()
        answer = pull(servicer, request, context)
        for tree in answer.message_object_trees:
            enclose(tree, store.get)
        return answer

    return pull_messages


def enclose_parts(handlers: Any) -> None:
    """Wrap `pull_messages` and `push_messages` of the Runtime API, which a ServerApp calls.

    A query for replies waits for them. It occupies one of the forty threads that answer such calls, a second at most.
    Flower deletes a message whose reply it has given. A ServerApp asks for it again if the answer was lost, and would
    have an error: here it has the answer.
    """
    pull, push = handlers.pull_messages, handlers.push_messages
    given = dict[int, Any]()  # by run: the last answer

    def pull_messages(request: Any, state: Any, task: Any) -> Any:
        asked, answer = {*request.message_ids}, given.get(task.run_id)
        if not (
            answer and asked & {of.metadata.reply_to_message_id for of in answer.messages_list}
        ):
            # A ServerApp would wait for the rest of the others
            if answered := wait_for_replies(state, asked):
                request = type(request)(message_ids=answered)
            answer = pull(request, state, task)
            for tree in answer.message_object_trees:
                enclose(tree, state.object_store.get)
        given[task.run_id] = answer
        if len(given) > MOST_GIVEN:
            given.clear()
        return answer

    def push_messages(request: Any, state: Any, task: Any) -> Any:
        answer = push(request, state, task)
        for tree in request.message_object_trees:
            take_enclosed(state, task.run_id, tree, answer)
        return answer

    handlers.pull_messages, handlers.push_messages = pull_messages, push_messages


def wait_for_replies(state: Any, asked: set[str]) -> set[str]:
    """Wait until all these messages have an answer, or a while from the first one; return which have."""
    until, answered = time.monotonic() + HELD_SECONDS, set[str]()
    while time.monotonic() < until and hasattr(state, "message_res_store"):
        online = {node.node_id for node in state.get_node_info(statuses=["online"])}
        new = {name for name in asked - answered if is_answered(state, name, online)}
        if new and not answered:
            until = min(until, time.monotonic() + GATHER_SECONDS)
        answered |= new
        if answered == asked:
            break
        time.sleep(LOOK_AT_REPLIES_SECONDS)
    return answered


def is_answered(state: Any, name: str, online: set[int]) -> bool:
    """Return whether a message's reply is whole, or Flower has an error in its place: its silo is offline."""
    asked = state.message_ins_store.get(name)
    if asked is None or asked.metadata.dst_node_id not in online:
        return True
    reply = state.message_res_store.get(state.message_ins_id_to_message_res_id.get(name))
    return reply is not None and is_whole(reply, state.object_store)


def messages_to(state: Any, node: int) -> list[Any]:
    """Return all messages to a node that wait for delivery or for a reply."""
    with state.lock:
        found = list(state.message_ins_store.values())
    return [message for message in found if message.metadata.dst_node_id == node]


def has_message(state: Any, store: Any, node: int) -> bool:
    """Return whether an undelivered message has all its parts; for a missing part the SuperNode waits a second."""
    new = (message for message in messages_to(state, node) if not message.metadata.delivered_at)
    return any(is_whole(message, store) for message in new)


def give_again(state: Any, store: Any, node: int, times: Counter[str]) -> None:
    """Mark delivered messages whose parts are still stored as undelivered: a silo confirms a complete message.

    ``times``: how often each message has been delivered again.
    """
    for message in messages_to(state, node):
        name = message.metadata.message_id
        if (
            message.metadata.delivered_at
            and times[name] < MOST_TIMES
            and is_stored(store, name)
        ):
            times[name] += 1
            logging.getLogger("flwr").info(
                "node %d did not get message %s; it is given to it again", node, name
            )
            message.metadata.delivered_at = ""


def is_stored(store: Any, message: str) -> bool:
    """Return whether the store still has parts of a message."""
    try:
        store.get_object_tree(message)
    except internal("NoObjectInStoreError"):
        return False
    return True


@dataclass
class Coming:
    """Received size and limit of a silo's reply to one message."""

    asked: str  # id of the message
    most: int  # bytes that its reply may have
    came: int = 0  # bytes received so far


class ReplyBounds:
    """Size limits of replies: the bytes of each reply are counted, and a larger reply is refused.

    All bytes that a silo sends in answer to one message are counted together. The ServerApp takes a reply as soon as it
    has begun, and the SuperLink then deletes message and reply while parts still arrive. So the message of a push
    session is recorded here when the session begins.
    """

    def __init__(self) -> None:
        self.messages: dict[str, Coming] = {}
        self.sessions: dict[str, Coming] = {}
        self.lock = threading.Lock()

    def install(self, servicer: Any) -> None:
        """Wrap a servicer's `PushMessages` and `PushObject`."""
        push_messages = servicer.PushMessages
        push_object = servicer.PushObject

        def bounded_messages(own: Any, request: Any, context: Any) -> Any:
            state = own.state_factory.state()
            coming = self.find_coming(
                state, request.messages_list[0].metadata.reply_to_message_id
            )
            if coming is not None and self.is_too_large(coming, request.ByteSize()):
                refuse(state, coming)
                return internal("fleet_pb2").PushMessagesResponse()
            answer = push_messages(own, request, context)
            if coming is not None and answer.session_id:
                self.note(self.sessions, answer.session_id, coming)
            if request.message_object_trees and answer.session_id:
                run = request.messages_list[0].metadata.run_id
                take_enclosed(state, run, request.message_object_trees[0], answer)
            return answer

        def bounded_object(own: Any, request: Any, context: Any) -> Any:
            coming = self.sessions.get(request.session_id)
            too_large = coming is not None and self.is_too_large(
                coming, len(request.object_content)
            )
            if coming is not None and too_large:
                refuse(own.state_factory.state(), coming)
            # Without a session id Flower uses any session that waits for this part, even another silo's.
            if too_large or not request.session_id:
                return internal("message_pb2").PushObjectResponse(stored=False)
            return push_object(own, request, context)

        servicer.PushMessages = bounded_messages
        servicer.PushObject = bounded_object

    def find_coming(self, state: Any, asked: str) -> Coming | None:
        """Return the size record of the reply to a message; None if the message is unknown or has no limit."""
        if asked in self.messages:
            return self.messages[asked]
        message = (
            state.message_ins_store.get(asked) if hasattr(state, "message_ins_store") else None
        )
        most = most_bytes(message.metadata.group_id) if message is not None else None
        return None if most is None else self.note(self.messages, asked, Coming(asked, most))

    def note(self, kept: dict[str, Coming], name: str, coming: Coming) -> Coming:
        """Store a size record under this name, drop the oldest ones, and return the stored record."""
        with self.lock:
            kept[name] = kept.get(name, coming)
            while len(kept) > MOST_COUNTED:
                del kept[next(iter(kept))]
            return kept.get(name, coming)

    def is_too_large(self, coming: Coming, size: int) -> bool:
        """Count received bytes; return whether the reply exceeds its limit."""
        with self.lock:
            coming.came += size
            return coming.came > coming.most


def take_enclosed(state: Any, run: int, tree: Any, answer: Any) -> None:
    """Store the parts that came in a message's tree; the answer asks for the others."""
    parts = parts_in(tree)
    answer.objects_to_push[:] = [
        name
        for name in answer.objects_to_push
        if not (name in parts and state.store_object(run, answer.session_id, name, parts[name]))
    ]


def refuse(state: Any, coming: Coming) -> None:
    """Discard the received parts of a reply and store an error in its place, unless there is one already.

    A ServerApp that has begun to pull the reply waits for its parts, and goes on without the silo if none arrive.
    """
    from flwr.app import Error, Message

    with state.lock:
        message = state.message_ins_store.get(coming.asked)
        line = too_large(coming.most)
        before = state.message_ins_id_to_message_res_id.get(coming.asked)
        if message is None or (
            before is not None and state.message_res_store[before].has_error()
        ):
            return
        for session in [
            name
            for name, one in state._object_push_sessions.items()
            if before in one.root_object_ids
        ]:
            state._cleanup_push_session(session, cleanup_messages=True)
        logging.getLogger("flwr").warning("node %d: %s", message.metadata.dst_node_id, line)
        error = Message(
            Error(internal("ErrorCode").CLIENT_APP_RAISED_EXCEPTION, line), reply_to=message
        )
        error.metadata.__dict__["_message_id"] = error.object_id
        if state.store_message_res(error) is not None:
            state._store_generated_message(error)


if __name__ == "__main__":
    main()
