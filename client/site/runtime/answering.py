"""What a SuperNode does with a message: it passes the gate (`../messages.py`), and the app answers in its own process.

No code of an app runs here, in any message. So pins, policy, budget and audit log are those of the site, whatever an
earlier message's app did. The app's reply is parsed, never executed, and passes the gate again before it is sent.
"""

import compileall
import contextlib
import hashlib
import io
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..audit_gate import refuse
from ..flower import internal
from ..messages import pass_gate
from ..terms import Terms, written_terms
from ..trust.pins import AppRefusedError, check_pin, content_sum, log_refusal
from .transfers import names_in
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
    digest = hashlib.sha256(content).hexdigest()
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
