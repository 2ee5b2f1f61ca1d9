"""Flower's Control API, as `flwr` calls it, and what `flwr`'s configuration starts with.

A person's key signs each call (`server/deploy/access`).
"""

import json
from base64 import b64encode
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from ..protocol.ours import errors
from .fleet import sign_call
from .internals import internal

FIELDS = (
    "silofl-key",
    "silofl-time",
    "silofl-signature",
)  # headers of a signed call, in base64
REFUSAL = "silofl-refusal"  # header of the answer to a call that is refused for its signature


class Signer:
    """Interceptor of Flower's client that signs each call with a key, if there is one."""

    def __init__(self, key: EllipticCurvePrivateKey | None) -> None:
        self.key = key

    def intercept(self, context: Any, call_next: Any) -> Any:
        """Add the fields of the signature to an HTTP call."""
        if self.key is not None:
            request = context.request
            public, moment, signature = sign_call(self.key, request.url.path, request.content)
            values = map(b64encode, (public, moment.encode(), signature))
            for name, value in zip(FIELDS, values, strict=True):
                request.headers[name] = value.decode()
        return call_next(context)


class ControlCalls:
    """The Control API of a SuperLink. ``where``: its name in errors; ``key``: the caller's.

    A call raises ConnectionError, one line, and UserError where the caller may not make it.
    """

    def __init__(
        self,
        where: str,
        address: str,
        *,
        insecure: bool,
        certificates: bytes | None,
        key: EllipticCurvePrivateKey | None,
    ) -> None:
        self.where, self.requests = where, internal("control_pb2")
        version = internal("RuntimeVersionHttpInterceptor")(component_name="flwr CLI")
        self.client = internal("ControlHttpClient").from_server_address(
            server_address=address,
            insecure=insecure,
            root_certificates=certificates,
            interceptors=[internal("CliClientHttpInterceptor")(), version, Signer(key)],
        )

    def close(self) -> None:
        self.client.close()

    def call(self, name: str, /, **fields: Any) -> Any:
        """Return the answer to a call; of one that is answered in parts, the first part or None."""
        import httpx

        try:
            answer = getattr(self.client, name)(
                getattr(self.requests, f"{name}Request")(**fields)
            )
            return answer if hasattr(answer, "DESCRIPTOR") else next(iter(answer), None)
        except httpx.HTTPStatusError as error:
            if error.response.headers.get(REFUSAL):
                line = json.loads(error.response.text)
                raise errors.UserError(f"{self.where} refuses: {line}") from None
            refusal = internal("FlowerError").from_json(error.response.text)
            # Words of ours stand behind Flower's
            said = refusal and (refusal.public_details or refusal.message)
            reason = said or f"HTTP status {error.response.status_code}"
            raise ConnectionError(f"{self.where} refused: {reason}") from None
        except httpx.HTTPError as error:
            raise ConnectionError(f"no answer from {self.where}: {error}") from None

    def start(
        self, fab: bytes, digest: str, settings: dict[str, Any], words: str
    ) -> tuple[int, str]:
        """Start a run of an app bundle with these settings, as `flwr run` does; return its number and its name.

        ``words``: what the server's queue takes of the run, in a field that Flower reads for agents only.
        """
        fields = {
            "override_config": internal("user_config_to_proto")(settings),
            "fab": {"content": fab, "hash_str": digest},
        }
        answer = self.call("StartRun", **fields, user_prompt=words)
        return int(answer.run_id), str(answer.note)


def default_config() -> str:
    """Return the text that a new `config.toml` of `flwr` starts with."""
    return str(internal("DEFAULT_FLOWER_CONFIG_TOML"))
