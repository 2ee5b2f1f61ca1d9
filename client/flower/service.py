"""The Fleet API of a SuperLink of ours: gRPC, started inside Flower's SuperLink by its extension of the lifespan.

Flower's own handlers of the Fleet API answer, behind three things of ours: each call is signed with the key of the node
that it names, method and body included; messages are waited for, and replies have bounds (`mail.py`). No single call
may be larger than :data:`MOST_CALL`: gRPC refuses it by its length prefix. Flower's own Fleet API over HTTP stays where
the Control API is, on the server's loopback interface.
"""

import contextlib
import gc
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from .fleet import HEADERS, covered, fleet_method, grpc_module, signed_text
from .internals import internal
from .mail import Mail
from .renewal import fleet_credentials, http_context

MOST_CALL = 1 << 26  # bytes; Flower moves arrays in parts of 5 MiB
MOST_CALLS = 1000  # at a time, each with a thread
KEEPALIVE_MS = 210_000  # some clouds cut a connection that is silent for four minutes
EARLIEST, LATEST = -5.0, 305.0  # seconds between a call's signed time and its arrival
OLD_SILO = "this server needs silofl 0.4 or newer at the silo"
# By method: Flower's handler, and whether it takes the store of parts
METHODS = {
    "ActivateNode": ("activate_node", False),
    "DeactivateNode": ("deactivate_node", False),
    "SendNodeHeartbeat": ("send_node_heartbeat", False),
    "PullMessages": ("", False),
    "PushMessages": ("", False),
    "GetRun": ("get_run", False),
    "GetFab": ("get_fab", False),
    "PushObject": ("", False),
    "PullObject": ("pull_object", False),
    "ConfirmMessageReceived": ("confirm_message_received", True),
}
# What of Flower's modules and classes is used here
SEAMS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "fleet_handlers": (
        lambda: internal("fleet_handlers"),
        (
            *("pull_messages", "push_messages", "push_object"),
            *(handler for handler, _ in METHODS.values() if handler),
        ),
    ),
    "runtime_handlers": (
        lambda: internal("runtime_handlers"),
        ("acquire_task", "pull_messages", "push_messages", "push_object", "pull_object"),
    ),
    "control_handlers": (lambda: internal("control_handlers"), ("start_run", "list_runs")),
    "extensions": (lambda: internal("extensions"), ("get_lifespan_contexts", "get_middleware")),
    "LinkState": (
        lambda: internal("LinkState"),
        (
            *("get_node_id_by_public_key", "get_node_info", "start_session", "store_object"),
            *("store_message_and_object_tree", "_cleanup_push_session"),
        ),
    ),
}


def missing_seams() -> list[str]:
    """Return the names of Flower's that are used here and that the installed Flower has not."""
    missing = []
    for owner, (find, names) in SEAMS.items():
        try:
            seam = find()
        except (ImportError, AttributeError):
            missing.append(owner)
            continue
        missing += [f"{owner}.{name}" for name in names if not hasattr(seam, name)]
    return missing


def run_superlink(
    most: Callable[[str], int | None],
    too_large: Callable[[int], str],
    room: Callable[[Any, Any], object],
    middleware: tuple[Any, ...] = (),
) -> None:
    """Run Flower's SuperLink with our Fleet API. ``most``, ``too_large``: of :class:`Mail`.

    ``room`` gets Flower's state and the handlers of its Runtime API, which it may wrap. ``middleware``: in front of its
    HTTP port.

    Raises SystemExit, one line, if the installed Flower has other names.
    """
    import uvicorn

    if missing := missing_seams():
        import flwr

        sys.exit(f"no server with Flower {flwr.__version__}: it has no {', '.join(missing)}")

    @contextlib.asynccontextmanager
    async def beside(app: Any) -> AsyncIterator[None]:
        config, states = app.state.superlink_lifespan.config, app.state.linkstate_factory
        mail = Mail(states.state(), most, too_large)
        handlers = SimpleNamespace(**vars(app.state.runtime_handlers))
        mail.wrap(handlers)
        room(mail.state, handlers)
        app.state.runtime_handlers = handlers
        server = fleet_server(config, mail)
        server.start()
        gc.freeze()  # a search for cycles (`mail.py`) need not pass through the libraries
        try:
            yield None
        finally:
            server.stop(1)

    internal("extensions").get_lifespan_contexts = lambda: (beside,)
    internal("extensions").get_middleware = lambda: middleware
    uvicorn.run = partial(uvicorn.run, ssl_context_factory=http_context)
    sys.argv[0] = "flower-superlink"
    internal("flower_superlink")()


def fleet_server(config: Any, mail: Mail) -> Any:
    """Return a gRPC server of the Fleet API. ``config``: Flower's, with its address and certificates.

    Raises ValueError without them or where parts are not compared, and OSError for an address that is taken.
    """
    if config.certificates is None:
        raise ValueError("silos connect by TLS: the server needs a certificate")
    if not getattr(mail.store, "verify", False):
        raise ValueError("Flower's object store must compare each part with its name")
    grpc = grpc_module()
    options = [
        ("grpc.max_concurrent_streams", MOST_CALLS),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", MOST_CALL),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ]
    server = grpc.server(ThreadPoolExecutor(MOST_CALLS), options=options)
    service = fleet_method("PullMessages").containing_service.full_name
    endpoints = {name: endpoint(name, mail) for name in METHODS}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, endpoints)])
    authority, *_ = config.certificates
    credentials = fleet_credentials(authority, config.ssl_certfile, config.ssl_keyfile)
    if not server.add_secure_port(config.fleet_api_address, credentials):
        raise OSError(f"the Fleet API cannot listen at {config.fleet_api_address}")
    return server


def endpoint(name: str, mail: Mail) -> Any:
    """Return gRPC's handler of a method: it gets the request as bytes, for a signature is of them."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from google.protobuf.message_factory import GetMessageClass  # type: ignore[import-untyped]

    grpc, method = grpc_module(), fleet_method(name)
    message, handler = GetMessageClass(method.input_type), handler_of(name, mail)

    def call(body: bytes, context: Any) -> Any:
        try:
            request = message.FromString(body)
            signed, headers = covered(name, body, request), dict(context.invocation_metadata())
            key = check_signature(name, signed, headers, time.time())
            check_node(mail.state, name, request, key)
        except (DecodeError, ValueError) as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        try:
            return handler(request, context)
        except internal("FlowerError") as error:
            context.abort(*status_of(error))

    return grpc.unary_unary_rpc_method_handler(
        call, response_serializer=GetMessageClass(method.output_type).SerializeToString
    )


def handler_of(name: str, mail: Mail) -> Callable[[Any, Any], Any]:
    """Return what answers a method's requests."""
    ours: dict[str, Callable[[Any, Any], Any]] = {
        "PullMessages": lambda request, context: mail.pull(request, context.is_active),
        "PushMessages": lambda request, context: mail.push(request),
        "PushObject": lambda request, context: mail.push_object(request),
    }
    handler, with_store = METHODS[name]
    if name in ours:
        return ours[name]
    flowers = getattr(internal("fleet_handlers"), handler)
    stores = (mail.state, mail.store) if with_store else (mail.state,)
    return lambda request, context: flowers(request, *stores)


def check_signature(method: str, body: bytes, headers: Mapping[str, Any], now: float) -> bytes:
    """Return the key that a call is signed with. Raises ValueError for another signature, or another time."""
    if not all(headers.get(name) for name in HEADERS):
        raise ValueError("Missing authentication metadata")
    public, moment, signature = (headers[name] for name in HEADERS)
    try:
        key = load_pem_public_key(public)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("Invalid signature")
        at = datetime.fromisoformat(moment).timestamp()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ValueError("Invalid signature") from None
    if not verifies(key, signature, signed_text(method, moment, body)):
        old = verifies(key, signature, moment.encode())
        raise ValueError(OLD_SILO if old else "Invalid signature")
    if not EARLIEST < now - at < LATEST:
        raise ValueError("Invalid timestamp")
    return bytes(public)


def verifies(key: ec.EllipticCurvePublicKey, signature: bytes, text: bytes) -> bool:
    """Return whether a text's signature is of this key."""
    try:
        key.verify(signature, text, ec.ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True


def check_node(state: Any, method: str, request: Any, key: bytes) -> None:
    """Raise ValueError if a call names another node than its key's."""
    if method == "ActivateNode":
        same = request.public_key == key
    else:
        named = request.node.node_id if hasattr(request, "node") else request.node_id
        same = state.get_node_id_by_public_key(key) == named
    if not same:
        raise ValueError("Invalid node ID")


def status_of(error: Any) -> tuple[Any, str]:
    """Return gRPC's status for an error of Flower's, and its words, as Flower's SuperLink 1.39 wrote them."""
    spec = internal("API_ERROR_MAP")[error.code]
    words = {"code": int(error.code), "public_message": spec.public_message}
    if error.public_details is not None:
        words["public_details"] = error.public_details
    return spec.status_code, json.dumps(words)
