"""What stands between a silo and its server: a TLS server with any certificate, and a proxy that answers CONNECT."""

import base64
import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable
from http.client import HTTPConnection, parse_headers
from pathlib import Path
from typing import Self

HOST = "127.0.0.1"


class Listener:
    """Serves every connection on a free loopback port in a thread of its own, until it is closed."""

    def __init__(self) -> None:
        self.socket = socket.create_server((HOST, 0))
        self.port = int(self.socket.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            self.serve(connection)

    def serve(self, connection: socket.socket) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TlsServer(Listener):
    """Shows a certificate to whoever connects, and closes the connection."""

    def __init__(
        self, certificate: Path, key: Path, protocols: tuple[str, ...] = ("h2",)
    ) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate, key)
        if protocols:
            self.context.set_alpn_protocols(list(protocols))
        super().__init__()

    def serve(self, connection: socket.socket) -> None:
        self.context.wrap_socket(connection, server_side=True).close()


class HttpProxy(Listener):
    """An HTTP proxy that connects every CONNECT to `target`, a port of this machine, or gives a fixed answer.

    `login`: the `USER:PASSWORD` that it wants. `asked`: the requests that it got.
    """

    def __init__(self, target: int = 0, answer: str = "", login: str = "") -> None:
        self.target, self.answer, self.login = target, answer, login
        self.asked: list[str] = []
        super().__init__()

    def serve(self, connection: socket.socket) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            if not (more := connection.recv(4096)):
                return
            request += more
        self.asked.append(request.decode())
        right = base64.b64encode(self.login.encode()).decode()
        if self.login and f"Proxy-Authorization: Basic {right}\r\n" not in self.asked[-1]:
            answer = '407 Authentication Required\r\nProxy-Authenticate: Basic realm="x"'
        else:
            answer = self.answer
        if answer:
            connection.sendall(f"HTTP/1.1 {answer}\r\nContent-Length: 0\r\n\r\n".encode())
            return
        with socket.create_connection((HOST, self.target)) as server:
            connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            pump(connection, server)


class Inspector(Listener):
    """A proxy that opens TLS, answers WebSockets itself, and passes POSTs on to the plain HTTP of `target`.

    `refusal`: what a WebSocket gets; nothing: its connection is closed. `fate` returns what becomes of a POST with this
    body: "" (it passes), "request" or "answer" (that is lost, and the connection), "twice" (it is sent on two times).
    """

    def __init__(
        self,
        certificate: Path,
        key: Path,
        target: int,
        refusal: str = "426 Upgrade Required",
        fate: Callable[[bytes], str] = lambda body: "",
    ) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate, key)
        self.target, self.refusal, self.fate, self.posts = target, refusal, fate, 0
        super().__init__()

    def serve(self, connection: socket.socket) -> None:
        with self.context.wrap_socket(connection, server_side=True) as silo:
            stream = silo.makefile("rwb")
            while line := stream.readline():
                head = parse_headers(stream)
                if not line.startswith(b"POST"):
                    if self.refusal:
                        stream.write(f"HTTP/1.1 {self.refusal}\r\n\r\n".encode())
                        stream.flush()
                    return
                self.posts += 1
                path = line.split()[1].decode()
                body = stream.read(int(head["Content-Length"]))
                fate = self.fate(body)
                if fate == "request":
                    return
                for _ in range(2 if fate == "twice" else 1):
                    onward = HTTPConnection(HOST, self.target)
                    onward.request("POST", path, body)
                    answer = onward.getresponse()
                    data = answer.read()
                    onward.close()
                if fate == "answer":
                    return
                status = f"HTTP/1.1 {answer.status} {answer.reason}"
                stream.write(f"{status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
                stream.flush()


def pump(
    one: socket.socket, other: socket.socket, keep: Callable[[bytes], object] = len
) -> None:
    """Carry bytes both ways until one side closes; `keep` gets what `one` sends."""
    peers = {one: other, other: one}
    while True:
        for ready in select.select(list(peers), [], [])[0]:
            data = ready.recv(1 << 16)
            if not data:
                return
            if ready is one:
                keep(data)
            peers[ready].sendall(data)
