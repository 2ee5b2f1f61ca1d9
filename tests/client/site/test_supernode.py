"""The SuperNode asks often while a run is on, and as rarely as Flower's own when nothing happens."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.client.grpc_rere_client import connection
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_MIN_INTERVAL, SubStatus
from flwr.supercore import heartbeat
from flwr.supercore.constant import TaskType
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.tls import get_client_tls_args
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from client.site.flower import internal
from client.site.runtime import supernode
from client.site.runtime.prefork.install import install_shim
from client.site.runtime.supernode import BUSY_SECONDS, HEARTBEAT_SECONDS, POLL_SECONDS, REPLY_SECONDS, Clock, Executor


class Hours:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_sleeps_are_short_for_a_minute_after_a_message() -> None:
    hours = Hours()
    clock = Clock(hours.sleep, lambda: hours.now, rest=lambda seconds: hours.sleep(seconds / 4))

    def slept(seconds: float) -> float:
        before = hours.now
        clock.sleep(seconds)
        return hours.now - before

    assert slept(3) == 3  # nothing has come yet
    assert slept(0.5) == pytest.approx(0.125)  # a message is worked on
    short = 0
    while slept(3) == pytest.approx(POLL_SECONDS):
        short += 1
    assert short == pytest.approx(BUSY_SECONDS / POLL_SECONDS, abs=1)


def test_nobody_sleeps_where_the_server_takes_its_time() -> None:
    hours = Hours()
    clock = Clock(hours.sleep, lambda: hours.now)
    for waited, slept in ((0.0, 3.0), (1.5, 0.0), (0.2, 3.0), (2.0, 0.0), (2.0, 0.0)):
        hours.now += waited
        before = hours.now
        clock.sleep(3)
        assert hours.now - before == slept


def test_a_reply_is_looked_for_when_its_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And often where a process calls by HTTP, which it can only be asked about."""
    executor = Executor()
    waited: list[float] = []
    monkeypatch.setattr(executor._done, "wait", waited.append)
    ours, its = socket.socketpair()
    with ours, its, subprocess.Popen(["sleep", "60"]) as cold:
        executor._tasks = [ours]
        executor.rest(0.5)
        executor._tasks = [ours, cold]
        executor.rest(0.5)
        executor.rest(0.05)
        cold.kill()
    assert waited == [0.5, REPLY_SECONDS, 0.05]  # never longer than Flower's


def test_flower_sleeps_where_we_think_it_does() -> None:
    """The loop sleeps through its module's ``time``, 3 s without a message and half a second for a reply."""
    source = inspect.getsource(start_client_internal)
    assert re.findall(r"time\.sleep\(([\d.]+)\)", source) == ["3", "0.5", "0.5"]
    assert "import time\n" in source


@pytest.fixture
def state() -> InMemoryNodeState:
    state = InMemoryNodeState(InMemoryObjectStore())
    state.set_node_id(1)
    return state


def test_a_task_has_its_process_at_once(
    state: InMemoryNodeState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what Flower would give to its SuperExec; a task has one process, and a process that ended is let go of."""
    (tmp_path / "flwr-clientapp").write_text('#!/bin/sh\necho "$@" >> "$SAID"\n')
    (tmp_path / "flwr-clientapp").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("SILOFL_WARM_SOCKET", raising=False)
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    executor = Executor()
    executor.Popen(["flower-superexec", "--insecure", "--runtime-api-address", "here:1", "--parent-pid", "7"])
    executor.start(state)  # there is none
    task = state.create_task(task_type=TaskType.CLIENT_APP, run_id=7, fab_hash="f" * 64)
    assert task is not None
    executor.start(state)
    executor.start(state)
    while executor._tasks:
        executor.poll()
    (line,) = (tmp_path / "said").read_text().splitlines()
    *options, token = line.split()
    assert options == ["--insecure", "--runtime-api-address", "here:1", "--parent-pid", "7", "--token"]
    found = state.get_task_by_token(token)
    assert found is not None and found.task_id == task


@pytest.mark.parametrize(
    ("kind", "why"),
    [(TaskType.AGENT_APP, "this silo runs no flwr-agentapp"), (TaskType.CLIENT_APP, "no process for the ClientApp: ")],
)
def test_a_task_that_gets_no_process_ends_with_the_reason(
    state: InMemoryNodeState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: TaskType, why: str
) -> None:
    """Flower's SuperExec runs whatever a server sends: of other kinds of apps nobody would ask pins and policy."""
    monkeypatch.setenv("PATH", str(tmp_path))
    state.create_task(task_type=kind, run_id=7, fab_hash="f" * 64)
    Executor().start(state)
    (task,) = state.get_tasks()
    assert task.status.sub_status == SubStatus.FAILED and task.status.details.startswith(why)


def test_flower_starts_its_superexec_where_we_think_it_does() -> None:
    source = inspect.getsource(start_client_internal)
    assert re.findall(r"subprocess\.\w+\(.*\)", source) == ["subprocess.Popen(command)"]
    assert "import subprocess\n" in source
    command = source.partition('command = ["flower-superexec"]')[2].partition("subprocess.Popen")[0]
    options = {*re.findall(r'"(--[\w-]+)"', command + inspect.getsource(get_client_tls_args))}
    assert {"--insecure", "--root-certificates", "--runtime-api-address", "--parent-pid"} <= options
    assert options <= internal("clientapp_parser")()._option_string_actions.keys()


def test_the_shim_takes_flowers_own_options(tmp_path: Path) -> None:
    install_shim(tmp_path)
    done = subprocess.run([tmp_path / "flower-supernode", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "usage: flower-supernode" in done.stdout
    assert "--auth-supernode-private-key" in done.stdout


def test_the_loop_gets_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.import_module("flwr.supernode.cli.flower_supernode")
    seen: list[object] = []
    for name in ("time", "subprocess", "_pull_and_store_message", "_push_messages"):
        monkeypatch.setattr(start_client_internal, name, getattr(start_client_internal, name))
    for module in (heartbeat, connection):
        monkeypatch.setattr(module, "HEARTBEAT_DEFAULT_INTERVAL", HEARTBEAT_DEFAULT_INTERVAL)
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(entry, "flower_supernode", lambda: seen.append(start_client_internal.time))
    supernode.run_supernode()
    assert isinstance(seen[0], Clock) and seen[0].monotonic() > 0
    assert heartbeat.HEARTBEAT_DEFAULT_INTERVAL == connection.HEARTBEAT_DEFAULT_INTERVAL == HEARTBEAT_SECONDS
    assert HEARTBEAT_MIN_INTERVAL <= HEARTBEAT_SECONDS < HEARTBEAT_DEFAULT_INTERVAL


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("raise RuntimeError('no heartbeat')", 1, "RuntimeError: no heartbeat"),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no such certificate')", 1, "no such certificate\n"),
        ("sys.exit()", 0, ""),
        ("pass", 0, ""),
    ],
)
def test_a_supernode_ends_whatever_its_threads_do(ending: str, code: int, said: str) -> None:
    script = (
        "import sys, threading, time\nfrom client.site.runtime.supernode import run_and_leave\n"
        "threading.Thread(target=time.sleep, args=(3600,)).start()\n"
        f"def entry():\n    print('started')\n    {ending}\nrun_and_leave(entry)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "started\n")
    assert said in done.stderr
