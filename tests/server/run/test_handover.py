"""A large part goes by memory that ServerApp and SuperLink both open, and in the answer where the SuperLink cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from client.flower.internals import internal
from server.run import handover
from server.run.handover import NAME, pull, write, write_into_slots

formats = internal("message_pb2")
LARGE, OTHER, SMALL = bytes(range(256)) * 400, b"abc" * 30_000, b"few bytes"
KEPT = {"large": LARGE, "other": OTHER, "small": SMALL}


@pytest.fixture
def link():
    """Return a SuperLink with the parts above; `sent` has the bytes of content in each answer."""
    sent = []

    def pull_object(request, state, task):
        content = KEPT.get(request.object_id, b"")
        return formats.PullObjectResponse(
            object_found=True, object_available=content != b"", object_content=content
        )

    handlers = SimpleNamespace(pull_object=pull_object)
    write_into_slots(handlers)

    def over_the_wire(request):
        request = formats.PullObjectRequest.FromString(request.SerializeToString())
        answer = handlers.pull_object(request, None, None)
        sent.append(len(answer.object_content))
        return answer

    return SimpleNamespace(
        sent=sent,
        pull=lambda name: pull(over_the_wire, formats.PullObjectRequest(object_id=name)),
        call=over_the_wire,
    )


def test_parts_arrive_as_they_were_and_large_ones_not_in_the_answer(link):
    for name in ("large", "other", "small", "large"):
        answer = link.pull(name)
        assert answer.object_found and answer.object_available
        assert answer.object_content[:] == KEPT[name]
    assert link.sent == [0, 0, len(SMALL), 0]


def test_a_part_that_is_not_there_has_no_content_of_an_earlier_one(link):
    link.pull("large")
    answer = link.pull("none")
    assert not answer.object_available and answer.object_content == b""


@pytest.mark.parametrize("place", [[1 << 22, 3, 5], [os.getpid(), 0, 5], [1], ["a", "b", "c"]])
def test_where_the_superlink_finds_no_slot_the_part_is_in_the_answer(link, monkeypatch, place):
    link.pull("large")
    monkeypatch.setattr(handover.OF_THREAD, "place", place)
    assert link.pull("other").object_content == OTHER
    assert link.sent == [0, len(OTHER)]


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
        write(json.dumps([other.pid, slot, 7]).encode(), b"a long part")
        write(json.dumps([other.pid, slot, 7]).encode(), b"a part")
        assert other.communicate("\n")[0] == "a part\n"


@pytest.mark.parametrize(("name", "number"), [("another", 7), (NAME + "7", 8)])
def test_only_a_slot_under_its_name_is_written(name, number):
    """A process of another container may have the number, and its files are not to be touched."""
    file = os.memfd_create(name)
    with pytest.raises(OSError, match="no slot"):
        write(json.dumps([os.getpid(), file, number]).encode(), b"a part")
    assert os.fstat(file).st_size == 0
    os.close(file)
