"""Certificates and keys of a federation: one CA, the server's certificate, one key pair per silo.

    DIRECTORY/ca.crt ca.key            the CA that silos trust; never replaced
    DIRECTORY/server.crt server.key    issued by the CA for the server's names and addresses
    DIRECTORY/receipt.key              signs receipts for the silos' audit logs (Ed25519)
    DIRECTORY/nodes/NAME  NAME.pub     a silo's key pair (ECDSA P-384, OpenSSH format, required by Flower)

`ensure_credentials` makes missing files and keeps existing ones, so that all other keys stay valid when a silo is
added. It renews only the server's certificate, when that is about to expire or lacks a name. Files have mode 0600,
directories 0700; no key is printed. It uses `cryptography`, which flwr requires.
"""

import datetime
import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from client.link.connection import shown_certificate, split_address
from client.link.route import Way
from client.protocol.keys import load_key, make_signing_key, new_key, write_key
from partitions.common.errors import UserError
from partitions.common.files import write_atomically
from partitions.silo_file import Check
from server.deploy.control import Connection

CA_YEARS = 10
SERVER_DAYS = 825
RENEW_DAYS = 30
RENEW = "renew it, between two runs or in one: silofl up; with containers: docs/deployment.md, Certificates"
RESTART = "restart the server between two runs: silofl down, then silofl up"
NEW_CA = "make a new CA and give it to every silo"


class Credentials:
    """Files of a federation's credentials."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca_certificate, self.ca_key = directory / "ca.crt", directory / "ca.key"
        self.server_certificate = directory / "server.crt"
        self.server_key = directory / "server.key"
        self.receipt_key = directory / "receipt.key"  # of the silos' audit logs

    def node_key(self, name: str) -> Path:
        """Return the path of silo `name`'s private key; the public key has the suffix `.pub`."""
        return self.directory / "nodes" / name

    def node_public_key(self, name: str) -> Path:
        return self.directory / "nodes" / f"{name}.pub"

    def node_public_pem(self, name: str) -> bytes:
        """Return the public key in PEM format, in which a SuperLink registers it."""
        key = load_ssh_public_key(self.node_public_key(name).read_bytes())
        return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def renew(self, name: str) -> None:
        """Make, or replace, the key pair of silo ``name``."""
        write_key(self.node_key(name), new_key())
        self.write_public_key(name)

    def write_public_key(self, name: str) -> None:
        """Write the public key of silo ``name`` beside its private key."""
        public = load_key(self.node_key(name)).public_key()
        text = (
            public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + f" {name}\n".encode()
        )
        write_atomically(self.node_public_key(name), text, mode=0o600)


def ensure_credentials(
    directory: Path, *, silos: Iterable[str], hosts: Iterable[str]
) -> Credentials:
    """Make the credentials missing in `directory`, and keep all others.

    ``silos``: names of the silos; each gets its own key pair.
    ``hosts``: names and IP addresses by which silos and operators reach the server.

    Raises UserError if the CA has expired, or only one of its certificate and key exists.
    """
    credentials = Credentials(directory)
    for folder in (directory, directory / "nodes"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
    halves = (credentials.ca_certificate, credentials.ca_key)
    if not any(path.exists() for path in halves):
        _make_ca(credentials)
    for path in halves:
        if not path.exists():
            raise UserError(
                f"{path} is missing while its other half is there: restore it from a backup, "
                f"or remove {directory} to start with new credentials for every silo"
            )
    ca = load_certificate(credentials.ca_certificate)
    if _now() >= ca.not_valid_after_utc:
        raise UserError(
            f"the CA certificate {credentials.ca_certificate} expired on {ca.not_valid_after_utc:%Y-%m-%d}: "
            f"remove {directory} to make a new CA, then give every silo its new certificate and key"
        )
    wanted = _alternative_names(hosts)
    if not _server_certificate_serves(credentials, ca, wanted):
        _issue_server_certificate(credentials, ca, wanted)
    make_signing_key(credentials.receipt_key)
    for name in silos:
        if not credentials.node_key(name).exists():
            credentials.renew(name)
        elif not credentials.node_public_key(name).exists():
            credentials.write_public_key(name)
    return credentials


def load_certificate(path: Path) -> x509.Certificate:
    """Return the certificate in a PEM file. Raises UserError if it cannot be read."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read the certificate {path}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path} is not a certificate in PEM format") from None


def dates_check(name: str, certificate: x509.Certificate, fix: str) -> Check:
    """Check that a certificate is valid, and stays so for 30 days."""
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    left = ends - _now()
    ok = left > datetime.timedelta(days=RENEW_DAYS)
    detail = f"valid until {ends:%Y-%m-%d} ({left.days} days)"
    if _now() < begins:
        ok, fix = False, "set this machine's clock"
        detail = f"not valid before {begins:%Y-%m-%d %H:%M} UTC"
    elif left <= datetime.timedelta(0):
        detail = f"expired on {ends:%Y-%m-%d}"
    return Check(f"{name} certificate's dates", ok, detail, "" if ok else fix)


@dataclass(frozen=True)
class Expiry:
    """The end of a certificate, as Unix time, and the check of it: it fails from 30 days before."""

    certificate: str
    ends: float
    check: Check


def expiries(connection: Connection) -> list[Expiry]:
    """Return the ends of the CA's and the server's certificate; without the server's while it does not answer.

    The server's is the one that it shows, not the file: a server that did not load a renewed one is named.
    """
    try:
        ca = load_certificate(path := Path(connection.root_certificates))
    except UserError:  # a connection without TLS, or of a federation that is gone
        return []
    ends = [Expiry("ca", ca.not_valid_after_utc.timestamp(), dates_check("CA", ca, NEW_CA))]
    host, port, _ = split_address(connection.address)
    try:
        shown = x509.load_der_x509_certificate(shown_certificate(Way(host, port)))
    except (OSError, ValueError):
        return ends
    check = dates_check("server", shown, RENEW)
    # In containers the host has the CA's alone
    if (file := path.with_name("server.crt")).exists() and load_certificate(file) != shown:
        detail = f"the server shows another certificate than {file}"
        check = Check("server certificate", False, detail, RESTART)
    return [*ends, Expiry("server", shown.not_valid_after_utc.timestamp(), check)]


def warnings(connection: Connection) -> list[str]:
    """Return a line for each certificate that wants something done."""
    failed = [end.check for end in expiries(connection) if not end.check.ok]
    return [f"{check.name}: {check.detail}; {check.fix}" for check in failed]


def _is_issued(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _alternative_names(hosts: Iterable[str]) -> set[x509.GeneralName]:
    names: set[x509.GeneralName] = set()
    for host in hosts:
        try:
            names.add(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.add(x509.DNSName(host))
    return names


def _names_of(certificate: x509.Certificate) -> set[x509.GeneralName]:
    try:
        return set(
            certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        )
    except x509.ExtensionNotFound:
        return set()


def _server_certificate_serves(
    credentials: Credentials, ca: x509.Certificate, wanted: set[x509.GeneralName]
) -> bool:
    if not credentials.server_certificate.exists() or not credentials.server_key.exists():
        return False
    certificate = load_certificate(credentials.server_certificate)
    key = load_pem_private_key(credentials.server_key.read_bytes(), password=None)
    if key.public_key() != certificate.public_key():  # killed between the two
        return False
    left = certificate.not_valid_after_utc - _now()
    lasts = left > datetime.timedelta(days=RENEW_DAYS)
    return lasts and wanted <= _names_of(certificate) and _is_issued(certificate, ca)


def _make_ca(credentials: Credentials) -> None:
    key = new_key()
    name = _common_name(f"silofl CA {os.urandom(4).hex()}")
    ends = _now() + datetime.timedelta(days=365 * CA_YEARS)
    _issue(credentials.ca_certificate, credentials.ca_key, key, name, name, key, ends)


def _issue_server_certificate(
    credentials: Credentials, ca: x509.Certificate, names: set[x509.GeneralName]
) -> None:
    ca_key = load_pem_private_key(credentials.ca_key.read_bytes(), password=None)
    if (
        not isinstance(ca_key, ec.EllipticCurvePrivateKey)
        or ca_key.public_key() != ca.public_key()
    ):
        raise UserError(f"{credentials.ca_key} is not the key of {credentials.ca_certificate}")
    if credentials.server_certificate.exists():
        names = names | _names_of(load_certificate(credentials.server_certificate))
    _issue(
        credentials.server_certificate,
        credentials.server_key,
        new_key(),
        _common_name("silofl server"),
        ca.subject,
        ca_key,
        min(_now() + datetime.timedelta(days=SERVER_DAYS), ca.not_valid_after_utc),
        x509.SubjectAlternativeName(sorted(names, key=repr)),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
    )


def _issue(
    certificate: Path,
    key_file: Path,
    key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    ends: datetime.datetime,
    *extensions: x509.ExtensionType,
) -> None:
    """Write a key, and its certificate: of a CA where it is its own issuer."""
    ca = subject == issuer
    builder = (
        x509.CertificateBuilder(issuer, subject, key.public_key())
        .serial_number(x509.random_serial_number())
        # A silo's clock may be slow
        .not_valid_before(_now() - datetime.timedelta(hours=1))
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca, 0 if ca else None), critical=True)
        .add_extension(_key_usage(ca=ca), critical=True)
    )
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    for extension in (identifier, *extensions):
        builder = builder.add_extension(extension, critical=False)
    signed = builder.sign(issuer_key, hashes.SHA384())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomically(key_file, private, mode=0o600)
    write_atomically(certificate, signed.public_bytes(Encoding.PEM), mode=0o600)


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    others = (
        *("content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(
        digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, **dict.fromkeys(others, False)
    )
