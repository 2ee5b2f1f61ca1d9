"""Whose bundle this is: the consortium's signature over it, and the key that this site has come to know.

    signed.json      {"manifest": TEXT, "public-key": PEM, "signature": BASE64}

The manifest, JSON in a text that is signed byte for byte, names every file of the bundle with its SHA-256, the
variables of `.env` that are not the hospital's to set, and the digests of the image. `silofl add-silo` signs where the
consortium has a key (Ed25519). It need not have: an unsigned bundle is taken, until one of this site's was signed.

The tar has to be what was signed. In the folder that was unpacked from it the hospital sets `.env`, `allowed-apps` and
`policy.toml` as it likes; one line reports what differs there.

The manifest says when it was made. A site remembers the newest bundle that it took of a key (`newest-bundle`, beside
the fingerprint), and refuses an older one unless it is asked for: somebody may hand over an old bundle again, with an
old list of apps in it. A site without that memory cannot tell.
"""

import base64
import hashlib
import json
import shutil
import subprocess
import time
from binascii import Error as NoBase64
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from client.site.trust.keys import fingerprint
from client.site.trust.variables import variables_of
from partitions.common.errors import DataError
from partitions.common.files import write_atomically

SIGNED = "signed.json"
KIND = "silofl bundle 1"
OWN_FILES = (".env", "allowed-apps", "policy.toml", "node.key")  # the hospital's to change, once unpacked
FIXED = ("SILOFL_NAME", "SILOFL_SERVER", "SILOFL_KEY", "SILOFL_FLWR")  # of `.env`, what is not
NEWEST = "newest-bundle"  # the file that remembers when the newest bundle of each key was made
TIME = "%Y-%m-%dT%H:%M:%SZ"
UNSIGNED = "nobody"  # --signed-by nobody: the bundle may be unsigned
AGAIN = "ask for the bundle again"
DOCKER_SECONDS = 60.0


@dataclass(frozen=True)
class Signed:
    """A bundle whose signature is right: by which key, what was signed, and which own files differ from it."""

    fingerprint: str
    manifest: dict[str, Any]
    changed: tuple[str, ...] = ()


# --- signing ----------------------------------------------------------------------------------------------------------


def make_signing_key(path: Path) -> Ed25519PrivateKey:
    """The key of this file, which is made where it is missing, readable for its owner alone."""
    if not path.exists():
        made = Ed25519PrivateKey.generate()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), mode=0o600)
    return load_signing_key(path)


def load_signing_key(path: Path) -> Ed25519PrivateKey:
    """The consortium's private key; ValueError, one line, where the file is none."""
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; `silofl signing-key` makes one") from None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise DataError(f"{path} is no signing key; `silofl signing-key` makes one")
    return key


def public_pem(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def sign(files: Mapping[str, bytes], key: Ed25519PrivateKey, images: Iterable[str] = ()) -> bytes:
    """The `signed.json` of a bundle with these files. `images`: digests of the image that the hospital is to run."""
    manifest = {
        "kind": KIND,
        "made": time.strftime(TIME, time.gmtime()),
        "files": {name: digest(content) for name, content in files.items() if name != SIGNED},
        "variables": fixed_variables(files),
        "images": sorted({*images}),
    }
    text = json.dumps(manifest, sort_keys=True)
    signature = base64.b64encode(key.sign(message(text))).decode()
    content = {"manifest": text, "public-key": public_pem(key).decode(), "signature": signature}
    return (json.dumps(content, indent=1) + "\n").encode()


def message(manifest: str) -> bytes:
    """Return the bytes that are signed: no other kind of text can pass for a manifest."""
    return f"{KIND}\0{manifest}".encode()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def fixed_variables(files: Mapping[str, bytes]) -> dict[str, str]:
    """The variables of a bundle's `.env` that the hospital does not set."""
    found = variables_of(files)
    return {key: found.get(key, "") for key in FIXED}


# --- checking ---------------------------------------------------------------------------------------------------------


def read_signed(files: Mapping[str, bytes], *, unpacked: bool) -> Signed | None:
    """Return what was signed, where the signature is right and the files are those; None for an unsigned bundle.

    Raises DataError, one line, that says what does not fit.
    """
    if SIGNED not in files:
        return None
    try:
        content = json.loads(files[SIGNED])
        pem, text = content["public-key"].encode(), str(content["manifest"])
        signature = base64.b64decode(content["signature"], validate=True)
        key = load_pem_public_key(pem)
        if not isinstance(key, Ed25519PublicKey):
            raise DataError("another kind of key")
        key.verify(signature, message(text))
        manifest = json.loads(text)
        listed, variables = dict(manifest["files"]), dict(manifest["variables"])
        if manifest["kind"] != KIND or not isinstance(manifest["images"], list):
            raise DataError("another kind of manifest")
        time.strptime(manifest["made"], TIME)
    except InvalidSignature:
        raise DataError(
            f"the bundle's {SIGNED} was changed: its signature is wrong; ask for the bundle again"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, NoBase64):
        raise DataError(f"the bundle's {SIGNED} is damaged; {AGAIN}") from None
    here = {name: digest(content) for name, content in files.items() if name != SIGNED}
    differ = sorted(name for name in {*listed, *here} if listed.get(name) != here.get(name))
    # What was left away of an unpacked folder is not used either.
    free = {*OWN_FILES, *(name for name in listed if name not in here)} if unpacked else set()
    if faulty := [name for name in differ if name not in free]:
        raise DataError(f"the bundle's {faulty[0]} is not what was signed: {AGAIN}")
    if other := [name for name, value in fixed_variables(files).items() if variables.get(name) != value]:
        raise DataError(f"{other[0]} in the bundle's .env is not what was signed: {AGAIN}")
    # A key that the hospital made itself lies beside the files of a bundle that brings none.
    return Signed(fingerprint(pem), manifest, tuple(name for name in differ if name != "node.key"))


def check_signed(
    files: Mapping[str, bytes],
    *,
    unpacked: bool,
    remembered: Path,
    others: Iterable[Path] = (),
    by: str = "",
    echo: Callable[[str], None],
    remember: bool = True,
    allow_older: bool = False,
) -> Signed | None:
    """Raise DataError, one line, where a bundle is not of whom this site knows, or not what they signed.

    ``unpacked``: the files are of a folder, not of the tar. ``remembered``: the file with the fingerprint of who signed
    this silo's bundle before; ``others``: those of other silos of this site, one of whom has to have signed a silo's
    first bundle too. ``by``: a fingerprint, or a file with a public key, that stands above what is remembered;
    :data:`UNSIGNED` takes an unsigned bundle. ``remember``: whether to keep in mind who signed it, and when.
    ``allow_older``: whether it may be older than the newest that was taken; later bundles are then held against it.
    """
    signed = read_signed(files, unpacked=unpacked)
    own = known(remembered)
    trusted = {own} if own else {known(path) for path in others} - {""}
    if by == UNSIGNED:
        if signed is None:
            if remember:
                remembered.unlink(missing_ok=True)
            return None
        raise DataError(f"this bundle is signed, by {signed.fingerprint}: leave --signed-by {UNSIGNED} away")
    if by:
        trusted = {wanted_key(by)}
    check_signer(signed, trusted)
    if signed is None:
        return None
    newest = remembered.with_name(NEWEST)
    times = check_time(signed, newest, allow_older)
    first = (
        "" if trusted else "; no signer was known before, so it is taken on trust: compare it with what you were told"
    )
    echo(f"signed by {signed.fingerprint}{first}")
    if signed.changed:
        echo(f"not as it was signed, so this site's own: {', '.join(signed.changed)}")
    if remember:
        remembered.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if signed.fingerprint != own:
            write_atomically(remembered, signed.fingerprint + "\n", mode=0o600)
        write_atomically(newest, json.dumps(times) + "\n", mode=0o600)
    return signed


def check_signer(signed: Signed | None, trusted: Set[str]) -> None:
    """Raise DataError where a bundle is signed by none of the trusted fingerprints, if there are any."""
    names = " or ".join(sorted(trusted))
    if trusted and signed is None:
        raise DataError(
            f"this bundle is not signed, and this site's are signed by {names}: ask for a signed one "
            f"(--signed-by {UNSIGNED} takes it all the same)"
        )
    if trusted and signed is not None and signed.fingerprint not in trusted:
        raise DataError(
            f"this bundle is signed by {signed.fingerprint}, not by {names}: somebody else made it; where the "
            "consortium tells you of a new key, --signed-by FINGERPRINT takes it"
        )


def check_time(signed: Signed, newest: Path, allow_older: bool) -> dict[str, str]:
    """When the newest bundle of each key was made, this one counted. Raises DataError where this one is older."""
    times = known_times(newest, forgiving=allow_older)
    made, before = str(signed.manifest["made"]), times.get(signed.fingerprint, "")
    if made < before and not allow_older:
        raise DataError(
            f"this bundle was made at {made}, and this site has taken one of {before}: ask for the newest one "
            "(--allow-older takes it all the same)"
        )
    return {**times, signed.fingerprint: made}


def known_times(newest: Path, forgiving: bool) -> dict[str, str]:
    """Read :data:`NEWEST`; nothing where there is no such file. Raises DataError where it is damaged."""
    try:
        times = {str(key): str(made) for key, made in json.loads(newest.read_text(encoding="utf-8")).items()}
        for made in times.values():
            time.strptime(made, TIME)
        return times
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{newest}: {error.strerror}; it says how old a bundle may be") from None
    except (ValueError, AttributeError, RecursionError):
        if forgiving:
            return {}
        raise DataError(
            f"{newest} is damaged: it says how old a bundle may be (--allow-older writes it anew)"
        ) from None


def known(path: Path) -> str:
    """The fingerprint that a file remembers; empty where there is none. Raises DataError for an empty or odd file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; it says whose bundles this site takes") from None
    if not is_fingerprint(text):
        raise DataError(f"{path} is damaged: it says whose bundles this site takes; write the fingerprint into it")
    return text


def is_fingerprint(text: str) -> bool:
    name, _, digits = text.partition(":")
    return name == "SHA256" and len(digits) == 64 and not set(digits) - set("0123456789abcdef")


def wanted_key(by: str) -> str:
    """The fingerprint that --signed-by names."""
    if is_fingerprint(by):
        return by
    try:
        load_pem_public_key(pem := Path(by).expanduser().read_bytes())
    except (OSError, ValueError):
        raise DataError(
            f"--signed-by {by}: no fingerprint (SHA256: and 64 digits), and no file with a public key"
        ) from None
    return fingerprint(pem)


# --- the image --------------------------------------------------------------------------------------------------------


def image_digests(image: str) -> set[str]:
    """The digests by which Docker on this machine knows an image; none where it has no such image."""
    if shutil.which("docker") is None:
        return set()
    command = ["docker", "image", "inspect", "--format", "{{json .}}", image]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOCKER_SECONDS, check=False)
        if done.returncode:
            return set()
        found = json.loads(done.stdout)
        return {str(found["Id"]), *(name.partition("@")[2] for name in found.get("RepoDigests") or ())} - {""}
    except (ValueError, KeyError, TypeError, AttributeError, OSError, subprocess.TimeoutExpired):
        return set()


def check_image(signed: Signed, image: str) -> str:
    """Check the image that a bundle's containers start. Raises DataError where it is another one."""
    wanted = {str(one) for one in signed.manifest["images"]}
    if not wanted:
        return f"{image}: the signature names no image"
    here = image_digests(image)
    if not here:
        raise DataError(f"Docker has no image {image} here: docker load, or docker pull it, then check again")
    if not wanted & here:
        raise DataError(
            f"the image {image} on this machine is {min(here)}, and {min(wanted)} was signed: it is another one; "
            "get the signed one"
        )
    return f"{image} is the image that was signed, {min(wanted & here)}"
