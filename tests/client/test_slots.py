"""What a ServerApp pulls and pushes: large parts by memory that both open, and what calls leave is freed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from client.flower import slots
from client.flower.internals import internal
from client.flower.mail import MOST_LEFT, Mail
from client.flower.slots import NAME, pull_by_slot, write_slot

formats = internal("message_pb2")
LARGE, OTHER, SMALL = bytes(range(256)) * 400, b"abc" * 30_000, b"few bytes"
PARTS = {"large": LARGE, "other": OTHER, "small": SMALL}


def handlers_of(**handlers):
    """Return these handlers as a SuperLink of ours wraps them."""
    names = ("pull_messages", "push_messages", "pull_object", "push_object")
    wrapped = SimpleNamespace(**{**dict.fromkeys(names), **handlers})
    Mail(SimpleNamespace(object_store=None), lambda group: None, str).wrap(wrapped)
    return wrapped


@pytest.fixture
def link():
    """Return a SuperLink with the parts above; `sent` has the bytes of content in each answer."""
    sent = []

    def pull_object(request, state, task):
        content = PARTS.get(request.object_id, b"")
        return formats.PullObjectResponse(
            object_found=True, object_available=content != b"", object_content=content
        )

    handlers = handlers_of(pull_object=pull_object)

    def call(request):
        request = formats.PullObjectRequest.FromString(request.SerializeToString())
        answer = handlers.pull_object(request, None, None)
        sent.append(len(answer.object_content))
        return answer

    def pull(name):
        return pull_by_slot(call, formats.PullObjectRequest(object_id=name))

    return SimpleNamespace(sent=sent, pull=pull, call=call)


def test_parts_arrive_as_they_were_and_large_ones_not_in_the_answer(link):
    for name in ("large", "other", "small", "large"):
        answer = link.pull(name)
        assert answer.object_found and answer.object_available
        assert answer.object_content[:] == PARTS[name]
    assert link.sent == [0, 0, len(SMALL), 0]


def test_a_part_that_is_not_there_has_no_content_of_an_earlier_one(link):
    link.pull("large")
    answer = link.pull("none")
    assert not answer.object_available and answer.object_content == b""


@pytest.mark.parametrize("place", [[1 << 22, 3, 5], [os.getpid(), 0, 5], [1], ["a", "b", "c"]])
def test_where_the_superlink_has_no_way_to_the_slot_the_part_is_in_the_answer(
    link, monkeypatch, place
):
    monkeypatch.setattr(
        slots, "json", SimpleNamespace(dumps=lambda _: json.dumps(place), loads=json.loads)
    )
    assert link.pull("other").object_content == OTHER
    assert link.sent == [len(OTHER)]


def test_a_call_without_a_slot_is_answered_as_flower_does(link):
    answer = link.call(formats.PullObjectRequest(object_id="large"))
    assert answer.object_content == LARGE


def test_a_slot_of_another_process_is_written():
    code = (
        f"import os, sys; slot = os.memfd_create('{NAME}7'); print(slot, flush=True);"
        "sys.stdin.readline(); print(os.pread(slot, 100, 0).decode())"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        slot = int(other.stdout.readline())
        write_slot(json.dumps([other.pid, slot, 7]).encode(), b"a part")
        assert other.communicate("\n")[0] == "a part\n"


@pytest.mark.parametrize(("name", "number"), [("another", 7), (NAME + "7", 8)])
def test_only_a_slot_under_its_name_is_written(name, number):
    """A process of another container may have the number, and its files are not to be touched."""
    file = os.memfd_create(name)
    with pytest.raises(OSError, match="no slot"):
        write_slot(json.dumps([os.getpid(), file, number]).encode(), b"a part")
    assert os.fstat(file).st_size == 0
    os.close(file)


def test_what_a_serverapps_calls_leave_in_cycles_is_freed_after_some_of_them(no_search):
    """As Starlette leaves a request with its body."""
    left = list[weakref.ref[Any]]()

    class Call(SimpleNamespace):
        pass

    def push_object(request, state, task):
        call = Call(request=request)
        call.itself = call
        left.append(weakref.ref(call))
        return formats.PushObjectResponse(stored=True)

    handlers = handlers_of(push_object=push_object)
    large = formats.PushObjectRequest(object_content=bytes(MOST_LEFT // 4))
    for _ in range(20):
        handlers.push_object(large, None, None)
        assert sum(call() is not None for call in left) < 5
