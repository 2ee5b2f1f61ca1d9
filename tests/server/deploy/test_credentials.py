"""Credentials: a TLS handshake and a node key as Flower reads them, what is kept and what is made anew."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_ssh_private_key,
    load_ssh_public_key,
)
from failing import fails
from flwr.cli.supernode.register import try_load_public_key

from server.deploy import credentials
from server.deploy.credentials import dates_check, ensure_credentials, load_certificate

HOSTS = ("localhost", "127.0.0.1", "::1", "fl.example.org")


@pytest.fixture
def made(tmp_path):
    return ensure_credentials(tmp_path / "credentials", silos=("north", "south"), hosts=HOSTS)


def contents(made):
    return {
        str(p.relative_to(made.directory)): p.read_bytes()
        for p in made.directory.rglob("*")
        if p.is_file()
    }


def handshake(made, host, ca):
    """A TLS connection to `host` that trusts `ca` alone, under the strictest checks of the X.509 profile."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.server_certificate, made.server_key)
    client = ssl.create_default_context(cafile=str(ca))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    one, other = socket.socketpair()

    def serve():
        try:
            server.wrap_socket(other, server_side=True).close()
        except (ssl.SSLError, OSError):
            other.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client.wrap_socket(one, server_hostname=host).close()
    finally:
        one.close()
        thread.join()


@pytest.mark.parametrize("host", HOSTS)
def test_the_server_is_believed_under_each_of_its_names(made, host):
    handshake(made, host, made.ca_certificate)


def test_the_server_is_not_believed_under_another_name_or_another_ca(made, tmp_path):
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(made, "other.example.org", made.ca_certificate)
    stranger = ensure_credentials(tmp_path / "stranger", silos=(), hosts=HOSTS)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made, "localhost", stranger.ca_certificate)


def test_a_node_key_is_what_flower_registers_and_reads(made):
    private = load_ssh_private_key(made.node_key("north").read_bytes(), password=None)
    assert isinstance(private, ec.EllipticCurvePrivateKey) and private.curve.name == "secp384r1"
    assert private.public_key() == load_ssh_public_key(
        made.node_public_key("north").read_bytes()
    )
    assert try_load_public_key(made.node_public_key("north")) == made.node_public_pem("north")
    assert made.node_public_pem("north") != made.node_public_pem("south")


def test_nobody_else_reads_the_files(made):
    for path in made.directory.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
    assert made.directory.stat().st_mode & 0o777 == 0o700


def test_one_more_silo_changes_nothing_that_is_there(made):
    before = contents(made)
    ensure_credentials(made.directory, silos=("north", "south", "west"), hosts=HOSTS)
    after = contents(made)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"nodes/west", "nodes/west.pub"}


def test_one_more_name_renews_the_servers_certificate_only(made):
    """The names it had stay, the CA and the silos' keys too: silos that trust the CA trust the new one."""
    before = contents(made)
    ensure_credentials(made.directory, silos=("north", "south"), hosts=("10.0.0.9",))
    after = contents(made)
    assert {name for name in before if before[name] != after[name]} == {
        "server.crt",
        "server.key",
    }
    for host in (*HOSTS, "10.0.0.9"):
        handshake(made, host, made.ca_certificate)


def test_a_server_certificate_about_to_expire_is_renewed(made, monkeypatch):
    """It is issued for 825 days and renewed within the last 30: not on day 794, but on day 796."""
    ca, first = made.ca_certificate.read_bytes(), made.server_certificate.read_bytes()
    today = datetime.datetime.now(datetime.UTC)
    for days, renewed in ((794, False), (796, True)):
        later = today + datetime.timedelta(days=days)
        monkeypatch.setattr(credentials, "_now", lambda later=later: later)
        ensure_credentials(made.directory, silos=(), hosts=HOSTS)
        assert (made.server_certificate.read_bytes() != first) is renewed
    assert made.ca_certificate.read_bytes() == ca


def test_an_expired_ca_is_one_clear_line(made, monkeypatch):
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=3651)
    monkeypatch.setattr(credentials, "_now", lambda: later)
    with pytest.raises(
        ValueError, match=r"the CA certificate .*ca.crt expired on \d{4}-\d\d-\d\d: remove"
    ):
        ensure_credentials(made.directory, silos=(), hosts=HOSTS)


@pytest.mark.parametrize("lost", ["ca.crt", "ca.key"])
def test_half_a_ca_is_never_replaced(made, lost):
    """A new CA would lock out every silo."""
    (made.directory / lost).unlink()
    before = contents(made)
    with pytest.raises(ValueError, match=rf"{lost} is missing .* restore it"):
        ensure_credentials(made.directory, silos=(), hosts=HOSTS)
    assert contents(made) == before


def test_the_dates_of_a_certificate(made, monkeypatch):
    """Checked: that it is valid today and for 30 days more. Each fault has what to do."""
    own = load_certificate(made.server_certificate)
    ends, day = own.not_valid_after_utc, datetime.timedelta(days=1)
    for now, fault in (
        (ends - 31 * day, ""),
        (ends - 29 * day, "valid until"),
        (ends + day, "expired on"),
        (ends - 900 * day, "not valid before"),
    ):
        monkeypatch.setattr(credentials, "_now", lambda now=now: now)
        check = dates_check("server", own, "renew it")
        assert check.ok is not bool(fault) and bool(check.fix) is bool(fault)
        assert check.ok or fault in check.detail
    fails(ValueError, "is not a certificate in PEM format", load_certificate, made.server_key)
