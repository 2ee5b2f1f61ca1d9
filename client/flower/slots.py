"""Parts of replies go from a SuperLink to its ServerApp by memory that both can open: they are on one machine.

Flower moves each part in the answer to a call by HTTPS. That takes several times the processor time of a copy, and
leaves copies at both ends until Python searches for cycles. Here the call has the place of a slot: a file in memory
(`memfd`) of the ServerApp, into which the SuperLink writes a large part. The call itself, its token, and the
SuperLink's checks of it stay Flower's. Each call has a slot of its own: one that is repeated may be answered late.

The SuperLink opens a slot through ``/proc``, which the kernel allows to processes of the same user, and only under the
slot's random name. It cannot where the ServerApp is in another container, or belongs to another user: then the part is
in the answer, as with a SuperLink that knows no slots.
"""

import json
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from .transfers import new_buffer

NAME = "silofl-slot-"  # and a number
LEAST_BYTES = 1 << 16  # of a part that goes by a slot
FIELD = 15  # of a call, which Flower's messages do not have


def pull_by_slot(call: Callable[[Any], Any], request: Any) -> Any:
    """Return the answer to a call for a part, with the part's content."""
    number = secrets.randbits(128)
    with open(os.memfd_create(f"{NAME}{number}"), "rb", buffering=0) as slot:
        place = json.dumps([os.getpid(), slot.fileno(), number]).encode()
        request.MergeFromString(bytes((FIELD << 3 | 2, len(place))) + place)
        answer = call(request)
        if answer.object_content or not answer.object_available:
            return answer
        # A map of the slot would keep it open, and a process may have a thousand open files
        content = new_buffer(os.fstat(slot.fileno()).st_size)
        slot.readinto(content)
    return SimpleNamespace(object_found=True, object_available=True, object_content=content)


def fill_slot(request: Any, answer: Any) -> None:
    """Move a large part from an answer to the slot that its call has, if this process can open it."""
    from google.protobuf.unknown_fields import UnknownFieldSet  # type: ignore[import-untyped]

    content = answer.object_content
    if len(content) < LEAST_BYTES:
        return
    with suppress(OSError, ValueError, TypeError):
        for field in UnknownFieldSet(request):
            write_slot(field.data, content)
            answer.ClearField("object_content")


def write_slot(place: bytes, content: bytes) -> None:
    """Write a part into the slot at this place. Raises OSError, ValueError or TypeError if it is not there."""
    process, descriptor, number = json.loads(place)
    path = f"/proc/{int(process)}/fd/{int(descriptor)}"
    # Another process may have this number where the ServerApp is in another container
    if os.readlink(path) != f"/memfd:{NAME}{int(number)} (deleted)":
        raise OSError("no slot")
    with open(path, "r+b", buffering=0) as slot:
        if slot.write(content) < len(content):
            raise OSError("no room")
