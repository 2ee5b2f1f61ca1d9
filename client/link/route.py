"""The way from a site to its server, as gRPC (1.85) takes it: straight, or through a proxy that the environment names.

gRPC reads `grpc_proxy`, `https_proxy` and `http_proxy`, in small letters, and takes the first that is set. It sends
CONNECT to a proxy over plain HTTP, with the user and password of the URL. `no_grpc_proxy`, or else `no_proxy`, names
hosts that are reached without it. A test compares this module with gRPC itself.
"""

import base64
import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping
from http.client import HTTPException, HTTPMessage, HTTPResponse
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from client.protocol.launch import THIS_MACHINE, reach_without_proxy
from partitions.silo_file import Check

TIMEOUT_SECONDS = 5.0
OPERATOR = "ask the server's operator"
YOUR_IT = "ask your IT"
VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
PLAIN_PORT = 443  # gRPC's for a proxy's URL without one
# A network, a proxy or a server that is down for now; a person must fix the other faults.
RESOLUTION = "name resolution"
PORT = "port"
PROXY_PORT = "proxy's port"
BEHIND_PROXY = "server behind the proxy"
TRANSIENT = (RESOLUTION, PORT, PROXY_PORT, BEHIND_PROXY)
PROXY = "proxy"


class Blocked(OSError):
    """There is no way through; `check` has the cause and the fix."""

    def __init__(self, check: Check) -> None:
        super().__init__(check.detail)
        self.check = check


class Proxy(NamedTuple):
    """A proxy that a variable names; `login` is `USER:PASSWORD`, or nothing."""

    variable: str
    host: str
    port: int
    login: str = ""

    @property
    def name(self) -> str:
        """Its address and its variable, without the password."""
        return f"{bracket_host(self.host)}:{self.port} ({self.variable})"


class Way(NamedTuple):
    """The way to a server. `note`: why gRPC does not use a proxy that the environment names, and `remedy` for it."""

    host: str
    port: int
    proxy: Proxy | None = None
    note: str = ""
    remedy: str = ""

    @property
    def server(self) -> str:
        return f"{bracket_host(self.host)}:{self.port}"

    @property
    def options(self) -> list[tuple[str, object]]:
        """Options of a gRPC channel that takes this way, whatever the environment of this process."""
        if self.proxy is None:
            return [("grpc.enable_http_proxy", 0)]
        login = f"{quote(self.proxy.login, safe=':')}@" if self.proxy.login else ""
        url = f"http://{login}{bracket_host(self.proxy.host)}:{self.proxy.port}"
        return [("grpc.http_proxy", url)]

    def connect(self) -> socket.socket:
        """Return a connection to the server. Raises Blocked if a proxy does not let it through, or OSError."""
        if self.proxy is None:
            return socket.create_connection((self.host, self.port), timeout=TIMEOUT_SECONDS)
        return tunnel(self, self.proxy)


def bracket_host(host: str) -> str:
    """Return a host as written before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


# --- the choice -------------------------------------------------------------------------------------------


def way_to(host: str, port: int, environment: Mapping[str, str] | None = None) -> Way:
    """Return the way of a Flower process to a server; `environment` is of the process that starts it (None: this)."""
    if host in THIS_MACHINE:
        return Way(host, port)
    named = os.environ if environment is None else environment
    variables = dict(named)
    removed = reach_without_proxy(variables)
    variable = next((name for name in VARIABLES if name in variables), "")
    value = variables.get(variable, "")
    if not value:
        return Way(host, port, None, *_explain_unused(named, removed if not variable else ""))
    try:
        proxy = _parse_proxy(variable, value)
    except ValueError:
        note = f"{variable} is no URL as http://HOST:PORT, so gRPC goes straight"
        return Way(host, port, None, note, f"write {variable}=http://HOST:PORT")
    if proxy is None:
        note = f"{variable} has a scheme other than http://, so gRPC goes straight"
        fix = (
            f"{YOUR_IT} for the proxy's plain HTTP port, and write {variable}=http://HOST:PORT"
        )
        return Way(host, port, None, note, fix)
    excepted = next((n for n in ("no_grpc_proxy", "no_proxy") if n in variables), "")
    for entry in map(str.strip, variables.get(excepted, "").split(",")):
        if entry and _covers(entry, host):
            note = f"{excepted} has {entry}, so gRPC does not use the proxy of {variable}"
            return Way(host, port, None, note, f"remove {entry} from {excepted}")
    return Way(host, port, proxy)


def _explain_unused(named: Mapping[str, str], removed: str) -> tuple[str, str]:
    """Return why no proxy is used although a variable names one, and the remedy; nothing if none does."""
    upper = next((name.upper() for name in VARIABLES if named.get(name.upper())), "")
    if removed:
        note = f"{removed} names a proxy of a kind that gRPC does not speak with"
        return note, f"{YOUR_IT} for an HTTP proxy, and set https_proxy=http://HOST:PORT"
    if upper:
        small = upper.lower()
        note = f"{upper} is set, but gRPC reads {small}, in small letters, so it goes straight"
        return note, f'export {small}="${upper}"'
    if named.get("all_proxy") or named.get("ALL_PROXY"):
        return "gRPC does not read all_proxy", "set https_proxy=http://HOST:PORT"
    return "", ""


def _parse_proxy(variable: str, value: str) -> Proxy | None:
    """Return the proxy of a URL; None if its scheme is not http. Raises ValueError if it is no URL."""
    scheme, mark, rest = value.partition("://")
    if not mark or not scheme.isalnum():
        raise ValueError(value)
    if scheme.lower() != "http":
        return None
    login, _, address = rest.partition("/")[0].rpartition("@")
    parts = urlsplit(f"//{address}")
    if not parts.hostname:
        raise ValueError(value)
    return Proxy(variable, parts.hostname, parts.port or PLAIN_PORT, unquote(login))


def _covers(entry: str, host: str) -> bool:
    """Return whether an entry of `no_proxy` is for this host: its name, a domain above it, or a network around it."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    name, domain = host.lower(), entry.lower().removeprefix(".")
    return name == domain or name.endswith(f".{domain}")


# --- name, port, proxy ------------------------------------------------------------------------------------


def way_checks(way: Way) -> list[Check]:
    """Check that the server's port can be reached: by its name, or through the proxy, which resolves the name."""
    if way.proxy:
        try:
            way.connect().close()
        except Blocked as blocked:
            return [blocked.check]
        return [Check("proxy", True, f"{way.proxy.name} connects to {way.server}")]
    checks = [resolve_check(way.host)]
    if checks[-1].ok:
        checks.append(port_check(way.host, way.port))
    last = checks[-1]
    if way.note and not last.ok:
        checks[-1] = Check(last.name, False, f"{last.detail} ({way.note})", way.remedy)
    return checks


def resolve_check(host: str) -> Check:
    """Check that the server's name has an address."""
    try:
        infos = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except OSError as error:
        fix = (
            f"check the name's spelling and this machine's DNS, or {OPERATOR} for an IP address; "
            f"where only a proxy finds names, set https_proxy=http://HOST:PORT"
        )
        return Check(RESOLUTION, False, f"{host}: {error.strerror or error}", fix)
    addresses = sorted({str(info[4][0]) for info in infos})
    return Check(RESOLUTION, True, f"{host} is {', '.join(addresses)}")


def port_check(host: str, port: int) -> Check:
    """Check that the server's port accepts connections."""
    where = f"{bracket_host(host)}:{port}"
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_SECONDS).close()
    except TimeoutError:
        fix = (
            f"let this machine out to TCP port {port} of {host} (firewall), or set "
            "https_proxy=http://HOST:PORT if there is a proxy"
        )
        detail = f"{where} does not answer within {TIMEOUT_SECONDS:.0f} s"
        return Check(PORT, False, detail, fix)
    except ConnectionRefusedError:
        fix = f"{OPERATOR} whether the server runs and listens on port {port}"
        return Check(PORT, False, f"{where} refuses connections", fix)
    except OSError as error:
        detail = f"{where}: {error.strerror or error}"
        return Check(PORT, False, detail, "check this machine's network")
    return Check(PORT, True, f"{where} answers")


# --- through a proxy --------------------------------------------------------------------------------------


def tunnel(way: Way, proxy: Proxy) -> socket.socket:
    """Return a connection to the server through a proxy, made by CONNECT. Raises Blocked."""
    to_proxy = _connect_to(proxy)
    try:
        to_proxy.sendall(_request(way, proxy))
        answer = HTTPResponse(to_proxy, method="CONNECT")
        answer.begin()
        if answer.status == 200:
            return to_proxy
        check = proxy_refusal(way, proxy, answer.status, answer.reason, answer.headers)
    except TimeoutError:
        fix = f"{OPERATOR} whether the server runs, and your IT whether the proxy may reach it"
        detail = (
            f"{proxy.name} has not connected to {way.server} within {TIMEOUT_SECONDS:.0f} s"
        )
        check = Check(BEHIND_PROXY, False, detail, fix)
    except (HTTPException, OSError) as error:
        detail = (
            f"{proxy.name} gives no answer of an HTTP proxy ({error or type(error).__name__})"
        )
        fix = f"{YOUR_IT} for the address of the HTTP proxy, and set {proxy.variable} to it"
        check = Check(PROXY, False, detail, fix)
    to_proxy.close()
    raise Blocked(check)


def _connect_to(proxy: Proxy) -> socket.socket:
    address = (proxy.host, proxy.port)
    right = (
        f"check {proxy.variable}, or {YOUR_IT.removeprefix('ask ')} knows the proxy's address"
    )
    try:
        return socket.create_connection(address, timeout=TIMEOUT_SECONDS)
    except socket.gaierror as error:
        check = Check(PROXY, False, f"{proxy.name}: {error.strerror}", right)
    except TimeoutError:
        detail = f"{proxy.name} does not answer within {TIMEOUT_SECONDS:.0f} s"
        check = Check(PROXY_PORT, False, detail, right)
    except OSError as error:
        check = Check(PROXY_PORT, False, f"{proxy.name}: {error.strerror or error}", right)
    raise Blocked(check)


def _request(way: Way, proxy: Proxy) -> bytes:
    lines = [f"CONNECT {way.server} HTTP/1.1", f"Host: {way.server}"]
    if proxy.login:
        lines.append(
            f"Proxy-Authorization: Basic {base64.b64encode(proxy.login.encode()).decode()}"
        )
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def proxy_refusal(
    way: Way, proxy: Proxy, status: int, reason: str, headers: HTTPMessage
) -> Check:
    """Explain why a proxy does not connect to the server."""
    what = f"{proxy.name} answers {status} {reason} to CONNECT {way.server}"
    if status == 407:
        return _login_wanted(way, proxy, headers.get_all("Proxy-Authenticate") or [])
    if status in (403, 405):
        fix = f"{YOUR_IT} to allow CONNECT to {way.server}"
        if way.port != 443:
            fix += f"; if they allow 443 only, {OPERATOR} for a server on 443 (server.public)"
        return Check(PROXY, False, f"{what}: it does not allow this address or port", fix)
    if status >= 500:
        fix = f"{OPERATOR} whether the server runs, and your IT whether the proxy finds {way.host}"
        return Check(BEHIND_PROXY, False, f"{what}: it does not reach the server", fix)
    return Check(PROXY, False, what, f"{YOUR_IT} what the proxy requires for {way.server}")


def _login_wanted(way: Way, proxy: Proxy, challenges: list[str]) -> Check:
    kinds = list(
        dict.fromkeys(
            challenge.split()[0].rstrip(",") for challenge in challenges if challenge.strip()
        )
    )
    what = f"{proxy.name} wants a login (407; it offers {', '.join(kinds) or 'no kind'})"
    if "basic" not in map(str.lower, kinds):
        fix = f"{YOUR_IT} to let {way.server} through without one: gRPC can only do Basic"
        return Check(PROXY, False, what, fix)
    url = f"{proxy.variable}=http://USER:PASSWORD@{bracket_host(proxy.host)}:{proxy.port}"
    fix = f"set {url}, with %40 for @ in the password"
    if proxy.login:
        user = proxy.login.partition(":")[0]
        what, fix = f"{what}, and refuses the password of {user}", f"check it: {url}"
    return Check(PROXY, False, what, fix)
