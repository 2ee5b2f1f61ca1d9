"""The watchdog's reply for a worker that died: an error for the message, and the task finished as failed."""

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

from ...audit_gate import MessageInfo, write_down
from ...flower import internal


def answer(note: dict[str, Any], reason: str) -> None:
    """Reply to the noted message with an error, unless it was never pulled or already has a reply."""
    if "message" not in note or note.get("replied"):
        return
    note["replied"] = True
    from flwr.app import Context, Error, Message, Metadata, RecordDict

    fields: dict[str, Any] = note["message"]
    if time.time() > fields["created_at"] + fields["ttl"] - 1.0:
        # Flower makes no reply to a message whose time is over, but the SuperNode waits for one. This reply frees the
        # SuperNode, and the server drops it.
        fields = fields | {"created_at": time.time(), "ttl": 60.0}
    message = internal("make_message")(metadata=Metadata(**fields), content=RecordDict())
    reply = Message(Error(code=internal("ErrorCode").CLIENT_APP_CRASHED, reason=reason), reply_to=message)
    with contextlib.suppress(Exception):  # only our own text, and it frees the silo: it is sent even if logging fails
        write_down(reply, MessageInfo(**note["info"]))
    context = Context(message.metadata.run_id, note["node_id"], {}, RecordDict(), {})
    report(lambda client: internal("push_message")(client, reply, context))


def finish(note: dict[str, Any], reason: str) -> None:
    """Finish the task as failed, unless the worker did: a task that expires fails the run's next message.

    If the worker died before it noted its message, the SuperNode then answers for it (`replying.py`).
    """
    if note.get("finished"):
        return
    report(lambda client: internal("push_task_output")(client, None, internal("SubStatus").FAILED, reason))


def report(call: Callable[[Any], object]) -> None:
    """Call `call` with the worker's client of the Runtime API and its token; a failure is only a warning.

    Flower turns a refused token into SIGINT.
    """
    try:
        args = internal("clientapp_parser")().parse_args(sys.argv[1:])
        retry = internal("http_retry")()
        retry.max_tries = 1  # a SuperNode that is gone needs no answer
        client = internal("RuntimeHttpClient").from_server_address(
            server_address=args.runtime_api_address,
            insecure=args.insecure,
            root_certificates=internal("root_certificates")(args.root_certificates, args.insecure),
            interceptors=[
                internal("RuntimeVersionHttpInterceptor")(component_name="flwr-clientapp"),
                internal("RuntimeTokenHttpInterceptor")(internal("app_token")(args)),
            ],
            retry_invoker=retry,
        )
        call(client)
        client.close()
    except BaseException as error:
        print(f"WARNING: could not report that the ClientApp failed: {error!r}", file=sys.stderr)
