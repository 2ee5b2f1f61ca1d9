"""A provider of OpenID Connect on loopback, which logs in without a question whom a test names."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from base64 import b64decode, urlsafe_b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256

CLIENT, SECRET = "silofl-watch", "secret"


def coded(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def new_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


class Provider:
    """Codes are used once, and only with the client's secret and the verifier of their challenge.

    ``claims``: of the next login. ``key``: that signs it, which need not be the published one.
    """

    def __init__(self) -> None:
        self.claims: dict[str, Any] = {}
        self.published = self.key = new_key()
        self.codes: dict[str, dict[str, str]] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.issuer = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def configuration(self) -> dict[str, Any]:
        places = {"authorization": "login", "token": "token"}
        return {
            "issuer": self.issuer,
            **{f"{name}_endpoint": f"{self.issuer}/{path}" for name, path in places.items()},
            "jwks_uri": f"{self.issuer}/keys",
            "response_types_supported": ["code"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["RS256"],
            "token_endpoint_auth_methods_supported": ["client_secret_basic"],
        }

    def keys(self) -> dict[str, Any]:
        numbers = self.published.public_key().public_numbers()
        n, e = coded(numbers.n.to_bytes(256, "big")), coded(numbers.e.to_bytes(3, "big"))
        return {
            "keys": [{"kty": "RSA", "use": "sig", "alg": "RS256", "kid": "1", "n": n, "e": e}]
        }

    def login(self, query: dict[str, str]) -> str:
        """The address to which a browser is sent, with a code."""
        code = str(len(self.codes))
        self.codes[code] = query
        answer = urlencode({"code": code, "state": query["state"]})
        return f"{query['redirect_uri']}?{answer}"

    def tokens(self, form: dict[str, str], login: str) -> dict[str, Any]:
        query = self.codes.pop(form["code"])
        challenge = coded(hashlib.sha256(form["code_verifier"].encode()).digest())
        assert query["code_challenge"] == challenge
        assert b64decode(login.removeprefix("Basic ")).decode() == f"{CLIENT}:{SECRET}"
        now = int(time.time())
        claims: dict[str, Any] = {
            "iss": self.issuer,
            "aud": CLIENT,
            "sub": "1",
            "nonce": query["nonce"],
        }
        claims |= {"iat": now, "exp": now + 300, **self.claims}
        head = {"alg": "RS256", "kid": "1"}
        text = ".".join(coded(json.dumps(part).encode()) for part in (head, claims))
        signature = self.key.sign(text.encode(), padding.PKCS1v15(), SHA256())
        token = f"{text}.{coded(signature)}"
        return {"access_token": "none", "token_type": "Bearer", "id_token": token}

    def _handler(provider) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                address = urlsplit(self.path)
                if address.path == "/login":
                    query = {k: v[0] for k, v in parse_qs(address.query).items()}
                    self.send_response(302)
                    self.send_header("Location", provider.login(query))
                    self.end_headers()
                elif address.path == "/keys":
                    self.say(provider.keys())
                else:
                    self.say(provider.configuration())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                form = {k: v[0] for k, v in parse_qs(body).items()}
                self.say(provider.tokens(form, self.headers["Authorization"]))

            def say(self, answer: dict[str, Any]) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: Any) -> None:
                pass

        return Handler
