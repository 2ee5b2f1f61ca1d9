"""Access control of the page: a token is required beyond loopback, and scripts of other sites are refused.

A page of another site can send requests to a loopback address, and with DNS rebinding it can read the answers. So
without a token only requests with a loopback name in ``Host`` are answered. A request that a browser marks as coming
from another site (``Sec-Fetch-Site``, ``Origin``) is always refused.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from partitions.common.errors import UserError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
# A name or an address, and a port: nothing before, between or behind them
HOST = re.compile(
    r"(?:\[([0-9A-Fa-f]*:[0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::[0-9]{1,5})?", re.ASCII
)
LEAST = 16  # minimum characters of a token
OPEN = "/health"  # answered without a token: it contains nothing about a run
HINT = "open the address with ?token=TOKEN, which silofl watch printed, or keeps in its --token-file"

HEADERS = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def read_token(file: Path) -> str:
    """Return the token in a file; create the file with mode 0600 if it is missing.

    Raises UserError if the token is too short, or if other users may read the file.
    """
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        token = file.read_text(errors="replace").strip()
        if (
            len(token) < LEAST
            or not token.isascii()
            or not token.isprintable()
            or set(token) & set(' ;,"')
        ):
            raise UserError(
                f"--token-file {file}: {LEAST} or more letters and digits are needed there"
            ) from None
        if file.stat().st_mode & 0o077:
            raise UserError(
                f"--token-file {file}: others may read it; chmod 600 {file}"
            ) from None
        return token
    with os.fdopen(descriptor, "w") as writing:
        writing.write(f"{(token := new_token())}\n")
    return token


class Token(NamedTuple):
    """A token that readers must know, empty for none, and the file that keeps it; without a file it is printed."""

    text: str = ""
    file: Path | None = None

    def address(self, base: str) -> str:
        """Return the page's address to print, with the token unless a file keeps it."""
        return f"{base}?token={self.text}" if self.text and self.file is None else base


def token_for(host: str, file: Path | None) -> Token:
    """Return the token for a page on ``host``: of a file, a new one beyond loopback, or none. Raises UserError."""
    if file is not None:
        return Token(read_token(file), file)
    return Token("" if host in LOOPBACK else new_token())


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(24)


@dataclass
class Guard:
    """ASGI middleware that refuses requests as described above, and adds the security headers to every answer.

    ``token``: empty for none; ``hint``: the text for a request without it.
    """

    app: ASGIApp
    token: str = ""
    csp: str = "default-src 'none'"
    hint: str = HINT

    def __post_init__(self) -> None:
        self.headers = [
            (k.encode(), v.encode())
            for k, v in {**HEADERS, "content-security-policy": self.csp}.items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self.headers]
            await send(message)

        request = Request(scope)
        answer = self.refusal(request)
        await (answer or self.app)(scope, receive, send_with_headers)

    def refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that is refused or redirected; None to pass it on."""
        host = request.headers.get("host", "")
        if not self.token and host_name(host) not in LOOPBACK:
            return refuse(f"this page is read as http://127.0.0.1, not as {host[:80]!r}")
        if from_elsewhere(request.headers, host):
            return refuse("a page of another site may not read this one")
        if not self.token or request.url.path == OPEN:
            return None
        if request.url.path == "/" and self._is_token(request.query_params.get("token", "")):
            # The redirection removes the token from the address bar. Lax, because a browser treats a redirection after
            # a link in a mail as cross-site.
            answer = RedirectResponse("/", 303)
            answer.set_cookie(cookie_name(host), self.token, httponly=True, samesite="lax")
            return answer
        kind, _, credentials = request.headers.get("authorization", "").partition(" ")
        if (kind.lower() == "bearer" and self._is_token(credentials)) or self._is_token(
            cookie(request.headers, host)
        ):
            return None
        return refuse(self.hint, 401)

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.token.encode())


def host_name(host: str) -> str:
    """Return the name in a ``Host`` header without its port, which ``ssh -L`` may change; empty: it is none."""
    match = HOST.fullmatch(host)
    return (match[1] or match[2]).lower() if match else ""


def from_elsewhere(headers: Mapping[str, str], host: str) -> bool:
    """Return whether a page of another site sent this request; following a link to this page is allowed."""
    site = headers.get("sec-fetch-site", "none")
    follows = (
        headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )
    origin = headers.get("origin")
    return (site not in ("none", "same-origin") and not follows) or (
        origin not in (None, f"http://{host}", f"https://{host}")
    )


def cookie_name(host: str) -> str:
    """Return the cookie's name, with the port: browsers share cookies between all ports of a host."""
    port = host.rpartition(":")[2]
    return f"silofl-{port if port.isascii() and port.isdigit() else 'default'}"


def cookie(headers: Mapping[str, str], host: str) -> str:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(cookie_name(host))
    except CookieError:
        return ""
    return morsel.value if morsel else ""


def refuse(why: str, status: int = 403) -> Response:
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    return PlainTextResponse(f"refused: {why}\n", status, headers=headers)
