"""The server's certificate, read again when its files change: a renewed one is loaded without a restart.

Both ports ask at every handshake. Certificate and key are two files: until both are there and fit, the pair before
stays. What uvicorn and gRPC offer for this is used: a context's `sni_callback`, and dynamic credentials.
"""

import os
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .fleet import grpc_module

T = TypeVar("T")


def on_change(files: Sequence[str], load: Callable[[], T]) -> Callable[[], T | None]:
    """Return a function that loads the files if they changed since they were last loaded; else it returns None."""
    loaded = _stamps(files)

    def renewed() -> T | None:
        nonlocal loaded
        try:
            if (now := _stamps(files)) == loaded:
                return None
            content = load()
        except (
            OSError
        ):  # as ssl.SSLError is: a key that does not fit, for the other file is yet to come
            return None
        loaded = now
        return content

    return renewed


def http_context(config: Any, default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """Return uvicorn's TLS context for the Control API (its `ssl_context_factory`)."""
    current = default()
    renewed = on_change((config.ssl_certfile, config.ssl_keyfile), default)

    def choose(connection: Any, name: str | None, first: ssl.SSLContext) -> None:
        nonlocal current
        current = renewed() or current
        connection.context = current

    context = default()
    context.sni_callback = choose
    return context


def fleet_credentials(authority: bytes, certificate: str, key: str) -> Any:
    """Return gRPC's credentials for the Fleet API. ``authority``: the CA's certificate in PEM. Raises OSError."""
    grpc = grpc_module()

    def load() -> Any:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        pair = Path(key).read_bytes(), Path(certificate).read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], authority)

    return grpc.dynamic_ssl_server_credentials(load(), on_change((certificate, key), load))


def _stamps(files: Sequence[str]) -> list[tuple[int, int]]:
    """Return what changes when a file is replaced. Raises OSError."""
    return [(status.st_mtime_ns, status.st_ino) for status in map(os.stat, files)]
