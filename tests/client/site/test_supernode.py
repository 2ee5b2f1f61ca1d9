"""The SuperNode asks often while a run is on, and as rarely as Flower's own when nothing happens."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.client.grpc_rere_client import connection
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_MIN_INTERVAL
from flwr.supercore import heartbeat
from flwr.supernode import start_client_internal

from client.site.node import Site, supernode_command
from client.site.runtime import supernode
from client.site.runtime.launch import own_supernode
from client.site.runtime.supernode import BUSY_SECONDS, HEARTBEAT_SECONDS, POLL_SECONDS, Clock
from client.site.secure.gate import KEY


class Hours:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now = 1000.0

    def sleep(self, seconds):
        self.now += seconds

    def monotonic(self):
        return self.now


def test_sleeps_are_short_for_a_minute_after_a_message(monkeypatch):
    hours = Hours()
    monkeypatch.setattr(supernode, "time", hours)
    clock = Clock(lambda: None)

    def slept(seconds):
        before = hours.now
        clock.sleep(seconds)
        return hours.now - before

    assert slept(3) == 3  # nothing has come yet
    clock.note_message()
    short = 0
    while slept(3) == pytest.approx(POLL_SECONDS):
        short += 1
    assert short == pytest.approx(BUSY_SECONDS / POLL_SECONDS, abs=1)


def test_nobody_sleeps_where_the_server_takes_its_time(monkeypatch):
    hours = Hours()
    monkeypatch.setattr(supernode, "time", hours)
    clock = Clock(lambda: None)
    for waited, slept in ((0.0, 3.0), (1.5, 0.0), (0.2, 3.0), (2.0, 0.0), (2.0, 0.0)):
        hours.now += waited
        before = hours.now
        clock.sleep(3)
        assert hours.now - before == slept


def test_flower_sleeps_where_we_think_it_does():
    """The loop sleeps through its module's ``time``: 3 s without a message, the rest for a reply that is not there."""
    source = inspect.getsource(start_client_internal)
    assert re.findall(r"time\.sleep\(([\d.]+)\)", source) == ["3", "0.5", "0.5"]
    assert "import time\n" in source


def test_flower_starts_its_superexec_where_we_think_it_does():
    source = inspect.getsource(start_client_internal)
    assert re.findall(r"subprocess\.\w+\(.*\)", source) == ["subprocess.Popen(command)"]
    assert "import subprocess\n" in source


def test_our_supernode_takes_flowers_own_options():
    done = subprocess.run(
        [*own_supernode(), "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "usage: flower-supernode" in done.stdout
    assert "--auth-supernode-private-key" in done.stdout


def test_the_loop_gets_the_clock_and_the_gate_its_key(monkeypatch):
    entry = importlib.import_module("flwr.supernode.cli.flower_supernode")
    seen = []
    for name in ("time", "subprocess", "_pull_and_store_message", "_push_messages"):
        monkeypatch.setattr(start_client_internal, name, getattr(start_client_internal, name))
    for module in (heartbeat, connection):
        monkeypatch.setattr(module, "HEARTBEAT_DEFAULT_INTERVAL", HEARTBEAT_DEFAULT_INTERVAL)
    own = Path("own.key")
    site = Site("a", "s:1", Path("ca"), own, Path("data"), Path("state"))
    monkeypatch.setattr(sys, "argv", supernode_command(site))
    monkeypatch.setenv(KEY, "")
    monkeypatch.setattr(
        entry, "flower_supernode", lambda: seen.append(start_client_internal.time)
    )
    supernode.run_supernode()
    assert os.environ[KEY] == str(own)
    assert isinstance(seen[0], Clock) and seen[0].monotonic() > 0
    assert start_client_internal.subprocess.Popen(["flower-superexec"]) is None
    assert (
        heartbeat.HEARTBEAT_DEFAULT_INTERVAL
        == connection.HEARTBEAT_DEFAULT_INTERVAL
        == HEARTBEAT_SECONDS
    )
    assert HEARTBEAT_MIN_INTERVAL <= HEARTBEAT_SECONDS < HEARTBEAT_DEFAULT_INTERVAL


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("raise RuntimeError('no heartbeat')", 1, "RuntimeError: no heartbeat"),
        ("sys.exit(3)", 3, ""),
        *(
            pytest.param(*given, marks=pytest.mark.exhaustive)
            for given in (
                ("sys.exit('no such certificate')", 1, "no such certificate\n"),
                ("sys.exit()", 0, ""),
                ("pass", 0, ""),
            )
        ),
    ],
)
def test_a_supernode_ends_whatever_its_threads_do(ending, code, said):
    script = (
        "import sys, threading, time\nfrom client.site.runtime.supernode import run_and_leave\n"
        "threading.Thread(target=time.sleep, args=(3600,)).start()\n"
        f"def entry():\n    print('started')\n    {ending}\nrun_and_leave(entry)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (code, "started\n")
    assert said in done.stderr
