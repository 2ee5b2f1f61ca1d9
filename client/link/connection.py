"""Checks of the connection from a site to its server: name, port, proxy, certificate, HTTP/2, key and clock.

They take the way that gRPC takes (`route.py`). Checks build on each other; if one fails, those that depend on it are
skipped.
"""

import hashlib
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import certifi
from cryptography.x509 import load_der_x509_certificate

from client.flower.fleet import INTERVAL_REFUSED, KEY_UNKNOWN, FleetCalls, refusal_in, request
from client.link.route import (
    OPERATOR,
    TIMEOUT_SECONDS,
    YOUR_IT,
    Blocked,
    Way,
    way_checks,
    way_to,
)
from client.protocol.envelope import load_node_key
from client.protocol.node import Site
from client.protocol.parsed import SiteError
from partitions.silo_file import Check

WARN_DAYS = 30
CLOCK = "clock"  # wrong until a person, or NTP, sets it: a silo that was online before waits for that
SET_IT = f"set it (NTP), or {OPERATOR} to set theirs: it may be 5 s ahead and 5 min behind"
OTHER_SIGNATURE = "Invalid signature"  # of method and body, which silofl 0.3 did not sign
HOUR = 3600
FURTHEST = 25 * HOUR  # the largest clock error that is searched
TIMESTAMP = "timestamp"  # in Flower's error for a wrong clock: "Invalid timestamp"
# A server accepts signed times from 305 s before its own to 5 s after it
HALF_WINDOW = 150
# OpenSSL's reasons for refusing a certificate (X509_V_ERR_...).
NOT_YET_VALID, EXPIRED, WRONG_NAME, WRONG_ADDRESS = 9, 10, 62, 64
# Larger than what proxies let pass by default (nginx: 1 MiB), and the seconds it may take before it says nothing.
LARGE_BYTES, LARGE_SECONDS = 1_100_000, 15.0
PASS_THROUGH = "to pass TLS through to the Fleet port (docs/proxies)"


def connection_checks(
    site: Site, environment: Mapping[str, str] | None = None, *, sizes: bool = False
) -> list[Check]:
    """Check name, port, certificate and key, each only if the one before is correct.

    `environment` names the proxies (None: this process's). `sizes`: also send a large message.
    """
    host, port, fault = split_address(site.server)
    if fault:
        return [fault]
    way = way_to(host, port, environment)
    checks = way_checks(way)
    if checks[-1].ok:
        checks += certificate_checks(way, site.ca_certificate)
    if checks[-1].ok:
        checks += key_checks(site, way, sizes=sizes)
    return checks


def split_address(server: str) -> tuple[str, int, Check | None]:
    """Return host and port of `host:port`, or of `[::1]:port`; and a failed check if it is neither."""
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    if host and port.isdigit() and 0 < int(port) < 65536:
        return host, int(port), None
    fix = "set the server to HOST:PORT, as in hospital-net.example:9092"
    return "", 0, Check("server address", False, f"{server!r} is no address", fix)


# --- the certificate --------------------------------------------------------------------------------------


def certificate_checks(way: Way, ca_certificate: Path) -> list[Check]:
    """Check the server's certificate: issued by this federation's CA, for this name, valid today; and HTTP/2."""
    try:
        context = ssl.create_default_context(cafile=str(ca_certificate))
    except (OSError, ssl.SSLError) as error:
        detail = f"{ca_certificate}: {error.strerror or error}"
        return [Check("CA certificate", False, detail, "restore it from the bundle")]
    context.set_alpn_protocols(["h2"])
    try:
        with (
            way.connect() as plain,
            context.wrap_socket(plain, server_hostname=way.host) as tls,
        ):
            certificate: dict[str, Any] = tls.getpeercert() or {}
            protocol = tls.selected_alpn_protocol()
    except ssl.SSLCertVerificationError as error:
        return [refused_certificate(error, way)]
    except Blocked as blocked:
        return [blocked.check]
    except OSError as error:
        return [_no_handshake(error, way)]
    names = ", ".join(str(value) for _, value in certificate.get("subjectAltName", ()))
    days = int((ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()) / 86400)
    checks = [
        Check("certificate chain", True, "issued by this federation's CA"),
        Check("certificate names", True, f"for {names}"),
    ]
    if days < WARN_DAYS:
        fix = f"{OPERATOR} to renew it; the CA, and every silo's key, stay"
        return [*checks, Check("certificate dates", False, f"expires in {days} days", fix)]
    checks.append(Check("certificate dates", True, f"valid for {days} days"))
    if protocol != "h2":
        fix = (
            f"{OPERATOR} to offer HTTP/2 on the proxy in front of the server, or {PASS_THROUGH}"
        )
        detail = f"{way.server} offers no h2 in TLS (ALPN), which gRPC needs"
        return [*checks, Check("HTTP/2", False, detail, fix)]
    return checks


def _no_handshake(error: OSError, way: Way) -> Check:
    """Explain why TLS did not come about."""
    if isinstance(error, ssl.SSLEOFError | ConnectionError | TimeoutError):
        fix = (
            f"{YOUR_IT} whether a firewall cuts TLS to {way.server}, or {OPERATOR} "
            "whether a server runs behind that address"
        )
        detail = f"{way.server} ends or leaves the connection during the TLS handshake"
        return Check("certificate", False, detail, fix)
    if isinstance(error, ssl.SSLError):
        fix = f"{OPERATOR} for the address of the Fleet port"
        detail = f"{way.server} does not speak TLS ({error.reason})"
        return Check("certificate", False, detail, fix)
    return Check("certificate", False, f"{way.server}: {error.strerror or error}", "try again")


def refused_certificate(error: ssl.SSLCertVerificationError, way: Way) -> Check:
    """Explain why OpenSSL refused the server's certificate, and what to do."""
    if error.verify_code == EXPIRED:
        fix = f"{OPERATOR} to renew it; if this machine's date is wrong, set it"
        detail = "the server's certificate, or the CA's, has expired"
        return Check("certificate dates", False, detail, fix)
    if error.verify_code == NOT_YET_VALID:
        return Check(
            CLOCK, False, f"the server's certificate is not valid yet{_behind(way)}", SET_IT
        )
    if error.verify_code in (WRONG_NAME, WRONG_ADDRESS):
        fix = f"use a name that is in the certificate, or {OPERATOR} to add this one (server.address)"
        detail = f"the server's certificate is not for {way.host}"
        return Check("certificate names", False, detail, fix)
    return _foreign_certificate(error, way)


def _foreign_certificate(error: ssl.SSLCertVerificationError, way: Way) -> Check:
    """Explain a certificate that this federation's CA has not issued: of another federation, public, or a proxy's."""

    name = "certificate chain"
    detail = f"not issued by this federation's CA ({error.verify_message})"
    try:  # it is read, not trusted
        shown = shown_certificate(way)
        certificate = load_der_x509_certificate(shown)
        subject = certificate.subject.rfc4514_string()
        issuer = certificate.issuer.rfc4514_string()
    except (OSError, ValueError):
        return Check(name, False, detail, f"{OPERATOR} for a new bundle")
    detail += (
        f"; it is for {subject or 'nobody'}, by {issuer or 'nobody'}, "
        f"SHA-256 {hashlib.sha256(shown).hexdigest()}"
    )
    if "CN=silofl CA" in issuer:
        fix = f"{OPERATOR} for a new bundle: this one is of another federation"
    elif _is_public(way):
        fix = f"a public certificate stands in front of the server: {OPERATOR} {PASS_THROUGH}"
    else:
        fix = (
            f"a proxy opens TLS on the way (inspection): {YOUR_IT} to exempt {way.server} from it, or"
            f" {OPERATOR} for a relay (silofl join --via) or, if the SHA-256 is theirs, {PASS_THROUGH}"
        )
    return Check(name, False, detail, fix)


def shown_certificate(way: Way) -> bytes:
    """Return the certificate that the server shows, unverified, as DER."""
    context = ssl._create_unverified_context()
    with way.connect() as plain, context.wrap_socket(plain, server_hostname=way.host) as tls:
        return tls.getpeercert(binary_form=True) or b""


def _is_public(way: Way) -> bool:
    """Return whether a CA that browsers trust has issued the certificate; not one that only this machine trusts."""
    context = ssl.create_default_context(cafile=certifi.where())
    context.check_hostname = False
    context.verify_flags &= (
        ~ssl.VERIFY_X509_STRICT
    )  # who issued it is asked, not whether it is well made
    try:
        with way.connect() as plain, context.wrap_socket(plain, server_hostname=way.host):
            return True
    except OSError:
        return False


def _behind(way: Way) -> str:
    """Return by how much this clock is slow at least: silofl's certificates begin an hour before they are made."""

    try:  # this certificate is not verified; only its date is read
        begins = load_der_x509_certificate(
            shown_certificate(way)
        ).not_valid_before_utc.timestamp()
    except (OSError, ValueError):
        return ""
    return f": this machine's clock is {int((begins - time.time()) // HOUR) + 1} h or more behind the server's"


# --- key and clock ----------------------------------------------------------------------------------------


def key_checks(site: Site, way: Way, *, sizes: bool = False) -> list[Check]:
    """Check that this silo's key is registered at the server, and that the server accepts this clock."""
    try:
        key = load_node_key(site.node_key)
    except SiteError as error:
        return [Check("key", False, str(error), "restore it from the bundle")]
    with FleetApi(way, site.ca_certificate, key) as fleet:
        code, answer = fleet.ask(time.time())
        if TIMESTAMP in answer:
            return [clock_check(lambda at: fleet.ask(at)[0] != 0)]
        if code == INTERVAL_REFUSED:
            checks = [
                Check(CLOCK, True, "within the server's limits"),
                Check("key", True, "registered at the server"),
            ]
            large = fleet.ask(time.time(), LARGE_BYTES)[1] if sizes else ""
            if "status: 413" in large:
                checks.append(_size_check(way))
            return checks
    if answer == OTHER_SIGNATURE:
        fix = f"{OPERATOR} to upgrade: the server first, then the silos"
        return [Check("version", False, "the server runs silofl 0.3 or older", fix)]
    if code == KEY_UNKNOWN:
        fix = f"{OPERATOR}: the silo was removed, or its bundle is of another server (silofl add-silo {site.name})"
        return [Check("key", False, "the server does not know this silo's key", fix)]
    return [_no_answer(answer, way)]


def _size_check(way: Way) -> Check:
    fix = f"{OPERATOR} to lift the proxy's limit: client_max_body_size 0 (docs/proxies)"
    detail = f"a proxy in front of {way.server} refuses a message of {LARGE_BYTES / 1e6:.1f} MB (413)"
    return Check("message size", False, detail, fix)


def _no_answer(answer: str, way: Way) -> Check:
    """Explain a call that Flower did not answer."""
    fix = (
        f"something between does not let HTTP/2 through: {YOUR_IT} about {way.server}, or {OPERATOR} "
        f"whether the server runs, and {PASS_THROUGH}"
    )
    return Check(
        "Fleet API", False, f"{way.server} gives no answer of a Flower server: {answer}", fix
    )


class FleetApi(FleetCalls):
    """The server's Fleet API, as a context: asked for an activation that changes nothing there.

    Its heartbeat interval is 0. It is refused only after key and time are verified, even while the silo is online.
    """

    def __init__(self, way: Way, ca_certificate: Path, key: Any) -> None:
        super().__init__(way.server, ca_certificate.read_bytes(), key, way.options)

    def ask(self, at: float, padding: int = 0) -> tuple[int, str]:
        """Return the server's refusal of a call that is signed with this time, and is larger by `padding` bytes."""
        call = request("ActivateNode", public_key=self.public, heartbeat_interval=0.0)
        if padding:  # a field that this message has not: servers ignore it
            part = request("PushObject", object_content=bytes(padding))
            call.MergeFromString(part.SerializeToString())
        seconds = LARGE_SECONDS if padding else TIMEOUT_SECONDS
        try:
            self.send("ActivateNode", call, at=at, timeout=seconds)
        except self.grpc.RpcError as error:
            return refusal_in(error)
        return 0, "activated"


def clock_check(taken: Callable[[float], bool]) -> Check:
    """Report by how much a rejected clock is off, by searching for a signed time that the server accepts.

    Whole half-hours, typical of a wrong time zone or day, are tried first.
    """
    steps = range(-FURTHEST, FURTHEST + 1, 2 * HALF_WINDOW)
    tried = sorted(steps, key=lambda off: (off % (HOUR // 2) != 0, abs(off)))
    offset = next((off for off in tried if taken(time.time() - off - HALF_WINDOW)), None)
    if offset is None:
        much = f"off by more than {FURTHEST // HOUR} h"
    else:
        much = f"about {_in_words(abs(offset))} {'behind' if offset < 0 else 'ahead of'} the server's"
    return Check(CLOCK, False, f"this machine's clock is {much}", SET_IT)


def _in_words(seconds: int) -> str:
    hours, minutes = seconds // HOUR, seconds % HOUR // 60
    return (
        " ".join(f"{n} {unit}" for n, unit in ((hours, "h"), (minutes, "min")) if n)
        or "a minute"
    )
