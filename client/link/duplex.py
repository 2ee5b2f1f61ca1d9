"""TLS that one thread reads while another one writes, as `websockets` does: OpenSSL's state is not for two at once."""

import select
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

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
