"""A wrapper of Flower's SuperNode loop that answers every message it takes, and drops what belongs to none.

Flower's loop (1.39) takes one message at a time, waits for its reply and sends it. In three cases it waits forever or
drops the reply, and the server waits for the silo until the round's time is up:

* the ClientApp's process ends before it has taken its message, so no process makes a reply;
* the process ends while it hands its reply over: the reply exists, but a part of it never comes;
* a reply does not get through: Flower drops it, though the silo has trained for it.

Here the first two are answered with an error, and a reply is sent up to four times.

In a fourth case Flower keeps what it should drop. If a run is stopped while a message's parts arrive, the message stays
with its task, which would go on in the middle of the next run. Here it is dropped.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..flower import internal
from .transfers import Transfer, be_patient, echo

GRACE_SECONDS = 2.0  # between a task's end and the error reply; a process hands its reply over before it ends its task
LOOK_SECONDS = 0.5  # poll interval for the reply: Flower's own, which `supernode.Clock` shortens
PAUSES = (1.0, 5.0, 20.0)  # before the second, third and fourth try
UNANSWERED = "its ClientApp's process ended without a reply"
OVER = "its run was over before the whole message had come"


def install(start: Callable[[Any], None]) -> None:
    """Wrap Flower's functions of the loop in :func:`pull_message` and :func:`push_messages`.

    ``start``: called with the SuperNode's NodeState, starts the process of an arrived message.
    """
    loop = internal("supernode_loop")
    pull, push = loop._pull_and_store_message, loop._push_messages

    def pull_message(state: Any, object_store: Any, **given: Any) -> int | None:
        run: int | None = pull(state=state, object_store=object_store, **given)
        if run is None:
            forget(state, object_store)
        return run

    def push_messages(state: Any, object_store: Any, send: Callable[..., Any], push_object: Callable[..., Any]) -> None:
        start(state)
        wait_for_reply(state, object_store, loop.time.sleep)
        with Transfer("sending the reply", echo, lasting=be_patient) as transfer:

            def send_noted(reply: Any, tree: Any, seconds: float) -> Any:
                wanted, session = send(reply, tree, seconds)
                transfer.expect(len(wanted), sum(len(object_store.get(name) or b"") for name in wanted))
                return wanted, session

            def push_noted(run_id: int, session: str, name: str, content: bytes) -> None:
                push_object(run_id, session, name, content)
                transfer.add(content)

            send_replies(push, state, object_store, send_noted, push_noted)

    loop._pull_and_store_message, loop._push_messages = pull_message, push_messages


def forget(state: Any, store: Any) -> None:
    """Drop the rest of a message that did not arrive whole, and end its task."""
    left = stored(state)
    runs = sorted({message.metadata.run_id for message in left})
    for task in state.get_tasks(run_ids=runs) if runs else ():
        state.finish_task(task.task_id, internal("SubStatus").FAILED, OVER)
    for message in left:
        state.delete_messages(message_ids=[message.metadata.message_id])
        store.delete(message.metadata.message_id)


def wait_for_reply(
    state: Any, store: Any, sleep: Callable[[float], None], now: Callable[[], float] = time.monotonic
) -> None:
    """Return once a message's whole reply is there: the ClientApp's, or an error if none can come any more.

    ``state`` is the SuperNode's NodeState, ``store`` its ObjectStore.
    """
    over_since: float | None = None
    while unanswered(state, store):
        over_since = (over_since or now()) if is_over(state) else None
        if over_since is not None and now() - over_since >= GRACE_SECONDS:
            break
        sleep(LOOK_SECONDS)
    for reply in replies(state):
        if not is_whole(reply, store):
            state.delete_messages(message_ids=[reply.metadata.message_id])
            store.delete(reply.metadata.message_id)
    for message in unanswered(state, store):
        answer_in_its_place(message, state, store)


def stored(state: Any) -> list[Any]:
    """Return the messages that were taken, and the replies to them."""
    with state.lock_msg_store:
        return [entry.message for entry in state.msg_store.values()]


def replies(state: Any) -> list[Any]:
    """Return the replies that are not sent yet."""
    return [message for message in stored(state) if message.metadata.reply_to_message_id]


def unanswered(state: Any, store: Any) -> list[Any]:
    """Return the messages that were taken and have no whole reply."""
    answered = {reply.metadata.reply_to_message_id for reply in replies(state) if is_whole(reply, store)}
    messages = [message for message in stored(state) if not message.metadata.reply_to_message_id]
    return [message for message in messages if message.metadata.message_id not in answered]


def is_whole(message: Any, store: Any) -> bool:
    """Return whether all parts of a message have arrived; for a reply, from the ClientApp's process."""
    try:
        tree = store.get_object_tree(message.metadata.message_id)
    except Exception:  # a part was removed again, with its push session
        return False
    return all(store.get(name) for name in names_in(tree))


def names_in(tree: Any) -> list[str]:
    return [tree.object_id, *(name for child in tree.children for name in names_in(child))]


def is_over(state: Any) -> bool:
    """Return whether no process works, or will work, on the messages without a reply."""
    runs = sorted({message.metadata.run_id for message in stored(state)})
    finished = internal("Status").FINISHED
    return all(task.status.status == finished for task in state.get_tasks(run_ids=runs))


def answer_in_its_place(message: Any, state: Any, store: Any) -> None:
    """Insert an error reply for a message that has none."""
    from flwr.app import Error, Message

    name = message.metadata.message_id
    if name not in state.time_store:  # never taken; Flower needs the processing time
        state.record_message_processing_start(name)
    state.record_message_processing_end(name)
    tasks = state.get_tasks(run_ids=[message.metadata.run_id])
    why = max(((task.finished_at, task.status.details) for task in tasks), default=("", ""))[1]
    error = Error(internal("ErrorCode").CLIENT_APP_CRASHED, why or UNANSWERED)
    internal("supernode_loop")._insert_message(Message(error, reply_to=message), state, store)


class Kept:
    """Flower's NodeState or ObjectStore during one sending: deletions are ignored."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.replies: Sequence[Any] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def get_messages(self, **asked: Any) -> Sequence[Any]:
        """Return the replies again; the state itself returns each of them only once."""
        self.replies = self.replies or self._target.get_messages(**asked)
        return self.replies

    def delete_messages(self, **_: Any) -> None: ...

    def delete(self, _: str) -> None: ...


def send_replies(
    push: Callable[..., None],
    state: Any,
    store: Any,
    send: Callable[..., Any],
    push_object: Callable[..., Any],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Call Flower's own ``push``, and repeat it after a failure while the run is on."""
    kept_state, kept_store = Kept(state), Kept(store)
    faults: list[Exception] = []

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except Exception as error:  # Flower's report that the run is over does not get here: it is no Exception
                faults.append(error)
                raise

        return noted

    for pause in (*PAUSES, None):
        push(kept_state, kept_store, noting(send), noting(push_object))
        if not faults or pause is None:
            break
        print(f"the reply did not get through ({faults[-1]}); again in {pause:g} s", flush=True)
        faults.clear()
        sleep(pause)
    for reply in kept_state.replies:
        state.delete_messages(message_ids=[reply.metadata.message_id, reply.metadata.reply_to_message_id])
        store.delete(reply.metadata.message_id)
