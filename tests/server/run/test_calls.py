"""A ServerApp confirms many replies by one call, and by one call each at Flower's own SuperLink."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from client.flower.internals import internal
from client.flower.mail import HELD_SECONDS
from server.run import calls
from server.run.calls import (
    NODES_SECONDS,
    TOGETHER_SECONDS,
    ask_for_nodes_once,
    confirm_together,
    take_confirmations,
)

formats = internal("message_pb2")
REPLIES = ["a", "b", "c"]


class Client:
    """A ServerApp's client of a SuperLink: ours, or Flower's own (``plain``)."""

    def __init__(self, plain):
        self.calls, self.deleted, self.faults = 0, [], 0
        self.handlers = SimpleNamespace(confirm_message_received=self.delete)
        if not plain:
            take_confirmations(self.handlers)

    def delete(self, request, state, task):
        self.deleted.append((request.node.node_id, request.run_id, request.message_object_id))
        return formats.ConfirmMessageReceivedResponse()

    def ConfirmMessageReceived(self, request):
        self.calls += 1
        request = formats.ConfirmMessageReceivedRequest.FromString(request.SerializeToString())
        answer = self.handlers.confirm_message_received(request, None, None)
        if self.faults:
            self.faults -= 1
            raise internal("http_grid").httpx.ReadTimeout("the answer is lost")
        return formats.ConfirmMessageReceivedResponse.FromString(answer.SerializeToString())


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(calls, "time", clock)
    return clock


@pytest.fixture
def grid(monkeypatch, clock):
    """Return a grid of Flower's as a ServerApp of ours has it; each reply takes ``seconds`` to come."""
    kind = internal("http_grid").HttpGrid

    def pull_messages(own, message_ids):
        clock.now += HELD_SECONDS
        for name in message_ids:
            clock.now += own.seconds
            own._runtime_client.ConfirmMessageReceived(
                formats.ConfirmMessageReceivedRequest(
                    node=own.node, run_id=7, message_object_id=name
                )
            )
            if name == own.fails_after:
                raise ValueError(name)
        return list(message_ids)

    monkeypatch.setattr(kind, "pull_messages", pull_messages)
    confirm_together()
    confirm_together()  # once for each exchange
    made = kind(token="any")
    made.seconds, made.fails_after = 0.0, ""
    return made


@pytest.mark.parametrize(("plain", "sent"), [(False, 1), (True, 3)])
def test_replies_of_a_query_are_confirmed_by_one_call_where_the_superlink_takes_it(
    grid, plain, sent
):
    grid._client = client = Client(plain)
    assert grid.pull_messages(REPLIES) == REPLIES
    assert client.deleted == [(grid.node.node_id, 7, name) for name in REPLIES]
    assert client.calls == sent
    assert grid.pull_messages([]) == [] and client.calls == sent
    assert grid.pull_messages(["d"]) == ["d"] and client.calls == sent + 1
    assert client.deleted[3:] == [(grid.node.node_id, 7, "d")]


def test_replies_that_take_long_are_confirmed_as_they_come(grid):
    """The SuperLink keeps a reply until then, and one more at most."""
    grid._client, grid.seconds = Client(plain=False), 2 * TOGETHER_SECONDS
    assert grid.pull_messages(REPLIES) == REPLIES
    assert grid._client.calls == 2 and len(grid._client.deleted) == 3


@pytest.mark.parametrize("plain", [False, True])
def test_a_confirmation_that_fails_loses_no_reply(grid, plain):
    grid._client = client = Client(plain)
    client.faults = 1
    assert grid.pull_messages(REPLIES) == REPLIES
    assert [name for *_, name in client.deleted] == REPLIES[: 1 if plain else 3]


def test_what_came_before_a_fault_is_confirmed(grid):
    grid._client, grid.fails_after = Client(plain=False), "b"
    with pytest.raises(ValueError, match="b"):
        grid.pull_messages(REPLIES)
    assert [name for *_, name in grid._client.deleted] == ["a", "b"]


def test_an_answer_about_the_nodes_counts_for_a_moment(monkeypatch, clock):
    kind, asked, node = internal("http_grid").HttpGrid, [], SimpleNamespace(node_id=5)

    def get_nodes(own):
        asked.append(clock.now)
        return [node]

    monkeypatch.setattr(kind, "get_nodes", get_nodes)
    ask_for_nodes_once()
    grid = kind(token="any")
    assert (grid.get_nodes(), grid.get_node_ids(), asked) == ([node], [5], [0.0])
    ask_for_nodes_once()  # once for each exchange
    assert (grid.get_nodes(), asked) == ([node], [0.0])
    clock.now += NODES_SECONDS
    assert (grid.get_nodes(), asked) == ([node], [0.0, NODES_SECONDS])
    assert kind(token="any").get_nodes() == [node] and len(asked) == 3
