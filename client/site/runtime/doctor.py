"""The site's half of `silofl doctor`: checks that this silo can reach its server and train, each with a fix.

Checks build on each other; if one fails, those that depend on it are skipped.
"""

import errno
import os
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from client.site.flower import internal
from client.site.node import Site
from client.site.runtime.launch import reach_without_proxy
from client.site.study.approvals import REQUIRED, list_approved
from client.site.trust.pins import read_pins
from client.site.trust.policy import read_policy
from partitions.common.errors import UserError
from partitions.schema import load_schema
from partitions.silo_file import Check, check_silo_file

TIMEOUT_SECONDS = 5.0
WARN_DAYS = 30
OPERATOR = "ask the server's operator"
# A network or a server that is down for now; a person must fix the others
TRANSIENT = ("name resolution", "port")
CLOCK = "clock"  # wrong until a person, or NTP, sets it: a silo that was online before waits for that
SET_IT = f"set it (NTP), or {OPERATOR} to set theirs: it may be 5 s ahead and 5 min behind"
HOUR = 3600
FURTHEST = 25 * HOUR  # the largest clock error that is searched
TIMESTAMP = "timestamp"  # in Flower's error for a wrong clock: "Invalid timestamp"
# Flower (1.39) accepts signed times from 305 s before its own to 5 s after it
HALF_WINDOW = 150
# OpenSSL's reasons for refusing a certificate (X509_V_ERR_...).
NOT_YET_VALID, EXPIRED, WRONG_NAME, WRONG_ADDRESS = 9, 10, 62, 64


def site_checks(site: Site) -> list[Check]:
    """Run all checks of a site, in the best order for fixing them."""
    checks = [
        version_check(site),
        *data_checks(site.data, site.schema),
        *state_checks(site.state),
        device_check(site.device),
    ]
    checks += [*pin_checks(site.allowed_apps), policy_check(site.policy), *study_checks(site)]
    return [*checks, *connection_checks(site)]


def table(checks: Iterable[Check]) -> str:
    """Return the checks as lines: `ok` or `FAIL`, name, detail; under a failure its fix."""
    lines = []
    for check in checks:
        lines.append(
            f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {' '.join(check.detail.split())}"
        )
        if not check.ok:
            lines.append(f"      fix: {check.fix}")
    return "\n".join(lines)


def first_failure(checks: Iterable[Check]) -> Check | None:
    """Return the first check that failed; None if there is none."""
    return next((check for check in checks if not check.ok), None)


def one_line(check: Check) -> str:
    """Return a failure and its fix in one line."""
    return f"{check.name}: {' '.join(check.detail.split())}; {check.fix}"


# --- this machine -----------------------------------------------------------------------------------------


def version_check(site: Site) -> Check:
    """Compare Flower's version here and at the server: another minor version has another protocol."""
    here = metadata.version("flwr")
    if not site.flwr:
        return Check("versions", True, f"flwr {here}; the server's is not known")
    same = here.split(".")[:2] == site.flwr.split(".")[:2]
    fix = "" if same else f"install flwr {site.flwr}, or take the image of the server's version"
    return Check("versions", same, f"flwr {here} here, {site.flwr} at the server", fix)


def data_checks(path: Path, schema: Path | None = None) -> list[Check]:
    """Check the silo's data file as `silofl check-data` does, and its schema against the file `schema`, if any.

    An empty mount has a check of its own.
    """
    if path.is_dir():
        fix = "name the .npz file itself; in a container SILOFL_DATA names a file of the host"
        return [Check("data", False, f"{path} is a folder, no file", fix)]
    if not path.exists() and path.parent.is_dir() and not any(path.parent.iterdir()):
        fix = "mount the folder or volume that holds the data file"
        return [Check("data", False, f"{path.parent} is empty", fix)]
    if path.exists() and not os.access(path, os.R_OK):
        fix = f"chmod o+r, or run the silo as a user who may read it (in a container SILOFL_USER={_owner(path)})"
        return [Check("data", False, f"{path} cannot be read by user {os.geteuid()}", fix)]
    try:
        agreed = load_schema(schema) if schema and schema.exists() else None
    except ValueError as error:
        return [Check("schema", False, str(error), "restore the file from the bundle")]
    checks = check_silo_file(path, agreed=agreed)
    bad = [check for check in checks if not check.ok]
    if bad:
        return [Check(f"data ({bad[0].name})", False, f"{path}: {bad[0].detail}", bad[0].fix)]
    samples = next((check.detail for check in checks if check.name == "samples"), "")
    return [
        Check("data", True, f"{path}: {samples}"),
        *(check for check in checks if "schema" in check.name),
    ]


def _owner(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_uid}:{stat.st_gid}"


def state_checks(path: Path) -> list[Check]:
    """Check that models and state can be written."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
            os.fsync(file.fileno())
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "make room on that disk" if full else f"let user {os.geteuid()} write there"
        return [Check("state directory", False, f"{path}: {error.strerror}", fix)]
    return [Check("state directory", True, f"{path} can be written")]


def device_check(device: str) -> Check:
    """Check that PyTorch finds the silo's device."""
    if device == "cpu":
        return Check("device", True, "cpu")
    import torch

    count = torch.cuda.device_count()
    number = int(device.partition(":")[2] or 0)
    if number < count:
        return Check("device", True, f"{device}: {torch.cuda.get_device_name(number)}")
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        detail = "this PyTorch is built for CPUs"
        fix = "use the GPU image (build argument TORCH_INDEX=)"
    else:
        detail = f"PyTorch sees {count} GPUs"
        fix = "nvidia-smi must list it; a container needs the NVIDIA container toolkit and a device reservation"
    return Check("device", False, f"{device}: {detail}", f"{fix}, or set the device to cpu")


def pin_checks(allowed_apps: str) -> list[Check]:
    """Report the apps that this site runs."""
    if not allowed_apps:
        return [
            Check(
                "allowed apps",
                True,
                "not pinned: this site runs whatever the server's operator submits",
            )
        ]
    try:
        count = len(set(read_pins(allowed_apps)))
    except OSError as error:
        fix = "restore the file from the bundle; until then every app is refused"
        return [Check("allowed apps", False, f"{error.filename}: {error.strerror}", fix)]
    return [Check("allowed apps", True, f"{count} pinned by SHA-256; all others are refused")]


def policy_check(where: str) -> Check:
    """Check the policy of this site."""
    try:
        policy = read_policy(where)
    except ValueError as error:
        detail, _, fix = str(error).partition("; ")
        return Check(
            "policy",
            False,
            detail,
            fix or "mend that line; until then nothing leaves this silo",
        )
    if policy.public:
        return Check("policy", True, "the data are public: nothing is held back")
    names = ("whole_model", "own_model", "peers", "sums", "min_metric_samples", "floor")
    rule_lines = ", ".join(map(policy.line, names))
    return Check(
        "policy",
        True,
        f"{policy.where}: {rule_lines}; `silofl policy{' FILE' if where else ''}` prints all",
    )


def study_checks(site: Site) -> list[Check]:
    """Report the approved studies if the site's policy requires one: without any, every run is refused."""
    try:
        if read_policy(site.policy).studies != REQUIRED:
            return []
        names = [one.study.name for one in list_approved(site.state) if not one.revoked]
    except ValueError as error:
        return [Check("studies", False, str(error), "until then no run is answered")]
    none = "none is approved, so no run is answered: silofl approve FILE"
    return [Check("studies", True, f"approved: {', '.join(names)}" if names else none)]


# --- the connection to the server -------------------------------------------------------------------------


def connection_checks(site: Site) -> list[Check]:
    """Check name, port, certificate and key, each only if the one before is correct."""
    host, port, fault = split_address(site.server)
    if fault:
        return [fault]
    checks = [resolve_check(host)]
    if checks[-1].ok:
        checks.append(port_check(host, port))
    if checks[-1].ok:
        checks += certificate_checks(host, port, site.ca_certificate)
    if checks[-1].ok:
        checks += key_checks(site)
    return checks


def split_address(server: str) -> tuple[str, int, Check | None]:
    """Return host and port of `host:port`, or of `[::1]:port`; and a failed check if it is neither."""
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    if host and port.isdigit() and 0 < int(port) < 65536:
        return host, int(port), None
    fix = "set the server to HOST:PORT, as in hospital-net.example:9092"
    return "", 0, Check("server address", False, f"{server!r} is no address", fix)


def resolve_check(host: str) -> Check:
    """Check that the server's name has an address."""
    try:
        found = sorted(
            {
                str(info[4][0])
                for info in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
            }
        )
    except OSError as error:
        fix = (
            f"check the name's spelling and this machine's DNS, or {OPERATOR} for an IP address"
        )
        return Check("name resolution", False, f"{host}: {error.strerror or error}", fix)
    return Check("name resolution", True, f"{host} is {', '.join(found)}")


def port_check(host: str, port: int) -> Check:
    """Check that the server's port accepts connections."""
    where = f"{host}:{port}"
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_SECONDS).close()
    except TimeoutError:
        fix = f"let this machine out to TCP port {port} of {host} (firewall, proxy)"
        return Check(
            "port", False, f"{where} does not answer within {TIMEOUT_SECONDS:.0f} s", fix
        )
    except ConnectionRefusedError:
        fix = f"{OPERATOR} whether the server runs and listens on port {port}"
        return Check("port", False, f"{where} refuses connections", fix)
    except OSError as error:
        return Check(
            "port", False, f"{where}: {error.strerror or error}", "check this machine's network"
        )
    return Check("port", True, f"{where} answers")


def certificate_checks(host: str, port: int, ca_certificate: Path) -> list[Check]:
    """Check the server's certificate: issued by this federation's CA, for this name, valid today."""
    try:
        context = ssl.create_default_context(cafile=str(ca_certificate))
    except (OSError, ssl.SSLError) as error:
        fix = "restore it from the bundle"
        return [
            Check("CA certificate", False, f"{ca_certificate}: {error.strerror or error}", fix)
        ]
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        with (
            socket.create_connection((host, port), timeout=TIMEOUT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as tls,
        ):
            certificate: dict[str, Any] = tls.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        return [refused_certificate(error, host, port)]
    except ssl.SSLError as error:
        fix = f"{OPERATOR} for the address of the Fleet port"
        return [
            Check(
                "certificate", False, f"{host}:{port} does not speak TLS ({error.reason})", fix
            )
        ]
    except OSError as error:
        return [
            Check(
                "certificate", False, f"{host}:{port}: {error.strerror or error}", "try again"
            )
        ]
    names = ", ".join(str(value) for _, value in certificate.get("subjectAltName", ()))
    days = int((ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()) / 86400)
    checks = [
        Check("certificate chain", True, "issued by this federation's CA"),
        Check("certificate names", True, f"for {names}"),
    ]
    if days < WARN_DAYS:
        fix = f"{OPERATOR} to renew it; the CA, and every silo's key, stay"
        return [*checks, Check("certificate dates", False, f"expires in {days} days", fix)]
    return [*checks, Check("certificate dates", True, f"valid for {days} days")]


def refused_certificate(error: ssl.SSLCertVerificationError, host: str, port: int) -> Check:
    """Explain why OpenSSL refused the server's certificate, and what to do."""
    if error.verify_code == EXPIRED:
        fix = f"{OPERATOR} to renew it; if this machine's date is wrong, set it"
        return Check(
            "certificate dates",
            False,
            "the server's certificate, or the CA's, has expired",
            fix,
        )
    if error.verify_code == NOT_YET_VALID:
        return Check(
            CLOCK,
            False,
            f"the server's certificate is not valid yet{_behind(host, port)}",
            SET_IT,
        )
    if error.verify_code in (WRONG_NAME, WRONG_ADDRESS):
        fix = f"use a name that is in the certificate, or {OPERATOR} to add this one (server.address)"
        return Check(
            "certificate names", False, f"the server's certificate is not for {host}", fix
        )
    fix = f"{OPERATOR} for a new bundle: this one is of another federation, or someone is in between"
    return Check(
        "certificate chain",
        False,
        f"not issued by this federation's CA ({error.verify_message})",
        fix,
    )


def _behind(host: str, port: int) -> str:
    """Return by how much this clock is slow at least: silofl's certificates begin an hour before they are made."""
    from cryptography.x509 import load_pem_x509_certificate

    try:  # this certificate is not verified; only its date is read
        shown = ssl.get_server_certificate((host, port), timeout=TIMEOUT_SECONDS)
        begins = load_pem_x509_certificate(shown.encode()).not_valid_before_utc.timestamp()
    except (OSError, ValueError):
        return ""
    return f": this machine's clock is {int((begins - time.time()) // HOUR) + 1} h or more behind the server's"


def key_checks(site: Site) -> list[Check]:
    """Check that this silo's key is registered at the server, and that the server accepts this clock.

    Sends an activation with a heartbeat interval of 0. Flower (1.39) refuses it only after it has verified the key
    and the time. So nothing changes at the server, even while the silo is online.
    """
    import grpc  # type: ignore[import-untyped]
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key(site.node_key.read_bytes(), None)
        if not isinstance(key, EllipticCurvePrivateKey):
            raise UserError("no elliptic curve key")
    except OSError as error:
        return [
            Check(
                "key", False, f"{site.node_key}: {error.strerror}", "restore it from the bundle"
            )
        ]
    except ValueError:
        fix = "restore it from the bundle"
        return [
            Check("key", False, f"{site.node_key} is no private key in OpenSSH format", fix)
        ]
    reach_without_proxy(os.environ)
    credentials = grpc.ssl_channel_credentials(site.ca_certificate.read_bytes())
    public = internal("public_key_to_bytes")(key.public_key())
    request = internal("ActivateNodeRequest")(public_key=public, heartbeat_interval=0.0)
    headers = internal("headers")
    sign = internal("sign_message")
    codes = internal("ApiErrorCode")
    in_flowers_words = internal("FlowerError").from_json

    def ask(at: float) -> str:
        """Return the server's answer to a call that is signed with this time."""
        moment = datetime.fromtimestamp(at, UTC).isoformat()
        names = (headers.PUBLIC_KEY_HEADER, headers.TIMESTAMP_HEADER, headers.SIGNATURE_HEADER)
        signed = tuple(zip(names, (public, moment, sign(key, moment.encode())), strict=True))
        try:
            internal("FleetStub")(channel).ActivateNode(
                request, timeout=TIMEOUT_SECONDS, metadata=signed
            )
        except grpc.RpcError as error:
            return str(error.details())
        return "activated"

    with grpc.secure_channel(site.server, credentials) as channel:
        answer = ask(time.time())
        if TIMESTAMP in answer:
            return [clock_check(lambda at: in_flowers_words(ask(at)) is not None)]
    flower = in_flowers_words(answer)
    code = flower.code if flower else None
    if code == codes.FLEET_INVALID_HEARTBEAT_INTERVAL:
        return [
            Check(CLOCK, True, "within the server's limits"),
            Check("key", True, "registered at the server"),
        ]
    if code == codes.FLEET_NODE_ACTIVATION_FAILED:
        fix = f"{OPERATOR}: the silo was removed, or its bundle is of another server (silofl add-silo {site.name})"
        return [Check("key", False, "the server does not know this silo's key", fix)]
    fix = f"{OPERATOR} which version of Flower runs there"
    return [Check("key", False, f"the server answers: {answer}", fix)]


def clock_check(taken: Callable[[float], bool]) -> Check:
    """Report by how much a rejected clock is off, by searching for a signed time that the server accepts.

    Whole half-hours, typical of a wrong time zone or day, are tried first.
    """
    steps = range(-FURTHEST, FURTHEST + 1, 2 * HALF_WINDOW)
    tried = sorted(steps, key=lambda off: (off % (HOUR // 2) != 0, abs(off)))
    found = next((off for off in tried if taken(time.time() - off - HALF_WINDOW)), None)
    if found is None:
        much = f"off by more than {FURTHEST // HOUR} h"
    else:
        much = f"about {_in_words(abs(found))} {'behind' if found < 0 else 'ahead of'} the server's"
    return Check(CLOCK, False, f"this machine's clock is {much}", SET_IT)


def _in_words(seconds: int) -> str:
    hours, minutes = seconds // HOUR, seconds % HOUR // 60
    return (
        " ".join(f"{n} {unit}" for n, unit in ((hours, "h"), (minutes, "min")) if n)
        or "a minute"
    )
