"""The app of a checkout, as `flwr run` builds and ships it.

python -m client.flower.apps FOLDER      prints a list (`allowed-apps`) with FOLDER's app only
"""

import os
import re
import sys
from pathlib import Path

from ..protocol.code import content_sum
from .internals import internal

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


if __name__ == "__main__":
    print(list_builds(Path(sys.argv[1])), end="")
