"""The server's Fleet API over gRPC, as a silo calls it: signed calls, which are repeated, and heartbeats.

Of Flower only the generated messages of its protocol are used. A call is repeated until the server can be reached, with
a line for each try, which the supervisor reads (``client/site/runtime/supervisor.py``).

Heartbeats are more frequent than Flower's, so that a run that waits for a lost silo reports it within half a minute.
They queue behind the parts of a message, so a call of theirs has 20 s. In a transfer that has lasted for three seconds
(`transfers.py`) they announce three minutes, the time for which a SuperLink keeps a reply without a new part: so the
line may be cut for longer when it matters most; a silo that dies then is reported later. The server detects this by the
heartbeat's interval, and does not count the transfer's time against silos (``server/run/exchange.py``).
"""

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Self

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from .internals import internal

# Log lines of a SuperNode: registered, connection lost, connection back, and refused by the server, in Flower's words
REGISTERED = "SuperNode ID: "
LOST = "Connection attempt failed, retrying in"
BACK = "Connection successful after"
REFUSED = "Failed to activate SuperNode"
# The SuperLink marks the silo offline after two; with Flower's 30 s, after a minute
HEARTBEAT_SECONDS = 12.0
HEARTBEAT_CALL_SECONDS = 20.0
# The heartbeat interval announced in a long transfer; a SuperLink waits for two
PATIENT_SECONDS = 90.0
# That of a silo whose work waits in a queue (`slurm.py`): by it the server knows
QUEUED_SECONDS = 13.0
LONGEST_PAUSE = 20.0  # between two tries
LEAVING_SECONDS = 2.0  # for the last call of a silo
# Flower's numbers of two refusals
INTERVAL_REFUSED, KEY_UNKNOWN = 2003, 2004
HEADERS = ("flwr-public-key-bin", "flwr-timestamp", "flwr-signature-bin")
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
OPEN: list["Fleet"] = []  # the one of this process


class RunIsOverError(BaseException):
    """The server takes and gives nothing more of this run."""


def grpc_module() -> Any:
    """Return the module `grpc`, imported late: before the forks of a silo there is none."""
    # gRPC reads both once: names as every program here finds them, also from /etc/hosts without a DNS
    os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
    os.environ.setdefault("GRPC_VERBOSITY", "error")
    import grpc  # type: ignore[import-untyped]

    return grpc


def fleet_method(name: str) -> Any:
    """Return the description of a method of the Fleet API."""
    return internal("fleet_pb2").DESCRIPTOR.services_by_name["Fleet"].methods_by_name[name]


def signed_text(method: str, moment: str, body: bytes) -> bytes:
    """Return what is signed of a call: its method, its time and its body."""
    return f"silofl fleet 1\0{method}\0{moment}\0".encode() + hashlib.sha256(body).digest()


def covered(method: str, body: bytes, message: Any) -> bytes:
    """Return what a signature covers of a request: its bytes, but of a part its name in place of its content.

    The name is the content's SHA-256, which the server's store compares.
    """
    if method != "PushObject":
        return body
    fields = (field for field, _ in message.ListFields() if field.name != "object_content")
    named = {field.name: getattr(message, field.name) for field in fields}
    return bytes(type(message)(**named).SerializeToString())


def sign_call(
    key: ec.EllipticCurvePrivateKey, method: str, body: bytes, at: float | None = None
) -> tuple[bytes, str, bytes]:
    """Return public key, time (None: now) and signature of a call."""
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return public, *_sign(key, method, body, at)


def _sign(
    key: ec.EllipticCurvePrivateKey, method: str, body: bytes, at: float | None
) -> tuple[str, bytes]:
    moment = datetime.fromtimestamp(time.time() if at is None else at, UTC).isoformat()
    return moment, key.sign(signed_text(method, moment, body), ec.ECDSA(SHA256()))


class FleetCalls:
    """A channel to the Fleet API, as a context, and calls that are signed with a silo's key."""

    def __init__(
        self,
        server: str,
        certificates: bytes,
        key: ec.EllipticCurvePrivateKey,
        options: Sequence[tuple[str, object]] = (),
    ) -> None:
        self.grpc, self.key = grpc_module(), key
        self.public = key.public_key().public_bytes(
            Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
        )
        credentials = self.grpc.ssl_channel_credentials(certificates)
        self.channel = self.grpc.secure_channel(
            server, credentials, options=[*UNLIMITED, *options]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def send(
        self, name: str, message: Any, *, at: float | None = None, timeout: float | None = None
    ) -> Any:
        """Return the answer to a request, signed with this time (None: now). Raises gRPC's RpcError."""
        from google.protobuf.message_factory import GetMessageClass  # type: ignore[import-untyped]

        method = fleet_method(name)
        call = self.channel.unary_unary(
            f"/{method.containing_service.full_name}/{name}",
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        body = message.SerializeToString()
        signed = covered(name, body, message)
        headers = tuple(
            zip(HEADERS, (self.public, *_sign(self.key, name, signed, at)), strict=True)
        )
        return call(body, timeout=timeout, metadata=headers)


def request(name: str, **fields: Any) -> Any:
    """Return a call's request."""
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(fleet_method(name).input_type)(**fields)


def refusal_in(error: Any) -> tuple[int, str]:
    """Return Flower's number of a refusal (0: it is not Flower's), and its words, which are in JSON; or gRPC's."""
    details = str(error.details())
    with contextlib.suppress(ValueError, TypeError, KeyError):
        fields = json.loads(details)
        words = filter(None, (fields["public_message"], fields.get("public_details")))
        return int(fields["code"]), " ".join(words)
    return 0, details


class Fleet(FleetCalls):
    """The Fleet API, as a context: while it is open, the silo is online. ``node``: the silo's id there."""

    node: int

    def __enter__(self) -> Self:
        """Activate the silo. Raises SystemExit if the server refuses it."""
        self.interval = HEARTBEAT_SECONDS
        self.over, self.beat_now = threading.Event(), threading.Event()
        answer = self.call(
            "ActivateNode", public_key=self.public, heartbeat_interval=self.interval
        )
        self.node = answer.node_id
        threading.Thread(target=self._beat, daemon=True).start()
        OPEN.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        OPEN.remove(self)
        self.over.set()
        self.beat_now.set()
        with contextlib.suppress(self.grpc.RpcError):
            self.send(
                "DeactivateNode",
                request("DeactivateNode", node_id=self.node),
                timeout=LEAVING_SECONDS,
            )
        self.channel.close()

    def ask(self, name: str, **fields: Any) -> Any:
        """Return the answer to a call that names this node, as :meth:`call`."""
        return self.call(name, node=internal("node_pb2").Node(node_id=self.node), **fields)

    def call(self, name: str, *, timeout: float | None = None, **fields: Any) -> Any:
        """Return the answer to a call, which is repeated while the server cannot be reached.

        Raises RunIsOverError; SystemExit if the server knows this silo no more, or never did; and gRPC's RpcError.
        """
        message, pause, tries, began = request(name, **fields), 1.0, 1, time.monotonic()
        while True:
            try:
                answer = self.send(name, message, timeout=timeout)
                break
            except self.grpc.RpcError as error:
                self._check_is_away(name, error)
            wait = pause * random.uniform(0.5, 1.0)
            print(f"{LOST} {wait:.2f} seconds", flush=True)
            if self.over.wait(wait):
                raise RunIsOverError
            pause, tries = min(2 * pause, LONGEST_PAUSE), tries + 1
        if tries > 1:
            seconds = time.monotonic() - began
            print(f"{BACK} {seconds:.2f} seconds and {tries} tries.", flush=True)
        return answer

    def _check_is_away(self, name: str, error: Any) -> None:
        """Raise what :meth:`call` raises, unless the server cannot be reached."""
        code, away = self.grpc.StatusCode, error.code() == self.grpc.StatusCode.UNAVAILABLE
        if error.code() == code.PERMISSION_DENIED:
            raise RunIsOverError from None
        if away and "handshake failed" not in str(error.details()).lower():
            return
        if away or error.code() == code.UNAUTHENTICATED or name == "ActivateNode":
            sys.exit(f"the server refuses this silo: {refusal_in(error)[1]}")
        raise error

    def announce(self, seconds: float) -> None:
        """Have heartbeats announce this interval from now on; another than the usual one at once."""
        before, self.interval = self.interval, seconds
        # The next heartbeat would be up to six seconds later
        if seconds not in (HEARTBEAT_SECONDS, before):
            self.beat_now.set()

    def _beat(self) -> None:
        pause = 1.0
        while not self.over.is_set():
            try:
                answer = self.ask(
                    "SendNodeHeartbeat",
                    heartbeat_interval=self.interval,
                    timeout=HEARTBEAT_CALL_SECONDS,
                )
                if not answer.success:
                    sys.exit("the server does not know this silo any more")
                pause, wait = 1.0, (HEARTBEAT_SECONDS - 5.0) * random.uniform(0.7, 0.9)
            except self.grpc.RpcError:  # it took too long
                wait = pause
                pause = min(2 * pause, LONGEST_PAUSE)
            except RunIsOverError:
                return
            except SystemExit as end:  # the silo begins anew, whatever it is at
                print(end, file=sys.stderr, flush=True)
                if not self.over.is_set():
                    os.kill(os.getpid(), signal.SIGINT)
                return
            self.beat_now.wait(wait)
            self.beat_now.clear()


def be_patient(yes: bool) -> None:
    """Announce a longer heartbeat interval, so that the SuperLink marks this silo offline later; False: the usual."""
    for fleet in OPEN:
        fleet.announce(PATIENT_SECONDS if yes else HEARTBEAT_SECONDS)


def announce_queue(yes: bool) -> None:
    """Announce that the silo's work waits in its site's queue; False: no more."""
    for fleet in OPEN:
        fleet.announce(QUEUED_SECONDS if yes else HEARTBEAT_SECONDS)
