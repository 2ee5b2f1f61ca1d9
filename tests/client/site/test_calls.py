"""A message's process calls its SuperNode over a socket: Flower's own process code, state and handlers at its ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.common.constant import SubStatus
from flwr.proto.message_pb2 import PullObjectRequest
from flwr.proto.runtime_pb2 import GetNodesRequest, PushAppMessagesRequest
from flwr.supercore.heartbeat import make_task_heartbeat_fn_http
from flwr.supernode.runtime import run_clientapp
from supernode import Silo

from client.site.runtime.launch import free_ports
from client.site.runtime.prefork.calls import answer_calls, client_over
from client.site.runtime.replying import is_whole, replies, stored

CONTENT = RecordDict({"model": ArrayRecord([np.arange(6.0), np.ones(3)])})


class Line:
    """A SuperNode that has taken a message, and its end of the socket; `client` is that of the message's process."""

    def __init__(self, silo: Silo) -> None:
        self.state = silo.state
        self.task = silo.store_message(silo.app("one"))
        calls, self.its_calls = Pipe()
        self.done = threading.Event()
        given = calls, self.state, str(self.state.claim_task(self.task)), self.done
        self.thread = threading.Thread(target=answer_calls, args=given, daemon=True)
        self.thread.start()
        self.client: Any = client_over(self.its_calls)(nowhere(), verify=False)


def nowhere() -> str:
    """Where a call by HTTP finds nobody."""
    return f"http://127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    silo = Silo(tmp_path)
    yield Line(silo)
    silo.server.should_exit = True
    silo.thread.join()


def test_a_message_and_its_reply_go_over_the_socket(line: Line) -> None:
    """All that Flower's process does for a message; nobody would answer it by HTTP."""
    assert make_task_heartbeat_fn_http(line.client)()
    message, context, run, fab = run_clientapp.pull_task_input(line.client)
    assert fab.hash_str == run.fab_hash and message.content["config"]["run"] == "today"
    assert not len(line.state.object_store), "what it pulled and confirmed is still there"
    run_clientapp.push_message(line.client, Message(CONTENT, reply_to=message), context)
    (reply,) = replies(line.state)
    assert is_whole(reply, line.state.object_store)
    assert not line.done.is_set()
    run_clientapp.push_task_output(line.client, context, SubStatus.COMPLETED, "")
    assert line.done.wait(10)
    (task,) = line.state.get_tasks()
    assert task.status.sub_status == SubStatus.COMPLETED


def test_what_is_refused_goes_by_http(line: Line) -> None:
    """Flower's handler raises where there is not one reply, and nodes are asked for by HTTP alone."""
    for call, request in (
        (line.client.PushMessages, PushAppMessagesRequest()),
        (line.client.GetNodes, GetNodesRequest()),
    ):
        with pytest.raises(httpx.ConnectError):
            call(request)
    assert run_clientapp.pull_task_input(line.client)[0].metadata.dst_node_id  # the socket is still good


def test_a_task_that_is_over_gets_nothing(line: Line) -> None:
    (message,) = stored(line.state)
    request = PullObjectRequest(object_id=message.metadata.message_id)
    assert line.client.PullObject(request).object_found
    line.state.finish_task(line.task, SubStatus.FAILED, "")
    with pytest.raises(httpx.ConnectError):
        line.client.PullObject(request)


def test_a_process_that_hangs_up_leaves_nothing_behind(line: Line) -> None:
    line.its_calls.close()
    line.thread.join(10)
    assert not line.thread.is_alive() and line.done.is_set()


def test_a_supernode_that_hangs_up_is_called_by_http() -> None:
    calls, its_calls = Pipe()
    client = client_over(its_calls)(nowhere(), verify=False)
    calls.close()
    with pytest.raises(httpx.ConnectError):
        client.PullObject(PullObjectRequest())
