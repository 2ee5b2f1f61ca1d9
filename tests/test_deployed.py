"""The same app in process, under Ray and deployed gives the same numbers; a killed federation resumes without a trace.

Three real silos on this machine, over gRPC with TLS and node keys; the tests share one federation.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import comparable

from server import local, processes, submit
from server.federation import read_federation
from server.history import History
from server.local import Local
from server.simulate import simulate

pytestmark = [
    pytest.mark.deployed,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="`silofl up` needs Linux"),
]

ROOT = Path(__file__).resolve().parent.parent
RUN: dict[str, Any] = {
    "dataset": "digits",
    "partition": "dirichlet",
    "rounds": 3,
    "threads": 1,
    "model": "mlp",
}
FEDERATION = """\
name: {name}
demo: {{dataset: digits, partition: dirichlet, seed: 42}}
silos:
  - {{name: hospital-01, data: demo}}
  - {{name: hospital-02, data: demo}}
  - {{name: hospital-03, data: demo}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Everything that is written lies here; all processes end with it."""
    folder = tmp_path_factory.mktemp("deployed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("FLWR_HOME", str(folder / "flower"))
        patch.setenv("FLWR_TELEMETRY_ENABLED", "0")
        patch.setenv("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "1")
        (folder / "federation.yaml").write_text(FEDERATION.format(name="trio"))
        yield folder
        processes.end(processes.find(local.state_root() / "trio"), grace=1.0)


@pytest.fixture(scope="module")
def federation(folder: Path) -> Local:
    return bring_up(folder)


def bring_up(folder: Path) -> Local:
    return local.up(read_federation(folder / "federation.yaml"), say=lambda line: None)


def rows(directory: Path) -> list[list[str]]:
    """Everything of the history but how long rounds took."""
    return comparable(History(directory / "history.csv").rows)


@pytest.mark.parametrize("strategy", ["apple", "fedala"])
def test_in_process_and_deployed_give_the_same_numbers(
    federation: Local, tmp_path: Path, strategy: str
) -> None:
    """Bit for bit: metrics of every silo and round, losses included, and the bytes."""
    settings = {**RUN, "strategy": strategy}
    simulate({**settings, "silos": 3, "out": str(tmp_path / "here")}, quiet=True)
    submit.run({**settings, "out": str(tmp_path / "there")})
    assert rows(tmp_path / "there") == rows(tmp_path / "here")


@pytest.mark.parametrize("strategy", ["apple", "fedala"])
def test_ray_gives_the_same_numbers(folder: Path, tmp_path: Path, strategy: str) -> None:
    """`flwr run . local`: the local SuperLink that it starts is a daemon, and ends with the test."""
    settings = {**RUN, "strategy": strategy, "silos": 3}
    simulate({**settings, "out": str(tmp_path / "here")}, quiet=True)
    text = " ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in settings.items())
    before = set(superlinks())
    try:
        done = subprocess.run(
            [
                *(sys.executable, "-P", "-c", "from flwr.cli.app import app; app()"),
                *("run", str(ROOT), "local", "--stream", "--federation-config", "num-supernodes=3"),
                *("--run-config", f'{text} out="{tmp_path / "there"}"'),
            ],
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    finally:
        for pid in set(superlinks()) - before:
            os.kill(pid, signal.SIGTERM)
    assert (tmp_path / "there" / "summary.json").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    assert rows(tmp_path / "there") == rows(tmp_path / "here")


def superlinks() -> list[int]:
    """Processes of simulation SuperLinks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if "flower-superlink" in command and "--simulation" in command:
            found.append(int(path.parent.name))
    return found


def supernode(federation: Local) -> list[int]:
    return [s["pid"] for s in local.status(federation)["silos"] if s["name"] == "hospital-02"]


def superlink(federation: Local) -> list[int]:
    return [local.status(federation)["superlink"]["pid"]]


def server_app(federation: Local) -> list[int]:
    """The process that runs our ServerApp, started by the SuperLink's SuperExec."""
    pids = []
    for one in processes.find(federation.directory):
        command = Path(f"/proc/{one.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        if "flwr-serverapp" in command:
            pids.append(one.pid)
    return pids


@pytest.mark.parametrize("victims", [supernode, superlink, server_app])
def test_a_federation_killed_in_mid_run_resumes_as_if_it_had_not_been(
    federation: Local, folder: Path, tmp_path: Path, victims: Callable[[Local], list[int]]
) -> None:
    """kill -9 after round 2 of 8; what is left of the run is stopped, `up` mends, `resume` goes on."""
    settings = {**RUN, "strategy": "apple", "rounds": 8, "apple.common-init": True}
    simulate({**settings, "silos": 3, "out": str(tmp_path / "here")}, quiet=True)
    out = tmp_path / "there"
    ended: list[str] = []

    def follow() -> None:
        try:
            submit.run({**settings, "out": str(out)})
            ended.append("completed")
        except RuntimeError as error:
            ended.append(str(error))

    follower = threading.Thread(target=follow)
    follower.start()
    wait_for(lambda: '"round": 2,' in text_of(out / "progress.jsonl"), 120)
    pids = victims(local.find_local())
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    if victims is supernode:
        submit.stop()
    follower.join(timeout=120)
    assert ended and ended[0] != "completed"
    bring_up(folder)
    submit.run({**settings, "out": str(out), "resume": True})
    assert rows(out) == rows(tmp_path / "here")


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_stopped_silo_does_not_stop_the_others(federation: Local, folder: Path, tmp_path: Path) -> None:
    """A silo that hangs (SIGSTOP) is named once the round's time is up; with a quorum of two the run goes on."""
    bring_up(folder)
    (pid,) = supernode(local.find_local())
    out = tmp_path / "out"
    settings = {**RUN, "strategy": "fedavg", "rounds": 3, "round-timeout": 40.0, "min-silos": 2}
    follower = threading.Thread(target=lambda: submit.run({**settings, "out": str(out)}))
    follower.start()
    try:
        wait_for(lambda: '"round": 1,' in text_of(out / "progress.jsonl"), 120)
        os.kill(pid, signal.SIGSTOP)
        follower.join(timeout=240)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert not follower.is_alive()
    history = History(out / "history.csv")
    left_out = {(r.round, r.silo) for r in history.rows if r.metric == "rejected"}
    assert (3, "hospital-02") in left_out
    assert {r.silo for r in history.rows if r.round == 3 and r.metric == "accuracy"} == {
        "hospital-01",
        "hospital-03",
    }
