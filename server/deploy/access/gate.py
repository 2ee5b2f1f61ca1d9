"""The middleware that decides on every call to the server's HTTP port, in front of Flower's (`operators.py`).

Left to Flower are its Runtime API, which its own processes call with the tokens of their runs, and its Fleet API.
"""

import threading
import time
from base64 import b64decode
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from client.flower.control import FIELDS, REFUSAL
from client.flower.fleet import HEADERS, signed_text
from client.flower.service import LATEST, MOST_CALL, check_signature
from client.protocol.chain import utc_now
from client.protocol.envelope import fingerprint
from partitions.common.parsed import parse_values
from server.deploy.access.operators import FILE, LOG, Actions, Operator, Operators

ROLES = ("viewer", "operator", "owner")  # each may do what those before it may
CONTROL = "/v1/control/"
# The least role for a call; any other one needs the last
NEEDED = {
    **dict.fromkeys(("list-nodes", "list-runs", "stream-logs"), "viewer"),
    **dict.fromkeys(("start-run", "stop-run"), "operator"),
}
OTHERS = ("/v1/runtime/", "/v1/fleet/", "/health")  # of Flower's own processes


class CallRefusedError(ValueError):
    """A call that no operator made; the text says why."""


class Gate:
    """The middleware. ``operators``, ``log``: its file, and the folder of the log."""

    def __init__(self, app: ASGIApp, operators: Path, log: Path) -> None:
        self.app, self.operators, self.log = app, operators, Actions(log)
        self.seen: dict[bytes, float] = {}  # calls, until they would be too old
        self.lock = threading.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call that is refused; pass on any other one, body and all."""
        if scope["type"] != "http" or scope["path"].startswith(OTHERS):
            await self.app(scope, receive, send)
            return
        body = b""
        async for part in Request(scope, receive).stream():
            if len(body := body + part) > MOST_CALL:
                break
        headers = dict(Request(scope).headers)
        if refused := await run_in_threadpool(self.decide, scope["path"], headers, body):
            await JSONResponse(refused, 403, {REFUSAL: "1"})(scope, receive, send)
            return
        rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def whole() -> Message:
            return rest.pop() if rest else await receive()

        await self.app(scope, whole, send)

    def decide(self, path: str, headers: Mapping[str, str], body: bytes) -> str:
        """Return why a call is refused; empty if it may pass. What changes something is in the log before."""
        if len(body) > MOST_CALL:
            return "it is too long"
        try:
            content = self.operators.read_bytes()
            known = parse_values(
                Operators, content, self.operators, "silofl up writes it"
            ).operators
        except (OSError, ValueError) as error:
            return f"the server cannot read who may do what: {error}"
        if not known:
            return ""
        try:
            operator = self.signer(path, headers, body, {each.key: each for each in known})
        except ValueError as error:
            return str(error)
        action = path.removeprefix(CONTROL)
        role = NEEDED.get(action, "owner") if path.startswith(CONTROL) else "owner"
        refused = ROLES.index(operator.role) < ROLES.index(role)
        if role != "viewer":
            digest = sha256(body).hexdigest()
            line = {
                "time": utc_now(),
                **operator.model_dump(),
                "action": action,
                "digest": digest,
            }
            try:
                self.log.append({**line, "outcome": "refused" if refused else "passed on"})
            except OSError as error:
                return f"{action}: the log of actions cannot be written ({error.strerror})"
        if refused:
            return f"{operator.name} is {operator.role}, and {action} needs {role}"
        return ""

    def signer(
        self, path: str, headers: Mapping[str, str], body: bytes, known: Mapping[str, Operator]
    ) -> Operator:
        """Return the operator who signed a call. Raises CallRefusedError, and ValueError for a wrong signature."""
        if not all(name in headers for name in FIELDS):
            raise CallRefusedError(
                "this federation has operators, and the call is signed by none: `silofl operator add NAME` makes your "
                "key, whose fingerprint belongs into federation.yaml (flwr itself cannot sign)"
            )
        key, at, signature = (b64decode(headers[name], validate=True) for name in FIELDS)
        now, moment = time.time(), at.decode()
        signed = dict(zip(HEADERS, (key, moment, signature), strict=True))
        who = fingerprint(check_signature(path, body, signed, now))
        if (operator := known.get(who)) is None:
            raise CallRefusedError(f"{who} is no operator's key: it is not in federation.yaml")
        # Not by its signature: ECDSA has two of each
        call = who.encode() + signed_text(path, moment, body)
        with self.lock:
            self.seen = {text: until for text, until in self.seen.items() if until > now}
            if call in self.seen:
                raise CallRefusedError("the same call was made before")
            self.seen[call] = now + LATEST + 60
        return operator


def gate_of(environment: Mapping[str, str]) -> tuple[Middleware, ...]:
    """Return the middleware for the variables of a SuperLink, as Flower's extension takes it; empty without them."""
    if not environment.get(FILE):
        return ()
    return (Middleware(Gate, operators=Path(environment[FILE]), log=Path(environment[LOG])),)
