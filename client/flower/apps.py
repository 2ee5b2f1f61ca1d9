"""The app of a checkout, as `flwr run` builds and ships it.

python -m client.flower.apps FOLDER      prints a list (`allowed-apps`) with FOLDER's app only
"""

import io
import os
import re
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..protocol.code import content_sum, sha256_of
from ..protocol.parsed import SiteError
from .internals import INTERNALS, internal

# What a process that runs an app imports ahead
PRELOADED = (
    INTERNALS["load_client_app"].partition(":")[0],
    INTERNALS["serde"],
    *("flwr.client", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"),
)
HEAD = "# SHA-256 of the app builds that this site runs, one per line\n"


def build(app: Path) -> bytes:
    """Return the app bundle (FAB) that `flwr run` builds from a folder. Raises ValueError, OSError if it has no app."""
    fab, _ = internal("build_fab_from_files")(files_of(app))
    return bytes(fab)


def install_app(content: bytes, folder: Path) -> Path:
    """Unpack an app bundle into a folder, as Flower does; return the app's folder there.

    Flower's own needs its commands: 0.3 s and 12 MB in each SuperNode. Raises SiteError, or KeyError, if it is no app.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        config = tomllib.loads(archive.read("pyproject.toml").decode())
        project, publisher = config["project"], config["tool"]["flwr"]["app"]["publisher"]
        name = f"{publisher}.{project['name']}.{project['version']}.{sha256_of(content)[:8]}"
        if not re.fullmatch(r"\w[\w.+-]*", name):
            raise SiteError(
                f"an app's name has letters, digits and . + - _ only: {name[:80]!r}"
            )
        # Nothing is written outside: a name's `..` and a leading `/` are dropped
        archive.extractall(folder / name, (f for f in archive.namelist() if f[:6] != ".info/"))
    return folder / name


def load_app(fab_id: str, version: str, digest: str) -> Callable[..., Any]:
    """Return the ClientApp of an unpacked bundle: a function of a message and a context."""
    load = internal("load_client_app")(default_app_ref="", app_path=None, multi_app=True)
    # Compiled once for all runs, and only what is imported; images compile nothing by themselves
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        app: Callable[..., Any] = load(fab_id, version, digest)
    finally:
        sys.dont_write_bytecode = before
    return app


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


if __name__ == "__main__":
    print(list_builds(Path(sys.argv[1])), end="")
