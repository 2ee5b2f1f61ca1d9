"""`make sbom`: what each image has of Python packages, in CycloneDX 1.6 (JSON), from the lock files.

    python -m requirements.sbom FOLDER     silofl-IMAGE-VERSION.cdx.json for each image

A package has its version, its purl, the SHA-256 sums of all its files that the lock allows, and the licence that the
installed package states, where that version is installed here. The same lock files and packages give the same bytes:
there is no serial number, and a time only where SOURCE_DATE_EPOCH gives one. The base image's packages are not listed.
"""

import datetime
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.markers import Marker

from requirements.lock import FOLDER, OLDEST, entries, name_of

# The lock files that requirements/install.sh installs into each image (server/deploy/compose.py).
IMAGES = {
    "silo": ("torch-cpu", "silo"),
    "silo-gpu": ("torch-cuda", "silo"),
    "server": ("torch-cpu", "silo", "server"),
}
PYTHON = {
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "os_name": "posix",
}
PYTHON |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
# The images' (docker/Dockerfile)
PYTHON |= {"python_version": OLDEST, "python_full_version": f"{OLDEST}.0"}
LONGEST = 60  # characters of a licence's name; some packages give the whole text


def sbom(image: str, folder: Path = FOLDER) -> dict[str, Any]:
    """Return the CycloneDX document of an image; ``folder`` has the lock files, and pyproject.toml lies above it."""
    project = tomllib.loads((folder.parent / "pyproject.toml").read_text("utf-8"))["project"]
    own = {
        "type": "application",
        "bom-ref": "silofl",
        "name": "silofl",
        "version": project["version"],
    }
    own |= {"licenses": [{"expression": project["license"]}]}
    texts = ((folder / f"{name}.txt").read_text("utf-8") for name in IMAGES[image])
    packages = [
        component(entry) for text in texts for entry in entries(text) if is_installed(entry)
    ]
    subject = {
        "type": "container",
        "bom-ref": "image",
        "name": f"silofl-{image}",
        "version": project["version"],
    }
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {**made(), "component": subject},
        "components": [own, *sorted(packages, key=lambda one: str(one["bom-ref"]))],
        "compositions": [{"aggregate": "incomplete", "assemblies": ["image"]}],
    }


def made() -> dict[str, str]:
    """Return the time of SOURCE_DATE_EPOCH, as reproducible builds set it; nothing without one."""
    seconds = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not seconds:
        return {}
    when = datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)
    return {"timestamp": when.strftime("%Y-%m-%dT%H:%M:%SZ")}


def is_installed(entry: str) -> bool:
    """Return whether a lock file's entry is for the images' Python on Linux."""
    marker = entry.partition("\n")[0].rstrip("\\ ").partition(" ; ")[2]
    return not marker or Marker(marker).evaluate(PYTHON)


def component(entry: str) -> dict[str, Any]:
    """Return the component of a lock file's entry."""
    name, version = name_of(entry), re.split(r"[=\s]+", entry, maxsplit=2)[1]
    purl = f"pkg:pypi/{name}@{quote(version, safe='')}"
    sums = re.findall(r"--hash=sha256:([0-9a-f]{64})", entry)
    found = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    hashes = [{"alg": "SHA-256", "content": content} for content in sums]
    return (
        found
        | {"hashes": hashes}
        | ({"licenses": named} if (named := list(licences(name, version))) else {})
    )


def licences(name: str, version: str) -> Iterator[dict[str, Any]]:
    """Yield the licences that the installed package states; none where another version is installed."""
    try:
        stated = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return
    if stated["Version"].partition("+")[0] != version.partition("+")[0]:
        return
    classifiers = [
        line for line in stated.get_all("Classifier") or () if line.startswith("License :: ")
    ]
    short = stated["License"].strip() if "License" in stated else ""
    if "License-Expression" in stated:
        yield {"expression": stated["License-Expression"]}
    elif short and len(short) <= LONGEST and "\n" not in short and short != "UNKNOWN":
        yield {"license": {"name": short}}
    else:
        yield from ({"license": {"name": line.rpartition(" :: ")[2]}} for line in classifiers)


def write(folder: Path) -> list[Path]:
    """Write the document of every image into a folder; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for image in IMAGES:
        content = sbom(image)
        path = folder / f"silofl-{image}-{content['metadata']['component']['version']}.cdx.json"
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        written.append(path)
    return written


if __name__ == "__main__":
    for file in write(Path(sys.argv[1])):
        print(file)
