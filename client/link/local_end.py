"""The hospital's end of a link: a CONNECT proxy on loopback that Flower's SuperNode gets as `grpc_proxy`.

Each connection of gRPC is carried by one WebSocket to the relay beside the server, through the proxies of the
environment; where these let none through, by POSTs. TLS and the node key of the federation stay inside: a proxy that
opens the outer TLS sees TLS records.
"""

import contextlib
import secrets
import select
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from client.link.handshake import (
    FRAME_BYTES,
    NO_SERVER,
    NONCE_BYTES,
    POST_BYTES,
    READY,
    UNKNOWN_KEY,
    prove,
)
from client.link.posts import Posts
from client.link.route import OPERATOR, YOUR_IT, Blocked, Way, way_checks, way_to
from client.protocol.keys import load_key
from client.protocol.launch import LOOPBACK, THIS_MACHINE
from client.protocol.node import Site
from partitions.common.errors import UserError
from partitions.silo_file import Check

T = TypeVar("T")
# Until more of a record has come, which a slow line brings in pieces: each of them would wake this thread
PIECES_SECONDS = 0.001


class Duplex:
    """A TLS socket whose reads and writes take turns, and wait outside of them."""

    def __init__(self, tls: ssl.SSLSocket) -> None:
        self.tls, self.turn = tls, threading.Lock()
        tls.settimeout(0)

    def settimeout(self, seconds: float | None) -> None:
        """Leave the socket as it is: it never waits inside OpenSSL."""

    def recv(self, size: int) -> bytes:
        """Return the next bytes; none at the end."""
        return self._in_turn(partial(self.tls.recv, size))

    def sendall(self, data: bytes) -> None:
        """Send all bytes."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._in_turn(partial(self.tls.send, rest)) :]

    def _in_turn(self, step: Callable[[], T]) -> T:
        waited = False
        while True:
            waiting = select.poll()
            with self.turn:
                try:
                    return step()
                except ssl.SSLWantReadError:
                    waiting.register(self.tls, select.POLLIN)
                except ssl.SSLWantWriteError:
                    waiting.register(self.tls, select.POLLOUT)
            if waited:
                time.sleep(PIECES_SECONDS)
            waiting.poll()
            waited = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tls, name)


OPEN_SECONDS = 20.0
POST_SECONDS = 60.0  # without a byte; the relay answers a POST that waits after 20
MOST_CONNECTIONS = 16  # of this silo's gRPC at once; it needs one or two
NAME = "link"
VIA_CA = "via-ca.crt"  # beside a container's compose file, and then in /site


class Link:
    """A link of one silo; as a context it listens on a loopback port of its own."""

    def __init__(self, url: str, site: Site, ca_file: Path | None = None) -> None:
        self.url, self.site = url, site
        self.way, self.path = _way_of(url), urlsplit(url).path
        self.context = _context(ca_file)
        self.key = load_key(site.node_key)
        self.token = secrets.token_urlsafe(16)
        self.by_posts = False  # a proxy let no WebSocket through
        self.places = threading.Semaphore(MOST_CONNECTIONS)

    @classmethod
    def of_container(cls, site: Site, variables: Mapping[str, str]) -> "Link | None":
        """Return the link of a silo's container, with the CA that lies beside its certificate; None without one."""
        ca_file = site.ca_certificate.with_name(VIA_CA)
        url = variables.get("SILOFL_VIA")
        return cls(url, site, ca_file if ca_file.exists() else None) if url else None

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a SuperNode takes this link, and no other proxy."""
        port = self.listener.getsockname()[1]
        return {
            "grpc_proxy": f"http://silo:{self.token}@{LOOPBACK}:{port}",
            "no_grpc_proxy": ",".join(THIS_MACHINE),
        }

    def __enter__(self) -> "Link":
        self.listener = socket.create_server((LOOPBACK, 0))
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def check(self) -> Check:
        """Check that the relay takes this silo's key and reaches the server."""
        try:
            with self.open_socket():
                how = ", by POSTs: a proxy lets no WebSocket through" if self.by_posts else ""
                return Check(
                    NAME, True, f"{self.url} carries this silo to {self.site.server}{how}"
                )
        except Blocked as fault:
            return fault.check

    @contextlib.contextmanager
    def open_socket(self) -> Iterator[ClientConnection | Posts]:
        """Open one link to the relay, ready for gRPC's bytes. Raises Blocked."""
        with self._carrier() as carrier:
            try:
                nonce = carrier.recv(OPEN_SECONDS)
                if not isinstance(nonce, bytes) or len(nonce) != NONCE_BYTES:
                    raise Blocked(_no_relay(self.url))
                carrier.send(prove(self.key, nonce))
                if carrier.recv(OPEN_SECONDS) != READY:
                    raise Blocked(_no_relay(self.url))
            except (OSError, WebSocketException) as error:
                raise Blocked(fault_of(error, self.way, self.url)) from None
            yield carrier

    def _carrier(self) -> AbstractContextManager[ClientConnection | Posts]:
        """Return a WebSocket; POSTs where the way is open, and no WebSocket comes through. Raises Blocked."""
        try:
            if not self.by_posts:
                return self._websocket()
        except (OSError, WebSocketException) as error:
            first = fault_of(error, self.way, self.url)
            if not isinstance(
                error,
                WebSocketException | TimeoutError | ConnectionResetError | ssl.SSLEOFError,
            ):
                raise Blocked(first) from None
        try:
            posts = Posts(self._connection, self.path)
        except (OSError, WebSocketException) as error:
            raise Blocked(
                first if not self.by_posts else fault_of(error, self.way, self.url)
            ) from None
        self.by_posts = True
        return posts

    def _websocket(self) -> ClientConnection:
        # With wss:// two threads would use one TLS state at once
        return connect(
            f"ws://{self.way.server}{self.path}",
            sock=cast(socket.socket, Duplex(self._tls())),
            open_timeout=OPEN_SECONDS,
            compression=None,
            ping_timeout=None,  # a ping waits behind a model on a slow line
            max_size=FRAME_BYTES,
            proxy=None,
        )

    def _connection(self) -> HTTPSConnection:
        """Return a new connection to the relay for POSTs. Raises OSError."""
        http = HTTPSConnection(self.way.host, self.way.port)
        http.sock = self._tls()
        return http

    def _tls(self) -> ssl.SSLSocket:
        plain = self.way.connect()
        plain.settimeout(POST_SECONDS)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self.context.wrap_socket(plain, server_hostname=self.way.host)

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, local: socket.socket) -> None:
        with contextlib.suppress(OSError), local:
            local.settimeout(OPEN_SECONDS)
            if not self._admit(local):
                return
            local.settimeout(None)
            with self.places:
                try:
                    with self.open_socket() as remote:
                        local.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
                        carry(local, remote)
                except Blocked as fault:
                    reason = fault.check.detail.encode("ascii", "replace").decode()
                    local.sendall(f"HTTP/1.1 502 {reason[:400]}\r\n\r\n".encode())

    def _admit(self, local: socket.socket) -> bool:
        """Read a request, and answer all but a CONNECT to this silo's server with this link's token."""
        request = b""
        while b"\r\n\r\n" not in request:
            more = local.recv(4096)
            if not more or len(request) > 16384:
                return False
            request += more
        first, *lines = request.decode("latin-1").split("\r\n")
        login = b64encode(f"silo:{self.token}".encode()).decode()
        known = f"Proxy-Authorization: Basic {login}" in lines
        if known and first.startswith(f"CONNECT {self.site.server} "):
            return True
        status = "403 Forbidden" if known else "407 Proxy Authentication Required"
        local.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
        return False


def carry(local: socket.socket, remote: ClientConnection | Posts) -> None:
    """Carry bytes both ways until one side ends."""
    largest = POST_BYTES if isinstance(remote, Posts) else FRAME_BYTES

    def up() -> None:
        with contextlib.suppress(OSError, WebSocketException):
            while data := local.recv(largest):
                remote.send(data)
        remote.close()

    thread = threading.Thread(target=up, daemon=True)
    thread.start()
    with contextlib.suppress(OSError, WebSocketException):
        for data in remote:
            local.sendall(data if isinstance(data, bytes) else data.encode())
    with contextlib.suppress(OSError):
        local.shutdown(socket.SHUT_RDWR)
    thread.join()


# --- settings and faults ----------------------------------------------------------------------------------


def _way_of(url: str) -> Way:
    """Return the way to the relay of `https://HOST[:PORT]/PATH`. Raises UserError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 443
    except ValueError:
        host, port = None, 0
    if not host or parts.scheme != "https" or parts.query or parts.username:
        raise UserError(f"--via {url}: no address of a relay; use https://HOST/link")
    return way_to(host, port)


def _context(ca_file: Path | None) -> ssl.SSLContext:
    """Return the trust of the outer TLS: this system's CAs, and those of a file. Raises UserError."""
    context = ssl.create_default_context()
    try:
        if ca_file:
            context.load_verify_locations(cafile=str(ca_file))
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or error
        raise UserError(
            f"--via-ca {ca_file}: {reason}; name a file of PEM certificates"
        ) from None
    return context


def _no_relay(url: str) -> Check:
    fix = f"{OPERATOR} for the relay's address (silofl relay)"
    return Check(NAME, False, f"{url} is no relay of silofl", fix)


CLOSINGS = {
    UNKNOWN_KEY: (
        "does not know this silo's key",
        f"{OPERATOR}: the silo was removed, or its bundle is of another server",
    ),
    NO_SERVER: ("does not reach its server", f"{OPERATOR} whether the server runs"),
}
STATUSES = dict.fromkeys(
    (502, 503, 504), f"{OPERATOR} whether silofl relay runs, and is not full"
) | {404: f"check the path, or {OPERATOR} for the relay's address"}
SQUID = "squid: http_upgrade_request_protocols websocket allow all"


def fault_of(error: Exception, way: Way, url: str) -> Check:
    """Explain why there is no link."""
    detail = f"{url}: {error or type(error).__name__}"
    fix = f"{YOUR_IT} whether a proxy lets WebSockets through to {url}, or {OPERATOR}"
    if isinstance(error, Blocked):
        return error.check
    if isinstance(error, ssl.SSLCertVerificationError):
        fix = "name the CA of a proxy that opens TLS with --via-ca FILE, or of the relay's certificate"
        detail = (
            f"{way.server} shows a certificate that is not trusted ({error.verify_message})"
        )
    elif isinstance(error, InvalidStatus):
        status = error.response.status_code
        detail = f"{url} answers {status} to a WebSocket, and takes no POST"
        fix = STATUSES.get(status, f"{YOUR_IT} to let WebSockets through to it ({SQUID})")
    elif isinstance(error, ConnectionClosed) and error.rcvd:
        closes = f"closes the link ({error.rcvd.code})", f"{OPERATOR}; try again"
        what, fix = CLOSINGS.get(error.rcvd.code, closes)
        detail = f"the relay at {url} {what}"
    elif isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        check = way_checks(way)[-1]
        if not check.ok:
            return check
    return Check(NAME, False, detail, fix)
