"""Prefork against the Runtime API of a SuperNode."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.supercore.fab import Fab
from supernode import LISTED, RUN, RUN_CONFIG, Silo, gone, parent, wait_until
from tiny import write_silo

from client.site import audit_gate, private
from client.site.egress_record import applied
from client.site.runtime.prefork.install import template_command
from client.site.runtime.prefork.sockets import template_pid
from client.site.runtime.supernode import Executor
from client.site.terms import read_terms
from client.site.trust import audit
from client.site.trust.apps import build, listed
from client.site.trust.pins import AppRefusedError, check_pin, content_sum
from client.site.trust.policy import Policy
from strategies.base.transport.reporting import reason_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prefork needs Linux")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a parent that most tests share; its path is too long for a socket's address."""
    folder = tmp_path_factory.mktemp("parent") / ("a directory with a long name " * 6)
    folder.mkdir()
    with parent(folder / "warm.sock"):
        yield folder / "warm.sock"


@pytest.fixture
def silo(tmp_path: Path) -> Iterator[Silo]:
    """A silo whose parent does not run."""
    one = Silo(tmp_path)
    yield one
    one.server.should_exit = True
    one.thread.join()


@pytest.fixture
def warm_silo(silo: Silo, shared: Path) -> Silo:
    """A silo with the shared parent."""
    silo.environment["SILOFL_WARM_SOCKET"] = str(shared)
    return silo


def test_a_message_runs_in_a_fork_that_looks_like_flowers_own_process(warm_silo: Silo) -> None:
    """Reply, output, exit code, directory, argv and the silo's environment (none of the parent's) are right."""
    code, out, err = warm_silo.run(warm_silo.message(warm_silo.app("one")))
    assert code == 0, err
    assert "app says one" in out and "app warns" in err and "app says" not in err
    answer = warm_silo.answer()
    assert answer["warm"]
    assert answer["cwd"] == str(warm_silo.folder / "work") and answer["argv"] == "flwr-clientapp"
    assert answer["secret"] == "of this silo" and answer["stray"] == ""


def test_two_versions_one_after_the_other_and_a_process_for_each_message(warm_silo: Silo) -> None:
    seen = []
    for version in ("one", "two", "one"):
        assert warm_silo.run(warm_silo.message(warm_silo.app(version)))[0] == 0
        answer = warm_silo.answer()
        seen.append((answer["version"], answer["pid"]))
    assert [version for version, _ in seen] == ["one", "two", "one"]
    assert len({pid for _, pid in seen}) == 3


def test_flowers_own_arguments_output_and_exit_codes_pass_through(warm_silo: Silo) -> None:
    code, out, _ = warm_silo.run(["flwr-clientapp", "--help"])
    assert code == 0 and "--runtime-api-address" in out
    code, _, err = warm_silo.run(["flwr-clientapp", "--token", "none", "--no-such-flag"])
    assert code == 2 and "--no-such-flag" in err
    code, _, err = warm_silo.run(warm_silo.message(warm_silo.app("one"), "raises"))
    assert code == 1 and "no such column" in err
    assert "no such column" in warm_silo.reason()


@pytest.mark.parametrize(
    ("start", "behaviour", "code", "reason"),
    [
        ("warm", "killed", -signal.SIGKILL, "SIGKILL (out of memory: lower batch-size; or killed by hand)"),
        ("cold", "killed", -signal.SIGKILL, "SIGKILL (out of memory: lower batch-size; or killed by hand)"),
        ("warm", "segfault", -signal.SIGSEGV, "SIGSEGV"),
        ("warm", "leaves", 3, "left with exit code 3 and without a reply"),
    ],
)
def test_a_dead_child_is_answered_for_at_once(
    silo: Silo, start: str, behaviour: str, code: int, reason: str, shared: Path
) -> None:
    """Without an answer the SuperNode would wait for the task's heartbeat to lapse: a minute, and no reason given."""
    if start == "warm":
        silo.environment["SILOFL_WARM_SOCKET"] = str(shared)
    command = silo.message(silo.app("one"), behaviour)
    ended, _, err = silo.run(command)
    assert ended == code, err
    assert reason in silo.reason()
    assert code > 0 or reason in err
    # and the next message is served as if nothing had been
    assert silo.run(silo.message(silo.app("one")))[0] == 0
    assert silo.answer()["warm"] is (start == "warm")


def test_a_hung_child_ends_with_the_messages_time_to_live(warm_silo: Silo) -> None:
    message = warm_silo.message(warm_silo.app("one"), "hangs", ttl=2.0)
    process = warm_silo.start(message, SILOFL_RESIDENT_MINUTES="0")  # of one that stays: test_persistent.py
    pid = warm_silo.app_pid()
    _, err = process.communicate(timeout=30)
    assert gone(pid) and process.returncode == -signal.SIGKILL  # it ignores SIGTERM
    assert "time to live is over" in err
    assert "end of the message's time to live" in warm_silo.reason()


def supernode_of(silo: Silo, monkeypatch: pytest.MonkeyPatch) -> Executor:
    """What our SuperNode starts its tasks with, in this process."""
    for key, value in silo.environment.items():
        monkeypatch.setenv(key, value)
    executor = Executor()
    executor.Popen(["flower-superexec", *silo.options])
    return executor


def idle(executor: Executor) -> bool:
    executor.poll()
    return not executor._tasks


def test_our_supernode_needs_no_shim_and_no_http(warm_silo: Silo, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = supernode_of(warm_silo, monkeypatch)
    warm_silo.server.should_exit = True  # nobody answers by HTTP
    warm_silo.thread.join()
    warm_silo.store_message(warm_silo.app("one"))
    executor.start(warm_silo.state)
    (line,) = executor._tasks
    assert isinstance(line, socket.socket)
    wait_until(warm_silo.replied)
    wait_until(lambda: idle(executor))
    assert warm_silo.answer()["warm"]


def test_where_no_parent_is_our_supernode_starts_the_shim(
    silo: Silo, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    executor = supernode_of(silo, monkeypatch)
    silo.store_message(silo.app("one"))
    executor.start(silo.state)
    (process,) = executor._tasks
    assert isinstance(process, subprocess.Popen) and process.wait(timeout=60) == 0
    assert not silo.answer()["warm"] and "WARNING: no template process" in capfd.readouterr().err
    assert idle(executor)


def test_a_child_ends_with_the_line_to_its_supernode(warm_silo: Silo, monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes where the SuperNode dies, however."""
    executor = supernode_of(warm_silo, monkeypatch)
    warm_silo.store_message(warm_silo.app("one"), "hangs")
    executor.start(warm_silo.state)
    pid = warm_silo.app_pid()
    (line,) = executor._tasks
    assert isinstance(line, socket.socket)
    line.close()
    wait_until(lambda: gone(pid))
    wait_until(warm_silo.replied)
    assert "ended with its SuperNode" in warm_silo.reason()


def test_the_child_ends_with_its_shim(warm_silo: Silo) -> None:
    """The shim killed with SIGKILL can tell nobody; its socket closes."""
    process = warm_silo.start(warm_silo.message(warm_silo.app("one"), "hangs"))
    pid = warm_silo.app_pid()
    process.kill()
    wait_until(lambda: gone(pid))
    wait_until(warm_silo.replied)
    process.communicate()
    assert "ended with its SuperNode" in warm_silo.reason()


def test_the_child_ends_with_its_supernode(warm_silo: Silo) -> None:
    """The shim's parent, here a shell, goes away without a word."""
    command = warm_silo.message(warm_silo.app("one"), "waits")
    shell = warm_silo.start(["sh", "-c", '"$@"; true', "sh", *command])
    pid = warm_silo.app_pid()
    shell.kill()
    wait_until(lambda: gone(pid))
    shell.communicate()


def test_signals_reach_the_child(warm_silo: Silo) -> None:
    """SIGTERM to the shim makes Flower's entry leave gracefully: exit code 0, and nobody waits for a reply."""
    process = warm_silo.start(warm_silo.message(warm_silo.app("one"), "waits"))
    pid = warm_silo.app_pid()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    wait_until(lambda: gone(pid))
    assert process.returncode == 0
    assert "SIGTERM" in warm_silo.reason()


def test_a_running_child_survives_the_parent(silo: Silo) -> None:
    with parent(silo.socket) as process:
        task = silo.start(silo.message(silo.app("one"), "waits", ttl=3.0))
        pid = silo.app_pid()
        process.kill()
        process.wait()
        assert not gone(pid)
        task.communicate(timeout=30)  # its watchdog still ends it when its time is over
    assert "time to live" in silo.reason()


def test_without_a_parent_flower_starts_it_with_a_warning(silo: Silo) -> None:
    code, out, err = silo.run(silo.message(silo.app("one")))
    assert code == 0 and "app says one" in out
    assert "WARNING: no template process" in err
    assert not silo.answer()["warm"]
    code, _, err = silo.run(silo.message(silo.app("two")), SILOFL_WARM_SOCKET="")  # switched off: no warning
    assert code == 0 and "WARNING: no template" not in err


def test_a_parent_that_dies_is_replaced_by_the_next_shim(silo: Silo) -> None:
    """The message that finds it dead runs cold and starts another one, of which there is only one."""
    with parent(silo.socket) as process:
        process.kill()
        process.wait()
        code, _, err = silo.run(silo.message(silo.app("one")), SILOFL_WARM_RESPAWN="1")
        assert code == 0 and "WARNING: no template" in err
        assert not silo.answer()["warm"]
        wait_until(lambda: template_pid(silo.socket))
        new = template_pid(silo.socket)
        assert new is not None and new != process.pid
        try:
            second = subprocess.run(template_command(silo.socket), capture_output=True, text=True, check=True)
            assert "another template process serves this socket" in second.stderr
            code, _, err = silo.run(silo.message(silo.app("one")))  # waits in the backlog for the imports
            assert code == 0, err
            assert silo.answer()["warm"]
        finally:
            os.kill(new, signal.SIGTERM)
        wait_until(lambda: gone(new))
        assert template_pid(silo.socket) is None


def told(err: str) -> list[str]:
    """The lines of a silo's log, without those that every message has."""
    return [line for line in err.splitlines() if "INFO" not in line and "no template process" not in line]


@pytest.mark.parametrize("start", ["warm", "cold"])
def test_a_message_that_the_policy_forbids_is_refused_before_import(silo: Silo, start: str, shared: Path) -> None:
    """By the site's own process: this app knows no policy, and the server chose every setting and the app."""
    policy = silo.folder / "policy.toml"
    policy.write_text("max-local-epochs = 5\nmin-silos = 1\nruns-per-day = 0\n")
    if start == "warm":
        silo.environment["SILOFL_WARM_SOCKET"] = str(shared)
    site: dict[str, Any] = {"name": "clinic", "data": "own.npz"}
    run: dict[str, Any] = {"strategy": "fedavg", "local-epochs": "1000", "batch-size": 64}
    code, _, err = silo.run(
        silo.message(silo.app("weak"), "1", node_config=site, run_config=run), SILOFL_POLICY=str(policy)
    )
    line = "clinic refuses: its policy has max-local-epochs = 5, the run local-epochs = 1000"
    assert code and told(err) == [f"ERROR: {line}"]
    assert reason_of(silo.reason()) == line
    assert not (silo.marks / "imported-weak").exists() and not list((silo.folder / "flower").glob("apps/*"))
    allowed = silo.message(silo.app("weak"), "1", node_config=site, run_config=run | {"local-epochs": 5})
    policy.write_text(policy.read_text() + 'methods = ["fedavg"]\n')
    code, _, err = silo.run(allowed, SILOFL_POLICY=str(policy))
    assert code == 1 and "min-silos = 1, the round 0 that train" in err


def test_a_server_without_receipts_is_named_or_refused_before_import(silo: Silo, shared: Path) -> None:
    """As the site's policy says. A refusal unpacks and imports nothing; else the line is there once."""
    policy = silo.folder / "policy.toml"
    silo.environment["SILOFL_WARM_SOCKET"] = str(shared)
    site: dict[str, Any] = {"name": "clinic", "data": "own.npz", "state-dir": str(silo.log.parent)}
    run: dict[str, Any] = {"strategy": "local", "local-epochs": 1, "batch-size": 64}
    policy.write_text('receipts = "required"\n')
    message = silo.message(silo.app("bare"), "1", node_config=site, run_config=run)
    code, _, err = silo.run(message, SILOFL_POLICY=str(policy))
    line = 'clinic refuses: its policy has receipts = "required", and the server gives no receipt for the audit log'
    assert code and told(err) == [f"ERROR: {line}"] and reason_of(silo.reason()) == line
    assert not (silo.marks / "imported-bare").exists()
    policy.write_text("")
    message = silo.message(silo.app("bare"), "1", node_config=site, run_config=run)
    code, _, err = silo.run(message, SILOFL_POLICY=str(policy))
    assert code == 0 and "WARNING: clinic: the server gives no receipt for the audit log (" in err
    assert (silo.marks / "imported-bare").exists()


@pytest.mark.parametrize("start", ["warm", "cold"])
def test_an_app_that_is_not_pinned_is_refused_before_import(silo: Silo, start: str, shared: Path) -> None:
    """Both starts refuse, with one line, before anything of the app is unpacked or imported."""
    good, bad = silo.app("good"), silo.app("bad")
    pins = silo.folder / "allowed-apps"
    pins.write_text(f"# apps this hospital runs\n{good.hash_str}  probe.fab\n")
    if start == "warm":
        silo.environment["SILOFL_WARM_SOCKET"] = str(shared)
    pinned = {"SILOFL_ALLOWED_APPS": str(pins)}
    assert silo.run(silo.message(good), **pinned)[0] == 0
    assert silo.answer()["version"] == "good"
    code, _, err = silo.run(silo.message(bad), **pinned)
    assert code == 1
    line = f"ERROR: app {content_sum(bad.content)} refused: its SHA-256 is not among the 1 listed in {pins}"
    assert told(err) == [line]
    assert "refused" in silo.reason()
    assert not (silo.marks / "imported-bad").exists()
    unpacked = list((silo.folder / "flower" / "apps").iterdir())
    assert [path.name.split(".")[-1] for path in unpacked] == [good.hash_str[:8]]


@pytest.mark.parametrize("start", ["warm", "cold"])
@pytest.mark.parametrize("field", ["fab_version", "fab_id"])
def test_no_other_folder_than_the_checked_one_is_imported(silo: Silo, start: str, field: str, shared: Path) -> None:
    """The pins check bytes; Flower imports from a folder whose name it makes of what the server says."""
    good = silo.app("good")
    pins = {"SILOFL_ALLOWED_APPS": good.hash_str}
    if start == "warm":
        silo.environment["SILOFL_WARM_SOCKET"] = str(shared)
    shutil.copytree(silo.folder / "app-good", planted := silo.folder / "flower" / f"x.{good.hash_str[:8]}")
    (planted / "main.py").write_text(f"open({str(silo.folder / 'planted')!r}, 'w')\n")
    folder = f"test.probe.1.0.0.{good.hash_str[:8]}"
    names = {"fab_version": f"1.0.0.{good.hash_str[:8]}/../../x", "fab_id": f"{folder}/../../x"}
    code, _, err = silo.run(silo.message(good, **{field: names[field]}), **pins)
    assert code == 1 and len(told(err)) == 1 and "the server names another folder to load it from" in err
    assert "the server names another folder" in silo.reason()
    assert not (silo.folder / "planted").exists() and not (silo.marks / "imported-good").exists()
    assert silo.run(silo.message(good), **pins)[0] == 0


def test_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list in the variable itself; a file that is not there refuses everything; no pins allow everything."""
    one, two = "ab" * 32, "cd" * 32
    monkeypatch.setenv("SILOFL_ALLOWED_APPS", f"{one},{two.upper()}")
    check_pin(one)
    check_pin(two)
    with pytest.raises(AppRefusedError, match="not among the 2 listed in SILOFL_ALLOWED_APPS"):
        check_pin("ef" * 32)
    monkeypatch.setenv("SILOFL_ALLOWED_APPS", str(tmp_path / "missing"))
    with pytest.raises(AppRefusedError, match="cannot read the allowed apps"):
        check_pin(one)
    (tmp_path / "empty").write_text("# none yet\n")
    monkeypatch.setenv("SILOFL_ALLOWED_APPS", str(tmp_path / "empty"))
    with pytest.raises(AppRefusedError, match="not among the 0 listed"):
        check_pin(one)
    monkeypatch.setenv("SILOFL_ALLOWED_APPS", "")
    check_pin(one)


def test_an_app_is_known_by_what_it_holds_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image's list: the same files compressed otherwise, as on another machine, are the same app. A byte more in a
    file, a file more, or a second file under a name, of which only one is looked at when it is unpacked, are not."""

    def app(files: list[tuple[str, str]], compression: int = zipfile.ZIP_DEFLATED) -> tuple[str, bytes]:
        content = io.BytesIO()
        with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(content, "w", compression) as archive:
            for name, text in files:
                archive.writestr(name, text)
        return hashlib.sha256(content.getvalue()).hexdigest(), content.getvalue()

    ours = [("a.py", "x = 1\n" * 50), ("b.py", "")]
    pins = tmp_path / "allowed-apps"
    pins.write_text(f"{content_sum(app(ours)[1])}  ours\n")
    monkeypatch.setenv("SILOFL_ALLOWED_APPS", str(pins))
    check_pin(*app(ours))
    check_pin(*app(ours[::-1], zipfile.ZIP_STORED))
    for other in (
        [("a.py", "x = 1\n" * 50 + " "), ("b.py", "")],
        [*ours, ("c.py", "")],
        [*ours, ("a.py", "x = 2\n")],
        [("a.py", ""), ("b.py", "x = 1\n" * 50)],
    ):
        with pytest.raises(AppRefusedError, match="not among the 1 listed in"):
            check_pin(*app(other))
    with pytest.raises(AppRefusedError, match="not among the 1 listed in"):
        check_pin("ab" * 32, b"no app at all")
    damaged = bytearray(app(ours)[1])
    damaged[45] ^= 255  # in the first file's data
    with pytest.raises(AppRefusedError, match="not among the 1 listed in"):
        check_pin("ab" * 32, bytes(damaged))


def test_the_list_of_an_image_is_the_app_of_its_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = build(Path(__file__).parents[3])
    (tmp_path / "allowed-apps").write_text(listed(Path(__file__).parents[3]))
    monkeypatch.setenv("SILOFL_ALLOWED_APPS", str(tmp_path / "allowed-apps"))
    check_pin(hashlib.sha256(content).hexdigest(), content)


def test_a_half_unpacked_app_is_unpacked_again(warm_silo: Silo) -> None:
    """Flower takes the directory `NAME.HASH8` as it is; a process killed while it unpacked leaves half of it."""
    fab = warm_silo.app("one")
    half = warm_silo.folder / "flower" / "apps" / f"test.probe.1.0.0.{fab.hash_str[:8]}"
    half.mkdir(parents=True)
    (half / "helper.py").write_text("VERSION = 'half'\n")
    assert warm_silo.run(warm_silo.message(fab))[0] == 0
    assert warm_silo.answer()["version"] == "one"


def test_what_the_parent_imports_ahead() -> None:
    """Third-party modules only, since ours would be old code; all that the silo's app needs; CUDA is left alone.

    The parent's own files, the worker's too, are loaded under a name that no app has.
    """
    code = textwrap.dedent("""
        import importlib, sys, threading
        from importlib.util import module_from_spec, spec_from_file_location
        root = sys.argv[1]
        spec = spec_from_file_location("private", root + "/client/site/private.py")
        private = module_from_spec(spec)
        spec.loader.exec_module(private)
        private.load_site()
        import silofl_site.runtime.prefork.commands
        import silofl_site.runtime.prefork.worker
        from silofl_site.runtime.prefork.template import PRELOAD
        for name in PRELOAD:
            importlib.import_module(name)
        ours = {"models", "strategies", "partitions", "client", "server"}
        before = {name.partition(".")[0] for name in sys.modules}
        print(sorted(ours & before), threading.active_count(), sys.modules["torch"].cuda.is_initialized())
        sys.path.insert(0, root)
        import client.app, client.site.flower
        after = {name.partition(".")[0] for name in sys.modules}
        print(sorted(after - before - ours - sys.stdlib_module_names))
        print(client.site.flower is silofl_site.flower)
    """)
    root = str(Path(private.__file__).parents[2])
    done = subprocess.run([sys.executable, "-P", "-c", code, root], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[] 1 False", "[]", "False"]


# --- the audit log ------------------------------------------------------------------------------------------


def test_what_leaves_is_written_down_before(warm_silo: Silo) -> None:
    """Who asked, with which app and settings, and of every record its name, bytes and digest; an error too."""
    app = warm_silo.app("one")
    environment = {"SILOFL_SERVER": "fl.example.org:9092", "SILOFL_ALLOWED_APPS": app.hash_str}
    assert warm_silo.run(warm_silo.message(app), **environment)[0] == 0
    answer = dict(warm_silo.answer())
    warm_silo.run(warm_silo.message(app, "raises"), **environment)
    assert "no such column" in warm_silo.reason()
    warm_silo.run(warm_silo.message(app, "killed"), **environment)
    assert "SIGKILL" in warm_silo.reason()
    found = audit.verify(warm_silo.log)
    assert (found.faults, found.notes) == ([], [])
    sent, raised, killed = found.entries
    told = {key: sent[key] for key in ("silo", "asked-by", "run", "round", "asked", "method", "app", "rule", "run-id")}
    assert LISTED in sent["rule"] and "policy: no policy.toml, so the defaults (rules " in sent["rule"]
    rule = audit_gate.rule_of(read_terms(warm_silo.node_config, {}))
    assert told == {
        "silo": "north",
        "asked-by": "fl.example.org:9092",
        "run": "today",
        "round": 3,
        "asked": "train",
        "method": "fedavg",
        "app": content_sum(app.content),
        "rule": rule.replace("no allowed-apps: any build may send", LISTED),
        "run-id": str(RUN + 1),
    }
    plain = json.dumps(answer, sort_keys=True).encode()
    digests = [hashlib.sha256(text).hexdigest() for text in (plain, json.dumps(RUN_CONFIG, sort_keys=True).encode())]
    record = {"name": "answer", "keys": sorted(answer), "bytes": len(plain), "sha256": digests[0]}
    assert (sent["sent"], sent["settings"], sent["bytes"]) == ([record], digests[1], len(plain))
    assert sent["run-config"] == raised["run-config"] == killed["run-config"] == RUN_CONFIG  # of three runs
    assert sent["rules"] == applied(Policy()) and sent["policy"] == ""  # no file
    assert sent["versions"]["flwr"] == importlib.metadata.version("flwr")
    assert sent["budget"] == {"before": {}, "after": {}}
    assert "withheld" not in sent  # this app reports nothing
    assert "no such column" in raised["sent"][0]["text"] and "SIGKILL" in killed["sent"][0]["text"]


@pytest.mark.parametrize("start", ["warm", "cold"])
def test_nothing_leaves_where_it_cannot_be_written_down(silo: Silo, start: str, shared: Path) -> None:
    """One line in place of the reply, and in the silo's log. (A full disk: test_audit.py.)"""
    silo.environment["SILOFL_WARM_SOCKET"] = str(shared) if start == "warm" else ""
    silo.log.parent.mkdir()
    silo.log.write_text("no folder")
    _, _, err = silo.run(silo.message(silo.app("one")))
    reason = silo.reason()  # a reply is there to be taken once
    assert reason == "nothing leaves: the audit log cannot be written: File exists"
    assert f"ERROR: {reason} ({silo.log})" in err


def without_shim(silo: Silo, fab: Fab) -> tuple[int, str, str]:
    """A query by Flower's own start: no shim on PATH, so none of our wrappers."""
    silo.node_config["policy"] = "public"
    silo.node_config["data"] = str(write_silo(silo.folder / "data.npz", [[1.0, 2.0], [3.0, 4.0]] * 6, [0, 1] * 6))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.defpath])
    return silo.run(silo.message(fab, kind="query"), PATH=path)


def silofls_app() -> Fab:
    content = build(Path(__file__).parents[3])
    return Fab(hashlib.sha256(content).hexdigest(), content, {})


@pytest.mark.exhaustive  # in process: test_private_kills.py
def test_flowers_own_start_writes_down_what_silofls_app_sends(silo: Silo) -> None:
    """Then the app does it itself."""
    code, out, err = without_shim(silo, fab := silofls_app())
    assert code == 0, out + err
    assert not silo.reply().has_error()
    (sent,) = audit.verify(silo.log).entries
    assert sent["asked"] == "query" and sent["app"] == fab.hash_str[:8]
    assert [record["name"] for record in sent["sent"]] == ["summary"] and "n_train" in sent["sent"][0]["keys"]


@pytest.mark.exhaustive
def test_nor_does_anything_leave_without_a_log_after_flowers_own_start(silo: Silo) -> None:
    silo.log.parent.mkdir(exist_ok=True)
    silo.log.write_text("no folder")
    without_shim(silo, silofls_app())
    assert silo.reason() == "nothing leaves: the audit log cannot be written: File exists"
