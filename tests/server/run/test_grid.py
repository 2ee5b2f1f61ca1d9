"""A ServerApp's Grid, with the real messages of the Runtime API: what it sends, takes, repeats and gives up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from failing import fails
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse, PushObjectResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import (
    GetNodesResponse,
    PullAppMessagesResponse,
    PushAppMessagesResponse,
)
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from client.flower import transfers
from client.flower.grid import SUPERLINK, RuntimeGrid, own_grid
from client.flower.transfers import LostPartError, enclose, parts_in

RUN, NODE = 7, 3
LARGE = np.arange(100_000, dtype=np.float64)


class Client:
    """The calls of a SuperLink: the parts that it has, and what it does with them."""

    def __init__(self):
        self.parts: dict[str, bytes] = {}
        self.replies: list[Any] = []
        self.trees: list[Any] = []
        self.calls: list[str] = []
        self.full = self.late = 0
        self.gone = self.deaf = False

    def GetNodes(self, request):
        return GetNodesResponse(nodes=[NodeInfo(node_id=NODE)])

    def PushMessages(self, request):
        self.pushed = request
        self.parts |= {
            k: v for tree in request.message_object_trees for k, v in parts_in(tree).items()
        }

        def names(tree):
            yield from (tree.object_id, *(n for child in tree.children for n in names(child)))

        wanted = [n for tree in request.message_object_trees for n in names(tree)]
        return PushAppMessagesResponse(
            message_ids=[m.metadata.message_id for m in request.messages_list],
            objects_to_push=[*dict.fromkeys(n for n in wanted if n not in self.parts)],
            session_id="session",
        )

    def PushObject(self, request):
        assert (request.node.node_id, request.run_id) == (SUPERLINK, RUN)
        self.calls.append("push")
        if self.full:
            return PushObjectResponse(stored=False)
        self.parts[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)

    def PullMessages(self, request):
        return PullAppMessagesResponse(
            messages_list=self.replies, message_object_trees=self.trees
        )

    def PullObject(self, request):
        self.calls.append("pull")
        if self.gone:
            return PullObjectResponse(object_found=False)
        if self.late:
            self.late -= 1
            return PullObjectResponse(object_found=True)
        return PullObjectResponse(
            object_found=True,
            object_available=True,
            object_content=self.parts[request.object_id],
        )

    def ConfirmMessageReceived(self, request):
        self.calls.append("confirm")
        if self.deaf:
            raise httpx.ReadTimeout("the answer is lost")


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """This process is a ServerApp's: each message asks for that."""
    for name, value in (("_task_id", 1), ("_run_id", RUN), ("_node_id", SUPERLINK)):
        monkeypatch.setattr(TaskIdentity, name, value)


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def grid(client):
    return RuntimeGrid(SimpleNamespace(_runtime_client=client, run=SimpleNamespace(run_id=RUN)))


def message(array=LARGE, node=NODE):
    return Message(
        RecordDict({"a": ArrayRecord([array]), "c": ConfigRecord({"x": 1})}), node, "train"
    )


def stored(client, *, inside):
    """A reply that a silo has sent; ``inside``: with its small parts in its tree."""
    asked = message()
    asked.metadata.__dict__["_message_id"] = "b" * 64
    reply = Message(RecordDict({"a": ArrayRecord([LARGE])}), reply_to=asked)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    parts = {k: part.deflate() for k, part in get_all_nested_objects(reply).items()}
    tree = get_object_tree(reply)
    if inside:
        enclose(tree, parts.get)
    client.parts |= parts
    client.replies = [message_to_proto(remove_content_from_message(reply))]
    client.trees = [tree]
    return reply


def test_one_model_for_many_silos_is_pushed_once_and_the_rest_travels_in_trees(grid, client):
    sent = [message(node=node) for node in (1, 2, 3)]
    names = grid.push_messages(iter(sent))
    assert names == [m.metadata.message_id for m in sent] and len({*names}) == 3
    assert client.calls == ["push"]
    for one in sent:
        assert client.parts.keys() >= get_all_nested_objects(one).keys()
    assert grid.push_messages([]) == []


def test_a_part_that_is_not_taken_is_an_error(grid, client):
    client.full = True
    fails(LostPartError, "did not take part", grid.push_messages, [message()])


@pytest.mark.parametrize("inside", [True, False])
def test_a_reply_is_what_the_silo_sent(grid, client, inside):
    reply = stored(client, inside=inside)
    (found,) = grid.pull_messages(["b" * 64])
    assert found.metadata.message_id == reply.metadata.message_id
    assert np.array_equal(found.content["a"].to_numpy_ndarrays()[0], LARGE)
    assert client.calls.count("pull") == (1 if inside else len(client.parts))
    assert client.calls[-1] == "confirm"


def test_a_confirmation_that_is_lost_costs_no_reply(grid, client):
    client.deaf = True
    stored(client, inside=True)
    assert len(grid.pull_messages(["b" * 64])) == 1


def test_a_part_is_waited_for_without_a_limit(grid, client, monkeypatch):
    """Flower's own function gives up after 500 looks."""
    monkeypatch.setattr(transfers, "AGAIN_SECONDS", (0.0, 0.0))
    stored(client, inside=True)
    client.late = 3000
    assert len(grid.pull_messages(["b" * 64])) == 1 and client.calls.count("pull") == 3001


def test_a_reply_whose_parts_are_gone_is_an_error_in_its_place(grid, client):
    stored(client, inside=True)
    client.gone = True
    (found,) = grid.pull_messages(["b" * 64])
    assert found.error.code == ErrorCode.MESSAGE_UNAVAILABLE
    assert found.metadata.reply_to_message_id == "b" * 64 and "confirm" not in client.calls


def test_only_flowers_own_grid_is_replaced(grid, client):
    assert grid.get_node_ids() == [NODE] and SUPERLINK == SUPERLINK_NODE_ID
    assert own_grid(grid) is grid
    flowers = HttpGrid(token="x")
    assert isinstance(own_grid(flowers), RuntimeGrid)
