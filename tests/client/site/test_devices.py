"""A silo with several devices: its app's processes, of which the first one's answer counts."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest
from supernode import NodeSilo, gone, parent, wait_until

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="an app's process needs Linux"
)
# An app that says which process it is, and does what its message names in one of them
APP = """
    import os, pathlib, signal, time
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def answer(message, context):
        rank, folder = os.environ["SILOFL_GROUP"].split(" ")
        marks = pathlib.Path(os.environ["MARKS"])
        (marks / f"{message.metadata.message_type}-{rank}").write_text(str(os.getpid()))
        where, _, behaviour = message.content["config"]["behaviour"].partition(" ")
        (pathlib.Path(folder) / rank).touch()
        if where == rank:
            if behaviour == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if behaviour == "raises":
                raise ValueError("no such GPU")
            if behaviour == "hangs":
                time.sleep(60)
        elif behaviour in ("killed", "raises"):  # it waits for the other, or finds it gone
            if rank == "0" and behaviour == "killed" and message.content["config"]["round"] == 3:
                raise RuntimeError("connection closed by peer")
            time.sleep(60)
        answer = {"rank": rank, "pid": os.getpid(), "folder": folder}
        return Message(RecordDict({"answer": ConfigRecord(answer)}), reply_to=message)

    @app.train()
    def train(message, context):
        return answer(message, context)

    @app.evaluate()
    def evaluate(message, context):
        return answer(message, context)
"""
ONE = 5  # a run


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parent")
    with parent(folder / "warm.sock"):
        yield folder / "warm.sock"


@pytest.fixture
def silo(tmp_path, template, monkeypatch):
    node = NodeSilo(tmp_path, template, monkeypatch)
    node.node_config["device"] = "cuda:0,cuda:1"
    yield node
    node.workers.end()


@pytest.fixture
def app(silo, monkeypatch):
    monkeypatch.setattr("supernode.CLIENT", textwrap.dedent(APP))
    return silo.app("one")


def pids(silo):
    return [worker.pid for kept in silo.workers.kept.values() for worker in kept.team.workers]


def test_a_training_has_a_process_for_each_device_and_the_first_answers(silo, app):
    silo.ask(app, run_id=ONE)
    answer = silo.answer()
    ours = pids(silo)
    assert answer["rank"] == "0" and answer["pid"] == ours[0] and len(ours) == 2
    assert (silo.marks / "train-1").read_text() == str(ours[1])
    silo.ask(app, run_id=ONE)
    assert silo.answer()["pid"] == ours[0] and pids(silo) == ours


def test_an_evaluation_is_of_the_first_alone(silo, app):
    silo.ask(app, run_id=ONE, kind="evaluate")
    assert silo.answer()["rank"] == "0"
    assert [path.name for path in silo.marks.glob("evaluate-*")] == ["evaluate-0"]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("1 killed", "device cuda:1: ClientApp process was ended by SIGKILL (out of memory: "),
        ("0 killed", "device cuda:0: ClientApp process was ended by SIGKILL (out of memory: "),
        ("1 raises", "ValueError: no such GPU"),
        ("0 raises", "ValueError: no such GPU"),
    ],
)
def test_one_that_ends_costs_one_message_and_all_processes(silo, app, behaviour, reason):
    """Whatever the others say of it, who wait or have lost it; the line has the cause."""
    silo.ask(app, run_id=ONE)
    before, folder = pids(silo), Path(str(silo.answer()["folder"]))
    silo.ask(app, behaviour, run_id=ONE)
    assert silo.reason().startswith(reason)
    wait_until(lambda: all(map(gone, before)))
    assert not folder.exists()
    silo.ask(app, run_id=ONE)
    assert silo.answer()["pid"] not in before


def test_one_that_hangs_ends_with_the_messages_time_to_live(silo, app):
    silo.ask(app, "1 hangs", run_id=ONE, ttl=4.0)
    assert "still running at the end of the message's time to live" in silo.reason()
    assert pids(silo) == []


def test_one_that_has_ended_between_two_messages_is_replaced_with_the_others(silo, app):
    silo.ask(app, run_id=ONE)
    first = silo.answer()["pid"]
    (kept,) = silo.workers.kept.values()
    os.kill(pids(silo)[1], signal.SIGKILL)
    wait_until(kept.team.has_ended)  # all its threads, later than its first
    silo.ask(app, run_id=ONE)
    assert silo.answer()["pid"] != first
