"""The process that stays from message to message of a run, and all that ends it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, RecordDict
from supernode import RUN_CONFIG, Silo, gone, parent, wait_until

from client.site.memory import available_share
from client.site.runtime.prefork import persistent
from client.site.runtime.prefork.persistent import Dispatcher, is_last

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prefork needs Linux")

ONE, OTHER = 5, 6  # runs
KILLED = "(out of memory: lower batch-size; or killed by hand)"


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a parent that the tests share."""
    folder = tmp_path_factory.mktemp("parent")
    with parent(folder / "warm.sock"):
        yield folder / "warm.sock"


@pytest.fixture
def silo(tmp_path: Path, warm: Path) -> Iterator[Silo]:
    one = Silo(tmp_path)
    one.environment["SILOFL_WARM_SOCKET"] = str(warm)
    yield one
    one.server.should_exit = True
    one.thread.join()


def ask(silo: Silo, behaviour: str = "", *, app: str = "one", run: int = ONE) -> tuple[int, str]:
    """Exit code and stderr of one message's task."""
    code, _, err = silo.run(silo.message(silo.app(app), behaviour, run_id=run))
    return code, err


def served_by(silo: Silo, app: str = "one", run: int = ONE) -> int:
    """The process that ran the app for a message."""
    code, err = ask(silo, app=app, run=run)
    assert code == 0, err
    pid = silo.answer()["pid"]
    assert isinstance(pid, int)
    return pid


def test_messages_of_a_run_share_a_process(silo: Silo) -> None:
    """The second looks as if it had a process of its own: output, environment, directory, and the run's context."""
    seen = []
    for secret in ("first", "second"):
        code, out, err = silo.run(silo.message(silo.app("one"), run_id=ONE), SECRET=secret)
        assert code == 0 and out.count("app says one") == 1 and err.count("app warns") == 1
        answer = silo.answer()
        assert answer["secret"] == secret and answer["cwd"] == str(silo.folder / "work")
        seen.append((answer["pid"], answer["served"], answer["messages"]))
    (pid, *first), (same, *second) = seen
    assert pid == same and first == [1, 1] and second == [2, 1]  # the test gives each message a new context


@pytest.mark.parametrize(("run", "app"), [(OTHER, "one"), (ONE, "two")])
def test_another_run_or_another_app_ends_it(silo: Silo, run: int, app: str) -> None:
    """Its first message has a process to itself, as before there were any that stay; the second finds a new one."""
    first = served_by(silo)
    alone = served_by(silo, run=run, app=app)
    wait_until(lambda: gone(first))
    second = served_by(silo, run=run, app=app)
    assert len({first, alone, second}) == 3 and second == served_by(silo, run=run, app=app)
    assert served_by(silo) != second
    wait_until(lambda: gone(second))


@pytest.mark.parametrize(
    ("behaviour", "code", "reason"),
    [
        ("killed", -signal.SIGKILL, f"ClientApp process was ended by SIGKILL {KILLED}"),
        ("segfault", -signal.SIGSEGV, "ClientApp process was ended by SIGSEGV"),
        ("leaves", 3, "ClientApp process left with exit code 3 and without a reply"),
    ],
)
def test_its_death_costs_one_message(silo: Silo, behaviour: str, code: int, reason: str) -> None:
    first = served_by(silo)
    ended, err = ask(silo, behaviour)
    assert ended == code, err
    assert silo.reason() == reason
    second = served_by(silo)
    assert second != first and second == served_by(silo)


def test_an_error_ends_it(silo: Silo) -> None:
    first = served_by(silo)
    code, err = ask(silo, "raises")
    assert code == 1 and "no such column" in err and "no such column" in silo.reason()
    wait_until(lambda: gone(first))
    assert served_by(silo) != first


@pytest.mark.parametrize("how", ["shim", "time to live"])
def test_it_ends_with_its_message(silo: Silo, how: str) -> None:
    first = served_by(silo)
    (silo.marks / "pid").unlink()
    process = silo.start(silo.message(silo.app("one"), "hangs", run_id=ONE, ttl=2.0 if how == "time to live" else 60.0))
    assert silo.app_pid() == first
    if how == "shim":
        process.kill()
    process.communicate(timeout=30)
    wait_until(lambda: gone(first))
    wait_until(silo.replied)
    assert ("ended with its SuperNode" if how == "shim" else "end of the message's time to live") in silo.reason()


def test_where_the_dispatcher_dies_the_worker_runs_the_app(silo: Silo) -> None:
    process = silo.start(silo.message(silo.app("one"), "waits once", run_id=ONE))
    wait_until((silo.marks / "waited").exists)
    stayed = silo.app_pid()
    dispatcher = int(Path(f"/proc/{stayed}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(dispatcher, signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == 0 and gone(stayed)
    assert silo.answer()["pid"] != stayed


def test_pins_and_policy_are_asked_for_each_message(silo: Silo) -> None:
    pins, policy = silo.folder / "allowed-apps", silo.folder / "policy.toml"
    policy.write_text("min-silos = 1\nruns-per-day = 0\n")
    pins.write_text(silo.app("one").hash_str)
    silo.environment |= {"SILOFL_ALLOWED_APPS": str(pins), "SILOFL_POLICY": str(policy)}
    assert served_by(silo) == served_by(silo)
    pins.write_text("ab" * 32)
    code, err = ask(silo)
    assert code == 1 and "refused: its SHA-256 is not among the 1 listed" in err
    assert "refused" in silo.reason()
    pins.write_text(silo.app("one").hash_str)
    silo.node_config["data"] = "own.npz"
    policy.write_text('methods = ["fedprox"]\n')
    code, err = ask(silo)
    assert code == 1 and "its policy has methods" in err


def test_who_comes_while_it_is_busy_runs_the_app(silo: Silo) -> None:
    process = silo.start(silo.message(silo.app("one"), "waits once", run_id=ONE))
    wait_until((silo.marks / "waited").exists)
    stays = silo.app_pid()
    second = silo.start(silo.message(silo.app("one"), run_id=OTHER))
    assert second.communicate(timeout=30) and second.returncode == 0
    assert silo.answer()["pid"] != stays and not gone(stays)
    process.kill()
    process.communicate(timeout=30)


def test_no_process_stays_where_none_is_wanted(silo: Silo) -> None:
    silo.environment["SILOFL_RESIDENT_MINUTES"] = "0"
    assert served_by(silo) != served_by(silo)
    silo.environment["SILOFL_RESIDENT_MINUTES"] = "ten"
    code, err = ask(silo)
    assert code == 0 and "WARNING: SILOFL_RESIDENT_MINUTES is not a number of minutes" in err


def test_it_ends_when_it_has_waited_and_with_the_parent(silo: Silo, tmp_path: Path) -> None:
    silo.environment["SILOFL_RESIDENT_MINUTES"] = "0.01"
    idle = served_by(silo)
    wait_until(lambda: gone(idle))
    del silo.environment["SILOFL_RESIDENT_MINUTES"]
    with parent(tmp_path / "warm.sock"):
        silo.environment["SILOFL_WARM_SOCKET"] = str(tmp_path / "warm.sock")
        stays = served_by(silo)
        assert list(tmp_path.glob("warm.sock.*[0-9]"))
    wait_until(lambda: gone(stays))
    wait_until(lambda: not list(tmp_path.glob("warm.sock.*[0-9]")))


def test_it_ends_with_its_supernode(silo: Silo) -> None:
    """Here a shell, which ends after the message."""
    shell = silo.start(["sh", "-c", '"$@"; true', "sh", *silo.message(silo.app("one"), run_id=ONE)])
    shell.communicate(timeout=30)
    wait_until(lambda: gone(silo.app_pid()))


def test_when_a_dispatcher_ends(monkeypatch: pytest.MonkeyPatch, warm: Path) -> None:
    monkeypatch.setenv("SILOFL_RESIDENT_MINUTES", "1")
    dispatcher = Dispatcher(0, None, None, 0, warm)  # type: ignore[arg-type]
    monkeypatch.setattr(persistent, "available_share", lambda: 0.5)
    assert not dispatcher._is_to_end()
    monkeypatch.setattr(persistent, "available_share", lambda: 0.05)
    assert dispatcher._is_to_end()
    monkeypatch.setattr(persistent, "available_share", available_share)
    assert 0 < available_share() <= 1
    dispatcher.idle_since -= 61
    assert dispatcher._is_to_end()


def test_a_messages_last_round() -> None:
    def last(told: dict[str, int], asked: dict[str, int]) -> bool:
        message = SimpleNamespace(content=RecordDict({"config": ConfigRecord(told)}))  # type: ignore[arg-type]
        return is_last(message, SimpleNamespace(run_config=RUN_CONFIG | asked))

    assert last({"round": 3}, {"rounds": 3}) and not last({"round": 2}, {"rounds": 3})
    assert not last({"round": 3}, {}) and not last({}, {"rounds": 3})
