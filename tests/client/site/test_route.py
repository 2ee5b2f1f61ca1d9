"""The way to the server: the doctor takes gRPC's, and names whatever stands in it, with the next step."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import certifi
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from middlebox import HOST, HttpProxy, TlsServer
from superlink import superlink

from client.link import route
from client.link.connection import connection_checks
from client.link.route import way_to
from client.protocol.node import Site
from client.site.runtime.doctor import as_json, first_failure, one_line, table
from partitions.silo_file import Check
from server.deploy import credentials as credentials_module
from server.deploy.control import Control
from server.deploy.credentials import ensure_credentials

NAME = "fl.example.org"  # no machine here finds it, as in a hospital whose proxy alone does
SERVER = f"{NAME}:9092"


# --- the choice is gRPC's ---------------------------------------------------------------------------------

P = "http://127.0.0.1:PORT"
CHOICES = [
    ({}, NAME),
    ({"http_proxy": P}, NAME),
    ({"https_proxy": "", "http_proxy": P}, NAME),
    ({"grpc_proxy": P, "https_proxy": "http://127.0.0.1:1"}, NAME),
    ({"HTTPS_PROXY": P}, NAME),
    ({"all_proxy": P}, NAME),
    ({"https_proxy": "https://127.0.0.1:PORT", "http_proxy": P}, NAME),
    ({"https_proxy": "127.0.0.1:PORT"}, NAME),
    ({"https_proxy": "HTTP://127.0.0.1:PORT/path"}, NAME),
    ({"https_proxy": "http://u:p%40x%25@127.0.0.1:PORT"}, NAME),
    ({"https_proxy": "http://u:p@x@127.0.0.1:PORT"}, NAME),
    ({"https_proxy": P, "no_proxy": "example.org"}, NAME),
    ({"https_proxy": P, "no_proxy": "a.test, .EXAMPLE.org ,b.test"}, NAME),
    ({"https_proxy": P, "NO_PROXY": "fl.example.org"}, NAME),
    ({"https_proxy": P, "no_proxy": "ample.org,*, ,fl.example.org:9092"}, NAME),
    ({"https_proxy": P, "no_proxy": "example.org", "no_grpc_proxy": "x"}, NAME),
    ({"https_proxy": P, "no_proxy": "example.org", "no_grpc_proxy": ""}, NAME),
    ({"https_proxy": P, "no_grpc_proxy": "example.org"}, NAME),
    ({"https_proxy": P, "no_proxy": "192.0.2.0/24"}, "192.0.2.7"),
    ({"https_proxy": P, "no_proxy": "192.0.2.7/24"}, "192.0.2.9"),
    ({"https_proxy": P, "no_proxy": "192.0.2.0/28"}, "192.0.2.99"),
    ({"https_proxy": P, "no_proxy": "192.0.2"}, "192.0.2.7"),
]
# What gRPC does in a process with these variables: it asks the proxy, or not. One process for all: gRPC reads the
# variables whenever a channel is made.
ASK_GRPC = """
import json, os, sys, threading
from client.protocol.launch import reach_without_proxy
os.environ["GRPC_DNS_RESOLVER"] = "native"
import grpc
channels = []
for variables, target in json.load(sys.stdin):
    for name in [n for n in os.environ if n.lower().endswith("proxy")]:
        del os.environ[name]
    os.environ.update(variables)
    reach_without_proxy(os.environ)
    channel, failed = grpc.secure_channel(target, grpc.ssl_channel_credentials()), threading.Event()
    fail = lambda state, failed=failed: state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and failed.set()
    channel.subscribe(fail, try_to_connect=True)
    channels.append((channel, failed))
for _, failed in channels:  # an address that no network has may take long: by then the proxy would have been asked
    failed.wait(2.0)
os._exit(0)
"""


def test_the_choice_is_that_of_grpc():
    with HttpProxy(answer="403 No") as proxy:
        asked = [
            (
                {k: v.replace("PORT", str(proxy.port)) for k, v in variables.items()},
                f"{host}:{7000 + i}",
            )
            for i, (variables, host) in enumerate(CHOICES)
        ]
        root = Path(__file__).parents[3]
        subprocess.run(
            [sys.executable, "-c", ASK_GRPC], input=json.dumps(asked), text=True, cwd=root,
            stderr=subprocess.DEVNULL, check=True, timeout=120,
        )  # fmt: skip
        of_grpc = {request.split()[1]: request for request in proxy.asked}
        proxy.asked.clear()
        for variables, target in asked:
            host, _, port = target.rpartition(":")
            way = way_to(host, int(port), variables)
            assert (way.proxy is not None) == (target in of_grpc), (variables, way)
            if way.proxy:
                with pytest.raises(route.Blocked):
                    way.connect()
                ours, theirs = (
                    {line for line in text.split("\r\n") if not line.startswith("User-Agent")}
                    for text in (proxy.asked.pop(), of_grpc[target])
                )
                assert ours == theirs
    assert len(of_grpc) == 10


# --- one table of faults ----------------------------------------------------------------------------------


class RouteCase(NamedTuple):
    """A fault: how the site reaches its server, and words of the line and of its fix."""

    arrange: Callable[["Arrangement"], dict[str, str]]
    name: str
    line: str
    fix: str


class Arrangement:
    """The server's credentials, and servers and proxies that are closed in the end."""

    def __init__(self, folder, monkeypatch, stack):
        self.folder, self.monkeypatch, self.stack = folder, monkeypatch, stack
        self.server = SERVER
        self.credentials, self.gateway = self.made(0.0), folder / "gateway.crt"

    def made(self, days, name=NAME):
        past = datetime.now(UTC) - timedelta(days=days)
        with self.monkeypatch.context() as patch:
            patch.setattr(credentials_module, "_now", lambda: past)
            return ensure_credentials(
                self.folder / f"made {days} {name}", silos=("north",), hosts=(name,)
            )

    def proxy(self, **given):
        return self.stack.enter_context(HttpProxy(**given)).port

    def shown(self, made, protocols=("h2",)):
        """A proxy that leads to a server with these credentials, of which the site knows the CA."""
        self.credentials = made
        return self.tls(made.server_certificate, made.server_key, protocols)

    def tls(self, certificate, key, protocols=("h2",)):
        server = self.stack.enter_context(TlsServer(certificate, key, protocols))
        return https(self.proxy(target=server.port))

    def foreign(self):
        """The certificate, with its key in the same file, that a hospital's gateway makes for the server's name."""
        path = self.folder / "gateway.pem"
        keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
        issuer = x509.Name.from_rfc4514_string("CN=Web Gateway,O=St. Elsewhere")
        own = x509.Name.from_rfc4514_string(f"CN={NAME}")
        now = datetime.now(UTC)
        made, root = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=9))
            .add_extension(x509.BasicConstraints(subject is issuer, None), critical=True)
            .sign(keys[1], hashes.SHA256())
            for subject, key in zip((own, issuer), keys, strict=True)
        )
        secret = keys[0].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        path.write_bytes(made.public_bytes(Encoding.PEM) + secret)
        self.gateway.write_bytes(root.public_bytes(Encoding.PEM))
        self.sha256 = made.fingerprint(hashes.SHA256()).hex()
        return path


def https(port, login=""):
    return {"https_proxy": f"http://{login}{HOST}:{port}"}


def full(a):
    """A port that swallows packets: its queue is full."""
    server = socket.create_server((HOST, 0), backlog=0)
    a.stack.enter_context(server)
    for _ in range(3):
        one = a.stack.enter_context(socket.socket())
        one.setblocking(False)
        one.connect_ex(server.getsockname())
    a.monkeypatch.setattr(route, "TIMEOUT_SECONDS", 0.2)
    a.server = f"{HOST}:{server.getsockname()[1]}"
    return {}


def inspection(a):
    made = a.foreign()
    return a.tls(made, made, ())


def public(a):
    """Browsers' CAs are replaced by the one that issued the certificate."""
    made = a.foreign()
    a.monkeypatch.setattr(certifi, "where", lambda: str(a.gateway))
    return a.tls(made, made)


def another_federation(a):
    other = a.made(1.0)
    return a.tls(other.server_certificate, other.server_key)


CASES = {
    "login wanted": RouteCase(
        lambda a: https(a.proxy(login="u:p")),
        "proxy", "wants a login (407; it offers Basic)", "set https_proxy=http://USER:PASSWORD@127.0.0.1:",
    ),
    "wrong password": RouteCase(
        lambda a: https(a.proxy(login="u:p"), "u:secret@"),
        "proxy", "refuses the password of u", "check it: https_proxy=http://USER:PASSWORD@",
    ),
    "NTLM": RouteCase(
        lambda a: https(a.proxy(answer="407 X\r\nProxy-Authenticate: Negotiate\r\nProxy-Authenticate: NTLM")),
        "proxy", "(407; it offers Negotiate, NTLM)", f"ask your IT to let {SERVER} through without one",
    ),
    "port not allowed": RouteCase(
        lambda a: https(a.proxy(answer="403 Forbidden")),
        "proxy", f"answers 403 Forbidden to CONNECT {SERVER}: it does not allow this address or port",
        f"ask your IT to allow CONNECT to {SERVER}; if they allow 443 only, ask the server's operator",
    ),
    "server behind the proxy": RouteCase(
        lambda a: https(a.proxy(answer="503 Service Unavailable")),
        "server behind the proxy", "does not reach the server", "whether the proxy finds fl.example.org",
    ),
    "no proxy at that port": RouteCase(
        lambda a: https(1), "proxy's port", "127.0.0.1:1 (https_proxy): Connection refused", "check https_proxy",
    ),
    "no such proxy": RouteCase(
        lambda a: {"grpc_proxy": "http://proxy.invalid:3128"},
        "proxy", "proxy.invalid:3128 (grpc_proxy): ", "check grpc_proxy",
    ),
    "no HTTP proxy": RouteCase(
        lambda a: https(a.proxy(answer="\r\nSSH-2.0")),
        "proxy", "gives no answer of an HTTP proxy", "ask your IT for the address of the HTTP proxy",
    ),
    "capital letters": RouteCase(
        lambda a: {"HTTPS_PROXY": "http://127.0.0.1:3128"},
        "name resolution", "HTTPS_PROXY is set, but gRPC reads https_proxy, in small letters",
        'export https_proxy="$HTTPS_PROXY"',
    ),
    "https proxy": RouteCase(
        lambda a: {"https_proxy": "https://127.0.0.1:3128"},
        "name resolution", "https_proxy has a scheme other than http://", "plain HTTP port",
    ),
    "proxy without http://": RouteCase(
        lambda a: {"https_proxy": "127.0.0.1:3128"},
        "name resolution", "https_proxy is no URL as http://HOST:PORT", "write https_proxy=http://HOST:PORT",
    ),
    "SOCKS proxy": RouteCase(
        lambda a: {"https_proxy": "socks4://127.0.0.1:3128"},
        "name resolution", "https_proxy names a proxy of a kind", "for an HTTP proxy",
    ),
    "excepted": RouteCase(
        lambda a: https(3128) | {"no_proxy": ".example.org"},
        "name resolution", "no_proxy has .example.org", "remove .example.org from no_proxy",
    ),
    "no name, no proxy": RouteCase(
        lambda a: {}, "name resolution", NAME, "where only a proxy finds names, set https_proxy=http://",
    ),
    "blocked port": RouteCase(
        full, "port", "does not answer within", "let this machine out to TCP port",
    ),
    "inspection": RouteCase(
        inspection, "certificate chain",
        "it is for CN=fl.example.org, by CN=Web Gateway,O=St. Elsewhere, SHA-256 SUM",
        f"a proxy opens TLS on the way (inspection): ask your IT to exempt {SERVER}",
    ),
    "public certificate": RouteCase(
        public, "certificate chain", "by CN=Web Gateway,O=St. Elsewhere, SHA-256 SUM",
        "a public certificate stands in front of the server: ask the server's operator to pass TLS through",
    ),
    "another federation": RouteCase(
        another_federation, "certificate chain", "by CN=silofl CA", "for a new bundle",
    ),
    "no h2": RouteCase(
        lambda a: a.shown(a.credentials, ("http/1.1",)),
        "HTTP/2", "offers no h2 in TLS (ALPN)", "to offer HTTP/2 on the proxy in front of the server",
    ),
    "another name": RouteCase(
        lambda a: a.shown(a.made(0, "other.example.org")),
        "certificate names", "not for fl.example.org", "server.address",
    ),
    "expired": RouteCase(
        lambda a: a.shown(a.made(900)), "certificate dates", "has expired", "renew it",
    ),
    "clock": RouteCase(
        lambda a: a.shown(a.made(-3)),
        "clock", "this machine's clock is 71 h or more behind the server's", "NTP",
    ),
    "not Flower": RouteCase(
        lambda a: a.shown(a.credentials),
        "Fleet API", "gives no answer of a Flower server", "something between does not let HTTP/2 through",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_fault_has_its_line_and_its_fix(name, tmp_path, monkeypatch):
    case = CASES[name]
    with ExitStack() as stack:
        arranged = Arrangement(tmp_path, monkeypatch, stack)
        environment = case.arrange(arranged)
        made = arranged.credentials
        site = Site(
            "north",
            arranged.server,
            made.ca_certificate,
            made.node_key("north"),
            tmp_path,
            tmp_path,
        )
        found = first_failure(connection_checks(site, environment))
    assert found is not None
    line = case.line.replace("SUM", getattr(arranged, "sha256", ""))
    assert found.name == case.name and line in found.detail and case.fix in found.fix, found
    assert "which version of Flower" not in one_line(found) and "secret" not in one_line(found)


# --- through a proxy to a real server ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A SuperLink with a certificate for a name that nothing here resolves."""
    folder = tmp_path_factory.mktemp("superlink")
    with superlink(folder, hosts=(HOST, "localhost", NAME)) as running:
        with Control(running.connection) as control:
            control.register("north", running.credentials.node_public_pem("north"))
        yield running


def test_a_proxy_with_a_login_carries_every_check(server, tmp_path):
    made = server.credentials
    site = Site(
        "north", SERVER, made.ca_certificate, made.node_key("north"), tmp_path, tmp_path
    )
    with HttpProxy(target=server.fleet, login="u:p/@ü") as proxy:
        environment = {"https_proxy": f"http://u:p%2F%40%C3%BC@{HOST}:{proxy.port}"}
        checks = connection_checks(site, environment, sizes=True)
    assert not first_failure(checks), table(checks)
    assert [check.name for check in checks] == [
        "proxy", "certificate chain", "certificate names", "certificate dates", "clock", "key",
    ]  # fmt: skip
    assert checks[0].detail == f"127.0.0.1:{proxy.port} (https_proxy) connects to {SERVER}"
    assert {request.split()[1] for request in proxy.asked} == {SERVER}
    assert os.environ.get("https_proxy") is None  # this process's own variables stay


def test_json_lists_every_check():
    checks = [Check("a", True, "fine"), Check("b", False, "bad", "mend it")]
    assert json.loads(as_json(checks)) == [
        {"check": "a", "ok": True, "detail": "fine", "fix": ""},
        {"check": "b", "ok": False, "detail": "bad", "fix": "mend it"},
    ]


def test_a_line_has_no_control_characters():
    assert one_line(Check("a", False, "CN=\x1b[2Jx", "fix")) == "a: CN=\\x1b[2Jx; fix"


# In a network of its own, whose DNS swallows packets: the name is in /etc/hosts.
NO_DNS = """
set -e
ip link set lo up
ip link add v0 type veth peer name v1
ip addr add 192.0.2.1/24 dev v0
ip link set v0 up; ip link set v1 up
ip neigh add 192.0.2.53 lladdr 02:00:00:00:00:01 dev v0
mount --bind hosts /etc/hosts; mount --bind resolv.conf /etc/resolv.conf
exec "$0" ask.py
"""
ASK = """
import sys
from pathlib import Path
sys.path[:0] = {path}
from middlebox import TlsServer
from client.protocol.node import Site
from client.link.connection import connection_checks
class Counting(TlsServer):
    served = 0
    def serve(self, connection):
        self.served += 1
        super().serve(connection)
server = Counting(Path({certificate!r}), Path({key!r}))
site = Site("north", f"fl.example.org:{{server.port}}", Path({ca!r}), Path({node!r}), Path(), Path())
connection_checks(site, {{}})
print(server.served)
"""


@pytest.mark.network
def test_a_name_in_etc_hosts_needs_no_dns(tmp_path):
    """The doctor's own two connections, and gRPC's."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made = ensure_credentials(tmp_path / "made", silos=("north",), hosts=(NAME,))
    (tmp_path / "hosts").write_text(f"127.0.0.1 {NAME}\n")
    (tmp_path / "resolv.conf").write_text("nameserver 192.0.2.53\n")
    root = Path(__file__).parents[3]
    (tmp_path / "ask.py").write_text(
        ASK.format(
            path=[str(root), str(root / "tests/helpers")],
            certificate=str(made.server_certificate),
            key=str(made.server_key),
            ca=str(made.ca_certificate),
            node=str(made.node_key("north")),
        )
    )
    ended = subprocess.run(
        ["unshare", "-n", "-m", "bash", "-c", NO_DNS, sys.executable],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert int(ended.stdout.strip() or 0) > 2, ended.stderr[-500:]
