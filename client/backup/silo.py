"""What a silo needs elsewhere: its state directory, and of `silofl join` its key and the bundle's files.

Not in it: the data, and the head that is kept apart (`client/site/head.py`). A silo may go on meanwhile: what one
transaction writes (record, audit log, ledger) is copied while none can begin.
"""

import json
import shutil
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

from client.protocol.keys import site_root
from client.site.budget.ledger import Ledger
from client.site.head import RESTORED
from client.site.record import FILE, Record, connect
from client.site.trust.bundle import POLICY_ASKED
from client.site.trust.signing import NEWEST
from partitions.common.errors import DataError

from .archive import BackupManifest, copy_now, files_below, put_in_place, write_backup

# The key, and what the bundle and the hospital have set
OF_SITE = (
    *("own.key", "node.key", "ca.crt", "allowed-apps", "policy.toml", "schema.json"),
    *("signed-by", NEWEST, POLICY_ASKED),
)
# By SQLite, which has them for the process that has the file open
NOT_COPIED = (FILE, f"{FILE}-wal", f"{FILE}-shm", ".*")


def back_up_silo(name: str, state: Path, out: Path, passphrase: str) -> BackupManifest:
    """Write a backup of a silo. Raises SiteError if its own process would refuse this state directory."""
    with tempfile.TemporaryDirectory(prefix=".backup-", dir=state) as place:
        copied = Path(place, "state")
        with ExitStack() as held:
            if (state / FILE).exists():
                held.enter_context(Record(state).write(sync=False))
            if (ledger := Ledger(state)).folder.exists():
                # A process writes its files after its transaction
                held.enter_context(ledger.hold())
            ignored = shutil.ignore_patterns(*NOT_COPIED)
            shutil.copytree(state, copied, ignore=ignored, copy_function=copy_now)
            if (state / FILE).exists():
                _copy_record(state / FILE, copied / FILE)
        files = files_below(copied, "state")
        folder = state.absolute().parent
        if folder == site_root() / name:
            kept = {f"site/{file}": folder / file for file in OF_SITE}
            files |= {member: file for member, file in kept.items() if file.is_file()}
        return write_backup(out, "silo", name, files, passphrase)


def _copy_record(file: Path, target: Path) -> None:
    with (
        closing(connect(f"{file.absolute().as_uri()}?mode=ro")) as committed,
        closing(connect(target.as_uri())) as copy,
    ):
        committed.backup(copy)
    target.chmod(0o600)


def restore_silo(manifest: BackupManifest, folder: Path, state: Path | None) -> Path:
    """Put a silo's files in place, marked as restored; return its state directory.

    ``state``: where its state goes, without the other files; None: as `silofl join` has it. Raises DataError if
    something is there already.
    """
    place = site_root() / manifest.name
    target = state or place / "state"
    if not (folder / "state").is_dir():
        raise DataError(f"the backup of {manifest.name} has no state")
    (folder / "state" / RESTORED).write_text(json.dumps({"backup": manifest.time}) + "\n")
    moves = {folder / "state": target}
    if state is None and (folder / "site").is_dir():
        moves |= {path: place / path.name for path in (folder / "site").iterdir()}
    put_in_place(moves)
    return target
