"""Parts of replies go from a SuperLink to its ServerApp by memory that both can open: they are on one machine.

Flower moves each part in the answer to a call by HTTPS, at three times the processor time of a copy. Here the call has
the place of a slot: a file in memory (`memfd`) of the ServerApp, into which the SuperLink writes a large part. The call
itself, its token, and the SuperLink's checks of it stay Flower's.

The SuperLink opens a slot through ``/proc``, which the kernel allows to processes of the same user, and only under the
slot's random name. It cannot where the ServerApp is in another container, or belongs to another user: then the part is
in the answer.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from client.flower.internals import internal, wraps
from client.flower.transfers import new_buffer
from server.run.calls import add_field, fields_of

NAME = "silofl-slot-"  # and a number
LEAST_BYTES = 1 << 16  # of a part that goes by a slot
OF_THREAD = threading.local()


def pull_by_slots() -> None:
    """Have this ServerApp offer a slot with each call for a part."""

    @wraps(internal("http_grid"), "make_pull_object_fn_protobuf")
    def make_with_slot(
        make: Callable[..., Any], pull_object_protobuf: Callable[[Any], Any], **given: Any
    ) -> Any:
        return make(lambda request: pull(pull_object_protobuf, request), **given)


def pull(call: Callable[[Any], Any], request: Any) -> Any:
    """Return the answer to a call for a part, with the part's content."""
    if not hasattr(OF_THREAD, "slot"):
        number = secrets.randbits(128)
        file = open(os.memfd_create(f"{NAME}{number}"), "r+b", buffering=0)  # noqa: SIM115 - for the thread's life
        OF_THREAD.slot, OF_THREAD.place = file, [os.getpid(), file.fileno(), number]
    add_field(request, json.dumps(OF_THREAD.place).encode())
    answer = call(request)
    content = answer.object_content
    if answer.object_available and not content:
        slot = OF_THREAD.slot.fileno()
        content = new_buffer(os.fstat(slot).st_size)
        os.preadv(slot, [content], 0)
    return SimpleNamespace(
        object_found=answer.object_found,
        object_available=answer.object_available,
        object_content=content,
    )


def write_into_slots(handlers: Any) -> None:
    """Wrap `pull_object` of the Runtime API, which a ServerApp calls."""
    pull_object = handlers.pull_object

    def pull_into_slot(request: Any, state: Any, task: Any) -> Any:
        answer = pull_object(request, state, task)
        content = answer.object_content
        if len(content) >= LEAST_BYTES:
            with suppress(OSError, ValueError, TypeError):
                for place in fields_of(request):
                    write(place, content)
                    answer.ClearField("object_content")
        return answer

    handlers.pull_object = pull_into_slot


def write(place: bytes, content: bytes) -> None:
    """Write a part into the slot at this place. Raises OSError, ValueError or TypeError if it is not there."""
    process, descriptor, number = json.loads(place)
    path = f"/proc/{int(process)}/fd/{int(descriptor)}"
    # Another process may have this number where the ServerApp is in another container
    if os.readlink(path) != f"/memfd:{NAME}{int(number)} (deleted)":
        raise OSError("no slot")
    with open(path, "r+b", buffering=0) as slot:
        if slot.write(content) < len(content):
            raise OSError("no room")
        slot.truncate()
