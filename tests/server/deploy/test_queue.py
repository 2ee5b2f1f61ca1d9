"""Runs of a real federation have names and a queue, which survives its server; stopping one leaves the others.

The app computes nothing: each of its two rounds lasts until the test lets it go on.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from apps import project
from flwr.common.serde import user_config_to_proto
from flwr.proto.control_pb2 import ListRunsResponse, StartRunRequest
from probe import CLIENT, make_app, write_file
from trio import bring_up, text_of, wait_for

from client.flower.apps import build
from client.flower.runs import RunCalls, refusal
from client.protocol.launch import free_ports
from server.cli.main import main
from server.deploy import local, processes, submit
from server.deploy.control import Control
from server.deploy.federation import read_federation
from server.deploy.local import record
from server.deploy.room.listing import named_runs
from server.deploy.room.queue import Queue, QueuedRun

pytestmark = pytest.mark.deployed

SERVER = """
    import json, os, pathlib, time
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid, context):
        config = context.run_config
        out = pathlib.Path(config["out"])
        (out / "pid").write_text(str(os.getpid()))
        with (out / "begun").open("a") as file:
            file.write(f"{config['strategy']} {config['resume']}\\n")
        (out / "config.toml").touch()
        while not (out / "go").exists():
            time.sleep(0.05)
        event = {"event": "round", "strategy": config["strategy"], "seed": 1, "round": 3}
        with (out / "progress.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\\n")
        while not (out / "end").exists():
            time.sleep(0.05)
        if (out / "end").read_text():
            raise ValueError("no such column")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("queue")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("FLWR_HOME", str(folder / "flower"))
        yield folder
        processes.end(processes.find(record.state_root() / "trial"), grace=1.0)


@pytest.fixture(scope="module")
def federation(folder):
    file, (fleet, control) = write_file(folder, "north"), free_ports(2)
    # Who follows a run finds the server again
    server = {"fleet-port": fleet, "control-port": control}
    file.write_text(json.dumps({**json.loads(file.read_text()), "server": server}))
    return bring_up(folder)


@pytest.fixture(scope="module")
def app(folder):
    make_app(folder / "app", SERVER, CLIENT)
    settings = 'strategy = ""\nseed = 1\nrounds = 5\nout = ""\nresume = false'
    (folder / "app" / "pyproject.toml").write_text(
        project("probe_server:app", "probe_client:app", settings)
    )
    return build(folder / "app")


class Begun:
    """A run that is followed, as `silofl run` does."""

    def __init__(self, federation, app, out, *methods, **words):
        out.mkdir()
        self.out, self.error = out, ""
        members = [{"strategy": method, "rounds": 5, "out": str(out)} for method in methods]

        def follow():
            with Control(federation.connection) as control:
                try:
                    submit.submit_and_follow(control, app, members, out, words)
                except submit.RunFailedError as error:
                    self.error = str(error)

        self.thread = threading.Thread(target=follow, daemon=True)
        self.thread.start()
        wait_for(lambda: (out / "name").exists() or not self.thread.is_alive(), 30)
        self.name = text_of(out / "name")

    @property
    def begun(self):
        return text_of(self.out / "begun").splitlines()

    def let_end(self, error=""):
        (self.out / "go").touch()
        (self.out / "end").write_text(error)
        self.thread.join(60)
        assert not self.thread.is_alive()


def listed(federation):
    with Control(federation.connection) as control:
        return {run.name: run for run in named_runs(control)}


def begins(run, *lines):
    wait_for(lambda: run.begun == [*lines], 60)


def test_runs_have_names_wait_for_their_turn_and_begin_by_themselves(
    federation, app, tmp_path, capsys
):
    first = Begun(federation, app, tmp_path / "a", "fedavg")
    second = Begun(
        federation, app, tmp_path / "b", "ditto", "apple", name="sepsis", method="study"
    )
    third = Begun(federation, app, tmp_path / "c", "fedavg")
    begins(first, "fedavg False")
    day = time.strftime("%Y-%m-%d")
    assert [run.name for run in (first, second, third)] == [
        f"fedavg-{day}",
        "sepsis",
        f"fedavg-{day}-2",
    ]
    (first.out / "go").touch()
    wait_for(lambda: listed(federation)[first.name].round == 3, 10)
    runs = listed(federation)
    assert [(r.state, r.place, r.method) for r in reversed(runs.values())] == [
        ("running", 0, "fedavg"),
        ("waiting", 1, "ditto,apple"),
        ("waiting", 2, "fedavg"),
    ]
    assert main(["runs", "--json"]) == 0
    entries = {run["name"]: run for run in json.loads(capsys.readouterr().out)}
    assert entries[first.name]["folder"] == str(first.out) and entries[first.name]["owner"]
    assert main(["status"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "fedavg" in line]
    assert f"fedavg-{day}" in lines[-1] and "running" in lines[-1] and "3/5" in lines[-1]
    # A study keeps its place until its last method has ended
    first.let_end()
    begins(second, "ditto False")
    (second.out / "end").write_text("")
    (second.out / "go").touch()
    begins(second, "ditto False", "apple False")
    assert not third.begun or listed(federation)["sepsis"].state == "completed"
    second.thread.join(60)
    begins(third, "fedavg False")
    third.let_end()
    assert [run.error for run in (first, second, third)] == ["", "", ""]
    assert {run.state for run in listed(federation).values()} == {"completed"}


def test_a_name_in_use_or_of_another_form_is_refused(federation, app, tmp_path):
    taken = Begun(federation, app, tmp_path / "a", "fedavg", name="sepsis")
    assert "--name sepsis: there is a run of that name" in taken.error
    wrong = Begun(federation, app, tmp_path / "b", "fedavg", name="../sepsis")
    assert "use 1 to 63 lower-case letters" in wrong.error


@pytest.mark.exhaustive
def test_one_of_two_runs_is_stopped(federation, app, tmp_path, capsys):
    first = Begun(federation, app, tmp_path / "a", "fedavg", name="first")
    begins(first, "fedavg False")
    beside = Begun(federation, app, tmp_path / "b", "ditto", name="beside", now=True)
    begins(beside, "ditto False")
    waits = Begun(federation, app, tmp_path / "c", "ditto", name="waits")
    assert main(["stop"]) == 2
    line = capsys.readouterr().err
    assert all(f"{name} (" in line for name in ("first", "beside", "waits"))
    for run in (beside, waits):
        assert main(["stop", run.name]) == 0
        run.thread.join(60)
        assert f"run {run.name} was stopped" in run.error
    assert main(["stop", "other"]) == 2 and "there is no run other" in capsys.readouterr().err
    assert listed(federation)["first"].state == "running" and not waits.begun
    first.let_end()
    assert first.error == ""


@pytest.mark.exhaustive
def test_a_study_whose_first_run_fails_is_over(federation, app, tmp_path):
    study = Begun(federation, app, tmp_path / "a", "fedavg", "ditto", name="fails")
    study.let_end("fails")
    assert "run fails failed" in study.error and "no such column" in study.error
    wait_for(lambda: not listed(federation)["fails"].on, 20)
    assert study.begun == ["fedavg False"]


def superlinks(federation):
    return [p for p in processes.find(federation.directory) if p.part == "superlink"]


@pytest.mark.exhaustive
def test_the_queue_survives_the_server(federation, folder, app, tmp_path, capsys):
    """kill -9 of the SuperLink and of all that it started; `up` keeps who waits, `--resume` goes on with who ran."""
    ran = Begun(federation, app, tmp_path / "a", "fedavg", name="ran")
    begins(ran, "fedavg False")
    waited = [
        Begun(federation, app, tmp_path / name, "ditto", name=name) for name in ("b", "c")
    ]
    processes.end(superlinks(federation), grace=0.0)
    lines: list[str] = []
    again = local.up(read_federation(folder / "federation.yaml"), echo=lines.append)
    again_or_not = "`silofl up --resume` goes on with it, `silofl stop RUN` ends it"
    assert f"ran was interrupted: {again_or_not}" in lines
    begins(waited[0], "ditto False")
    lines.clear()
    local.up(read_federation(folder / "federation.yaml"), echo=lines.append, resume=True)
    assert "ran goes on" in lines
    assert listed(again)["ran"].place == 1 and listed(again)["c"].place == 2
    waited[0].let_end()
    begins(ran, "fedavg False", "fedavg True")
    ran.let_end()
    begins(waited[1], "ditto False")
    waited[1].let_end()
    assert [run.error for run in (ran, *waited)] == ["", "", ""]
    said = capsys.readouterr().err
    for line in ("up to 600 s: the run may go on\n", "the server answers again\n"):
        assert said.count(line) == 3


@pytest.mark.exhaustive
def test_an_interrupted_run_is_listed_until_it_is_stopped(
    federation, folder, app, tmp_path, capsys
):
    """Also of a SuperLink that has no Flower run of it; then its name is free, and `--resume` leaves it."""
    lost = Begun(record.find_local(), app, tmp_path / "a", "ditto", "apple", name="long")
    begins(lost, "ditto False")
    processes.end(superlinks(federation), grace=0.0)
    again = bring_up(folder)
    entry = listed(again)["long"]
    expected = ("interrupted", "ditto", 5, str(lost.out))
    assert (entry.state, entry.method, entry.rounds, entry.folder) == expected
    assert main(["runs"]) == 0 and "interrupted" in capsys.readouterr().out
    refused = Begun(again, app, tmp_path / "b", "fedavg", name="long")
    assert "--name long: there is a run of that name" in refused.error
    assert main(["stop", "long"]) == 0 and "run long is stopped" in capsys.readouterr().out
    assert "long" not in listed(again)
    assert main(["stop", "long"]) == 2
    local.up(read_federation(folder / "federation.yaml"), echo=lambda line: None, resume=True)
    assert "long" not in listed(again)
    anew = Begun(again, app, tmp_path / "c", "fedavg", name="long")
    begins(anew, "fedavg False")
    anew.let_end()
    assert anew.error == "" and lost.begun == ["ditto False"]


@pytest.mark.exhaustive
def test_a_run_whose_server_app_died_goes_on(federation, folder, app, tmp_path):
    again = record.find_local()
    dies = Begun(again, app, tmp_path / "a", "fedavg", name="dies")
    begins(dies, "fedavg False")
    os.kill(int((dies.out / "pid").read_text()), signal.SIGKILL)
    wait_for(lambda: listed(again)["dies"].state == "interrupted", 120)
    dies.thread.join(30)
    assert "`silofl up --resume` goes on" in dies.error
    local.up(read_federation(folder / "federation.yaml"), echo=lambda line: None, resume=True)
    begins(dies, "fedavg False", "fedavg True")
    (dies.out / "go").touch()
    (dies.out / "end").write_text("")
    wait_for(lambda: listed(again)["dies"].state == "completed", 30)
    # The Flower run that died is part of it, and no run of its own
    assert [name for name in listed(again) if name.isdigit()] == []
    assert not [*Path(again.directory, "flower/superlink/queue").glob("*.request")]


@pytest.mark.exhaustive
def test_a_limit_above_one_lets_runs_share(federation, folder, app, tmp_path):
    file = folder / "federation.yaml"
    file.write_text(json.dumps({**json.loads(file.read_text()), "runs": 2}))
    up = bring_up(folder)
    runs = [Begun(up, app, tmp_path / name, "fedavg") for name in ("a", "b", "c")]
    for run in runs[:2]:
        begins(run, "fedavg False")
    assert listed(up)[runs[2].name].place == 1
    for run in runs:
        run.let_end()


def test_two_runs_with_masks_are_never_on_at_once(tmp_path, monkeypatch):
    """A silo keeps the masks of one run: a second one waits, also with `--now`, and others pass it."""
    queue = Queue(tmp_path, limit=3)
    calls = SimpleNamespace(pending=lambda member: [member])
    monkeypatch.setattr(queue, "calls", calls, raising=False)
    monkeypatch.setattr(queue, "follow", lambda: None)
    for number, masked in enumerate((True, True, False), 1):
        fields: dict[str, Any] = {
            "owner": "",
            "account": "",
            "out": "",
            "app": "",
            "trains": True,
            "now": True,
        }
        queue.runs[str(number)] = QueuedRun(**fields, masked=masked, members=(number,))
    assert queue.next_tasks() == [1, 3]
    queue.began(1)
    assert queue.next_tasks() == [1, 3]
    queue.end("1")
    assert queue.next_tasks() == [2, 3]


def test_an_interrupted_run_without_a_flower_run_is_listed(tmp_path, monkeypatch):
    queue, answer = Queue(tmp_path), ListRunsResponse()
    state = SimpleNamespace(get_run_info=lambda run_ids: [])
    monkeypatch.setattr(queue, "calls", RunCalls(state), raising=False)
    fields: dict[str, Any] = {"owner": "otto", "account": "", "out": "", "app": ""}
    queue.runs["lost"] = QueuedRun(
        **fields, trains=True, state="interrupted", members=(5, 6), done=1
    )
    request = StartRunRequest(
        override_config=user_config_to_proto({"strategy": "ditto", "rounds": 5})
    )
    queue.file("lost", 1).write_bytes(request.SerializeToString())
    queue.name_all(answer, False)
    assert not answer.run_dict
    queue.name_all(answer, True)
    control: Any = SimpleNamespace(runs=lambda: [*map(Control._run, answer.run_dict.values())])
    (run,) = named_runs(control)
    assert (run.name, run.state, run.members) == ("lost", "interrupted", ("6",))
    assert (run.method, run.rounds, run.owner) == ("ditto", 5, "otto")


def test_an_interrupted_run_is_dropped_with_the_members_it_has_left(tmp_path, monkeypatch):
    """Its name is free once the SuperLink has none of its Flower runs; that of one that waits is not touched."""
    queue, listed, stopped = Queue(tmp_path), {7: "run"}, list[int]()
    calls = SimpleNamespace(runs=lambda numbers: listed, stop=stopped.append)
    monkeypatch.setattr(queue, "calls", calls, raising=False)
    monkeypatch.setattr(queue, "follow", lambda: None)
    fields: dict[str, Any] = {"owner": "", "account": "", "out": "", "app": "", "trains": True}
    queue.runs = {
        "lost": QueuedRun(**fields, state="interrupted", members=(5, 6, 7, 8), done=1),
        "waits": QueuedRun(**fields, members=(9,)),
    }
    assert not queue.discard(9) and not queue.discard(4) and queue.discard(6)
    assert stopped == [7, 8] and not queue.discard(6)
    assert {name: entry.state for name, entry in Queue(tmp_path).runs.items()} == {
        "lost": "ended",
        "waits": "waiting",
    }
    taken = pytest.raises(type(refusal("")), match="there is a run of that name")
    with taken:
        queue.new_name("lost", "fedavg")
    listed.clear()
    assert queue.new_name("lost", "fedavg") == "lost"
    with taken:
        queue.new_name("waits", "fedavg")


def test_a_damaged_book_is_refused(tmp_path):
    (tmp_path / "book.json").write_text('{"runs": {"a": 1}}')
    with pytest.raises(ValueError, match="move it away"):
        Queue(tmp_path)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("[]", "must be keys and values"),
        ("{", "EOF"),
        ('{"limit": "two"}', "limit = 'two'"),
        ('{"limit": 0}', "limit = 0"),
        ('{"resume": "yes"}', "resume = 'yes'"),
        ('{"name": 3}', "name = 3"),
    ],
)
def test_words_of_another_kind_are_refused_in_one_line(tmp_path, words, fault):
    """As any refusal, not as a fault of the server's."""
    queue = Queue(tmp_path)
    fab = SimpleNamespace(content=b"", hash_str="")
    request = SimpleNamespace(user_prompt=words, fab=fab, app_spec="")
    with pytest.raises(type(refusal(""))) as caught:
        queue.start(request, None, lambda: None)
    line = str(caught.value)
    assert "what the request says of its run: " in line and fault in line and "\n" not in line
