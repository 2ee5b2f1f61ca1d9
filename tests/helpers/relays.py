"""A relay for the links of tests."""

import asyncio
import ssl
import threading

from middlebox import HOST

from server.deploy.credentials import Credentials
from server.deploy.relay import Limits, Relay


class Running:
    """A relay in a thread of its own for a Fleet port, with TLS where it has a certificate."""

    def __init__(
        self, made: Credentials | None, fleet: int, limits: Limits, keys: list[bytes]
    ) -> None:
        self.keys, self.said = keys, list[str]()
        self.relay = Relay((HOST, fleet), lambda: self.keys, limits, self.said.append)
        self.context = None
        if made:
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.load_cert_chain(made.server_certificate, made.server_key)
        self.loop, self.ready = asyncio.new_event_loop(), threading.Event()
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(self._run(),))
        self.thread.start()
        assert self.ready.wait(10)

    async def _run(self) -> None:
        self.over = asyncio.Event()
        async with self.relay.serve(HOST, 0, self.context) as server:
            self.port = next(iter(server.sockets)).getsockname()[1]
            self.ready.set()
            await self.over.wait()

    def cut(self) -> None:
        """Cut all links."""
        for transport in list(self.relay.doors):
            self.loop.call_soon_threadsafe(transport.abort)

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}/link"

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.over.set)
        self.thread.join(10)
        self.loop.close()
