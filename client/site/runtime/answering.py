"""What a SuperNode does with a message: it is taken, passes the gate (`../messages.py`), and the app answers in its own
process. The reply is sent until it gets through.

No code of an app runs here, in any message. So pins, policy, budget and audit log are those of the site, whatever an
earlier message's app did. The app's reply is parsed, never executed, and passes the gate again before it is sent.

Flower's loop (1.39) waits until a ClientApp's process has handed its reply over by HTTP. Here the SuperNode answers the
message itself. Flower drops a reply that does not get through, though the silo has trained for it: here it is sent up
to four times. If a run is stopped while a message's parts arrive, Flower keeps the message with its task, which would
go on in the middle of the next run. Here both are dropped.
"""

import compileall
import contextlib
import io
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..audit_gate import refuse
from ..flower import internal
from ..messages import pass_gate
from ..private import return_memory
from ..terms import Terms, written_terms
from ..trust.code import AppRefusedError, check_pin, content_sum, log_refusal, sha256_of
from .transfers import Transfer, be_patient, echo, enclose, names_in, open_tree
from .worker import WorkerEndedError, Workers

CLIENT_APP = "flwr-clientapp"  # Flower's name for a message's task


def answer_messages(workers: Workers, state: Any, store: Any) -> None:
    """Replace the messages that have arrived by their replies. ``state``, ``store``: NodeState and ObjectStore."""
    for task in state.get_tasks(statuses=[internal("Status").PENDING]):
        for waiting in state.get_messages(run_ids=[task.run_id], is_reply=False):
            name = waiting.metadata.message_id
            state.record_message_processing_start(name)
            message = waiting
            try:
                message = take_message(waiting, store)
                reply = answer_message(workers, message, task, state)
            except Exception as error:
                traceback.print_exc()
                reply = refuse(
                    message,
                    f"nothing leaves: {type(error).__name__}: {error}",
                    "CLIENT_APP_CRASHED",
                )
            state.record_message_processing_end(name)
            internal("supernode_loop")._insert_message(reply, state, store)
        state.finish_task(task.task_id, internal("SubStatus").STOPPED, "")


def take_message(waiting: Any, store: Any) -> Any:
    """Return a message with its content, whose parts are removed from the store."""
    name = waiting.metadata.message_id
    parts = {part: store.get(part) for part in names_in(store.get_object_tree(name))}
    store.delete(name)
    message = internal("inflatable_utils").inflate_object_from_contents(name, parts)
    message.metadata.__dict__["_message_id"] = name  # which its parts do not have
    return message


def answer_message(workers: Workers, message: Any, task: Any, state: Any) -> Any:
    """Return the reply to a message, and keep the context that belongs to it."""
    if task.type != CLIENT_APP:  # Flower's SuperExec would run whatever a server sends
        return refuse(message, f"this silo runs no {task.type}")
    run = state.get_run(task.run_id)
    fab = state.get_fab(run.fab_hash)
    context = state.get_run_series_context(run.series_id)
    content: bytes = fab.content
    digest = sha256_of(content)
    own_sum = content_sum(content)
    identity = {"task_id": task.task_id, "run_id": run.run_id, "node_id": context.node_id}

    def check_app() -> Iterable[str]:
        check_pin(digest, content)
        return digest, own_sum

    def answer(terms: Terms) -> Any:
        try:
            check_folder(unpack_app(content, digest), run.fab_id, run.fab_version, fab.hash_str)
            head = {"fab": [run.fab_id, run.fab_version, fab.hash_str], "identity": identity}
            return workers.ask({**head, "terms": written_terms(terms)}, message, context)
        except Exception as error:
            return failure_reply(message, error)

    reply = pass_gate(message, context, own_sum or digest, answer, check_app)
    state.set_run_series_context(run.series_id, context)
    return reply


def failure_reply(message: Any, error: Exception) -> Any:
    """Return the reply to a message whose app has not answered."""
    if isinstance(error, WorkerEndedError):
        return refuse(message, str(error), "CLIENT_APP_CRASHED")
    if not isinstance(error, AppRefusedError):  # whose line is there already
        print(f"ERROR: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return refuse(message, str(error))


# --- the app on the disk ----------------------------------------------------------------------------------


def check_folder(unpacked: Path, fab_id: str, fab_version: str, fab_hash: str) -> Path:
    """Return the folder of the unpacked app. Raises AppRefusedError if Flower would load another one.

    Flower makes the folder's name of these fields, which the server sends beside the app. They may hold `/` and `..`.
    """
    if f"{fab_id.replace('/', '.', 1)}.{fab_version}.{fab_hash[:8]}" != unpacked.name:
        fields = f"{fab_id[:80]!r}, {fab_version[:80]!r}, {fab_hash[:80]!r}"
        raise log_refusal(
            f"app {unpacked.name} refused: the server names another folder to load it from: {fields}"
        )
    return unpacked


def unpack_app(content: bytes, digest: str) -> Path:
    """Unpack like Flower's `install_from_fab`, except that a half-written app is never used.

    Flower unpacks straight into `FLWR_HOME/apps/PUBLISHER.NAME.VERSION.HASH8` and later uses that directory unchecked.
    Here a directory counts as complete, and as this very app, exactly if it contains the full SHA-256.
    """
    apps: Path = internal("get_flwr_home")() / "apps"
    for path in apps.glob(f"*.{digest[:8]}"):
        mark = path / ".sha256"
        if mark.is_file() and mark.read_text() == digest:
            return path
    apps.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=apps))
    with contextlib.redirect_stdout(io.StringIO()):  # its output names the temporary directory
        made: Path = internal("install_from_fab")(
            content, install_dir=temporary, skip_prompt=True
        )
    print(f"app {made.name}, SHA-256 {digest}")
    # Once: processes with PYTHONDONTWRITEBYTECODE would repeat it
    compileall.compile_dir(made, quiet=2)
    (made / ".sha256").write_text(digest)
    final = apps / made.name
    shutil.rmtree(final, ignore_errors=True)
    made.rename(final)
    shutil.rmtree(temporary, ignore_errors=True)
    return final


# --- replies, until they get through ---


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
        if transfer.size:
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
) -> None:
    """Call Flower's own ``push``, and repeat it after a failure while the run is on."""
    kept_state, kept_store = WithoutDeletion(state), WithoutDeletion(store)
    faults: list[Exception] = []

    def note_faults(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_noted(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except Exception as error:  # Flower's report that the run is over does not get here: it is no Exception
                faults.append(error)
                raise

        return call_noted

    for pause in (*PAUSES, None):
        push(kept_state, kept_store, note_faults(send), note_faults(push_object))
        if not faults or pause is None:
            break
        print(f"the reply did not get through ({faults[-1]}); again in {pause:g} s", flush=True)
        faults.clear()
        time.sleep(pause)
    for reply in kept_state.replies:
        state.delete_messages(
            message_ids=[reply.metadata.message_id, reply.metadata.reply_to_message_id]
        )
        store.delete(reply.metadata.message_id)
