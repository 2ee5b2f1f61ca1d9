"""The consortium's signature over a bundle, and the signer's key that this site has stored.

    signed.json      {"manifest": TEXT, "public-key": PEM, "signature": BASE64}

The manifest is JSON in a text that is signed byte for byte. It contains every file of the bundle with its SHA-256, the
variables of `.env` that the hospital must not change, and the digests of the image. `silofl add-silo` signs if the
consortium has a key (Ed25519). Unsigned bundles are accepted until a signed one was accepted at this site.

The tar must be exactly what was signed. In the folder unpacked from it the hospital may change `.env`, `allowed-apps`
and `policy.toml`; one line reports the differences.

The manifest contains its time. A site stores the time of the newest bundle that it accepted of a key (`newest-bundle`,
beside the fingerprint). It refuses an older one unless told to accept it, since an old bundle may be handed over
again, with an old list of apps. A site without that file cannot detect this. A time after this machine's clock is
refused too: it would block all later bundles.
"""

import calendar
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.serialization import load_pem_public_key

from client.protocol.bundle_files import OWN_FILES, check_rendered
from client.protocol.chain import digest
from client.protocol.envelope import BUNDLE, fingerprint, unseal
from client.protocol.manifest import SIGNED, TIME, Manifest, fixed_variables, image_digests
from client.protocol.parsed import SiteError, parse_values
from partitions.common.errors import DataError
from partitions.common.files import make_folder, write_atomically

NEWEST = "newest-bundle"  # the file with the time of the newest bundle of each key
CLOCKS = 86400  # seconds by which the consortium's clock may be ahead of this machine's
UNSIGNED = "nobody"  # --signed-by nobody: the bundle may be unsigned
AGAIN = "ask for the bundle again"
ON_TRUST = (
    "; no signer was known before, so it is taken on trust: compare it with what you were told"
)


@dataclass(frozen=True)
class Signed:
    """A bundle with a correct signature: the key, what was signed, and which own files differ from it."""

    fingerprint: str
    manifest: Manifest
    changed: tuple[str, ...] = ()


# --- signing ----------------------------------------------------------------------------------------------------------


# --- checking ---------------------------------------------------------------------------------------------------------


def read_signed(files: Mapping[str, bytes], *, unpacked: bool) -> Signed | None:
    """Return what was signed, if the signature and the files are correct; None for an unsigned bundle.

    Raises DataError, one line, with what does not fit.
    """
    if SIGNED not in files:
        return None
    try:
        fields, signer = unseal(BUNDLE, "manifest", files[SIGNED])
    except SiteError as error:
        raise DataError(f"the bundle's {SIGNED}: {error}; {AGAIN}") from None
    manifest = parse_values(Manifest, fields, f"the bundle's {SIGNED}", AGAIN)
    listed = manifest.files
    here = {name: digest(content) for name, content in files.items() if name != SIGNED}
    differ = sorted(name for name in {*listed, *here} if listed.get(name) != here.get(name))
    # Signed files that are missing in an unpacked folder are not used either.
    free = {*OWN_FILES, *(name for name in listed if name not in here)} if unpacked else set()
    if faulty := [name for name in differ if name not in free]:
        raise DataError(f"the bundle's {faulty[0]} is not what was signed: {AGAIN}")
    if other := [
        name
        for name, value in fixed_variables(files).items()
        if manifest.variables.get(name) != value
    ]:
        raise DataError(f"{other[0]} in the bundle's .env is not what was signed: {AGAIN}")
    # A key that the hospital made itself is beside the files of a bundle without one.
    return Signed(signer, manifest, tuple(name for name in differ if name != "node.key"))


def check_signed(
    files: Mapping[str, bytes],
    folder: Path,
    by: str = "",
    *,
    unpacked: bool,
    echo: Callable[[str], None],
    remember: bool = True,
    allow_older: bool = False,
) -> Signed | None:
    """Raise DataError, one line, if a bundle is not from a known signer, not what was signed, or not what is rendered.

    ``unpacked``: the files are of a folder, not of the tar. ``folder``: the silo's, beside those of the site's
    other silos; each has the fingerprint of the signer of its last bundle. One of them must have signed a silo's first
    bundle, too. ``by``: a fingerprint, or a file with a public key, that overrides the stored ones;
    :data:`UNSIGNED` accepts an unsigned bundle. ``remember``: whether to store the signer and the time.
    ``allow_older``: whether the bundle may be older than the newest accepted one; later bundles are compared with it.
    """
    signed = read_signed(files, unpacked=unpacked)
    changed = check_rendered(files, unpacked=unpacked)
    remembered = signed_by(folder)
    last, trusted = read_signer(remembered), known_signers(remembered)
    if by == UNSIGNED:
        if signed is None:
            if remember:
                remembered.unlink(missing_ok=True)
            return None
        raise DataError(
            f"this bundle is signed, by {signed.fingerprint}: leave --signed-by {UNSIGNED} away"
        )
    if by:
        trusted = {wanted_key(by)}
    check_bundle_signer(signed, trusted)
    if signed is None:
        name_own_files("silofl made it", changed, echo)
        return None
    newest = remembered.with_name(NEWEST)
    times = check_time(signed, newest, allow_older)
    echo(f"signed by {signed.fingerprint}{'' if trusted else ON_TRUST}")
    name_own_files("it was signed", signed.changed, echo)
    if remember:
        make_folder(remembered.parent, 0o700)
        if signed.fingerprint != last:
            write_atomically(remembered, signed.fingerprint + "\n", mode=0o600)
        write_atomically(newest, json.dumps(times) + "\n", mode=0o600)
    return signed


def name_own_files(how: str, names: Iterable[str], echo: Callable[[str], None]) -> None:
    """Report the files of an unpacked bundle that the hospital has changed, if there are any."""
    if listed := ", ".join(names):
        echo(f"not as {how}, so this site's own: {listed}")


def known_signers(remembered: Path) -> set[str]:
    """Return the signer of the silo's last bundle; before its first, those of the site's other silos."""
    if last := read_signer(remembered):
        return {last}
    others = sorted(remembered.parent.parent.glob(f"*/{remembered.name}"))
    return {read_signer(path) for path in others}


def check_bundle_signer(signed: Signed | None, trusted: Set[str]) -> None:
    """Raise DataError if there are trusted fingerprints and none of them signed a bundle."""
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
    """Return the time of the newest bundle of each key, including this one.

    Raises DataError if this one is older, or was made after this machine's present time.
    """
    times = read_times(newest, forgiving=allow_older)
    when, before = signed.manifest.made, times.get(signed.fingerprint, "")
    now = time.gmtime()
    if calendar.timegm(time.strptime(when, TIME)) > calendar.timegm(now) + CLOCKS:
        raise DataError(
            f"this bundle was made at {when}, and this machine's clock says {time.strftime(TIME, now)}: set the clock "
            f"if it is wrong, else {AGAIN}, for its maker's clock was wrong"
        )
    if when < before and not allow_older:
        raise DataError(
            f"this bundle was made at {when}, and this site has taken one of {before}: ask for the newest one "
            "(--allow-older takes it all the same)"
        )
    return {**times, signed.fingerprint: when}


def read_times(newest: Path, forgiving: bool) -> dict[str, str]:
    """Read :data:`NEWEST`; empty if there is no such file. Raises DataError if it is damaged."""
    try:
        times = {
            str(key): str(when)
            for key, when in json.loads(newest.read_text(encoding="utf-8")).items()
        }
        for when in times.values():
            time.strptime(when, TIME)
        return times
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(
            f"{newest}: {error.strerror}; it says how old a bundle may be"
        ) from None
    except (ValueError, AttributeError, RecursionError):
        if forgiving:
            return {}
        raise DataError(
            f"{newest} is damaged: it says how old a bundle may be (--allow-older writes it anew)"
        ) from None


def signed_by(folder: Path) -> Path:
    """Return the file that stores the signer of a silo's bundle, in the silo's folder below `site_root()`."""
    return folder / "signed-by"


def read_signer(path: Path) -> str:
    """Return the fingerprint in a file; empty if there is no file. Raises DataError for an empty or invalid file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; it says whose bundles this site takes"
        ) from None
    if not is_fingerprint(text):
        raise DataError(
            f"{path} is damaged: it says whose bundles this site takes; write the fingerprint into it"
        )
    return text


def is_fingerprint(text: str) -> bool:
    return re.fullmatch("SHA256:[0-9a-f]{64}", text) is not None


def wanted_key(by: str) -> str:
    """Return the fingerprint that --signed-by names."""
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


def check_image(signed: Signed, image: str) -> str:
    """Check the image that a bundle's containers start. Raises DataError if it is not the signed one."""
    wanted = {*signed.manifest.images}
    if not wanted:
        return f"{image}: the signature names no image"
    here = image_digests(image)
    if not here:
        raise DataError(
            f"Docker has no image {image} here: docker load, or docker pull it, then check again"
        )
    if not wanted & here:
        raise DataError(
            f"the image {image} on this machine is {min(here)}, and {min(wanted)} was signed: it is another one; "
            "get the signed one"
        )
    return f"{image} is the image that was signed, {min(wanted & here)}"
