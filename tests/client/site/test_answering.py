"""A message at the SuperNode: checked, answered by the app in its own process, written down."""

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
import threading
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from failing import fails
from flwr.app import ConfigRecord, RecordDict
from flwr.supercore.constant import TaskType
from supernode import LISTED, RUN, RUN_CONFIG, NodeSilo, gone, parent, wait_until

from client.flower.apps import build, list_builds
from client.protocol import private
from client.protocol.code import content_sum
from client.protocol.launch import template_command, template_pid
from client.protocol.policy import Policy
from client.site import release
from client.site.release import rule_values
from client.site.runtime import worker
from client.site.runtime.worker import is_last
from client.site.terms import GIVEN, read_terms, take_terms
from client.site.trust import audit
from client.site.trust.code import AppRefusedError, check_pin

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="an app's process needs Linux"
)

ONE, OTHER = 5, 6  # runs
KILLED = "(out of memory: lower batch-size; or killed by hand)"


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """The socket of a template process that the tests share; its path is too long for a socket's address."""
    folder = tmp_path_factory.mktemp("parent") / ("a directory with a long name " * 6)
    folder.mkdir()
    with parent(folder / "warm.sock"):
        yield folder / "warm.sock"


@pytest.fixture
def silo(tmp_path, template, monkeypatch):
    one = NodeSilo(tmp_path, template, monkeypatch)
    yield one
    one.workers.end()


def served_by(silo, app="one", run=ONE):
    """The process that ran the app for a message."""
    silo.ask(silo.app(app), run_id=run)
    pid = silo.answer()["pid"]
    assert isinstance(pid, int)
    return pid


def kept(silo):
    """The processes that stay."""
    return [entry.team.workers[0] for entry in silo.workers.kept.values()]


def told(err):
    """The lines of a silo's log, without Flower's own."""
    return [line for line in err.splitlines() if "INFO" not in line]


# --- the process that runs the app ------------------------------------------------------------------------


def test_a_message_runs_in_a_fork_that_looks_like_flowers_own_process(silo, capfd):
    """Reply, output, directory, argv and the silo's environment (none of the template's) are right."""
    silo.ask(silo.app("one"))
    out, err = capfd.readouterr()
    assert "app says one" in out and "app warns" in err and "app says" not in err
    answer = silo.answer()
    assert answer["warm"]
    assert answer["cwd"] == str(silo.folder / "work") and answer["argv"] == "flwr-clientapp"
    assert answer["secret"] == "of this silo" and answer["stray"] == ""


def test_messages_of_a_run_share_a_process(silo, capfd):
    seen = []
    for _ in range(2):
        silo.ask(silo.app("one"), run_id=ONE)
        out, err = capfd.readouterr()
        assert out.count("app says one") == 1 and err.count("app warns") == 1
        answer = silo.answer()
        seen.append((answer["pid"], answer["served"], answer["messages"]))
    (pid, *first), (same, *second) = seen
    # The test gives each message a new context
    assert pid == same and first == [1, 1] and second == [2, 1]


@pytest.mark.parametrize(("run", "app"), [(OTHER, "one"), (ONE, "two")])
def test_another_run_or_another_app_has_a_process_of_its_own(silo, run, app):
    """Which stays as the first one does: messages of two runs come in turns."""
    first = served_by(silo)
    second = served_by(silo, run=run, app=app)
    assert second != first
    assert [served_by(silo), served_by(silo, run=run, app=app)] == [first, second]


def test_the_processes_are_few_and_fewer_where_memory_is_short(silo, monkeypatch):
    """The one that was used last stays longest."""
    monkeypatch.setattr(worker, "MOST_KEPT", 2)
    first, second = served_by(silo), served_by(silo, run=OTHER)
    assert served_by(silo) == first
    third = served_by(silo, app="two")
    wait_until(lambda: gone(second))
    assert [entry.pid for entry in kept(silo)] == [first, third]
    monkeypatch.setattr(worker, "available_share", lambda: 0.05)
    fourth = served_by(silo, run=OTHER)
    wait_until(lambda: gone(first) and gone(third))
    assert [entry.pid for entry in kept(silo)] == [fourth]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("killed", f"ClientApp process was ended by SIGKILL {KILLED}"),
        ("segfault", "ClientApp process was ended by SIGSEGV"),
        ("leaves", "ClientApp process left with exit code 3 and without a reply"),
        ("lies", "ClientApp process ended without a reply"),
        ("raises", "ValueError: no such column"),
    ],
)
def test_its_death_costs_one_message(silo, behaviour, reason):
    """So does an error, after which nobody knows what the process holds."""
    first = served_by(silo)
    silo.ask(silo.app("one"), behaviour, run_id=ONE)
    assert silo.reason() == reason
    wait_until(lambda: gone(first))
    second = served_by(silo)
    assert second != first and second == served_by(silo)


def test_a_process_that_dies_between_two_messages_is_replaced(silo):
    first = served_by(silo)
    os.kill(first, signal.SIGKILL)
    wait_until(kept(silo)[0].has_ended)
    assert served_by(silo) != first


def test_a_hung_child_ends_with_the_messages_time_to_live(silo, capfd):
    silo.ask(silo.app("one"), "hangs", ttl=1.0)  # it ignores SIGTERM
    assert "end of the message's time to live" in silo.reason()
    assert "time to live is over" in capfd.readouterr().err
    wait_until(lambda: gone(silo.app_pid()))


def hang(silo, behaviour):
    """A message that is being worked on, and the app's process."""
    silo.store_message(silo.app("one"), behaviour, ttl=30.0)
    thread = threading.Thread(target=silo.answer_all)
    thread.start()
    return thread, silo.app_pid()


def test_it_ends_with_its_supernode(silo):
    """Whose end of the connection closes, however the SuperNode dies."""
    thread, pid = hang(silo, "hangs")
    kept(silo)[0].connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: gone(pid))
    thread.join()
    assert "ended without a reply" in silo.reason()


def test_it_survives_its_template_which_is_replaced(silo, tmp_path):
    """One for all that ask; it ends with the SuperNode that started it."""
    path = tmp_path / "own/warm.sock"
    path.parent.mkdir()
    silo.set(SILOFL_WARM_SOCKET=str(path))
    with parent(path) as process:
        thread, _ = hang(silo, "waits")
        process.kill()
        process.wait()
    thread.join()
    stays = silo.answer()["pid"]
    assert stays == silo.app_pid() and template_pid(path) is None
    silo.ask(silo.app("two"))
    assert silo.answer()["warm"] and silo.workers.template is not None
    new = template_pid(path)
    assert new == silo.workers.template.pid
    second = subprocess.run(template_command(path), capture_output=True, text=True, check=True)
    assert "another template process serves this socket" in second.stderr
    given = f"{silo.workers.template.args!r}"
    assert "'--parent'" in given and str(os.getpid()) in given
    silo.workers.idle_since -= 60 * 20
    silo.workers.tidy()
    assert template_pid(path) == new
    silo.workers.idle_since -= 60 * 11
    for _ in range(2):  # the second starts none
        silo.workers.tidy()
        assert template_pid(path) is None
    silo.ask(silo.app("three"))
    assert silo.answer()["warm"] and template_pid(path) == silo.workers.template.pid != new
    silo.workers.template.terminate()
    silo.workers.template.wait()


def test_a_template_that_dies_with_a_request_is_replaced(silo, tmp_path, monkeypatch):
    """A dying process still takes connections: the message is answered by a process of the next template."""
    path = tmp_path / "own/warm.sock"
    path.parent.mkdir()
    silo.set(SILOFL_WARM_SOCKET=str(path))
    connections = []

    def connect_to(path):
        connections.append(worker_connects(path))
        return connections[-1]

    worker_connects = worker.connect_to
    monkeypatch.setattr(worker, "connect_to", connect_to)
    with parent(path) as process:
        process.send_signal(signal.SIGSTOP)
        thread = threading.Thread(target=silo.ask, args=(silo.app("one"),))
        thread.start()
        wait_until(lambda: connections)
        process.kill()
        process.wait()
    thread.join()
    assert len(connections) == 2
    assert silo.answer()["warm"] and template_pid(path) == silo.workers.template.pid
    silo.workers.template.terminate()
    silo.workers.template.wait()


def test_a_template_ends_with_the_process_that_started_it(tmp_path):
    script = "import os, subprocess, sys; subprocess.Popen([*sys.argv[1:], '--parent', str(os.getpid())]); input()"
    command = [
        sys.executable,
        "-c",
        script,
        *template_command(tmp_path / "s"),
        "--import",
        "wave",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as starter:
        wait_until(lambda: template_pid(tmp_path / "s"))
        pid = template_pid(tmp_path / "s")
        starter.kill()
    assert pid is not None
    wait_until(lambda: gone(pid))


@pytest.mark.parametrize(
    ("minutes", "idle", "ends"), [("1", 61, True), ("1", 50, False), ("", 50, False)]
)
def test_it_ends_when_it_has_waited(silo, minutes, idle, ends):
    silo.set(SILOFL_RESIDENT_MINUTES=minutes)
    pid = served_by(silo)
    ((key, entry),) = silo.workers.kept.items()
    silo.workers.kept[key] = entry._replace(since=entry.since - idle)
    silo.workers.tidy()
    assert (not kept(silo)) == ends
    if ends:
        wait_until(lambda: gone(pid))


def test_no_message_goes_to_another_users_template(silo, monkeypatch):
    """Who comes first at a path in a folder of all, such as /tmp, would get the hospital's environment."""
    monkeypatch.setattr("client.site.runtime.app_process.os.geteuid", lambda: os.getuid() + 1)
    silo.ask(silo.app("one"))
    assert silo.reason().startswith("no process for the ClientApp: a process of user ")
    assert silo.workers.template is None


@pytest.mark.parametrize("share", [0.5, 0.05])
def test_it_ends_where_memory_is_short(silo, monkeypatch, share):
    monkeypatch.setattr(worker, "available_share", lambda: share)
    served_by(silo)
    silo.workers.tidy()
    assert (not kept(silo)) == (share < 0.1)


@pytest.mark.parametrize("minutes", ["0", "ten"])
def test_no_process_stays_where_none_is_wanted(silo, minutes, capfd):
    silo.set(SILOFL_RESIDENT_MINUTES=minutes)
    assert served_by(silo) != served_by(silo)
    warned = (
        "WARNING: SILOFL_RESIDENT_MINUTES is not a number of minutes" in capfd.readouterr().err
    )
    assert warned == (minutes == "ten")


def test_a_messages_last_round():
    def last(sent, asked):
        content = RecordDict({"config": ConfigRecord(sent)})
        message = SimpleNamespace(content=content, has_content=lambda: True)
        return is_last(message, SimpleNamespace(run_config=RUN_CONFIG | asked))

    assert last({"round": 3}, {"rounds": 3}) and not last({"round": 2}, {"rounds": 3})
    assert not last({"round": 3}, {}) and not last({}, {"rounds": 3})


def test_no_other_kind_of_app_is_run(silo):
    """Flower's SuperExec runs whatever a server sends: of other kinds of apps nothing would check pins and policy."""
    silo.store_message(silo.app("one"), kind_of_task=TaskType.AGENT_APP)
    silo.answer_all()
    assert silo.reason() == "this silo runs no flwr-agentapp" and not kept(silo)


# --- what is refused before anything is imported ----------------------------------------------------------


def test_a_message_that_the_policy_forbids_is_refused_before_import(silo, capfd):
    """By the site's own process: this app knows no policy, and the server chose every setting and the app."""
    policy = silo.folder / "policy.toml"
    policy.write_text("max-local-epochs = 5\nmin-silos = 1\nruns-per-day = 0\n")
    silo.set(SILOFL_POLICY=str(policy))
    site = {"name": "clinic", "data": "own.npz"}
    run = {"strategy": "fedavg", "local-epochs": "1000", "batch-size": 64}
    silo.ask(silo.app("weak"), "1", node_config=site, run_config=run)
    line = "clinic refuses: its policy has max-local-epochs = 5, the run local-epochs = 1000"
    assert told(capfd.readouterr().err) == [f"ERROR: {line}"] and silo.reason() == line
    assert not (silo.marks / "imported-weak").exists() and not list(
        (silo.folder / "flower").glob("apps/*")
    )
    policy.write_text(policy.read_text() + 'methods = ["fedavg"]\n')
    silo.ask(silo.app("weak"), "1", node_config=site, run_config=run | {"local-epochs": 5})
    assert "min-silos = 1, the round 0 that train" in silo.reason()


def test_pins_and_policy_are_asked_for_each_message(silo):
    pins, policy = silo.folder / "allowed-apps", silo.folder / "policy.toml"
    policy.write_text("min-silos = 1\nruns-per-day = 0\n")
    pins.write_text(silo.app("one").hash_str)
    silo.set(SILOFL_ALLOWED_APPS=str(pins), SILOFL_POLICY=str(policy))
    assert served_by(silo) == served_by(silo)
    pins.write_text("ab" * 32)
    silo.ask(silo.app("one"), run_id=ONE)
    assert "refused: its SHA-256 is not among the 1 listed" in silo.reason()
    pins.write_text(silo.app("one").hash_str)
    silo.node_config["data"] = "own.npz"
    policy.write_text('methods = ["fedprox"]\n')
    silo.ask(silo.app("one"), run_id=ONE)
    assert "its policy has methods" in silo.reason()


def test_an_app_does_not_loosen_what_its_reply_must_pass(silo):
    """It gets the gate's terms, and neither changes those nor reads others: they are read once for a message."""
    policy = silo.folder / "policy.toml"
    policy.write_text("min-silos = 1\nruns-per-day = 0\n")
    silo.set(SILOFL_POLICY=str(policy))
    run = {
        "strategy": "local",
        "local-epochs": 1,
        "batch-size": 64,
        GIVEN: '{"policy": {"peers": true}}',
    }
    site = {"name": "clinic", "data": "own.npz", "state-dir": str(silo.log.parent)}
    silo.ask(silo.app("one"), "loosens", node_config=site, run_config=run)
    terms = take_terms({GIVEN: silo.answer()["terms"]})
    assert (
        terms is not None
        and terms.rules.peers is False
        and terms.rules.min_silos == 1
        and terms.study is None
    )
    assert policy.read_text() == "peers = true"  # written by the app, as the same user
    (line,) = audit.verify_log(silo.log).entries
    assert line["rules"]["peers"] is False and line["rules"]["min-silos"] == 1


def test_a_message_that_cannot_be_checked_is_refused_in_one_line(silo, monkeypatch, capfd):
    """Whatever goes wrong before there is an entry for the log."""

    def unlucky(*_):
        raise RuntimeError("no luck")

    monkeypatch.setattr("client.site.message.read_terms", unlucky)
    silo.ask(silo.app("one"))
    assert (
        silo.reason() == "nothing leaves: the message cannot be checked: RuntimeError: no luck"
    )
    assert len(told(capfd.readouterr().err)) == 1 and not list(silo.marks.glob("imported-*"))


def test_a_server_without_receipts_is_named_or_refused_before_import(silo, capfd):
    """As the site's policy says. A refusal unpacks and imports nothing; else the line is there once."""
    policy = silo.folder / "policy.toml"
    silo.set(SILOFL_POLICY=str(policy))
    site = {"name": "clinic", "data": "own.npz", "state-dir": str(silo.log.parent)}
    run = {"strategy": "local", "local-epochs": 1, "batch-size": 64}
    policy.write_text('receipts = "required"\n')
    silo.ask(silo.app("bare"), "1", node_config=site, run_config=run)
    line = 'clinic refuses: its policy has receipts = "required", and the server gives no receipt for the audit log'
    assert told(capfd.readouterr().err) == [f"ERROR: {line}"] and silo.reason() == line
    assert not (silo.marks / "imported-bare").exists()
    policy.write_text("")
    silo.ask(silo.app("bare"), "1", node_config=site, run_config=run)
    assert (
        "WARNING: clinic: the server gives no receipt for the audit log ("
        in capfd.readouterr().err
    )
    assert (silo.marks / "imported-bare").exists()


def test_an_app_that_is_not_pinned_is_refused_before_import(silo, capfd):
    """With one line, before anything of the app is unpacked or imported."""
    good, bad = silo.app("good"), silo.app("bad")
    pins = silo.folder / "allowed-apps"
    pins.write_text(f"# apps this hospital runs\n{good.hash_str}  probe.fab\n")
    silo.set(SILOFL_ALLOWED_APPS=str(pins))
    silo.ask(good)
    assert silo.answer()["version"] == "good"
    capfd.readouterr()
    silo.ask(bad)
    line = f"app {content_sum(bad.content)} refused: its SHA-256 is not among the 1 listed in {pins}"
    assert told(capfd.readouterr().err) == [f"ERROR: {line}"] and silo.reason() == line
    assert not (silo.marks / "imported-bad").exists()
    unpacked = list((silo.folder / "flower/apps").iterdir())
    assert [path.name.split(".")[-1] for path in unpacked] == [good.hash_str[:8]]


@pytest.mark.parametrize("field", ["fab_version", "fab_id"])
def test_no_other_folder_than_the_checked_one_is_imported(silo, field, capfd):
    """The pins check bytes; Flower imports from a folder whose name it makes of what the server says."""
    good = silo.app("good")
    silo.set(SILOFL_ALLOWED_APPS=good.hash_str)
    shutil.copytree(
        silo.folder / "app-good", planted := silo.folder / "flower" / f"x.{good.hash_str[:8]}"
    )
    (planted / "main.py").write_text(f"open({str(silo.folder / 'planted')!r}, 'w')\n")
    folder = f"test.probe.1.0.0.{good.hash_str[:8]}"
    names = {"fab_version": f"1.0.0.{good.hash_str[:8]}/../../x", "fab_id": f"{folder}/../../x"}
    silo.ask(good, **{field: names[field]})
    assert "the server names another folder to load it from" in silo.reason()
    assert len(told(capfd.readouterr().err)) == 1
    assert (
        not (silo.folder / "planted").exists() and not (silo.marks / "imported-good").exists()
    )
    silo.ask(good)
    assert silo.answer()["version"] == "good"


def test_pins(tmp_path, monkeypatch):
    """A list in the variable itself; a file that is not there refuses everything; no pins allow everything."""
    one, two = "ab" * 32, "cd" * 32
    monkeypatch.setenv("SILOFL_ALLOWED_APPS", f"{one},{two.upper()}")
    check_pin(one)
    check_pin(two)
    fails(
        AppRefusedError, "not among the 2 listed in SILOFL_ALLOWED_APPS", check_pin, "ef" * 32
    )
    monkeypatch.setenv("SILOFL_ALLOWED_APPS", str(tmp_path / "missing"))
    fails(AppRefusedError, "cannot read the allowed apps", check_pin, one)
    (tmp_path / "empty").write_text("# none yet\n")
    monkeypatch.setenv("SILOFL_ALLOWED_APPS", str(tmp_path / "empty"))
    fails(AppRefusedError, "not among the 0 listed", check_pin, one)
    monkeypatch.setenv("SILOFL_ALLOWED_APPS", "")
    check_pin(one)


def test_an_app_is_known_by_what_it_holds_too(tmp_path, monkeypatch):
    """The image's list: the same files compressed otherwise, as on another machine, are the same app. A byte more in a
    file, a file more, or a second file under a name, of which only one is looked at when it is unpacked, are not."""

    def app(files, compression=zipfile.ZIP_DEFLATED):
        content = io.BytesIO()
        with (
            warnings.catch_warnings(action="ignore"),
            zipfile.ZipFile(content, "w", compression) as archive,
        ):
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
        fails(AppRefusedError, "not among the 1 listed in", check_pin, *app(other))
    fails(AppRefusedError, "not among the 1 listed in", check_pin, "ab" * 32, b"no app at all")
    damaged = bytearray(app(ours)[1])
    damaged[45] ^= 255  # in the first file's data
    fails(AppRefusedError, "not among the 1 listed in", check_pin, "ab" * 32, bytes(damaged))


def test_the_list_of_an_image_is_the_app_of_its_checkout(monkeypatch, tmp_path):
    content = build(Path(__file__).parents[3])
    (tmp_path / "allowed-apps").write_text(list_builds(Path(__file__).parents[3]))
    monkeypatch.setenv("SILOFL_ALLOWED_APPS", str(tmp_path / "allowed-apps"))
    check_pin(hashlib.sha256(content).hexdigest(), content)


def test_a_half_unpacked_app_is_unpacked_again(silo):
    """Flower takes the directory `NAME.HASH8` as it is; a process killed while it unpacked leaves half of it."""
    fab = silo.app("one")
    half = silo.folder / "flower/apps" / f"test.probe.1.0.0.{fab.hash_str[:8]}"
    half.mkdir(parents=True)
    (half / "helper.py").write_text("VERSION = 'half'\n")
    silo.ask(fab)
    assert silo.answer()["version"] == "one"


def test_what_the_parent_imports_ahead():
    """Third-party modules only, since ours would be old code; all that the silo's app needs; CUDA is left alone.

    The parent's own files, the worker's too, are loaded under a name that no app has.
    """
    code = textwrap.dedent("""
        import importlib, sys, threading
        from importlib.util import module_from_spec, spec_from_file_location
        root = sys.argv[1]
        spec = spec_from_file_location("private", root + "/client/protocol/private.py")
        private = module_from_spec(spec)
        spec.loader.exec_module(private)
        private.load_site()
        import silofl_site
        from silofl_site.site.runtime.template import PRELOAD
        for name in PRELOAD:
            importlib.import_module(name)
        ours = {"models", "strategies", "partitions", "client", "server"}
        before = {name.partition(".")[0] for name in sys.modules}
        print(sorted(ours & before), threading.active_count(), sys.modules["torch"].cuda.is_initialized())
        sys.path.insert(0, root)
        import client.app, client.flower.internals, silofl_site.flower.internals
        after = {name.partition(".")[0] for name in sys.modules}
        print(sorted(after - before - ours - sys.stdlib_module_names))
        print(client.flower.internals is silofl_site.flower.internals)
    """)
    root = str(Path(private.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, root], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[] 1 False", "[]", "False"]


# --- the audit log ------------------------------------------------------------------------------------------


def test_what_leaves_is_written_down_before(silo):
    """Who asked, with which app and settings, and of every record its name, bytes and digest; an error too."""
    app = silo.app("one")
    silo.set(SILOFL_SERVER="fl.example.org:9092", SILOFL_ALLOWED_APPS=app.hash_str)
    silo.ask(app)
    answer = dict(silo.answer())
    silo.ask(app, "raises")
    assert "no such column" in silo.reason()
    silo.ask(app, "killed")
    assert "SIGKILL" in silo.reason()
    found = audit.verify_log(silo.log)
    assert (found.faults, found.notes) == ([], [])
    sent, raised, killed = found.entries
    told = {
        key: sent[key]
        for key in (
            "silo",
            "asked-by",
            "run",
            "round",
            "asked",
            "method",
            "app",
            "rule",
            "run-id",
        )
    }
    assert (
        LISTED in sent["rule"]
        and "policy: no policy.toml, so the defaults (rules " in sent["rule"]
    )
    rule = release.rule_of(read_terms(silo.node_config, {}))
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
    digests = [
        hashlib.sha256(text).hexdigest()
        for text in (plain, json.dumps(RUN_CONFIG, sort_keys=True).encode())
    ]
    record = {
        "name": "answer",
        "keys": sorted(answer),
        "bytes": len(plain),
        "sha256": digests[0],
    }
    assert (sent["sent"], sent["settings"], sent["bytes"]) == ([record], digests[1], len(plain))
    # Of three runs
    assert sent["run-config"] == raised["run-config"] == killed["run-config"] == RUN_CONFIG
    assert sent["rules"] == rule_values(Policy()) and sent["policy"] == ""  # no file
    assert sent["versions"]["flwr"] == importlib.metadata.version("flwr")
    assert sent["budget"] == {"before": {}, "after": {}}
    assert "withheld" not in sent  # this app reports nothing
    assert (
        "no such column" in raised["sent"][0]["text"] and "SIGKILL" in killed["sent"][0]["text"]
    )


def test_nothing_leaves_where_it_cannot_be_written_down(silo, capfd):
    """One line in place of the reply, and in the silo's log. (A full disk: test_audit.py.)"""
    silo.log.parent.mkdir()
    silo.log.write_text("no folder")
    silo.ask(silo.app("one"))
    reason = silo.reason()  # a reply is there to be taken once
    assert reason == "nothing leaves: the audit log cannot be written: File exists"
    assert f"ERROR: {reason} ({silo.log})" in capfd.readouterr().err
