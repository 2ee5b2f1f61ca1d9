"""What the consortium signs of a bundle: `signed.json`.

    {"manifest": TEXT, "public-key": PEM, "signature": BASE64}

The manifest is JSON in a text that is signed byte for byte. It contains every file of the bundle with its SHA-256, the
variables of `.env` that the hospital must not change, and the digests of the image.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import AfterValidator

from .bundle_files import FIXED
from .chain import digest, utc_now
from .envelope import BUNDLE, seal
from .node import variables_of
from .parsed import Frozen, SiteError

SIGNED = "signed.json"
TIME = "%Y-%m-%dT%H:%M:%SZ"
DOCKER_SECONDS = 60.0


def check_time_text(text: str) -> str:
    """Raise SiteError, or ValueError, for a time that cannot be compared as text."""
    if time.strftime(TIME, time.strptime(text, TIME)) != text:
        raise SiteError("must be a time as in 2026-11-24T09:00:00Z")
    return text


class Manifest(Frozen):
    """What a bundle's signature covers."""

    kind: str
    made: Annotated[str, AfterValidator(check_time_text)]
    files: dict[str, str]  # SHA-256 by name
    variables: dict[str, str]  # of `.env`, which the hospital does not set
    images: list[str]  # digests of the image for the hospital; empty: any


def sign_bundle(
    files: Mapping[str, bytes], key: Ed25519PrivateKey, images: Iterable[str] = ()
) -> bytes:
    """Return the `signed.json` of a bundle with these files. `images`: digests of the image for the hospital."""
    manifest = {
        "made": utc_now(),
        "files": {name: digest(content) for name, content in files.items() if name != SIGNED},
        "variables": fixed_variables(files),
        "images": sorted({*images}),
    }
    return (seal(BUNDLE, "manifest", manifest, key, indent=1) + "\n").encode()


def fixed_variables(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the variables of a bundle's `.env` that the hospital does not set."""
    variables = variables_of(files)
    return {key: variables.get(key, "") for key in FIXED}


def image_digests(image: str) -> set[str]:
    """Return the digests of an image in Docker on this machine; empty if it has no such image."""
    if shutil.which("docker") is None:
        return set()
    command = ["docker", "image", "inspect", "--format", "{{json .}}", image]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOCKER_SECONDS, check=False
        )
        if done.returncode:
            return set()
        image_info = json.loads(done.stdout)
        return {
            str(image_info["Id"]),
            *(name.partition("@")[2] for name in image_info.get("RepoDigests") or ()),
        } - {""}
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OSError,
        subprocess.TimeoutExpired,
    ):
        return set()
