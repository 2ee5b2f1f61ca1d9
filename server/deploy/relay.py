"""The server's end of a link through proxies (`silofl relay`): WebSockets or POSTs in, the Fleet port alone out.

It opens nothing before a signature of a registered key over its nonce. The inner TLS stays closed to it. Connections,
waiting times, frames and buffers are bounded; a key that is removed at the server loses its links.
"""

import asyncio
import contextlib
import logging
import secrets
import signal
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, TypeVar

from websockets.asyncio.server import Request, Response, Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from client.link.handshake import (
    FRAME_BYTES,
    HEAD_BYTES,
    LARGEST_ANSWER,
    NO_LINK,
    NO_SERVER,
    OPEN,
    POST_BYTES,
    READY,
    TOKEN_BYTES,
    TOO_MANY,
    UNKNOWN_KEY,
    answer_of,
    new_nonce,
    proven_key,
    read_post,
)
from partitions.common.errors import UserError
from server.deploy.control import Connection, Control
from server.deploy.posted import PATH, Posted, Visitor

SOCKETS = 4  # of one link by POSTs: two, and two anew after a cut
S = TypeVar("S", bound="Door | Posted")
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
    # Without a POST; a silo that waits asks again after 20 s
    silent: float = 120.0
    refresh: float = 5.0  # between two questions for the registered keys


@dataclass
class Relay:
    """A relay to one Fleet port. `registered` returns the public keys (PEM) that the server knows."""

    fleet: tuple[str, int]
    registered: Callable[[], Iterable[bytes]]
    limits: Limits = Limits()
    echo: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self.keys: frozenset[bytes] = frozenset()
        self.over = False
        self.doors: dict[asyncio.Transport, Door] = {}
        self.links: dict[ServerConnection | Posted, bytes] = {}
        self.sessions: dict[bytes, Posted] = {}  # by their tokens
        self.tasks = set[asyncio.Task[None]]()

    @contextlib.asynccontextmanager
    async def serve(
        self, host: str, port: int, context: ssl.SSLContext | None = None
    ) -> AsyncIterator[Server]:
        """Serve while the context is open."""
        await self.refresh()
        server = await serve(
            self._handle,
            host,
            port,
            ssl=context,
            ssl_handshake_timeout=self.limits.handshake if context else None,
            process_request=self._admit_request,
            create_connection=self._door,  # type: ignore[arg-type]
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
            self.over = True
            for transport in self.doors:
                if not isinstance(transport.get_protocol(), ServerConnection):
                    transport.abort()
            tasks = list(self.tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.wait_closed()

    # --- who may come in ----------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Ask the server for the registered keys, and end the links of the others."""
        registered = await asyncio.to_thread(self.registered)
        self.keys = frozenset(key.strip() for key in registered)
        for link, key in list(self.links.items()):
            if key not in self.keys:
                self.echo("a link ends: its key was removed")
                self.spawn(link.close(UNKNOWN_KEY))

    def _door(self, *args: Any, **options: Any) -> "Door":
        return Door(self, partial(ServerConnection, *args, **options))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.limits.refresh)
            now = asyncio.get_running_loop().time()
            for session in self.sessions.values():
                if not session.busy and now - session.seen > self.limits.silent:
                    self.spawn(session.close())
            try:
                await self.refresh()
            except (OSError, ValueError) as error:
                self.echo(f"the server's Control API does not answer: {error}")
                self.keys = frozenset()  # no new links; open ones stay

    def _admit_request(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path != PATH:
            return connection.respond(HTTPStatus.NOT_FOUND, "")
        if len(self.links) >= self.limits.links:
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "")
        return None

    # --- POSTs --------------------------------------------------------------------------------------------

    def full(self) -> bool:
        """Whether there are as many TCP connections as strangers and links may have; in the end no new one.

        A stranger gives way to a newer connection.
        """
        self.doors = {
            way: entry for way, entry in self.doors.items() if entry.socket.fileno() >= 0
        }
        if len(self.doors) < self.limits.unsigned + SOCKETS * len(self.links):
            return self.over
        if oldest := crowding(door for door in self.doors.values() if not door.signed):
            self.doors.pop(oldest.transport).transport.abort()
        return self.over or oldest is None

    def admit(self, begin: bytes) -> tuple[int, float]:
        """Return the bytes and seconds of a POST that begins so: few unless it is of a link."""
        if self.sessions.get(begin[:TOKEN_BYTES]) in self.links:
            return HEAD_BYTES + POST_BYTES, self.limits.silent
        return HEAD_BYTES + LARGEST_ANSWER, self.limits.handshake

    async def answer(self, door: "Door", body: bytes) -> bytes:
        """Return the answer to a POST through this connection."""
        if not body:
            return self._greet(door.address)
        token, direction, number, data = read_post(body)
        session = self.sessions.get(token)
        if session is None or session.busy >= SOCKETS:
            return answer_of(NO_LINK, b"")
        session.busy += 1
        door.signed |= session in self.links
        try:
            return await session.answer(direction, number, data)
        finally:
            session.busy -= 1
            session.seen = asyncio.get_running_loop().time()

    def _greet(self, address: str) -> bytes:
        if len(self.links) >= self.limits.links:
            return answer_of(TOO_MANY, b"")
        unsigned = [s for s in self.sessions.values() if s not in self.links and not s.code]
        if len(unsigned) >= self.limits.unsigned and (oldest := crowding(unsigned)):
            oldest.end(TOO_MANY)  # its task removes it
        token = secrets.token_bytes(TOKEN_BYTES)
        self.sessions[token] = Posted(address)
        self.spawn(self._session(token))
        return answer_of(OPEN, token)

    async def _session(self, token: bytes) -> None:
        try:
            await self._handle(self.sessions[token])
        finally:
            del self.sessions[token]

    # --- a link -------------------------------------------------------------------------------------------

    async def _prove(self, silo: ServerConnection | Posted) -> bytes | None:
        nonce = new_nonce()
        async with asyncio.timeout(self.limits.handshake):
            await silo.send(nonce)
            return proven_key(await silo.recv(), nonce, self.keys)

    async def _handle(self, silo: ServerConnection | Posted) -> None:
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
        if isinstance(silo, ServerConnection) and silo.transport in self.doors:
            self.doors[silo.transport].signed = True
        try:
            await self._carry(silo)
            await silo.close()
        finally:
            del self.links[silo]

    async def _carry(self, silo: ServerConnection | Posted) -> None:
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

    async def _up(self, silo: ServerConnection | Posted, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionClosed, OSError):
            while True:
                async with asyncio.timeout(self.limits.idle):
                    data = await silo.recv()
                if not isinstance(data, bytes) or not data:
                    return
                writer.write(data)
                await writer.drain()

    async def _down(
        self, reader: asyncio.StreamReader, silo: ServerConnection | Posted
    ) -> None:
        largest = POST_BYTES if isinstance(silo, Posted) else FRAME_BYTES
        with contextlib.suppress(ConnectionClosed, OSError):
            while data := await reader.read(largest):
                await silo.send(data)


def crowding(strangers: Iterable[S]) -> S | None:
    """Return the oldest stranger of the address with the most of them, which gives way; they are in order of age.

    So one address takes no other's place. Behind a web server all have one address: there only the oldest gives way.
    """
    waiting = [*strangers]
    crowd = Counter(stranger.address for stranger in waiting)
    return max(waiting, key=lambda stranger: crowd[stranger.address]) if waiting else None


def network_of(peer: tuple[str, int] | None) -> str:
    """Return the address that counts as one: an IPv6 network of 64 bits, in which a host chooses its address."""
    host = ip_address(peer[0].partition("%")[0] if peer else "::")
    host = getattr(host, "ipv4_mapped", None) or host
    return str(ip_network((host, 32 if host.version == 4 else 64), strict=False))


class Door(asyncio.Protocol):
    """The begin of a TCP connection, counted from then on: of a WebSocket, or of POSTs, by its first byte."""

    def __init__(self, relay: Relay, websocket: Callable[[], ServerConnection]) -> None:
        self.relay, self.websocket, self.signed = relay, websocket, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.socket = transport, transport.get_extra_info("socket")
        self.address = network_of(transport.get_extra_info("peername"))
        loop = asyncio.get_running_loop()
        self.timer = loop.call_later(self.relay.limits.handshake, transport.abort)
        if self.relay.full():
            transport.abort()
        else:
            self.relay.doors[transport] = self

    def data_received(self, data: bytes) -> None:
        self.timer.cancel()
        inner = self._stream() if data[:1] == b"P" else self.websocket()
        self.transport.set_protocol(inner)
        inner.connection_made(self.transport)
        inner.data_received(data)

    def _stream(self) -> asyncio.Protocol:
        relay, reader = self.relay, asyncio.StreamReader(FRAME_BYTES)

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answer = partial(relay.answer, self)
            relay.spawn(Visitor(reader, writer, relay.admit, answer).serve())

        return asyncio.StreamReaderProtocol(reader, begin)

    def connection_lost(self, exc: Exception | None) -> None:
        self.timer.cancel()


def tls_of(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Return the relay's own TLS; None if a web server in front of it speaks TLS. Raises UserError."""
    if bool(certificate) != bool(key):
        raise UserError("--certificate and --key go together")
    if not certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--certificate {certificate}, --key {key}: {reason}") from None
    return context


def relay(
    listen: tuple[str, int],
    fleet: tuple[str, int],
    connection: Connection,
    context: ssl.SSLContext | None,
    echo: Callable[[str], None],
) -> None:
    """Run a relay until SIGTERM or SIGINT. Raises OSError if the address is taken."""

    def list_registered() -> list[bytes]:
        with Control(connection, service=True) as control:
            return [node.public_key for node in control.nodes()]

    async def run() -> None:
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        carrier = Relay(fleet, list_registered, echo=echo)
        async with carrier.serve(*listen, context):
            echo(f"the relay listens on {listen[0]}:{listen[1]}{PATH}; Ctrl-C ends it")
            await stopped.wait()

    asyncio.run(run())
