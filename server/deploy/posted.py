"""Links by numbered POSTs at the relay: a session with the methods of a WebSocket, and the HTTP of one connection."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import h11
from websockets.exceptions import ConnectionClosedError

from client.link.handshake import DOWN, FRAME_BYTES, NO_LINK, OPEN, UP, answer_of

PATH = "/link"
POLL_SECONDS = 20.0  # how long a POST waits for what comes down
TOLD_SECONDS = 15.0  # how long an ended session waits for the silo to ask once more
HEADERS = (("Content-Type", "application/octet-stream"), ("Cache-Control", "no-store"))


class Posted:
    """One link by POSTs. Each number is taken once; a POST that is repeated gets the same answer."""

    def __init__(self, address: str = "") -> None:
        self.address = address
        self.up: bytes | None = None  # taken, and not read yet
        self.down: bytes | None = None  # sent, and not asked for yet
        self.last = b""  # the answer to the last POST that asked
        self.next = {UP: 0, DOWN: 0}
        self.turn = {UP: 0, DOWN: 0}
        self.code, self.notified = OPEN, False
        self.busy, self.seen = 0, asyncio.get_running_loop().time()
        self.news = asyncio.Event()

    async def _until(self, met: Callable[[], object]) -> None:
        while not met():
            await self.news.wait()

    def _tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    # --- as a WebSocket -----------------------------------------------------------------------------------

    async def recv(self) -> bytes:
        """Return what the silo sent next. Raises ConnectionClosed."""
        await self._until(lambda: self.up is not None or self.code)
        data, self.up = self.up, None
        if data is None:
            raise ConnectionClosedError(None, None)
        self._tell()
        return data

    async def send(self, data: bytes) -> None:
        """Send to the silo, once it has asked for what was sent before. Raises ConnectionClosed."""
        await self._until(lambda: self.down is None or self.code)
        if self.code:
            raise ConnectionClosedError(None, None)
        self.down = data
        self._tell()

    def end(self, code: int) -> None:
        """End the link without waiting."""
        self.code = self.code or code
        self._tell()

    async def close(self, code: int = NO_LINK) -> None:
        """End the link; wait until the silo has asked for the rest, and for the code."""
        self.end(code)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TOLD_SECONDS):
                await self._until(lambda: self.notified)

    # --- POSTs --------------------------------------------------------------------------------------------

    async def answer(self, direction: bytes, number: int, data: bytes) -> bytes:
        """Return the answer to a POST."""
        if direction not in self.next or number > self.next[direction]:
            return answer_of(NO_LINK, b"")
        if number == self.next[direction]:
            self.turn[direction] += 1
            self._tell()  # an earlier POST with this number has lost its connection
        turn = self.turn[direction]

        def is_superseded() -> bool:
            return number != self.next[direction] or turn != self.turn[direction]

        if direction == UP:
            await self._until(lambda: self.up is None or self.code or is_superseded())
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._until(
                        lambda: self.down is not None or self.code or is_superseded()
                    )
        if number == self.next[direction] and turn == self.turn[direction]:
            return self._take(data) if direction == UP else self._give()
        repeated = number == self.next[direction] - 1 and direction == DOWN
        return answer_of(OPEN, self.last if repeated else b"")

    def _take(self, data: bytes) -> bytes:
        if not self.code:
            self.up = data
            self.notified = not data  # it ends the link, and asks no more
            self.next[UP] += 1
            self._tell()
        return answer_of(self.code, b"")

    def _give(self) -> bytes:
        if self.code and self.down is None:
            self.notified = True
            self._tell()
            return answer_of(self.code, b"")
        self.last, self.down = self.down or b"", None
        self.next[DOWN] += 1
        self._tell()
        return answer_of(OPEN, self.last)


# --- HTTP -------------------------------------------------------------------------------------------------


@dataclass
class Visitor:
    """One connection of POSTs. `admit` returns bytes and seconds that a body may have, by what came of it so far."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    admit: Callable[[bytes], tuple[int, float]]
    answer: Callable[[bytes], Awaitable[bytes]]

    def __post_init__(self) -> None:
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=8192)

    async def serve(self) -> None:
        """Answer one POST after the other, until the peer ends, or is too slow, or sends something else."""
        faults = (h11.RemoteProtocolError, h11.LocalProtocolError, OSError, TimeoutError)
        with contextlib.suppress(*faults), contextlib.closing(self.writer):
            while (body := await self._body()) is not None:
                await self._send(200, await self.answer(body))
                self.http.start_next_cycle()

    async def _body(self) -> bytes | None:
        """Return the body of the next POST; None if there is none."""
        body = bytearray()
        begun = asyncio.get_running_loop().time()
        async with asyncio.timeout(self.admit(b"")[1]) as patience:
            while True:
                event = self.http.next_event()
                if event is h11.NEED_DATA:
                    self.http.receive_data(await self.reader.read(FRAME_BYTES))
                elif isinstance(event, h11.Request):
                    if event.method != b"POST" or event.target != PATH.encode():
                        await self._send(404, b"")
                        return None
                elif isinstance(event, h11.Data):
                    body += event.data
                    most, seconds = self.admit(bytes(body[:64]))
                    if len(body) > most:
                        await self._send(413, b"")
                        return None
                    patience.reschedule(begun + seconds)
                elif isinstance(event, h11.EndOfMessage):
                    return bytes(body)
                else:
                    return None

    async def _send(self, status: int, data: bytes) -> None:
        headers = [*HEADERS, ("Content-Length", str(len(data)))]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=data)):
            self.writer.write(self.http.send(event) or b"")
        self.http.send(h11.EndOfMessage())
        async with asyncio.timeout(self.admit(b"")[1]):
            await self.writer.drain()
