"""Atomic unpacking of an app."""

import compileall
import contextlib
import io
import shutil
import tempfile
from pathlib import Path

from ..flower import internal
from ..trust.pins import refused


def check_folder(unpacked: Path, fab_id: str, fab_version: str, fab_hash: str) -> Path:
    """Return the folder of the unpacked app. Raises AppRefusedError if Flower would load another one.

    Flower makes the folder's name of these fields, which the server sends beside the app. They may hold `/` and `..`.
    """
    if f"{fab_id.replace('/', '.', 1)}.{fab_version}.{fab_hash[:8]}" != unpacked.name:
        fields = f"{fab_id[:80]!r}, {fab_version[:80]!r}, {fab_hash[:80]!r}"
        raise refused(f"app {unpacked.name} refused: the server names another folder to load it from: {fields}")
    return unpacked


def unpack(content: bytes, digest: str) -> Path:
    """Unpack like Flower's `install_from_fab`, except that a half-written app is never used.

    Flower unpacks straight into `FLWR_HOME/apps/PUBLISHER.NAME.VERSION.HASH8` and later uses that directory unchecked.
    Here a directory counts as complete, and as this very app, exactly if it contains the full SHA-256.
    """
    apps: Path = internal("get_flwr_home")() / "apps"
    for path in apps.glob(f"*.{digest[:8]}"):
        mark = path / ".sha256"
        if mark.is_file() and mark.read_text() == digest:
            return path
    apps.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=apps))
    with contextlib.redirect_stdout(io.StringIO()):  # its output names the temporary directory
        made: Path = internal("install_from_fab")(content, install_dir=temporary, skip_prompt=True)
    print(f"app {made.name}, SHA-256 {digest}")
    compileall.compile_dir(made, quiet=2)  # once: processes with PYTHONDONTWRITEBYTECODE would repeat it
    (made / ".sha256").write_text(digest)
    final = apps / made.name
    shutil.rmtree(final, ignore_errors=True)
    made.rename(final)
    shutil.rmtree(temporary, ignore_errors=True)
    return final
