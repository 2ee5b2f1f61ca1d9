"""The SuperNode's calls, against a Fleet API that is Flower's own behind TLS, and how it begins and ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import certifi
import grpc  # type: ignore[import-untyped]
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from flwr.common import constant
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_MIN_INTERVAL
from flwr.proto import fleet_pb2
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.error.catalog import API_ERROR_MAP
from representatives import seldom
from supernode import wait_until

from client.flower import fleet
from client.flower.fleet import (
    BACK,
    HEADERS,
    HEARTBEAT_SECONDS,
    INTERVAL_REFUSED,
    KEY_UNKNOWN,
    LOST,
    PATIENT_SECONDS,
    QUEUED_SECONDS,
    REFUSED,
    REGISTERED,
    Fleet,
    RunIsOverError,
    announce_queue,
    be_patient,
    fleet_method,
    refusal_in,
)
from client.protocol.launch import LOOPBACK, free_ports, own_supernode
from client.protocol.node import Site, supernode_command
from client.site.runtime import answering, supernode
from client.site.secure.gate import KEY


class FaultError(grpc.RpcError):  # type: ignore[misc]
    def __init__(self, code, details=""):
        self.found, self.text = code, details

    def code(self):
        return self.found

    def details(self):
        return self.text


AWAY = FaultError(grpc.StatusCode.UNAVAILABLE, "connection refused")
LATE = FaultError(grpc.StatusCode.DEADLINE_EXCEEDED)
STRANGE = FaultError(grpc.StatusCode.UNAUTHENTICATED, "Invalid node ID")


@pytest.fixture
def silo(monkeypatch):
    """A Fleet whose calls are answered by ``silo.answers``, in turn, and at last always by the last one."""
    monkeypatch.setattr(fleet.random, "uniform", lambda a, b: 0.001)
    monkeypatch.setattr(fleet.grpc_module(), "ssl_channel_credentials", lambda pem: None)
    monkeypatch.setattr(
        grpc, "secure_channel", lambda *given, **named: SimpleNamespace(close=lambda: None)
    )
    made: Any = Fleet("localhost:1", b"", ec.generate_private_key(ec.SECP384R1()))
    made.answers, made.sent = [SimpleNamespace(node_id=7, success=True)], []

    def send(name, message, *, at=None, timeout=None):
        made.sent.append((name, message, timeout))
        answer = made.answers[0] if len(made.answers) == 1 else made.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(made, "send", send)
    return made


def test_a_call_is_repeated_while_the_server_is_away(silo, capsys):
    silo.answers[:0] = [AWAY, AWAY]
    with silo:
        assert silo.node == 7
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" in ")[0] + " in" for line in said[:2]] == [LOST, LOST]
    assert said[2].startswith(f"{BACK} ") and said[2].endswith(" seconds and 3 tries.")
    assert [name for name, *_ in silo.sent if name != "SendNodeHeartbeat"] == [
        *["ActivateNode"] * 3,
        "DeactivateNode",
    ]


@pytest.mark.parametrize(
    "error",
    [
        STRANGE,
        FaultError(grpc.StatusCode.UNAVAILABLE, "Ssl handshake failed: CERTIFICATE_VERIFY"),
        FaultError(
            grpc.StatusCode.FAILED_PRECONDITION,
            '{"code": 2004, "public_message": "Failed to activate SuperNode."}',
        ),
    ],
)
def test_a_refused_silo_ends_with_one_line(silo, error):
    silo.answers = [error]
    with pytest.raises(SystemExit, match="the server refuses this silo: "):
        silo.__enter__()
    assert len(silo.sent) == 1


def test_what_a_run_that_is_over_and_other_faults_raise(silo):
    with silo:
        for error, raised in (
            (FaultError(grpc.StatusCode.PERMISSION_DENIED), RunIsOverError),
            (FaultError(grpc.StatusCode.INTERNAL), FaultError),
            (STRANGE, SystemExit),
        ):
            silo.answers = [error]
            with pytest.raises(raised):
                silo.call("GetRun")
            silo.answers = [SimpleNamespace(success=True)]


def beats_of(silo):
    calls = [message for name, message, _ in silo.sent if name == "SendNodeHeartbeat"]
    return [call.heartbeat_interval for call in calls]


def test_heartbeats_ask_for_patience_at_once_and_end_with_it(silo, monkeypatch):
    monkeypatch.setattr(fleet.random, "uniform", lambda a, b: 0.8)
    assert HEARTBEAT_MIN_INTERVAL <= HEARTBEAT_SECONDS < HEARTBEAT_DEFAULT_INTERVAL
    with silo:
        wait_until(lambda: beats_of(silo) == [HEARTBEAT_SECONDS])
        be_patient(True)
        wait_until(lambda: beats_of(silo)[1:] == [PATIENT_SECONDS])
        be_patient(False)
        announce_queue(True)
        wait_until(lambda: beats_of(silo)[2:] == [QUEUED_SECONDS])
        announce_queue(False)
        time.sleep(0.1)
        assert len(beats_of(silo)) == 3 and silo.interval == HEARTBEAT_SECONDS
    assert {t for name, _, t in silo.sent if name == "SendNodeHeartbeat"} == {20.0}
    be_patient(True)  # nobody is there to hear it
    assert silo.interval == HEARTBEAT_SECONDS


def test_a_late_heartbeat_is_repeated_and_a_refused_one_ends_the_silo(silo, monkeypatch, capfd):
    ended: list[int] = []
    monkeypatch.setattr(fleet.os, "kill", lambda pid, number: ended.append(pid))
    with silo:
        wait_until(lambda: len(beats_of(silo)) > 2)
        silo.answers = [LATE, LATE, SimpleNamespace(success=True)]
        before = len(silo.sent)
        wait_until(lambda: len(silo.sent) > before + 3)
        assert ended == []
        silo.answers = [SimpleNamespace(success=False)]
        wait_until(lambda: ended == [os.getpid()])
    assert "the server does not know this silo any more" in capfd.readouterr().err


def test_flowers_names_and_numbers():
    """Of its protocol: headers, methods, refusals; the lines that the supervisor reads are Flower's own."""
    flowers = [
        getattr(constant, f"{n}_HEADER") for n in ("PUBLIC_KEY", "TIMESTAMP", "SIGNATURE")
    ]
    assert list(HEADERS) == flowers
    assert fleet_method("PullMessages").input_type.full_name == "flwr.proto.PullMessagesRequest"
    assert fleet_pb2.PushMessagesResponse.DESCRIPTOR.fields_by_name["session_id"]
    assert ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL == INTERVAL_REFUSED
    assert ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED == KEY_UNKNOWN
    assert REFUSED in API_ERROR_MAP[KEY_UNKNOWN].public_message
    denied = API_ERROR_MAP[ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED].status_code
    assert denied == grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("details", "found"),
    [
        ('{"code": 2003, "public_message": "a", "public_details": "b"}', (2003, "a b")),
        ("connection refused", (0, "connection refused")),
        ("[1]", (0, "[1]")),
    ],
)
def test_a_refusal_has_flowers_number_and_words(details, found):
    assert refusal_in(FaultError(grpc.StatusCode.INTERNAL, details)) == found


def test_our_supernode_takes_the_options_that_we_write():
    done = subprocess.run(
        [*own_supernode(), "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "usage: flower-supernode" in done.stdout
    site = Site("a", "s:1", Path("ca"), Path("own.key"), Path("data"), Path("state"))
    given = supernode.argument_parser().parse_args(supernode_command(site)[1:])
    assert (given.superlink, given.root_certificates) == ("s:1", Path("ca"))


def test_a_missing_key_and_a_port_are_one_line_each(tmp_path, monkeypatch, capsys):
    """A bundle of silofl 0.3 names a port, which our SuperNode does not open."""
    site = Site("a", "s:1", Path("ca"), tmp_path / "own.key", Path("data"), Path("state"))
    command = supernode_command(site)
    for more in ([], ["--host", "127.0.0.1", "--port", "9094"]):
        monkeypatch.setattr(sys, "argv", command + more)
        with pytest.raises(SystemExit, match=r"own\.key: No such file"):
            supernode.run_supernode()
        assert ("--host and --port have no effect" in capsys.readouterr().err) == bool(more)
    assert "--port" not in command


def test_the_gate_has_the_key_and_the_loop_the_silos_configuration(
    tmp_path, monkeypatch, capsys
):
    key, seen = tmp_path / "own.key", list[Any]()
    (tmp_path / "ca").write_bytes(b"pem")
    site = Site("a", "s:1", tmp_path / "ca", key, Path("data"), Path("state"))
    monkeypatch.setattr(sys, "argv", supernode_command(site))
    monkeypatch.setenv(KEY, "")
    monkeypatch.setattr(supernode, "load_node_key", lambda path: path)
    monkeypatch.setattr(supernode.signal, "signal", lambda *given: None)

    class Opened:
        node = 7

        def __init__(self, *given):
            seen.append(given)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    class Served:
        def __init__(self, fleet, node_config, answer, rest):
            seen.append(node_config)

        def serve(self):
            sys.exit(0)

    monkeypatch.setattr(supernode, "Fleet", Opened)
    monkeypatch.setattr(supernode, "MessageLoop", Served)
    with pytest.raises(SystemExit):
        supernode.run_supernode()
    assert seen[0] == ("s:1", b"pem", key) and seen[1]["name"] == "a"
    assert os.environ[KEY] == str(key) and f"{REGISTERED}7" in capsys.readouterr().out
    supernode.leave_records()
    assert not supernode.gate.cache_info().currsize
    assert supernode.gate() is answering
    supernode.leave_records()


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("raise RuntimeError('no heartbeat')", 1, "RuntimeError: no heartbeat"),
        ("sys.exit(3)", 3, ""),
        *(
            seldom(*given)
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


def test_a_silo_that_waits_takes_at_most_60_mb(tmp_path):
    """Flower, NumPy and pydantic are loaded for the first message: 40 MB more."""
    key, authority = tmp_path / "own.key", tmp_path / "ca.crt"
    generated = ec.generate_private_key(ec.SECP384R1())
    key.write_bytes(
        generated.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    )
    key.chmod(0o600)
    authority.write_bytes(Path(certifi.where()).read_bytes())
    server = f"{LOOPBACK}:{free_ports(1)[0]}"
    site = Site("a", server, authority, key, tmp_path / "data", tmp_path)
    command = supernode_command(site, program=own_supernode())
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and LOST in process.stdout.readline()
        status = Path(f"/proc/{process.pid}/status").read_text("utf-8")
        files = Path(f"/proc/{process.pid}/maps").read_text("utf-8")
        process.terminate()
    assert int(status.partition("VmRSS:")[2].split()[0]) < 60 * 1024
    assert "cygrpc" in files and "numpy" not in files and "pydantic_core" not in files
