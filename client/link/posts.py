"""The hospital's end of a link in numbered HTTPS POSTs, for proxies that let no WebSocket through.

A body is the session's token, a direction, a number and bytes (`handshake.request`); an answer is a close code, or
`OPEN`, and bytes. One connection sends up; another one asks for what comes down, and waits for it. What was sent
without an answer is sent again with its number: the relay takes each number once, and repeats its answer.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPException, HTTPSConnection

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.frames import Close
from websockets.http11 import Response

from client.link.handshake import DOWN, OPEN, POST_BYTES, UP, read_posted_answer, write_post

# Seconds before what had no answer is sent again
PAUSES = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0)


class Posts:
    """A link with the methods of the WebSocket that it stands for. `connect` returns a new connection to the relay."""

    def __init__(self, connect: Callable[[], HTTPSConnection], path: str) -> None:
        self.ups = Line(connect, path)
        self.downs = Line(connect, path)
        self.over = threading.Event()
        self.token = self.downs.ask(b"", PAUSES[:1])

    def __enter__(self) -> "Posts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.ups.drop()
        self.downs.drop()

    def send(self, data: bytes) -> None:
        """Send up. Raises OSError or ConnectionClosed."""
        self.ups.ask(write_post(self.token, UP, self.ups.number, data))

    def recv(self, timeout: float | None = None) -> bytes:
        """Return what came down next. Raises OSError or ConnectionClosed."""
        while not self.over.is_set():
            body = write_post(self.token, DOWN, self.downs.number, b"")
            if data := self.downs.ask(body):
                return data
        raise ConnectionClosedError(None, None)

    def __iter__(self) -> Iterator[bytes]:
        while True:
            yield self.recv()

    def close(self) -> None:
        """End the session, once; the relay then answers what waits for it."""
        if not self.over.is_set():
            self.over.set()
            with contextlib.suppress(OSError, ConnectionClosedError, InvalidStatus):
                self.ups.ask(write_post(self.token, UP, self.ups.number, b""), ())


class Line:
    """One connection after another, for one direction: the next request's number, and its answer."""

    def __init__(self, connect: Callable[[], HTTPSConnection], path: str) -> None:
        self.connect, self.path = connect, path
        self.number = 0
        self.http: HTTPSConnection | None = None

    def ask(self, body: bytes, pauses: tuple[float, ...] = PAUSES) -> bytes:
        """Return the bytes of the answer. Raises OSError, InvalidStatus, or ConnectionClosed with the relay's code."""
        for pause in (*pauses, None):
            try:
                code, data = read_posted_answer(self._post(body))
                break
            except (OSError, HTTPException, InvalidStatus) as error:
                self.drop()
                if pause is None:
                    if not isinstance(error, HTTPException):
                        raise
                    reason = str(error) or type(error).__name__
                    raise OSError(reason) from None
            threading.Event().wait(pause)
        if code != OPEN:
            raise ConnectionClosedError(Close(code, ""), None)
        if body:
            self.number += 1
        return data

    def _post(self, body: bytes) -> bytes:
        if self.http is None or self.http.sock is None:
            self.http = self.connect()
        self.http.request("POST", self.path, body, {"Content-Type": "application/octet-stream"})
        answer = self.http.getresponse()
        data = answer.read(POST_BYTES + 3)
        if answer.status != 200:
            raise InvalidStatus(Response(answer.status, answer.reason, Headers()))
        return data

    def drop(self) -> None:
        if self.http:
            self.http.close()
        self.http = None
