"""A silo under supervision: what it does when its SuperNode is online, is refused, or dies.

The SuperNode is a script here that prints the lines of Flower's; `test_compose.py` finds them in Flower itself.
"""

import signal
import sys

import numpy as np
import pytest
from failing import fails

from client.flower.fleet import LOST, REFUSED, REGISTERED
from client.protocol.launch import flower_home
from client.protocol.node import Site, node_config, read_node_config
from client.site.runtime import supervisor as module
from client.site.runtime.supervisor import run
from partitions.common.errors import RunFailedError, UserError
from partitions.silo_file import Check

UNKNOWN = Check("key", False, "unknown", "ask")


@pytest.fixture(autouse=True)
def handlers():
    """`run` takes over the process's signals; the tests' own come back."""
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    }
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def site(tmp_path, monkeypatch):
    x = np.zeros((20, 3), np.float32)
    np.savez(
        tmp_path / "data.npz",
        x_train=x,
        y_train=np.arange(20) % 2,
        x_test=x,
        y_test=np.arange(20) % 2,
    )
    for name, value in (
        ("WAIT_SECONDS", 0.0),
        ("IN_USE_SECONDS", 0.6),
        ("RESTART_SECONDS", 0.6),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "fault_in_connection", lambda _: None)
    return Site(
        "clinic",
        "fl:1",
        tmp_path / "ca",
        tmp_path / "key",
        tmp_path / "data.npz",
        tmp_path / "state",
    )


class Supervision:
    """Runs a site with a script for its SuperNode, which appends a line to `starts` each time."""

    def __init__(self, site, folder):
        self.site, self.folder = site, folder
        self.said: list[str] = []
        self.starts = folder / "starts"

    def run(self, script):
        program = f"import os, pathlib, signal, sys, time\nopen({str(self.starts)!r}, 'a').write('x')\n{script}"
        return run(
            self.site,
            [sys.executable, "-u", "-c", program],
            {},
            online=self.folder / "online",
            echo=self.said.append,
        )

    @property
    def started(self):
        return len(self.starts.read_text())


@pytest.fixture
def supervision(site, tmp_path):
    return Supervision(site, tmp_path)


def wait_for_online(folder):
    return f"while not os.path.exists({str(folder / 'online')!r}): time.sleep(0.01)\n"


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 0), ("SIGINT", None)])
def test_online_until_a_signal(supervision, tmp_path, number, code, capsys):
    """The script ends its supervisor as soon as the supervisor has seen it online; it is ended in turn."""
    script = (
        f"print('INFO : {REGISTERED}17')\n{wait_for_online(tmp_path)}"
        f"os.kill(os.getppid(), signal.{number})\ntime.sleep(60)"
    )
    if code is None:
        with pytest.raises(KeyboardInterrupt):
            supervision.run(script)
    else:
        assert supervision.run(script) == code
    assert not (tmp_path / "online").exists() and supervision.started == 1
    assert f"{REGISTERED}17" in capsys.readouterr().out  # the SuperNode's own log is passed on


def test_a_supernode_that_ignores_sigterm_is_killed(supervision, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)
    script = (
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('{REGISTERED}1')\n{wait_for_online(tmp_path)}"
        "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)"
    )
    assert supervision.run(script) == 0


def test_a_lost_connection_is_not_online(supervision, tmp_path):
    online = str(tmp_path / "online")
    script = (
        f"print('{REGISTERED}1')\n{wait_for_online(tmp_path)}"
        f"print('WARNING : {LOST} 1.00 seconds')\n"
        f"while os.path.exists({online!r}): time.sleep(0.01)\n"
        f"print('{module.BACK} 3.00 seconds and 2 tries.')\n{wait_for_online(tmp_path)}"
        "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)"
    )
    assert supervision.run(script) == 0


def test_why_there_is_no_connection_is_told_once_a_while(supervision, monkeypatch):
    """Flower's SuperNode tries for ever and does not say why."""
    monkeypatch.setattr(
        module, "fault_in_connection", lambda _: Check("port", False, "fl:1 refuses", "ask")
    )
    lost = f"print('{LOST} 1.00 seconds')\n" * 3
    assert supervision.run(f"{lost}os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)") == 0
    assert supervision.said == ["clinic: no connection: port: fl:1 refuses; ask"]


def test_a_certificate_that_does_not_fit_ends_what_would_try_for_ever(supervision, monkeypatch):
    fault = Check("certificate chain", False, "not this CA's", "ask")
    monkeypatch.setattr(module, "fault_in_connection", lambda _: fault)
    with pytest.raises(UserError, match=r"^clinic: certificate chain: not this CA's; ask$"):
        supervision.run(f"print('{LOST} 1.00 seconds')\ntime.sleep(60)")
    assert supervision.started == 1 and supervision.said == []


def test_a_key_in_use_is_tried_again_then_told(supervision):
    with pytest.raises(
        UserError, match=r"^clinic: its key is in use: a bundle runs in one place at a time"
    ):
        supervision.run(f"print('[code: 2004] {REFUSED}.'); sys.exit(49)")
    assert supervision.started > 1
    assert len(supervision.said) == 1 and supervision.said[0].endswith("; trying again")


def test_a_cause_that_the_doctor_finds_ends_it_at_once(supervision, monkeypatch):
    monkeypatch.setattr(module, "fault_in_connection", lambda _: UNKNOWN)
    with pytest.raises(UserError, match=r"^clinic: key: unknown; ask$"):
        supervision.run(f"print('{REFUSED}'); sys.exit(49)")
    assert supervision.started == 1 and supervision.said == []


@pytest.mark.parametrize(
    ("fault", "seconds"), [(UNKNOWN, 60.0), (Check("clock", False, "ahead", "set it"), 0.0)]
)
def test_a_silo_that_was_in_waits_for_a_server_that_restarts_and_for_its_clock(
    supervision, tmp_path, monkeypatch, fault, seconds
):
    """Start 1 is online and thrown out, 2 and 3 find the key unknown or the clock wrong, 4 is in again."""
    monkeypatch.setattr(module, "fault_in_connection", lambda _: fault)
    monkeypatch.setattr(module, "RESTART_SECONDS", seconds)
    script = (
        f"start = len(open({str(supervision.starts)!r}).read())\n"
        "if start in (2, 3): sys.exit(1)\n"
        f"print('{REGISTERED}1')\n{wait_for_online(tmp_path)}"
        "if start == 1: sys.exit(1)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)"
    )
    assert supervision.run(script) == 0
    assert supervision.started == 4
    assert supervision.said == [
        f"clinic: {fault.name}: {fault.detail}; {fault.fix}; trying again"
    ]


def test_a_removed_silo_ends_with_the_reason(supervision, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "fault_in_connection", lambda _: UNKNOWN)
    script = (
        f"if len(open({str(supervision.starts)!r}).read()) == 1:\n"
        f"    print('{REGISTERED}1')\n    {wait_for_online(tmp_path)}"
        "sys.exit(1)"
    )
    fails(UserError, r"^clinic: key: unknown; ask$", supervision.run, script)
    assert supervision.started > 1 and len(supervision.said) == 1


def test_a_supernode_that_dies_for_no_known_reason(supervision):
    with pytest.raises(
        RunFailedError, match=r"^clinic: the SuperNode ended with exit code 3: something broke$"
    ):
        supervision.run("print('something broke'); sys.exit(3)")
    assert supervision.started == 1


@pytest.mark.timeout(60)
def test_what_outlives_a_supernode_is_ended(supervision):
    """It has the SuperNode's output, which is read to its end: this returns because the child was ended."""
    script = "import subprocess\nsubprocess.Popen(['sleep', '3600'])\nprint('killed', flush=True)\nsys.exit(3)"
    with pytest.raises(
        RunFailedError, match=r"^clinic: the SuperNode ended with exit code 3: killed$"
    ):
        supervision.run(script)


def test_no_supernode_is_started_on_an_empty_mount(supervision, site):
    site.data.unlink()
    (site.data.parent / "mount").mkdir()
    object.__setattr__(site, "data", site.data.parent / "mount/data.npz")
    fails(UserError, r"^clinic: data: .*/mount is empty; mount the folder", supervision.run, "")
    assert not supervision.starts.exists()


def test_node_config_is_what_flowers_parser_reads_back():
    from flwr.common.config import parse_config_args

    values = {"name": "a", "data": '/d/with "quotes" and spaces.npz', "state-dir": "/it's here"}
    text = node_config(values)
    assert read_node_config(text) == parse_config_args([text]) == values
    numbers = "partition-id=3 share=0.5 on=true"
    assert read_node_config(numbers) == parse_config_args([numbers])
    fails(ValueError, "has quotes that Flower", node_config, {"data": """it's "both" """})


@pytest.mark.parametrize("text", ["name", "name='a' b", "name=a", "a=1 a=2", "='a'"])
def test_a_node_config_that_is_none_is_refused(text):
    """Flower's parser takes the first two, without the word that is no pair."""
    fails(UserError, "^--node-config ", read_node_config, text)


def test_flowers_folder_is_the_one_that_flower_takes(monkeypatch):
    from flwr.supercore.utils import get_flwr_home

    for value in ("", "/flower"):
        monkeypatch.setenv("FLWR_HOME", value)
        assert flower_home() == get_flwr_home()
    monkeypatch.delenv("FLWR_HOME")
    assert flower_home() == get_flwr_home()
