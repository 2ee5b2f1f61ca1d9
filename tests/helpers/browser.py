"""A real browser without a window: Debian's Chromium, driven by its DevTools protocol over a WebSocket."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    "--remote-debugging-port=0",
)
LISTENS = "DevTools listening on "


def program() -> str | None:
    """The browser of this machine, if it has one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a running browser."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.numbers, self.events = socket, itertools.count(1), list[dict[str, Any]]()
        self.session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self.numbers)
        own = {"sessionId": self.session} if self.session else {}
        self.socket.send(json.dumps({"id": number, "method": method, "params": params, **own}))
        while True:
            answer: dict[str, Any] = json.loads(self.socket.recv(timeout=60))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]  # type: ignore[no-any-return]
            self.events.append(answer)

    def open(self, file: Path, width: int, height: int, scheme: str) -> None:
        """Open a page in a window of this size, for a reader who prefers this colour scheme, and wait for it."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=file.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(json.loads(self.socket.recv(timeout=60)))

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self) -> bytes:
        """The page as a PNG, all of its length."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def asked(self) -> list[str]:
        """What the page asked the network for."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile in ``folder``; it ends with the context."""
    command = [str(program()), *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin"}
    with (
        (folder / "out").open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True, env=environment) as process,
    ):
        try:
            assert process.stderr is not None
            address = next((line for line in process.stderr if LISTENS in line), "")
            assert address, "the browser did not start"
            with connect(address.partition(LISTENS)[2].strip(), max_size=None, proxy=None) as socket:
                yield Browser(socket)
        finally:
            process.kill()
