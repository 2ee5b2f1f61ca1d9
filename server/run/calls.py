"""Fewer calls of a ServerApp, each of which takes Flower's SuperLink about 7 ms: one confirms many replies.

Flower's ServerApp confirms each reply by a call of its own, after which the SuperLink deletes the reply's parts. Here
a call names other replies in a field that Flower's request does not have, and the answer has such a field, too. Without
it, as from Flower's own SuperLink, the others are confirmed one by one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet  # type: ignore[import-untyped]

from client.flower.internals import internal, wraps

# How long a received reply may wait for others: the SuperLink keeps its parts until then
TOGETHER_SECONDS = 0.25
# How long an answer about the nodes counts: a heartbeat tells of a silo every 12 s
NODES_SECONDS = 0.25


def confirm_together() -> None:
    """Have this ServerApp confirm the replies of a query together."""

    @wraps(internal("http_grid").HttpGrid, "pull_messages")
    def pull_messages(pull: Callable[..., Any], own: Any, message_ids: Any) -> Any:
        received, client = list[tuple[float, Any]](), own._runtime_client
        call = partial(type(client).ConfirmMessageReceived, client)

        def note(request: Any) -> None:
            received.append((time.monotonic(), request))
            if received[-1][0] - received[0][0] > TOGETHER_SECONDS:
                confirm(received, call)

        client.ConfirmMessageReceived = note
        try:
            return pull(own, message_ids)
        finally:
            confirm(received, call)


def ask_for_nodes_once() -> None:
    """Have this ServerApp use an answer about the nodes again for a moment: several look before an exchange."""

    @wraps(internal("http_grid").HttpGrid, "get_nodes")
    def get_nodes(get: Callable[[Any], Any], own: Any) -> Any:
        asked, nodes = vars(own).get("nodes", (-NODES_SECONDS, None))
        if time.monotonic() - asked >= NODES_SECONDS:
            own.nodes = time.monotonic(), (nodes := get(own))
        return nodes


def confirm(received: list[tuple[float, Any]], call: Callable[[Any], Any]) -> None:
    """Confirm these replies now, and empty the list. ``call``: sends Flower's request for one.

    They are here, so a call that fails costs memory of the SuperLink until the run ends, and no reply.
    """
    if not received:
        return
    first, *others = [request for _, request in received]
    received.clear()
    add_field(first, json.dumps([one.message_object_id for one in others]).encode())
    with suppress(internal("http_grid").httpx.HTTPError):
        if not fields_of(call(first)):
            for one in others:
                call(one)


def take_confirmations(handlers: Any) -> None:
    """Wrap `confirm_message_received` of the Runtime API, which a ServerApp calls."""
    confirm_one = handlers.confirm_message_received

    def confirm_message_received(request: Any, state: Any, task: Any) -> Any:
        answer = confirm_one(request, state, task)
        for names in fields_of(request):
            for name in json.loads(names):
                request.message_object_id = name
                confirm_one(request, state, task)
            add_field(answer, names)
        return answer

    handlers.confirm_message_received = confirm_message_received


def add_field(message: Any, content: bytes) -> None:
    """Add a field that Flower's message does not have."""
    field = internal("message_pb2").PushObjectRequest(object_content=content)
    message.MergeFromString(field.SerializeToString())


def fields_of(message: Any) -> list[bytes]:
    """Return the content of the fields that Flower's message does not have."""
    return [field.data for field in UnknownFieldSet(message)]
