"""The app of a checkout, as `flwr run` ships it, and the sums by which a site knows it (`allowed-apps`).

python -m client.site.trust.apps FOLDER      the list that goes into the images: FOLDER's app and no other
"""

import hashlib
import os
import re
import sys
from pathlib import Path

from client.site.flower import internal
from client.site.trust.pins import content_sum

HEAD = "# SHA-256 of the app builds that this site runs, one per line\n"


def build(app: Path) -> bytes:
    """The app bundle (FAB) that `flwr run` makes of a folder. Raises ValueError, OSError: it is none of an app."""
    fab, _ = internal("build_fab_from_files")(files_of(app))
    return bytes(fab)


def files_of(app: Path) -> dict[str, Path]:
    """The files below a folder by their paths in it, links left out.

    Flower looks at every file before it asks `.gitignore`, and a virtual environment has 50,000 of them. Here a folder
    that `.gitignore` names by its bare name is not entered at all.
    """
    rules = app / ".gitignore"
    lines = rules.read_text(encoding="utf-8").splitlines() if rules.is_file() else []
    ignored = {line.strip()[:-1] for line in lines if re.fullmatch(r"[\w.-]+/\s*", line)}
    files: dict[str, Path] = {}
    for folder, below, names in os.walk(app):
        below[:] = [name for name in below if name not in ignored]
        paths = [Path(folder, name) for name in names]
        files |= {path.relative_to(app).as_posix(): path for path in paths if not path.is_symlink()}
    return files


def app_hash(app: Path) -> str:
    """SHA-256 of the app as `flwr run` ships it from this machine."""
    return hashlib.sha256(build(app)).hexdigest()


def listed(app: Path) -> str:
    """`allowed-apps` of an image, which other machines ship the app to: by what the app holds."""
    return f"{HEAD}{content_sum(build(app))}  what the app of this image's checkout holds\n"


if __name__ == "__main__":
    print(listed(Path(sys.argv[1])), end="")
