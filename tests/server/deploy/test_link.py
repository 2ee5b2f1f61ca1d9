"""The link through proxies: what it carries, whom the relay lets in, and what stays within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from failing import fails
from hypothesis import given
from hypothesis import strategies as st
from middlebox import HOST, HttpProxy, Inspector, Listener, TlsServer, pump
from relays import Running
from superlink import superlink
from trio import RUN, bring_up, is_online, rows, start_over, start_run, text_of, wait_for
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from client.link.handshake import (
    DOWN,
    NO_LINK,
    OPEN,
    READY,
    UP,
    new_nonce,
    prove,
    proven_key,
    read_posted_answer,
    write_post,
)
from client.link.local_end import Duplex, Link
from client.link.route import Proxy, Way, _request
from client.protocol.envelope import LINK, public_pem
from client.protocol.keys import load_key, site_root
from client.protocol.launch import free_ports
from client.protocol.node import Site
from client.site.runtime.doctor import one_line
from docker import entry
from partitions.common.errors import UserError
from server.cli.main import main
from server.deploy.control import Control, write_connection
from server.deploy.credentials import ensure_credentials
from server.deploy.posted import Posted, Visitor
from server.deploy.relay import Door, Limits, Relay, network_of, tls_of
from server.deploy.submit import app_directory
from server.simulation.simulate import simulate

NAME = "fl.example.org"
SMALL = {**RUN, "strategy": "fedavg"}


class Echo(Listener):
    """Stands for the Fleet port: it sends back what it gets, and counts who came."""

    def __init__(self):
        self.came = 0
        super().__init__()

    def serve(self, connection):
        self.came += 1
        while data := connection.recv(1 << 16):
            connection.sendall(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return ensure_credentials(folder, silos=("north", "south"), hosts=("localhost", NAME))


@pytest.fixture
def fleet():
    with Echo() as echo:
        yield echo


@pytest.fixture
def running(made, fleet):
    """Only `north` is registered."""
    limits = Limits(links_per_key=2, unsigned=8, refresh=0.1)
    one = Running(made, fleet.port, limits, [made.node_public_pem("north")])
    yield one
    one.close()


@pytest.fixture
def plain(made, fleet):
    """A relay without TLS of its own, as behind a proxy that opens TLS."""
    one = Running(None, fleet.port, Limits(unsigned=8), [made.node_public_pem("north")])
    yield one
    one.close()


@pytest.fixture(params=["websocket", "posts"])
def by_posts(request):
    return bool(request.param == "posts")


def link_of(made, running, by_posts, name="north"):
    link = Link(running.url, site_of(made, name), made.ca_certificate)
    link.by_posts = by_posts
    return link


def site_of(made, name="north", server=f"{NAME}:9092"):
    return Site(name, server, made.ca_certificate, made.node_key(name), Path(), Path())


def dial(link, server=f"{NAME}:9092", token=""):
    """Return a connection through the local end, and the status of the CONNECT."""
    port = int(link.environment["grpc_proxy"].rpartition(":")[2])
    host, _, own = server.rpartition(":")
    way = Way(host, int(own), Proxy("x", HOST, port, f"silo:{token or link.token}"))
    connection = socket.create_connection((HOST, port), timeout=20)
    assert way.proxy
    connection.sendall(_request(way, way.proxy))
    return connection, connection.recv(4096).decode().split("\r\n")[0]


# --- whom the relay lets in -------------------------------------------------------------------------------


def test_bytes_go_both_ways_and_only_with_the_token_to_the_server(
    made, running, fleet, by_posts
):
    with link_of(made, running, by_posts) as link:
        assert link.check().ok, link.check()
        wait_for(lambda: fleet.came == 1, 20)
        for server, token, status in (
            (f"{NAME}:9092", "guessed", "407"),
            (f"{NAME}:8000", "", "403"),
            ("127.0.0.1:9092", "", "403"),
        ):
            connection, answered = dial(link, server, token)
            connection.close()
            assert status in answered and fleet.came == 1
        connection, answered = dial(link)
        assert answered == "HTTP/1.1 200 Connected"
        there_and_back(connection)
    relay = running.relay
    wait_for(lambda: not (relay.links or relay.full() or relay.doors), 30)
    assert not running.relay.sessions


def there_and_back(connection):
    sent = random.Random(0).randbytes(1 << 21)
    threading.Thread(target=connection.sendall, args=(sent,)).start()
    got = b""
    while len(got) < len(sent):
        data = connection.recv(1 << 16)
        assert data
        got += data
    connection.close()
    assert got == sent


def test_a_key_that_is_not_registered_opens_nothing(made, running, fleet, by_posts):
    with link_of(made, running, by_posts, "south") as link:
        check = link.check()
        assert not check.ok and "does not know this silo's key" in check.detail
        assert dial(link)[1].startswith("HTTP/1.1 502 the relay at")
    assert not fleet.came


def hello(running, text):
    """Return the code with which the relay closes after this answer to its nonce."""
    with (
        connect(f"ws://{HOST}:{running.port}/link", proxy=None) as silo,
        pytest.raises(ConnectionClosed) as closed,
    ):
        silo.recv(20)
        silo.send(text)
        silo.recv(20)
    return closed.value.rcvd.code if closed.value.rcvd else 0


def test_answers_that_prove_no_key(made, plain, fleet):
    """A signature over another nonce, the public key alone, other forms, and too much."""
    north = load_key(site_of(made).node_key)
    for text in (
        prove(north, new_nonce()),
        "{}",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"\0" * 32,
        b"[" * 2000,
    ):
        assert hello(plain, text) == 4401
    assert hello(plain, b"\0" * (1 << 17)) == 1009  # too large
    assert not fleet.came


def test_a_removed_key_ends_its_links(made, running, by_posts):
    with link_of(made, running, by_posts) as link:
        connection, _ = dial(link)
        running.keys = []
        assert connection.recv(1) == b""
        assert "removed" in running.said[0]
        assert not link.check().ok


def test_a_key_has_a_number_of_links(made, running, by_posts):
    with link_of(made, running, by_posts) as link:
        taken = [dial(link) for _ in range(3)]
        assert [status[9:12] for _, status in taken] == ["200", "200", "502"]
        for connection, _ in taken:
            connection.close()


def test_strangers_stay_within_bounds_and_a_silo_gets_in(made, fleet):
    """A thousand connections without a key: eight are open at once, each for two seconds."""
    context, most = ssl._create_unverified_context(), 0
    limits = Limits(unsigned=8, handshake=2.0)
    with contextlib.ExitStack() as stack:
        running = Running(made, fleet.port, limits, [made.node_public_pem("north")])
        stack.callback(running.close)
        for number in range(1000):
            plain = stack.enter_context(socket.create_connection((HOST, running.port)))
            if number % 50 == 0:  # and some that speak TLS, and then nothing
                with contextlib.suppress(OSError):
                    stack.enter_context(context.wrap_socket(plain))
            most = max(most, len(running.relay.doors))
        assert most <= 9
        with Link(running.url, site_of(made), made.ca_certificate) as link:
            wait_for(lambda: link.check().ok, 20)
    assert fleet.came >= 1


def post(connection, body=b""):
    connection.request("POST", "/link", body)
    return read_posted_answer(connection.getresponse().read())


@pytest.mark.parametrize("before", [0, 20])
def test_one_address_takes_no_others_place(made, plain, before):
    """Hundreds of greetings and idle connections of 127.0.0.1: a silo at 127.0.0.2 keeps its session and connection.

    It greets the relay, is slow, and proves its key in the end, on the same connection.
    """
    key = load_key(made.node_key("north"))
    with contextlib.ExitStack() as stack:

        def connect(source):
            one = http.client.HTTPConnection(
                HOST, plain.port, timeout=10, source_address=(source, 0)
            )
            return stack.enter_context(contextlib.closing(one))

        def crowd(number):
            for _ in range(number):
                other = connect(HOST)
                with contextlib.suppress(OSError, http.client.HTTPException):
                    other.connect()
                    other.send(b"P")  # and nothing more, on this one
                flooding = connect(HOST)
                assert post(flooding)[0] == OPEN

        crowd(before)
        silo = connect("127.0.0.2")
        code, token = post(silo)
        assert code == OPEN
        crowd(20)
        _, nonce = post(silo, write_post(token, DOWN, 0, b""))
        assert post(silo, write_post(token, UP, 0, prove(key, nonce)))[0] == OPEN
        assert post(silo, write_post(token, DOWN, 1, b"")) == (OPEN, READY)


@pytest.mark.parametrize(
    ("peer", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:2"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::2"),
    ],
)
def test_what_counts_as_one_address(peer, same):
    """A host chooses among 2^64 addresses of its IPv6 network; an IPv4 address in IPv6 is the IPv4 address."""
    assert network_of((peer, 1)) == network_of((same, 2))
    assert (
        network_of((peer, 1))
        != network_of(("2001:db8:0:1::1", 1))
        != network_of(("10.0.0.2", 1))
    )


KEY = ec.generate_private_key(ec.SECP384R1())
FIELDS = st.dictionaries(
    st.sampled_from(["public-key", "signature", "proof", "x"]), st.none() | st.text()
)


@given(st.text() | FIELDS.map(json.dumps) | st.lists(FIELDS).map(json.dumps))
def test_no_answer_breaks_the_relay(text):
    nonce, known = new_nonce(), {public_pem(KEY).strip()}
    assert proven_key(text.encode(), nonce, known) is None


def test_an_answer_is_for_one_nonce_and_one_registered_key():
    nonce, known = new_nonce(), {public_pem(KEY).strip()}
    assert proven_key(prove(KEY, nonce), nonce, known) in known
    assert proven_key(prove(KEY, nonce), nonce, set()) is None
    assert proven_key(prove(KEY, new_nonce()), nonce, known) is None


def test_flowers_signature_of_a_time_is_none_of_the_links():
    """Both are made with the node key: what is signed begins differently."""
    assert not b"2026-11-26T03:00:00+00:00".startswith(LINK[:4].encode())


class Watched:
    """Stands for a TLS socket: it notes calls of two threads at once, and is not ready every second time."""

    def __init__(self):
        self.inside, self.most, self.calls = 0, 0, 0
        self.ours, self.theirs = socket.socketpair()
        self.theirs.send(b"x")  # so that it can be waited for

    def settimeout(self, seconds):
        pass

    def fileno(self):
        return self.ours.fileno()

    def recv(self, size):
        self.send(b"")
        return b"x"

    def send(self, data):
        self.inside += 1
        self.calls += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.001)
        self.inside -= 1
        if self.calls % 2:
            raise ssl.SSLWantReadError
        return 1


def test_one_thread_at_a_time_is_in_openssl():
    tls = Watched()
    duplex = Duplex(cast(ssl.SSLSocket, tls))
    reading = threading.Thread(target=lambda: [duplex.recv(1) for _ in range(40)])
    reading.start()
    duplex.sendall(b"x" * 40)
    reading.join(20)
    assert tls.calls >= 80 and tls.most == 1
    tls.ours.close()
    tls.theirs.close()


# --- POSTs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", ["426 Upgrade Required", "403 Forbidden", ""])
def test_where_no_websocket_comes_through_posts_do(made, plain, refusal):
    both = made.server_certificate, made.server_key
    with (
        Inspector(*both, plain.port, refusal) as proxy,
        Link(
            f"https://localhost:{proxy.port}/link", site_of(made), made.ca_certificate
        ) as link,
    ):
        check = link.check()
        assert check.ok and "by POSTs: a proxy lets no WebSocket through" in check.detail
        there_and_back(dial(link)[0])


def test_posts_pass_a_proxy_that_wants_a_password(made, plain, monkeypatch):
    with (
        Inspector(made.server_certificate, made.server_key, plain.port) as inspector,
        HttpProxy(target=inspector.port, login="u:p@x") as proxy,
    ):
        monkeypatch.setenv("https_proxy", f"http://u:p%40x@{HOST}:{proxy.port}")
        with Link(f"https://{NAME}/link", site_of(made), made.ca_certificate) as link:
            there_and_back(dial(link)[0])
            assert link.by_posts and inspector.posts and len(proxy.asked) > 1
        monkeypatch.setenv("https_proxy", f"http://u:q@{HOST}:{proxy.port}")
        refused = Link(f"https://{NAME}/link", site_of(made), made.ca_certificate).check()
        assert "refuses the password of u" in refused.detail


def test_whatever_is_lost_or_doubled_every_byte_comes_once(made, plain):
    draw = random.Random(1)
    fates = ["", "", "", "request", "answer", "twice"]
    both = made.server_certificate, made.server_key
    with (
        Inspector(
            *both, plain.port, fate=lambda body: draw.choice(fates) if body else ""
        ) as proxy,
        Link(
            f"https://localhost:{proxy.port}/link", site_of(made), made.ca_certificate
        ) as link,
    ):
        link.by_posts = True
        there_and_back(dial(link)[0])
        assert proxy.posts > 20


STEPS = st.lists(
    st.sampled_from(["up", "down", "up again", "down again", "up next", "down next"])
)


@given(st.lists(st.binary(min_size=1, max_size=4)), STEPS)
def test_each_number_is_taken_once_and_answered_alike(sent, steps):
    """Whatever the order of new, repeated and future POSTs: what the relay reads and what it sends comes once."""

    async def run():
        silo, numbers, read, got = Posted(), {UP: 0, DOWN: 0}, list[bytes](), list[bytes]()

        async def echo():
            with contextlib.suppress(ConnectionClosed):
                while True:
                    read.append(await silo.recv())
                    await silo.send(read[-1])

        task = asyncio.create_task(echo())
        last, waiting = b"", list(sent)
        for step in steps:
            way = UP if step.startswith("up") else DOWN
            if step.endswith("again") and numbers[way]:
                answer = read_posted_answer(await silo.answer(way, numbers[way] - 1, b"other"))
                assert answer == (OPEN, last if way == DOWN else b"")
            elif step.endswith("next"):
                assert (
                    read_posted_answer(await silo.answer(way, numbers[way] + 1, b"x"))[0]
                    == NO_LINK
                )
            elif step == "up" and waiting and len(got) == numbers[UP]:
                await silo.answer(UP, numbers[UP], waiting.pop(0))
                numbers[UP] += 1
            elif step == "down" and len(got) < numbers[UP]:
                code, last = read_posted_answer(await silo.answer(DOWN, numbers[DOWN], b""))
                assert code == OPEN
                got.append(last)
                numbers[DOWN] += 1
        assert got == read[: len(got)] == sent[: len(got)]
        task.cancel()

    asyncio.run(run())


@given(
    st.binary()
    | st.builds(
        write_post, st.just(b"t" * 32), st.binary(max_size=1), st.integers(0, 9), st.binary()
    )
)
def test_no_post_breaks_the_relay_or_opens_anything(body):
    """A body without a session's token gets one answer; an empty one a token, and at the bound another's place."""

    async def run():
        relay = Relay((HOST, 1), list, Limits(unsigned=1))
        door = Door(relay, cast(Any, None))
        door.address = HOST
        code, token = read_posted_answer(await relay.answer(door, body))
        assert (code, len(token)) == ((NO_LINK, 0) if body else (OPEN, 32))
        if not body:
            assert read_posted_answer(await relay.answer(door, b""))[0] == OPEN
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert [*relay.sessions] != [token] and len(relay.sessions) == 1
        for task in relay.tasks:
            task.cancel()

    asyncio.run(run())


HEADERS = st.lists(st.sampled_from([
    b"POST /link HTTP/1.1\r\n", b"PUT /link HTTP/1.1\r\n", b"POST /other HTTP/1.1\r\n", b"Host: x\r\n", b"\r\n",
    b"Content-Length: 3\r\n", b"Content-Length: 9999999\r\n", b"Transfer-Encoding: chunked\r\n",
    b"3\r\nabc\r\n", b"abc",
]))  # fmt: skip


@given(st.binary() | HEADERS.map(b"".join))
def test_no_http_breaks_the_relay(sent):
    """It is parsed as data; a body is at most 64 bytes here."""

    async def run():
        bodies = list[bytes]()

        async def answer(body):
            bodies.append(body)
            return b"ok"

        def begin(reader, writer):
            return Visitor(reader, writer, lambda begun: (64, 20.0), answer).serve()

        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            theirs.sendall(sent)
            theirs.shutdown(socket.SHUT_WR)
            await begin(reader, writer)
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            assert all(len(body) <= 64 for body in bodies)
            assert theirs.recv(1 << 16).count(b"200 ") == len(bodies)

    asyncio.run(run())


# --- what stands in the way -------------------------------------------------------------------------------


def test_faults_have_their_lines(made, running, monkeypatch):
    site, ca = site_of(made), made.ca_certificate
    dead = Running(made, 1, Limits(), running.keys)
    with (
        TlsServer(made.server_certificate, made.server_key) as other,
        HttpProxy(answer="403 Forbidden") as proxy,
    ):
        plain = "https://localhost"
        cases = [
            (running.url, None, "not trusted", "--via-ca FILE"),
            (
                f"{plain}:{running.port}/other",
                ca,
                "answers 404 to a WebSocket",
                "check the path",
            ),
            (dead.url, ca, "does not reach its server", "whether the server runs"),
            (f"{plain}:{other.port}/link", ca, plain, "lets WebSockets through"),
            (f"{plain}:1/link", ca, "refuses connections", "listens on port 1"),
        ]
        for url, file, line, fix in cases:
            check = Link(url, site, file).check()
            assert not check.ok and line in check.detail and fix in check.fix, one_line(check)
        monkeypatch.setenv("https_proxy", f"http://{HOST}:{proxy.port}")
        check = Link(f"https://{NAME}/link", site, ca).check()
        assert f"answers 403 Forbidden to CONNECT {NAME}:443" in check.detail
    dead.close()
    for url in (
        "http://a.org/link",
        "wss://a.org/link",
        "a.org",
        "https://a.org:x/link",
        "https://u:p@a/link",
    ):
        fails(UserError, r"--via .*: no address of a relay", Link, url, site)
    with pytest.raises(UserError, match="--certificate and --key go together"):
        tls_of(made.server_certificate, None)
    with pytest.raises(UserError, match=r"--via-ca .*: .*PEM certificates"):
        Link(running.url, site, made.node_key("north"))


def test_a_container_takes_the_link_of_its_variable(made, running, monkeypatch, tmp_path):
    """The proxy's CA lies beside the federation's; the SuperNode and the checks get the local end."""
    shutil.copy(made.ca_certificate, tmp_path / "ca.crt")
    site = replace(site_of(made), ca_certificate=tmp_path / "ca.crt")
    ways = list[Mapping[str, str]]()
    monkeypatch.setattr(Site, "from_environment", lambda variables: site)
    monkeypatch.setattr("partitions.common.files.keep_private", lambda: None)

    def run(site, command, environment, **_):
        ways.append(environment)
        return 0

    monkeypatch.setattr("client.site.runtime.supervisor.run", run)
    monkeypatch.setenv("SILOFL_VIA", running.url)
    with Link.of_container(site, os.environ) or pytest.fail("no link") as link:
        assert "not trusted" in link.check().detail
    shutil.copy(made.ca_certificate, tmp_path / "via-ca.crt")
    with Link.of_container(site, os.environ) or pytest.fail("no link") as link:
        assert link.check().ok
    for _ in range(2):
        assert entry.main(["flower-supernode"]) == 0
        monkeypatch.setenv("SILOFL_VIA", "")
    assert ways[0]["grpc_proxy"].startswith("http://silo:") and "grpc_proxy" not in ways[1]


# --- a federation -----------------------------------------------------------------------------------------


class Recording(Listener):
    """Passes everything on to a port, and keeps what the silo's side said."""

    def __init__(self, target):
        self.target, self.heads, self.seen = target, list[bytes](), bytearray()
        super().__init__()

    def serve(self, connection):
        with socket.create_connection((HOST, self.target)) as server:
            pump(connection, server, self.keep)

    def keep(self, data):
        self.heads.append(data[:3])
        self.seen += data


@pytest.mark.exhaustive
@pytest.mark.deployed
def test_a_federation_through_links_has_the_direct_history(folder, tmp_path, monkeypatch):
    """Three links, one behind a proxy with a login, one by POSTs; all are cut in the run. Inside is TLS only."""
    path = folder / "federation.yaml"
    path.write_text(path.read_text() + f"server: {{public: '{NAME}:443'}}\n")
    up = bring_up(folder)
    names = [silo.name for silo in up.silos]
    with Control(up.connection) as control:
        keys = [node.public_key for node in control.nodes()]
    outer = ensure_credentials(tmp_path / "outer", silos=(), hosts=("localhost", NAME))
    with Recording(up.fleet_port) as recorder, contextlib.ExitStack() as stack:
        one = Running(outer, recorder.port, Limits(), keys)
        stack.callback(one.close)
        proxy = stack.enter_context(HttpProxy(target=one.port, login="u:p"))
        for name in names:
            url = one.url
            if name == names[0]:
                monkeypatch.setenv("https_proxy", f"http://u:p@{HOST}:{proxy.port}")
                url = f"https://{NAME}/link"
            site = replace(site_of(up.credentials, name), server=f"{NAME}:443")
            link = stack.enter_context(Link(url, site, outer.ca_certificate))
            link.by_posts = name == names[1]
            monkeypatch.delenv("https_proxy", raising=False)
            start_over(up, 443, name, NAME, link.environment)
        wait_for(lambda: all(is_online(up, name) for name in names), 90)
        follower = start_run({**SMALL, "local-epochs": 5}, tmp_path / "out")
        wait_for(lambda: '"round"' in text_of(tmp_path / "out" / "progress.jsonl"), 90)
        one.cut()
        follower.join(180)
        assert len(one.relay.links) >= 3 and proxy.asked
        here = simulate(
            {**SMALL, "local-epochs": 5, "silos": 3, "out": str(tmp_path / "here")}, quiet=True
        )
        assert rows(tmp_path / "out") == rows(here)
        assert recorder.heads[0] == b"\x16\x03\x01" and b"hospital-0" not in recorder.seen


@pytest.mark.exhaustive
@pytest.mark.deployed
def test_relay_and_join_as_commands(tmp_path, monkeypatch):
    """The silo of a bundle is online through the link, though nothing here finds its server's name."""
    monkeypatch.chdir(tmp_path)
    for variable in ("FLWR_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    outer = ensure_credentials(tmp_path / "outer", silos=(), hosts=("localhost",))
    x = np.zeros((20, 3), np.float32)
    np.savez(
        "data.npz", x_train=x, y_train=np.arange(20) % 2, x_test=x, y_test=np.arange(20) % 2
    )
    with (
        superlink(tmp_path, hosts=(HOST, "localhost", NAME)) as server,
        contextlib.ExitStack() as stack,
    ):
        write_connection(server.connection)
        Path("federation.yaml").write_text(
            f"name: test\nserver: {{public: '{NAME}:443', fleet-port: {server.fleet}, control-port: {server.port}}}\n"
            "demo: {dataset: digits}\nsilos: [{name: north, data: demo}]\n"
        )
        assert main(["add-silo", "joiner"]) == 0
        (port,) = free_ports(1)
        tls = ["--certificate", str(outer.server_certificate), "--key", str(outer.server_key)]

        def start(*command):
            process = subprocess.Popen(
                [sys.executable, "-m", "server.cli.main", *command],
                env={**os.environ, "PYTHONPATH": str(app_directory())},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            stack.callback(process.kill)
            return process

        relay = start("relay", "--listen", f"{HOST}:{port}", *tls)
        assert relay.stdout and "the relay listens on" in relay.stdout.readline()
        way = ["--via", f"https://localhost:{port}/link", "--via-ca", str(outer.ca_certificate)]
        doctor = start("doctor", "joiner.tar", "--data", "data.npz", "--json", *way)
        checks = json.loads(doctor.communicate(timeout=120)[0].partition("silofl:")[0])
        assert checks[0]["check"] == "link" and checks[0]["ok"], checks
        assert "proxy" in [check["check"] for check in checks if check["ok"]]
        silo = start("join", "joiner.tar", "--data", "data.npz", *way)
        online = site_root() / "joiner/online"
        wait_for(lambda: online.exists() or silo.poll() is not None, 120)
        for process in (silo, relay):
            process.send_signal(signal.SIGTERM)
        said, _ = silo.communicate(timeout=60)
        assert silo.returncode == 0 and relay.wait(30) == 0, said
        assert (
            f"ok    link: https://localhost:{port}/link carries this silo to {NAME}:443" in said
        )
        assert "(grpc_proxy) connects to" in said
