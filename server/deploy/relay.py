"""The server's end of a link through proxies (`silofl relay`): WebSockets in, the Fleet port out, and nothing else.

It opens nothing before a signature of a registered key over its nonce. The inner TLS stays closed to it. Connections,
waiting times, frames and buffers are bounded; a key that is removed at the server loses its links.
"""

import asyncio
import contextlib
import logging
import signal
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus

from websockets.asyncio.server import Request, Response, Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from client.link.handshake import (
    FRAME_BYTES,
    NO_SERVER,
    READY,
    TOO_MANY,
    UNKNOWN_KEY,
    new_nonce,
    verified,
)

PATH = "/link"
SILENT = logging.getLogger("silofl.relay")  # what strangers send is no news
SILENT.addHandler(logging.NullHandler())
SILENT.propagate = False


@dataclass(frozen=True)
class Limits:
    """Bounds of a relay: connections, and seconds."""

    links: int = 512
    links_per_key: int = 16
    unsigned: int = 128  # connections that have not proved a key yet
    handshake: float = 15.0
    # Without a byte from the silo, which sends a heartbeat every 90 s at least
    idle: float = 900.0
    refresh: float = 5.0  # between two questions for the registered keys


class Relay:
    """A relay to one Fleet port. `registered` returns the public keys (PEM) that the server knows."""

    def __init__(
        self,
        fleet: tuple[str, int],
        registered: Callable[[], Iterable[bytes]],
        limits: Limits = Limits(),
        echo: Callable[[str], None] = print,
    ) -> None:
        self.fleet, self.registered, self.limits, self.echo = fleet, registered, limits, echo
        self.keys: frozenset[bytes] = frozenset()
        self.open = 0  # TCP connections
        self.links: dict[ServerConnection, bytes] = {}
        self.closing: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def serving(
        self, host: str, port: int, context: ssl.SSLContext | None = None
    ) -> AsyncIterator[Server]:
        """Serve while the context is open."""
        await self.refresh()
        server = await serve(
            self._handle,
            host,
            port,
            ssl=context,
            process_request=self._admit_request,
            create_connection=self._counted(),
            compression=None,
            max_size=FRAME_BYTES,
            max_queue=4,
            write_limit=FRAME_BYTES,
            open_timeout=self.limits.handshake,
            close_timeout=5,
            ping_timeout=None,  # a ping waits behind a model on a slow line
            server_header=None,
            logger=SILENT,
        )
        watch = asyncio.create_task(self._watch())
        try:
            yield server
        finally:
            watch.cancel()
            server.close()
            await server.wait_closed()

    # --- who may come in ----------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Ask the server for the registered keys, and end the links of the others."""
        found = await asyncio.to_thread(self.registered)
        self.keys = frozenset(key.strip() for key in found)
        self.closing = [task for task in self.closing if not task.done()]
        for link, key in list(self.links.items()):
            if key not in self.keys:
                self.echo("a link ends: its key was removed")
                self.closing.append(asyncio.create_task(link.close(UNKNOWN_KEY)))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.limits.refresh)
            try:
                await self.refresh()
            except (OSError, ValueError) as error:
                self.echo(f"the server's Control API does not answer: {error}")
                self.keys = frozenset()  # no new links; open ones stay

    def _counted(self) -> type[ServerConnection]:
        """Return the class of this relay's connections, which it counts from their first byte on."""
        relay = self

        class Counted(ServerConnection):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                relay.open += 1
                super().connection_made(transport)
                if relay.open - len(relay.links) > relay.limits.unsigned:
                    self.transport.abort()

            def connection_lost(self, exc: Exception | None) -> None:
                relay.open -= 1
                super().connection_lost(exc)

        return Counted

    def _admit_request(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path != PATH:
            return connection.respond(HTTPStatus.NOT_FOUND, "")
        if len(self.links) >= self.limits.links:
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "")
        return None

    async def _prove(self, silo: ServerConnection) -> bytes | None:
        nonce = new_nonce()
        async with asyncio.timeout(self.limits.handshake):
            await silo.send(nonce)
            return verified(await silo.recv(), nonce, self.keys)

    # --- bytes --------------------------------------------------------------------------------------------

    async def _handle(self, silo: ServerConnection) -> None:
        try:
            key = await self._prove(silo)
        except (ConnectionClosed, TimeoutError):
            return
        if key is None:
            await silo.close(UNKNOWN_KEY)
            return
        if Counter(self.links.values())[key] >= self.limits.links_per_key:
            await silo.close(TOO_MANY)
            return
        self.links[silo] = key
        try:
            await self._carry(silo)
        finally:
            del self.links[silo]

    async def _carry(self, silo: ServerConnection) -> None:
        try:
            async with asyncio.timeout(self.limits.handshake):
                reader, writer = await asyncio.open_connection(*self.fleet, limit=FRAME_BYTES)
        except OSError:
            await silo.close(NO_SERVER)
            return
        ways = set()
        try:
            await silo.send(READY)
            ways = {
                asyncio.create_task(self._up(silo, writer)),
                asyncio.create_task(self._down(reader, silo)),
            }
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except ConnectionClosed:
            pass
        finally:
            for way in ways:
                way.cancel()
            writer.close()

    async def _up(self, silo: ServerConnection, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionClosed, OSError):
            while True:
                async with asyncio.timeout(self.limits.idle):
                    data = await silo.recv()
                if not isinstance(data, bytes):
                    return
                writer.write(data)
                await writer.drain()

    async def _down(self, reader: asyncio.StreamReader, silo: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed, OSError):
            while data := await reader.read(FRAME_BYTES):
                await silo.send(data)


def relay(
    listen: tuple[str, int],
    fleet: tuple[str, int],
    registered: Callable[[], Iterable[bytes]],
    context: ssl.SSLContext | None,
    echo: Callable[[str], None],
) -> None:
    """Run a relay until SIGTERM or SIGINT. Raises OSError if the address is taken."""

    async def run() -> None:
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        one = Relay(fleet, registered, echo=echo)
        async with one.serving(*listen, context):
            echo(f"the relay listens on {listen[0]}:{listen[1]}{PATH}; Ctrl-C ends it")
            await stopped.wait()

    asyncio.run(run())
