"""The Control API of a SuperLink: what silofl asks it."""

from __future__ import annotations

import inspect
from typing import Any

from flwr.proto.control_pb2 import ListRunsResponse
from flwr.proto.run_pb2 import Run
from flwr.superlink.servicer.control import control_handlers

from client.flower.control import ControlCalls
from server.deploy import control
from server.deploy.control import Connection, Control


def test_runs_come_a_page_at_a_time_and_none_is_missing(tmp_path, monkeypatch):
    """Flower gives the newest 20 without a limit; `silofl stop` looks for the older ones, too."""
    assert "request.limit if request.HasField" in inspect.getsource(control_handlers)
    monkeypatch.setattr(control, "RUNS_A_PAGE", 3)
    newest = [Run(run_id=n, pending_at=f"2026-11-{n:02}") for n in range(30, 0, -1)]
    # The queue adds those that the SuperLink lost to each page that is not full
    lost = [Run(run_id=n) for n in (31, 32, 33)]
    asked: list[Any] = []

    class Client:
        def ListRuns(self, request):
            asked.append((request.limit, request.skip))
            page = newest[request.skip : request.skip + request.limit]
            page += lost if len(page) < request.limit else []
            return ListRunsResponse(run_dict={run.run_id: run for run in page})

        def close(self):
            pass

    calls = ControlCalls("here", "127.0.0.1:1", insecure=True, certificates=None, key=None)
    calls.client = Client()
    one = Control(Connection("test", "127.0.0.1:1", insecure=True))
    monkeypatch.setattr(one, "_calls", calls)
    numbers = [run.run_id for run in one.runs()]
    assert numbers[:30] == [*range(30, 0, -1)] and {*numbers[30:]} == {31, 32, 33}
    assert asked[:2] == [(3, 0), (3, 3)] and len(asked) == 12
