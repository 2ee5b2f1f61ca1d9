"""`silofl doctor`: each fault is found, named, and has a fix; a healthy site and server have none."""

import datetime
import socket
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from failing import fails
from middlebox import TlsServer
from superlink import superlink
from taken import silofl

from client.link import connection
from client.link.connection import certificate_checks, connection_checks, key_checks
from client.link.route import Way, port_check, resolve_check
from client.local_data import gpu_share
from client.protocol.launch import free_ports
from client.protocol.node import Site, gpu_environment
from client.site.runtime import doctor
from client.site.runtime.doctor import (
    data_checks,
    device_check,
    first_failure,
    one_line,
    pin_checks,
    site_checks,
    slurm_check,
    state_checks,
    table,
    version_check,
)
from partitions.common.errors import UserError
from partitions.silo_file import Check
from server.deploy import credentials as credentials_module
from server.deploy.control import Control, write_connection
from server.deploy.credentials import ensure_credentials
from server.deploy.doctor import exposure_checks, server_checks
from server.deploy.federation import read_federation

HOST = "127.0.0.1"


def write_data(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    x = np.zeros((20, 3), np.float32)
    np.savez(path, x_train=x, y_train=np.arange(20) % 2, x_test=x[:4], y_test=np.arange(4) % 2)
    return path


def only(checks):
    assert len(checks) == 1
    return checks[0]


def keys(site):
    host, port, _ = connection.split_address(site.server)
    return key_checks(site, Way(host, port))


def failed(checks):
    return {check.name: check.detail for check in checks if not check.ok}


# --- certificate ------------------------------------------------------------------------------------------


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """`shown(days=0)`: a server whose credentials were made `days` ago; its port and its CA's certificate."""
    servers: list[TlsServer] = []

    def make(days=0.0):
        past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)
        with monkeypatch.context() as patch:
            patch.setattr(credentials_module, "_now", lambda: past)
            made = ensure_credentials(
                tmp_path / f"made-{len(servers)}", silos=(), hosts=(HOST,)
            )
        servers.append(TlsServer(made.server_certificate, made.server_key))
        return Way(HOST, servers[-1].port), made.ca_certificate

    yield make
    for server in servers:
        server.close()


def test_a_good_certificate_passes_chain_names_and_dates(shown):
    checks = certificate_checks(*shown())
    assert [check.name for check in checks] == [
        "certificate chain",
        "certificate names",
        "certificate dates",
    ]
    assert all(check.ok for check in checks)
    assert checks[2].detail == f"valid for {credentials_module.SERVER_DAYS - 1} days"


def test_a_certificate_about_to_expire_fails_while_it_still_works(shown):
    checks = certificate_checks(*shown(days=credentials_module.SERVER_DAYS - 10.5))
    assert failed(checks) == {"certificate dates": "expires in 10 days"}


def test_a_port_without_tls(tmp_path, shown):
    _, ca = shown()
    with socket.create_server((HOST, 0)) as plain:
        thread = threading.Thread(
            target=lambda: plain.accept()[0].sendall(b"SSH-2.0-x\r\n" * 10)
        )
        thread.start()
        check = only(certificate_checks(Way(HOST, plain.getsockname()[1]), ca))
        thread.join()
    assert (check.name, check.ok) == (
        "certificate",
        False,
    ) and "does not speak TLS" in check.detail


def test_a_damaged_ca_certificate(tmp_path):
    for name, content in (("empty.crt", ""), ("text.crt", "no certificate")):
        (tmp_path / name).write_text(content)
        check = only(certificate_checks(Way(HOST, 1), tmp_path / name))
        assert (check.name, check.ok) == ("CA certificate", False) and "bundle" in check.fix
    assert not only(certificate_checks(Way(HOST, 1), tmp_path / "none.crt")).ok


# --- name and port ----------------------------------------------------------------------------------------


def test_names_and_ports():
    unknown = resolve_check("no-such-host.invalid")  # RFC 6761: .invalid never resolves
    assert not unknown.ok and "no-such-host.invalid" in unknown.detail and "DNS" in unknown.fix
    assert resolve_check("localhost").ok
    (closed,) = free_ports(1)
    refused = port_check(HOST, closed)
    assert not refused.ok and "refuses" in refused.detail
    with socket.create_server((HOST, 0)) as server:
        assert port_check(HOST, server.getsockname()[1]).ok


@pytest.mark.parametrize(
    "server", ["", "host", "host:", "host:port", ":9092", "host:0", "host:70000"]
)
def test_an_address_that_is_none(tmp_path, server):
    site = Site("a", server, tmp_path, tmp_path, tmp_path, tmp_path)
    assert failed(connection_checks(site)) == {"server address": f"{server!r} is no address"}


def test_later_checks_are_left_out_where_an_earlier_one_fails(tmp_path):
    site = Site("a", "no-such-host.invalid:9092", tmp_path, tmp_path, tmp_path, tmp_path)
    assert [check.name for check in connection_checks(site)] == ["name resolution"]


# --- this machine -----------------------------------------------------------------------------------------


def test_data_of_every_kind(tmp_path):
    good = write_data(tmp_path / "good/data.npz")
    assert [check.name for check in data_checks(good)] == ["data", "schema"]
    assert data_checks(good)[0].detail == f"{good}: train 20, test 4"
    (tmp_path / "mount").mkdir()
    assert (
        f"{tmp_path / 'mount'} is empty"
        == only(data_checks(tmp_path / "mount/data.npz")).detail
    )
    assert "is a folder" in only(data_checks(tmp_path / "mount")).detail
    assert "no such file" in only(data_checks(tmp_path / "good/other.npz")).detail
    bad = tmp_path / "bad.npz"
    bad.write_bytes(b"nonsense")
    assert not only(data_checks(bad)).ok and only(data_checks(bad)).fix


def test_data_that_another_user_owns(tmp_path, monkeypatch):
    path = write_data(tmp_path / "data.npz")
    # The tests may run as root, who reads everything
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    check = only(data_checks(path))
    owner = path.stat()
    assert not check.ok and f"SILOFL_USER={owner.st_uid}:{owner.st_gid}" in check.fix


def test_state_directory(tmp_path):
    assert only(state_checks(tmp_path / "new")).ok
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700 and not list(
        (tmp_path / "new").iterdir()
    )
    (tmp_path / "file").touch()
    assert not only(state_checks(tmp_path / "file")).ok


@pytest.mark.parametrize("device", ["cuda:97", "MIG-3eb87630-93d5-b2b6-b8ff-9b359caf4ee2"])
def test_a_gpu_that_is_not_there(device, tmp_path):
    check = device_check(Site("a", "b:1", tmp_path, tmp_path, tmp_path, tmp_path, device))
    assert not check.ok and check.detail.startswith(f"{device}: ")
    assert check.fix.endswith("or set the device to cpu")


def test_a_machine_without_slurm_submits_no_job(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    check = slurm_check("gpu")
    assert not check.ok and check.detail == "there is no sbatch, squeue, scancel here"


def test_the_device_computes(tmp_path, monkeypatch, capsys):
    """The program that a GPU runs, on a CPU; and on a device without numbers."""
    assert device_check(Site("a", "b:1", tmp_path, tmp_path, tmp_path, tmp_path)).ok
    monkeypatch.setattr(sys, "argv", ["-c", "cpu"])
    exec(doctor.KERNEL, {})
    assert capsys.readouterr().out == "this machine's CPU\n"
    sys.argv[1] = "meta"
    fails(RuntimeError, "meta tensors", exec, doctor.KERNEL, {})


def test_a_part_of_a_gpu_is_the_first_that_its_process_sees(tmp_path):
    name = "MIG-3eb87630-93d5-b2b6-b8ff-9b359caf4ee2"
    assert (
        Site("a", "b:1", tmp_path, tmp_path, tmp_path, tmp_path, name).node_config["device"]
        == "cuda:0"
    )
    assert gpu_environment(name, 0.25) == {
        "CUDA_VISIBLE_DEVICES": name,
        "SILOFL_GPU_SHARE": "0.25",
    }
    assert not gpu_environment("cuda:1") and not gpu_environment("cpu")
    assert gpu_share({}) == 0 and gpu_share(gpu_environment("cuda:0", 0.25)) == 0.25
    for text in ("0", "1.5", "-1", "nan", "half"):
        fails(UserError, "above 0 and at most 1", gpu_share, {"SILOFL_GPU_SHARE": text})


def test_versions(tmp_path):
    site = Site("a", "b:1", tmp_path, tmp_path, tmp_path, tmp_path)
    assert version_check(site).ok
    # A patch release speaks the same protocol
    assert version_check(replace(site, flwr="1.42.7")).ok
    other = version_check(replace(site, flwr="1.40.0"))
    assert not other.ok and "1.40.0" in other.detail and "install flwr 1.40.0" in other.fix


def test_pins(tmp_path):
    assert "not pinned" in only(pin_checks("")).detail
    (tmp_path / "pins").write_text(f"# builds\n{'a' * 64}  silofl 0.1.0\n{'b' * 64}\n")
    assert "2 pinned" in only(pin_checks(str(tmp_path / "pins"))).detail
    assert not only(pin_checks(str(tmp_path / "none"))).ok


def test_table_and_first_failure():
    checks = [
        Check("a", True, "fine"),
        Check("b", False, "line one\nline two", "mend it"),
        Check("c", False, "x", "y"),
    ]
    assert table(checks) == (
        "ok    a: fine\nFAIL  b: line one line two\n      fix: mend it\nFAIL  c: x\n      fix: y"
    )
    assert first_failure(checks) == checks[1] and first_failure(checks[:1]) is None
    assert one_line(checks[1]) == "b: line one line two; mend it"


# --- against a real SuperLink -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A SuperLink at which `north` is registered and `south` is not."""
    with superlink(tmp_path_factory.mktemp("superlink")) as running:
        with Control(running.connection) as control:
            control.register("north", running.credentials.node_public_pem("north"))
        yield running


def test_a_registered_key_passes_and_nothing_changes_at_the_server(server, tmp_path):
    write_data(tmp_path / "data.npz")
    checks = site_checks(server.site(tmp_path))
    assert failed(checks) == {}
    assert [check.name for check in checks][-2:] == ["clock", "key"]
    with Control(server.connection) as control:
        assert [node.status for node in control.nodes()] == ["registered"]  # not online


def test_a_key_that_the_server_does_not_know(server, tmp_path):
    check = only(keys(server.site(tmp_path, "south")))
    assert (check.name, check.ok) == ("key", False)
    assert "does not know" in check.detail and "silofl add-silo south" in check.fix


@pytest.mark.parametrize(
    ("seconds", "how"),
    [
        (-3600, "about 1 h behind the server's"),
        (86400, "about 24 h ahead of the server's"),
        (60, "about a minute ahead of the server's"),
        (-5000, "about 1 h 25 min behind the server's"),
        (10**6, "off by more than 25 h"),
    ],
)
def test_a_wrong_clock(server, tmp_path, monkeypatch, seconds, how):
    """The doctor finds by how much: it tries, in steps of 300 s, which signed time the server takes."""
    monkeypatch.setattr(connection, "time", SimpleNamespace(time=lambda: time.time() + seconds))
    check = only(keys(server.site(tmp_path)))
    assert (check.name, check.ok) == ("clock", False) and "NTP" in check.fix
    assert check.detail == f"this machine's clock is {how}"


def test_a_key_file_that_is_none(server, tmp_path):
    (tmp_path / "node.key").write_text("no key")
    site = replace(server.site(tmp_path), node_key=tmp_path / "node.key")
    assert "no private key" in only(keys(site)).detail
    assert not only(keys(replace(site, node_key=tmp_path / "none"))).ok


def federation_file(folder, server, silos):
    path = folder / "federation.yaml"
    listed = "".join(f"  - {{name: {name}, data: demo}}\n" for name in silos)
    ports = f"fleet-port: {server.fleet}, control-port: {server.port}"
    path.write_text(
        f"name: test\nserver: {{{ports}}}\ndemo: {{dataset: digits}}\nsilos:\n{listed}"
    )
    return path


def test_server_doctor_says_who_is_missing_and_who_is_away(
    server, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    path = federation_file(tmp_path, server, ("north", "west"))
    before = server_checks(read_federation(path), "test")
    assert list(failed(before)) == ["connection"]
    write_connection(server.connection)
    checks = server_checks(read_federation(path), "test")
    assert failed(checks) == {
        "registrations": "not registered: west",
        "online": "not online: north",
    }
    names = [check.name for check in checks]
    assert {"control port", "fleet port", "CA certificate's dates"} <= set(names)
    assert {f"certificate {one}" for one in ("chain", "names", "dates")} <= set(names)
    assert silofl("doctor", path) == 2
    out, err = capsys.readouterr()
    assert "FAIL  online: not online: north\n      fix: ask these sites" in out
    assert (
        err == f"silofl doctor: test: 2 of {len(checks)} checks failed: registrations, online\n"
    )


def test_server_doctor_takes_the_public_address(server, tmp_path, monkeypatch, shown):
    """Behind it is the server, and then another one, with another certificate."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    write_connection(server.connection)
    path = federation_file(tmp_path, server, ("north",))
    text = path.read_text()
    for port, fault in ((server.fleet, None), (shown()[0].port, "public certificate chain")):
        path.write_text(text.replace("server: {", f"server: {{public: 'localhost:{port}', "))
        checks = server_checks(read_federation(path), "test")
        assert "public address" in [check.name for check in checks if check.ok]
        faults = failed(checks).keys() - {"online", "control port's reach"}
        assert faults == ({fault} if fault else set())


def test_a_control_port_that_others_reach_is_a_failure(monkeypatch):
    """The address stands for one of this machine's that is not loopback."""
    with socket.create_server((HOST, 0)) as reachable:
        port = reachable.getsockname()[1]
        monkeypatch.setattr("server.deploy.doctor.THIS_MACHINE", ())
        assert "ship code" in only(exposure_checks(HOST, port)).detail
        assert not only(exposure_checks(HOST, port)).ok
    (closed,) = free_ports(1)
    assert only(exposure_checks(HOST, closed)).ok


def test_doctor_without_anything_to_look_at_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SILOFL_SERVER", raising=False)
    assert silofl("doctor") == 2
    assert capsys.readouterr().err == (
        "silofl doctor: there is no federation.yaml here: name the server's; at a hospital: BUNDLE --data FILE\n"
    )
