"""What a SuperNode does with a message: it passes the gate (`../messages.py`), and the app answers in its own process.

No code of an app runs here, in any message. So pins, policy, budget and audit log are those of the site, whatever an
earlier message's app did. The app's reply is parsed, never executed, and passes the gate again before it is sent.
"""

import secrets
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ...flower.apps import install_app
from ...flower.loop import Received
from ...flower.messages import CRASHED, refuse
from ...protocol.code import content_sum, sha256_of
from ...protocol.launch import flower_home
from ..gate import pass_gate
from ..terms import Terms, written_terms
from ..trust.code import AppRefusedError, check_pin, log_refusal
from .worker import WorkerEndedError, Workers

AGENT_APP = "flwr-agentapp"  # Flower's name for runs of another kind


def answer_message(workers: Workers, message: Any, take: Callable[[], Received]) -> Any:
    """Return the reply to a message. ``take`` returns it with its content, and what its answer needs."""
    try:
        task = take()
        message = task.message
        return answer_task(workers, task)
    except Exception as error:
        traceback.print_exc()
        return refuse(message, f"nothing leaves: {type(error).__name__}: {error}", CRASHED)


def answer_task(workers: Workers, task: Received) -> Any:
    """Return the reply to a message, and keep its state in the task's context."""
    message, run, fab, context = task
    if run.primary_task_type == AGENT_APP:  # nothing would check pins and policy
        return refuse(message, f"this silo runs no {run.primary_task_type}")
    content: bytes = fab.content
    digest = sha256_of(content)
    own_sum = content_sum(content)
    identity = {
        "task_id": secrets.randbits(63),
        "run_id": run.run_id,
        "node_id": context.node_id,
    }

    def check_app() -> Iterable[str]:
        check_pin(digest, content)
        return digest, own_sum

    def answer(terms: Terms) -> Any:
        try:
            check_app_folder(
                unpack_app(content, digest), run.fab_id, run.fab_version, fab.hash_str
            )
            head = {"fab": [run.fab_id, run.fab_version, fab.hash_str], "identity": identity}
            return workers.ask({**head, "terms": written_terms(terms)}, message, context)
        except Exception as error:
            return failure_reply(message, error)

    return pass_gate(message, context, own_sum or digest, answer, check_app)


def failure_reply(message: Any, error: Exception) -> Any:
    """Return the reply to a message whose app has not answered."""
    if isinstance(error, WorkerEndedError):
        return refuse(message, str(error), CRASHED)
    if not isinstance(error, AppRefusedError):  # whose line is there already
        print(f"ERROR: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return refuse(message, str(error))


# --- the app on the disk ----------------------------------------------------------------------------------


def check_app_folder(unpacked: Path, fab_id: str, fab_version: str, fab_hash: str) -> Path:
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
    """Unpack as Flower does, except that a half-written app is never used.

    Flower unpacks straight into `FLWR_HOME/apps/PUBLISHER.NAME.VERSION.HASH8` and later uses that directory unchecked.
    Here a directory counts as complete, and as this very app, exactly if it contains the full SHA-256.
    """
    apps = flower_home() / "apps"
    for path in apps.glob(f"*.{digest[:8]}"):
        mark = path / ".sha256"
        if mark.is_file() and mark.read_text() == digest:
            return path
    apps.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=apps))
    unpacked = install_app(content, temporary)
    print(f"app {unpacked.name}, SHA-256 {digest}")
    (unpacked / ".sha256").write_text(digest)
    final = apps / unpacked.name
    shutil.rmtree(final, ignore_errors=True)
    unpacked.rename(final)
    shutil.rmtree(temporary, ignore_errors=True)
    return final
