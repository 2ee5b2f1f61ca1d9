"""A SuperNode's Runtime API for one message's process, over a socket of its own.

Over HTTP, Flower's own way, a process makes some twenty calls for a message, one for each part of it, and each costs
both sides milliseconds. Here the same handlers answer the same requests. A call goes over HTTP as before if it is not
in `SERVED`, if it fails, or if the other side is gone: Flower then handles the error itself.
"""

import contextlib
import threading
import typing
from multiprocessing.connection import Connection
from typing import Any

from ...flower import internal

SERVED = {  # Flower's names of a call and of its handler
    "SendTaskHeartbeat": "send_task_heartbeat",
    "PullTaskInput": "pull_task_input",
    "PullMessages": "pull_messages",
    "PullObject": "pull_object",
    "ConfirmMessageReceived": "confirm_message_received",
    "PushMessages": "push_messages",
    "PushObject": "push_object",
    "PushTaskOutput": "push_task_output",
}
LAST = "PushTaskOutput"
ANSWERED, REFUSED = b"A", b"R"


def answer_calls(calls: Connection, state: Any, token: str, done: threading.Event) -> None:
    """Answer the process of one task until it closes the connection; `done` is set by its last call, and then.

    `state` is the SuperNode's NodeState, which stores whether the task's `token` is still valid.
    """
    with calls, contextlib.suppress(EOFError, OSError):
        while True:
            name, content = calls.recv_bytes().decode(), calls.recv_bytes()
            try:
                answer = handle(name, content, state, token)
            except Exception:
                calls.send_bytes(REFUSED)
            else:
                calls.send_bytes(ANSWERED)
                calls.send_bytes(answer)
            if name == LAST:
                done.set()
    done.set()


def handle(name: str, content: bytes, state: Any, token: str) -> bytes:
    """Answer a request with Flower's handler, both serialised. Raises what that raises, and for an invalid token."""
    own, shared = internal("runtime_handlers"), internal("shared_runtime_handlers")
    handler = getattr(own, SERVED[name], None) or getattr(shared, SERVED[name])
    task = state.get_task_by_token(token)
    if task is None:
        raise PermissionError("the task is over")
    request = typing.get_type_hints(handler)["request"].FromString(content)
    answer: bytes = handler(request, state, task).SerializeToString()
    return answer


def client_over(calls: Connection) -> type:
    """Return Flower's client class of the Runtime API, which calls over the socket if it can."""
    one_call = threading.Lock()

    class SocketClient(internal("RuntimeHttpClient")):  # type: ignore[misc]
        def _unary_unary(self, *, path: str, rpc_method: str, request: Any, response_type: Any) -> Any:
            name = rpc_method.rpartition("/")[2]
            if name in SERVED:
                with one_call, contextlib.suppress(EOFError, OSError):
                    calls.send_bytes(name.encode())
                    calls.send_bytes(request.SerializeToString())
                    if calls.recv_bytes() == ANSWERED:
                        return response_type.FromString(calls.recv_bytes())
            return super()._unary_unary(path=path, rpc_method=rpc_method, request=request, response_type=response_type)

    return SocketClient
