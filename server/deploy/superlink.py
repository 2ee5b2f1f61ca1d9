"""`flower-superlink`, except that a silo that asks for a message is kept waiting until there is one.

Flower's SuperLink (1.39) answers at once, and mostly with nothing: a silo asks four times a second while a run is on,
and each question is signed, checked, and searches all messages of the run. Here the answer waits until a message has
come whole, ten seconds at most, so that a silo that waits for the others asks seldom and has its message at once. Any
SuperNode may ask; ours asks again without a pause (`Clock` in ``client/site/supernode.py``).

An answer may be lost on its way, with its message, which would keep the silo, and the round, waiting. But a SuperNode
asks only when it is done with what it had. So what it was given before and has not confirmed is given to it again, a
few times.

Run by ``python -P -m server.deploy.superlink`` with the arguments of `flower-superlink`.
"""

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from client.site.flower import internal
from client.site.replying import is_whole

WAIT_SECONDS = 10.0  # for a message, before the answer is that there is none
LOOK_SECONDS = 0.05  # between two looks: into this process's own memory
MOST_WAITING = 500  # silos; each has one of the thousand threads that answer calls
MOST_TIMES = 5  # that a message is given again: of a run that was stopped meanwhile it cannot be taken any more

Pull = Callable[[Any, Any, Any], Any]


def in_place_of(command: Sequence[str]) -> list[str]:
    """The command line of this SuperLink, of one that begins with `flower-superlink`."""
    return [sys.executable, "-P", "-m", "server.deploy.superlink", *command[1:]]


def main() -> None:
    """Flower's own entry, whose answers to `PullMessages` wait."""
    servicer = internal("FleetServicer")
    servicer.PullMessages = waiting(servicer.PullMessages)
    sys.argv[0] = "flower-superlink"
    internal("flower_superlink")()


def waiting(pull: Pull, most: int = MOST_WAITING) -> Pull:
    """``pull``, a servicer's method, once there is something to pull, or :data:`WAIT_SECONDS` are over."""
    room = threading.BoundedSemaphore(most)
    times: Counter[str] = Counter()

    def pull_messages(servicer: Any, request: Any, context: Any) -> Any:
        state, store = servicer.state_factory.state(), servicer.objectstore_factory.store()
        node = request.node.node_id
        # In a database, which silofl has none of, a look is a search.
        if hasattr(state, "message_ins_store") and room.acquire(blocking=False):
            try:
                give_again(state, store, node, times)
                until = time.monotonic() + WAIT_SECONDS
                while time.monotonic() < until and context.is_active() and not has_message(state, store, node):
                    time.sleep(LOOK_SECONDS)
            finally:
                room.release()
        if not context.is_active():  # nobody would have it
            return internal("PullMessagesResponse")()
        return pull(servicer, request, context)

    return pull_messages


def messages_to(state: Any, node: int) -> list[Any]:
    """All messages to a node that wait for it or for its reply."""
    with state.lock:
        found = list(state.message_ins_store.values())
    return [message for message in found if message.metadata.dst_node_id == node]


def has_message(state: Any, store: Any, node: int) -> bool:
    """Whether a message to the node has come with all its parts; for one of them the SuperNode would wait a second."""
    new = (message for message in messages_to(state, node) if not message.metadata.delivered_at)
    return any(is_whole(message, store) for message in new)


def give_again(state: Any, store: Any, node: int, times: Counter[str]) -> None:
    """Let the node have the messages again whose parts are still here: a silo that has them all confirms it.

    ``times``: how often each has been given again.
    """
    for message in messages_to(state, node):
        name = message.metadata.message_id
        if message.metadata.delivered_at and times[name] < MOST_TIMES and is_here(store, name):
            times[name] += 1
            logging.getLogger("flwr").info("node %d did not get message %s; it is given to it again", node, name)
            message.metadata.delivered_at = ""


def is_here(store: Any, message: str) -> bool:
    """Whether the store has parts of a message still."""
    try:
        store.get_object_tree(message)
    except internal("NoObjectInStoreError"):
        return False
    return True


if __name__ == "__main__":
    main()
