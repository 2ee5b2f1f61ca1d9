"""The app of a checkout, as `flwr run` ships it, and the sums by which a site knows it (`allowed-apps`).

python -m client.site.apps FOLDER      the list that goes into the images: FOLDER's app and no other
"""

import hashlib
import sys
from pathlib import Path

from client.site.flower import internal
from client.site.warm.pins import content_sum

HEAD = "# SHA-256 of the app builds that this site runs, one per line\n"


def build(app: Path) -> bytes:
    """The app bundle (FAB) that `flwr run` makes of a folder."""
    fab: bytes = internal("build_fab_from_disk")(app)
    return fab


def app_hash(app: Path) -> str:
    """SHA-256 of the app as `flwr run` ships it from this machine."""
    return hashlib.sha256(build(app)).hexdigest()


def listed(app: Path) -> str:
    """`allowed-apps` of an image, which other machines ship the app to: by what the app holds."""
    return f"{HEAD}{content_sum(build(app))}  what the app of this image's checkout holds\n"


if __name__ == "__main__":
    print(listed(Path(sys.argv[1])), end="")
