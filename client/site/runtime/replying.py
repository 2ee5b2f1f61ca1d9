"""The SuperNode's half of a message: it is taken, answered (`answering.py`), and its reply sent until it gets through.

Flower's loop (1.39) takes one message at a time, and waits until a ClientApp's process has handed its reply over by
HTTP. Here the SuperNode answers the message itself. Flower drops a reply that does not get through, though the silo has
trained for it: here it is sent up to four times.

If a run is stopped while a message's parts arrive, Flower keeps the message with its task, which would go on in the
middle of the next run. Here both are dropped.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..flower import internal
from .transfers import Transfer, be_patient, echo, enclose, names_in, open_tree, return_memory

PAUSES = (1.0, 5.0, 20.0)  # before the second, third and fourth try
OVER = "its run was over before the whole message had come"


def install(answer: Callable[[Any, Any], None]) -> None:
    """Wrap Flower's functions of the loop in :func:`pull_message` and :func:`push_messages`.

    ``answer``: called with NodeState and ObjectStore, inserts the reply to the message that has arrived.
    """
    loop = internal("supernode_loop")
    pull, push = loop._pull_and_store_message, loop._push_messages

    def pull_message(
        state: Any, object_store: Any, receive: Callable[[], Any], **given: Any
    ) -> int | None:
        def receive_noted() -> Any:
            if received := receive():
                open_tree(received[1])
            return received

        given |= {"receive": receive_noted}
        # A part's name is its hash: the server names its own as it likes, and this process made the reply's
        object_store.verify = False
        run: int | None = pull(state=state, object_store=object_store, **given)
        if run is None:
            forget(state, object_store)
        return run

    def push_messages(
        state: Any, object_store: Any, send: Callable[..., Any], push_object: Callable[..., Any]
    ) -> None:
        answer(state, object_store)
        with Transfer("sending the reply", echo, lasting=be_patient) as transfer:

            def send_noted(reply: Any, tree: Any, seconds: float) -> Any:
                enclose(tree, object_store.get)
                wanted, session = send(reply, tree, seconds)
                transfer.expect(
                    len(wanted), sum(len(object_store.get(name) or b"") for name in wanted)
                )
                return wanted, session

            def push_noted(run_id: int, session: str, name: str, content: bytes) -> None:
                push_object(run_id, session, name, content)
                transfer.add(content)

            send_replies(push, state, object_store, send_noted, push_noted)
        return_memory()

    loop._pull_and_store_message, loop._push_messages = pull_message, push_messages


def forget(state: Any, store: Any) -> None:
    """Drop the rest of a message that did not arrive whole, and end its task."""
    with state.lock_msg_store:
        left = [entry.message for entry in state.msg_store.values()]
    runs = sorted({message.metadata.run_id for message in left})
    for task in state.get_tasks(run_ids=runs) if runs else ():
        state.finish_task(task.task_id, internal("SubStatus").FAILED, OVER)
    for message in left:
        state.delete_messages(message_ids=[message.metadata.message_id])
        store.delete(message.metadata.message_id)


def is_whole(message: Any, store: Any) -> bool:
    """Return whether all parts of a message have arrived."""
    try:
        tree = store.get_object_tree(message.metadata.message_id)
    except Exception:  # a part was removed again, with its push session
        return False
    return all(store.get(name) for name in names_in(tree))


class WithoutDeletion:
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
    kept_state, kept_store = WithoutDeletion(state), WithoutDeletion(store)
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
        state.delete_messages(
            message_ids=[reply.metadata.message_id, reply.metadata.reply_to_message_id]
        )
        store.delete(reply.metadata.message_id)
