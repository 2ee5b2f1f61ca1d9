"""The code that may run at this site: the apps of `SILOFL_ALLOWED_APPS`, and what a run names as MODULE:FUNCTION.

A list, or a file of it, has SHA-256 sums of apps. A sum is over the app's content (`content_sum`), because two machines
may compress the same app differently. A list may also have the SHA-256 of a file as shipped.

python -m client.site.trust.code FOLDER      prints a list (`allowed-apps`) with FOLDER's app only

The source of MODULE:FUNCTION is found without running it.
"""

import functools
import hashlib
import io
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ...flower.internals import internal
from ...flower.private import load_ours


class AppRefusedError(Exception):
    """The app's SHA-256 is not among those this site allows."""


LARGEST = 1 << 26  # bytes of an unpacked app; ours has a hundredth of that


def check_pin(digest: str, app: bytes = b"") -> None:
    """Raise AppRefusedError unless the app with SHA-256 `digest` is allowed at this site (`SILOFL_ALLOWED_APPS`)."""
    pins = os.environ.get("SILOFL_ALLOWED_APPS", "")
    if not pins:
        return
    own = content_sum(app)
    try:
        allowed = set(read_pins(pins))
    except OSError as error:
        raise log_refusal(
            f"app {own or digest} refused: cannot read the allowed apps: {error}"
        ) from None
    if allowed.isdisjoint((digest, own)):
        where = "SILOFL_ALLOWED_APPS" if is_sums(pins) else pins
        raise log_refusal(
            f"app {own or digest} refused: its SHA-256 is not among the {len(allowed)} listed in {where}"
        )


@functools.lru_cache(maxsize=2)
def sha256_of(app: bytes) -> str:
    """Return the SHA-256 of an app, 3 MB that each message of its run has."""
    return hashlib.sha256(app).hexdigest()


@functools.lru_cache(maxsize=2)
def content_sum(app: bytes) -> str:
    """Return the SHA-256 over names and SHA-256 of all files in an app, ordered by name; empty if it is no app."""
    try:
        with zipfile.ZipFile(io.BytesIO(app)) as archive:
            infos = sorted(archive.infolist(), key=lambda info: info.filename)
            names = [info.filename for info in infos]
            if len({*names}) < len(names) or sum(info.file_size for info in infos) > LARGEST:
                return ""
            sums = [
                f"{hashlib.sha256(archive.read(info)).hexdigest()}  {info.filename!r}\n"
                for info in infos
            ]
    except (
        zipfile.BadZipFile,
        OSError,
        RuntimeError,
        NotImplementedError,
        EOFError,
        ValueError,
        zlib.error,
    ):
        return ""
    return hashlib.sha256("".join(sums).encode("utf-8", "surrogateescape")).hexdigest()


def log_refusal(line: str) -> AppRefusedError:
    """Log the line and return the error with it."""
    print(f"ERROR: {line}", file=sys.stderr, flush=True)
    return AppRefusedError(line)


def is_sums(pins: str) -> bool:
    """Return whether a value of `SILOFL_ALLOWED_APPS` is a list of sums, and not a file name."""
    return all(
        len(part) == 64 and not set(part) - set("0123456789abcdef") for part in split(pins)
    )


def split(text: str) -> list[str]:
    """Return the words of a text, in lower case, separated by commas or white space."""
    return text.replace(",", " ").lower().split()


def read_pins(pins: str) -> Iterator[str]:
    """Yield the SHA-256 sums of `SILOFL_ALLOWED_APPS`; a file has one per line, `#` starts a comment."""
    if is_sums(pins):
        yield from split(pins)
        return
    for line in Path(pins).expanduser().read_text(encoding="utf-8").splitlines():
        # `sha256sum` writes the file's name after the sum
        yield from split(line.partition("#")[0])[:1]


# --- the app of a checkout ---


HEAD = "# SHA-256 of the app builds that this site runs, one per line\n"


def build(app: Path) -> bytes:
    """Return the app bundle (FAB) that `flwr run` builds from a folder. Raises ValueError, OSError if it has no app."""
    fab, _ = internal("build_fab_from_files")(files_of(app))
    return bytes(fab)


def files_of(app: Path) -> dict[str, Path]:
    """Return the files below a folder by their relative paths, without links.

    Flower visits every file before it applies `.gitignore`; a virtual environment has 50,000. Here a folder that
    `.gitignore` lists by its bare name is skipped as a whole.
    """
    rules = app / ".gitignore"
    lines = rules.read_text(encoding="utf-8").splitlines() if rules.is_file() else []
    ignored = {line.strip()[:-1] for line in lines if re.fullmatch(r"[\w.-]+/\s*", line)}
    files: dict[str, Path] = {}
    for folder, below, names in os.walk(app):
        below[:] = [name for name in below if name not in ignored]
        paths = [Path(folder, name) for name in names]
        files |= {
            path.relative_to(app).as_posix(): path for path in paths if not path.is_symlink()
        }
    return files


def list_builds(app: Path, what: str = "what the app of this image's checkout holds") -> str:
    """Return the `allowed-apps` of an image or a bundle: the sum over the content of a checkout's app."""
    return f"{HEAD}{content_sum(build(app))}  {what}\n"


def file_of(name: str) -> Path | None:
    """Return the file that defines MODULE of MODULE:FUNCTION; None where this machine has none."""
    found: Path | None = None
    search: Sequence[str] | None = None
    parts = name.partition(":")[0].split(".")
    for i in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: i + 1]), search)
        if spec is None:
            return None
        search = spec.submodule_search_locations
        found = None
        if spec.origin:
            found = Path(spec.origin)
    return found


def digest_of_code(name: str) -> str:
    """Return the SHA-256 of the source of MODULE (`partitions/common/source_sum.py`); empty where there is none."""
    file = file_of(name)
    if file is None:
        return ""
    module = name.partition(":")[0]
    shared = load_ours("partitions/common", "source_sum")
    return str(shared.source_sum(module, file))


def code_of_data(path: Path) -> str:
    """Return the SHA-256 of an own data set's source, as its index file has it (`partitions/own`); empty: no index."""
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            return str(file["code"].item())
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
        return ""


def dataset_faults(study: str, datasets: Mapping[str, str], silo: str, data: Path) -> list[str]:
    """Return why the silo's data are not those of a study, which has each silo's own data set by its source."""
    if not datasets:
        return []
    wanted = datasets.get(silo, "")
    here = code_of_data(data)
    if wanted == here:
        return []
    found = "a data file"
    if here:
        found = f"an own data set with SHA-256 {here[:16]}..."
    asked = f"no {silo}"
    if wanted:
        asked = f"{silo} = {wanted[:16]}..."
    return [f"the study {study} has in [datasets] {asked}, and the data here are {found}"]


def trainer_faults(study: str, wanted: str, run: Mapping[str, Any]) -> list[str]:
    """Return why the trainer that a run names is not the one of a study, whose source has the SHA-256 ``wanted``."""
    name = str(run.get("trainer", ""))
    if not name:
        return []
    here = digest_of_code(name)
    if here and here == wanted:
        return []
    found = "is missing"
    if here:
        found = f"has SHA-256 {here[:16]}..."
    asked = f"the study {study} has trainer = {wanted[:16]}..."
    return [f"{asked}, and {name[:80]} here {found}"]


if __name__ == "__main__":
    print(list_builds(Path(sys.argv[1])), end="")
