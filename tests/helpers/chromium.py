"""A real Chromium without a window, driven by its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-dev-shm-usage",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-extensions",
    ),
    *(
        "--disable-quic",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
        "--remote-allow-origins=*",
    ),
)
SECONDS = 30.0


def program() -> str | None:
    """Where Chromium is on this machine; None where it is not."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. ``requests``: the addresses that it has asked for; ``errors``: what its console has said is wrong."""

    def __init__(self, line: ClientConnection) -> None:
        self.line, self.numbers = line, itertools.count(1)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.loader = ""  # names the document that is shown
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command, and its result; the events before it are noted."""
        number = next(self.numbers)
        self.line.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self.line.recv(SECONDS))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self.note(message)

    def note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message["method"] == "Page.frameNavigated" and "parentId" not in params["frame"]:
            self.loader = params["frame"]["loaderId"]
        elif message["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def open(self, address: str) -> None:
        """Go to an address, and wait until its document is the page's."""
        loader = self.call("Page.navigate", url=address)["loaderId"]
        while self.loader != loader:
            self.note(json.loads(self.line.recv(SECONDS)))

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def show(self, file: Path, width: int, height: int, scheme: str) -> None:
        """Open a file in a window of this size, for a reader who prefers this colour scheme; notes begin anew."""
        self.resize(width, height)
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.requests.clear()
        self.errors.clear()
        self.open(file.as_uri())
        self.until("document.readyState === 'complete'")

    def picture(self) -> bytes:
        """The page as a PNG, all of its length."""
        return base64.b64decode(
            self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        )

    def value(self, script: str) -> Any:
        """What an expression is in the page; a promise is awaited."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait in the page until an expression is true there."""
        check = f"const c = () => {{ let ok = false; try {{ ok = {condition}; }} catch (e) {{}} ok ? done(true) :"
        check += " Date.now() > end ? done(false) : setTimeout(c, 20); };"
        script = (
            f"new Promise(done => {{ const end = Date.now() + {SECONDS * 900}; {check} c(); }})"
        )
        assert self.value(script), (
            f"it was never so: {condition}; the page says {self.value('document.body.innerText')}"
        )

    def text(self) -> str:
        return str(self.value("document.body.innerText"))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A tab of a new Chromium, whose profile is in ``folder``."""
    chromium = program()
    assert chromium is not None
    command = [chromium, *QUIET, f"--user-data-dir={folder}", "about:blank"]
    environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            assert process.stderr is not None
            said = next(line for line in process.stderr if "DevTools listening on " in line)
            whole = said.split("DevTools listening on ")[1].strip()
            with connect(whole, max_size=None, proxy=None) as line:
                line.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
                targets = json.loads(line.recv(SECONDS))["result"]["targetInfos"]
            target = next(t["targetId"] for t in targets if t["type"] == "page")
            tab = f"{whole.split('/devtools/')[0]}/devtools/page/{target}"
            with connect(tab, max_size=None, proxy=None) as line:
                yield Page(line)
        finally:
            process.kill()
