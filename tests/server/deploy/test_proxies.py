"""The configuration files of docs/proxies/ in front of a real federation: what goes through, and what does not."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

import grpc  # type: ignore[import-untyped]
import pytest
from debian import FOLDER, libraries, start, unpacked
from relays import Running as Relayed
from trio import RUN, bring_up, is_online, rows, start_over, wait_for

from client.link.connection import connection_checks
from client.link.local_end import Link
from client.protocol.launch import LOOPBACK, free_ports
from client.protocol.node import Site
from server.deploy import processes, submit
from server.deploy.control import Control
from server.deploy.credentials import ensure_credentials
from server.deploy.relay import Limits
from server.results.history import History
from server.simulation.simulate import simulate

pytestmark = [pytest.mark.network, pytest.mark.deployed]

FILES = Path(__file__).parents[3] / "docs" / "proxies"
NAME = "fl.example.org"
SQUID = """\
{listen}
http_access deny all
hosts_file {hosts}
mime_table {root}/usr/share/squid/mime.conf
icon_directory {root}/usr/share/squid/icons
error_directory {root}/usr/share/squid-langpack/templates
unlinkd_program {root}/usr/lib/squid/unlinkd
pid_filename none
access_log none
cache_log /dev/null
cache deny all
pinger_enable off
netdb_filename none
coredump_dir /tmp
shutdown_lifetime 0 seconds
"""
LOGIN = """\
auth_param basic program {root}/usr/lib/squid/basic_fake_auth
acl known proxy_auth REQUIRED
"""
WITH_LOGIN = f"""\
http_port 127.0.0.1:{{port}}
acl fleet port {{fleet}}
{LOGIN}http_access allow CONNECT fleet known
"""
# It opens TLS with certificates of its own.
INSPECTING = """\
http_port 127.0.0.1:{port} ssl-bump tls-cert={gateway} generate-host-certificates=on dynamic_cert_mem_cache_size=4MB
sslcrtd_program {root}/usr/lib/squid/security_file_certgen -s {database} -M 4MB
acl step1 at_step SslBump1
ssl_bump peek step1
ssl_bump bump all
tls_outgoing_options cafile={ca}
http_access allow all
"""
PASSWORD = f"{LOGIN}http_access deny CONNECT !known\n"
WEBSOCKETS = "http_upgrade_request_protocols websocket allow all\n"
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")  # nginx makes these folders
SMALL = {**RUN, "strategy": "fedavg"}
# One message of 64 MB each way to each silo; nothing is trained.
LARGE = {**SMALL, "rounds": 1, "local-epochs": 0, "mlp.hidden": "3963,3963"}


class Proxies:
    """Proxies with the files of docs/proxies/, on free ports, in front of one federation; ended with it."""

    def __init__(self, folder, running):
        self.folder, self.running, self.root = folder, running, unpacked()
        self.started: dict[str, int] = {}
        self.ended: list[processes.Process] = []
        made = running.credentials
        (folder / "server.pem").write_bytes(
            made.server_certificate.read_bytes() + made.server_key.read_bytes()
        )
        # squid becomes another user, who cannot read pytest's folders
        (FOLDER / "hosts").write_text(f"127.0.0.1 {NAME}\n")

    def configured(self, file, port, changes):
        """Return a file of docs/proxies/ for these ports, paths and names."""
        made = self.running.credentials
        replaced = {
            ":9092": f":{self.running.fleet_port}",
            "listen 443": f"listen 127.0.0.1:{port}",
            ":443": f"127.0.0.1:{port}",
            "/etc/silofl/server.pem": str(self.folder / "server.pem"),
            "/etc/silofl/server.crt": str(made.server_certificate),
            "/etc/silofl/server.key": str(made.server_key),
            "/etc/silofl/ca.crt": str(made.ca_certificate),
            "/etc/traefik": str(self.folder),
            "/usr/lib/nginx": str(self.root / "usr/lib/nginx"),
            NAME: "localhost",
            "http {": "http { access_log off;\n"
            + "".join(f"{kind}_temp_path {self.folder};" for kind in TEMPORARY),
        }
        lines = (FILES / file).read_text().splitlines()
        text = "\n".join(line for line in lines if not line.startswith("#"))
        for old, new in {**changes, **replaced}.items():
            assert old in text or old not in changes, old
            text = text.replace(old, new)
        path = self.folder / file
        path.write_text(text + "\n")
        return path

    def start(self, file, changes=None):
        """Return the port of the proxy with this file, which is started unless it runs."""
        key = f"{file} {changes}"
        if key not in self.started:
            (port,) = free_ports(1)
            command, log = self._command(file, port, changes or {}), self.folder / f"{file}.log"
            self.ended.append(start(command, port, log))
            self.started[key] = port
        return self.started[key]

    def _command(self, file, port, changes):
        if file == "squid":
            places = {
                "port": port,
                "fleet": self.running.fleet_port,
                "root": self.root,
                **changes,
            }
            listen = changes.get("listen", WITH_LOGIN).format(**places)
            path = self.folder / f"squid-{port}.conf"
            path.write_text(SQUID.format(listen=listen, root=self.root, hosts=FOLDER / "hosts"))
            name = f"silofl{port}"
            return [str(self.root / "usr/sbin/squid"), "-N", "-n", name, "-f", str(path)]
        path = self.configured(file, port, changes)
        if file.startswith("nginx"):
            alone = f"user root; daemon off; pid {path}.pid; error_log stderr;"
            return [
                str(self.root / "usr/sbin/nginx"),
                "-p",
                str(self.folder),
                "-c",
                str(path),
                "-g",
                alone,
            ]
        if file.startswith("haproxy"):
            return [str(self.root / "usr/sbin/haproxy"), "-f", str(path)]
        self.configured("traefik-fleet.yaml", port, {})
        return [str(Path(sys.executable).parent / "traefik"), f"--configfile={path}"]

    def close(self):
        processes.end(self.ended, grace=2.0)


@pytest.fixture(scope="module")
def running(folder):
    """A federation whose certificate is for fl.example.org, too."""
    path = folder / "federation.yaml"
    path.write_text(path.read_text() + f"server: {{public: '{NAME}:443'}}\n")
    return bring_up(folder)


@pytest.fixture(scope="module")
def proxies(running, tmp_path_factory):
    made = Proxies(tmp_path_factory.mktemp("proxies"), running)
    yield made
    made.close()


def reach(running, ways):
    for name, go in ways.items():
        go(name)
    wait_for(lambda: all(is_online(running, name) for name in ways), 90)


def by(proxies, file, changes=None):
    """Return what starts a silo anew so that it reaches its server by this proxy."""
    return lambda name: start_over(
        proxies.running, proxies.start(file, changes), name, "localhost"
    )


def by_squid(proxies):
    def go(name):
        proxy = {"https_proxy": f"http://user:password@{LOOPBACK}:{proxies.start('squid')}"}
        start_over(proxies.running, proxies.running.fleet_port, name, NAME, proxy)

    return go


def deployed(settings, out):
    return rows(Path(submit.run({**settings, "out": str(out)})))


@pytest.fixture(scope="module")
def direct(tmp_path_factory):
    """The history of the same run without a network."""
    out = tmp_path_factory.mktemp("here") / "run"
    return rows(simulate({**SMALL, "silos": 3, "out": str(out)}, quiet=True))


def site_of(running, server, folder, name="hospital-01"):
    made = running.credentials
    return Site(name, server, made.ca_certificate, made.node_key(name), folder, folder)


PASSING = ("nginx-stream.conf", "haproxy-tcp.cfg", "traefik.yaml")
OPENING = ("nginx-grpc.conf", "haproxy-h2.cfg")


def test_tls_passes_through_three_proxies_at_once(running, proxies, direct, tmp_path):
    ways = {f"hospital-0{n}": by(proxies, file) for n, file in enumerate(PASSING, 1)}
    reach(running, ways)
    assert deployed(SMALL, tmp_path / "out") == direct


def test_proxies_with_the_federations_certificate_and_a_squid_with_a_login(
    running, proxies, direct, tmp_path
):
    """A message of 64 MB passes, too."""
    ways = {f"hospital-0{n}": by(proxies, file) for n, file in enumerate(OPENING, 1)}
    reach(running, {**ways, "hospital-03": by_squid(proxies)})
    assert deployed(SMALL, tmp_path / "out") == direct
    submit.run({**LARGE, "out": str(tmp_path / "large")})
    large = History(tmp_path / "large" / "history.csv").rows
    assert max(row.value for row in large if row.metric == "bytes_up") > 3 * 64e6


def test_a_line_that_is_cut_whenever_it_is_idle_loses_no_round(
    running, proxies, direct, tmp_path
):
    cut = {"timeout client 10m": "timeout client 1s", "timeout server 10m": "timeout server 1s"}
    reach(running, {"hospital-02": by(proxies, "haproxy-tcp.cfg", cut)})
    time.sleep(3)  # idle: the line is cut
    assert deployed(SMALL, tmp_path / "out") == direct


def inspecting(proxies, gateway, ca, more):
    """Return the port of a squid that opens TLS with certificates of its own."""
    # Of its own: a squid whose certificates vanish ends
    database = FOLDER / f"certificates-{'websocket' if more == WEBSOCKETS else 'posts'}"
    shutil.rmtree(database, ignore_errors=True)
    program = proxies.root / "usr/lib/squid/security_file_certgen"
    subprocess.run(
        [program, "-c", "-s", database, "-M", "4MB"],
        env=libraries(proxies.root), check=True, capture_output=True,
    )  # fmt: skip
    subprocess.run(["chown", "-R", "proxy:", database], check=True)
    both = proxies.folder / "gateway.pem"
    both.write_bytes(gateway.ca_certificate.read_bytes() + gateway.ca_key.read_bytes())
    trusted = FOLDER / "outer.crt"  # for squid's user
    trusted.write_bytes(ca.read_bytes())
    places = {"gateway": str(both), "database": str(database), "ca": str(trusted)}
    return proxies.start("squid", {"listen": more + INSPECTING, **places})


def test_links_pass_a_web_server_and_a_squid_that_opens_tls(
    running, proxies, direct, tmp_path, monkeypatch
):
    """A squid lets WebSockets through only where it is told to; else the link is one of POSTs, here with a password."""
    outer = ensure_credentials(tmp_path / "outer", silos=(), hosts=("localhost", NAME))
    gateway = ensure_credentials(tmp_path / "gateway", silos=(), hosts=(NAME,))
    with Control(running.connection) as control:
        keys = [node.public_key for node in control.nodes()]
    relays = [Relayed(made, running.fleet_port, Limits(), keys) for made in (None, outer)]
    live = f"/etc/letsencrypt/live/{NAME}"
    changes = {
        "127.0.0.1:8082": f"127.0.0.1:{relays[0].port}",
        f"{live}/fullchain.pem": str(outer.server_certificate),
        f"{live}/privkey.pem": str(outer.server_key),
    }
    web = f"https://localhost:{proxies.start('nginx-link.conf', changes)}/link"
    far = f"https://{NAME}:{relays[1].port}/link"
    squids = [
        inspecting(proxies, gateway, outer.ca_certificate, more)
        for more in (PASSWORD, WEBSOCKETS)
    ]
    with contextlib.ExitStack() as stack:
        for one in relays:
            stack.callback(one.close)
        for name, url, ca, squid in (
            ("hospital-01", web, outer.ca_certificate, None),
            ("hospital-02", far, gateway.ca_certificate, squids[0]),
            ("hospital-03", far, gateway.ca_certificate, squids[1]),
        ):
            with monkeypatch.context() as patch:
                if squid:
                    login = "user:password@" if squid == squids[0] else ""
                    patch.setenv("https_proxy", f"http://{login}{LOOPBACK}:{squid}")
                site = site_of(running, f"{NAME}:443", tmp_path, name)
                link = stack.enter_context(Link(url, site, ca))
            check = link.check()
            assert check.ok and link.by_posts == (squid == squids[0]), check
            start_over(running, 443, name, NAME, link.environment)
        wait_for(lambda: all(is_online(running, f"hospital-0{n}") for n in (1, 2, 3)), 90)
        assert deployed(SMALL, tmp_path / "out") == direct
        assert all(one.relay.links for one in relays)


@pytest.mark.parametrize("file", [*PASSING, *OPENING])
def test_only_the_fleet_api_is_reached_and_the_doctor_is_content(
    running, proxies, tmp_path, file
):
    port = proxies.start(file)
    checks = connection_checks(site_of(running, f"localhost:{port}", tmp_path), sizes=True)
    assert all(check.ok for check in checks), checks
    ca = running.credentials.ca_certificate
    with grpc.secure_channel(
        f"localhost:{port}", grpc.ssl_channel_credentials(ca.read_bytes())
    ) as channel, pytest.raises(grpc.RpcError) as refused:  # fmt: skip
        channel.unary_unary("/flwr.proto.Control/ListRuns")(b"", timeout=10)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_proxys_limit_of_size_is_named(running, proxies, tmp_path):
    port = proxies.start("nginx-grpc.conf", {"client_max_body_size 0;": ""})
    checks = connection_checks(site_of(running, f"localhost:{port}", tmp_path), sizes=True)
    assert [check.name for check in checks if not check.ok] == ["message size"]
    assert "(413)" in checks[-1].detail and "client_max_body_size 0" in checks[-1].fix
