"""The page of `silofl watch` behind docs/proxies/apache-watch.conf: a login by OpenID Connect, for real."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from debian import start, unpacked
from openid import SECRET, Provider, new_key
from trio import text_of
from watching import begin, served, write

from client.protocol.launch import LOOPBACK, free_ports
from server.deploy import processes
from server.deploy.credentials import ensure_credentials

pytestmark = [pytest.mark.network, pytest.mark.deployed, pytest.mark.exhaustive]
FILE = Path(__file__).parents[3] / "docs/proxies/apache-watch.conf"
MODULES = (
    *("mpm_event", "authn_core", "authz_core", "authz_user", "headers", "ssl", "proxy"),
    *("proxy_http", "auth_openidc"),
)
MAIN = """\
ServerRoot {folder}
DefaultRuntimeDir {folder}
PidFile {folder}/pid
ErrorLog {folder}/log
User www-data
Group www-data
ServerName localhost
Listen 127.0.0.1:{port}
"""
ANNA: dict[str, Any] = {"email": "anna@example.org", "email_verified": True}


class Login:
    """Apache in front of a page, and the provider that it asks."""

    def __init__(self, folder: Path, page: str) -> None:
        self.provider, (port,) = Provider(), free_ports(1)
        made = ensure_credentials(folder / "credentials", silos=[], hosts=["localhost"])
        self.certificate, self.address = made.ca_certificate, f"https://localhost:{port}"
        self.token = text_of(folder / "token").strip()
        secrets = folder / "secrets"
        secrets.write_text(
            f'RequestHeader set Authorization "Bearer {self.token}"\n'
            f'OIDCClientSecret {SECRET}\nOIDCCryptoPassphrase "{"x" * 32}"\n'
        )
        text = FILE.read_text()
        for old, new in {
            "*:443": f"{LOOPBACK}:{port}",
            "/etc/silofl/watch-secrets": str(secrets),
            "/etc/letsencrypt/live/fl.example.org/fullchain.pem": str(made.server_certificate),
            "/etc/letsencrypt/live/fl.example.org/privkey.pem": str(made.server_key),
            "https://login.example.org/realms/hospitals": self.provider.issuer,
            "https://fl.example.org": self.address,
            "fl.example.org": "localhost",
            "http://127.0.0.1:8642/": page,
        }.items():
            assert old in text, old
            text = text.replace(old, new)
        root = unpacked()
        places = [f"{root}/usr/lib/apache2/modules/mod_{name}.so" for name in MODULES]
        loaded = [f"LoadModule {n}_module {p}\n" for n, p in zip(MODULES, places, strict=True)]
        whole = folder / "apache.conf"
        whole.write_text(MAIN.format(folder=folder, port=port) + "".join(loaded) + text)
        command = [str(root / "usr/sbin/apache2"), "-X", "-f", str(whole)]
        self.process = start(command, port, folder / "printed")
        self.browser = self.new_browser()

    def new_browser(self) -> httpx.Client:
        context = ssl.create_default_context(cafile=self.certificate)
        return httpx.Client(verify=context, follow_redirects=True)

    def as_user(self, **claims: object) -> httpx.Response:
        """What somebody new sees."""
        self.provider.claims = claims
        self.browser = self.new_browser()
        return self.browser.get(f"{self.address}/")

    def shows_anything(self) -> bool:
        """Whether this browser reads the run; a page of Apache's that says why not has the code 200, too."""
        paths = {"": "silofl", "metrics": "silofl_", "health": '"status"'}
        texts = [(self.browser.get(f"{self.address}/{p}").text, w) for p, w in paths.items()]
        shown = {word in text for text, word in texts}
        assert len(shown) == 1, texts
        return shown.pop()


@pytest.fixture(scope="module")
def login(tmp_path_factory):
    folder = tmp_path_factory.mktemp("login")
    write(folder / "run", begin(1, {"north": "train"}, rounds=2))
    words = str(folder / "run"), "--port", "0", "--token-file", str(folder / "token")
    with served(*words) as (page, _):
        made = Login(folder, page)
        yield made
        processes.end([made.process], grace=1.0)


def test_who_logged_in_and_is_listed_sees_the_page_and_its_stream(login):
    page = login.as_user(**ANNA)
    assert login.shows_anything()
    assert login.token not in f"{page.text} {page.headers} {page.history[-1].headers}"
    with login.browser.stream("GET", f"{login.address}/events") as stream:
        assert "retry" in next(stream.iter_lines())
    assert not login.provider.codes


@pytest.mark.parametrize(
    "claims",
    [
        {**ANNA, "email": "mallory@example.org"},
        {**ANNA, "email_verified": False},
        {"email": ANNA["email"]},
        {**ANNA, "aud": "another client"},
        {**ANNA, "iss": "http://elsewhere.example.org"},
        {**ANNA, "nonce": "of another login"},
        {**ANNA, "exp": 1},
    ],
)
def test_another_login_is_refused(login, claims):
    login.as_user(**claims)
    assert not login.shows_anything()


def test_a_token_that_the_provider_did_not_sign_is_refused(login):
    login.provider.key = new_key()
    login.as_user(**ANNA)
    shown = login.shows_anything()
    login.provider.key = login.provider.published
    assert not shown and login.shows_anything()


@pytest.mark.parametrize("path", ["", "events", "metrics", "health", "oidc/", "x/../metrics"])
def test_without_a_login_there_is_nothing(login, path):
    claims = {"OIDC_CLAIM_email": ANNA["email"], "OIDC_CLAIM_email_verified": "1"}
    headers = {**claims, "Cookie": "mod_auth_openidc_session=1", "Authorization": "Bearer none"}
    context = ssl.create_default_context(cafile=login.certificate)
    answer = httpx.get(f"{login.address}/{path}", headers=headers, verify=context)
    assert answer.status_code == 302
    assert answer.headers["location"].startswith(f"{login.provider.issuer}/login?")
