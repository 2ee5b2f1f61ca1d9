"""What a server needs elsewhere: its CA, keys, registrations, operators and federation file, and runs that are named.

Not in it: demo data, which are split again, the silos of this machine, which have backups of their own, and logs.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from client.backup.archive import (
    BackupManifest,
    copy_now,
    files_below,
    put_in_place,
    write_backup,
)
from partitions.common.errors import UserError
from server.deploy.federation import Federation
from server.deploy.local.record import state_root

# In the federation's state directory
KEPT = ("credentials", "remote", "signing.key", "signing.pub", "actions")


def back_up_server(
    federation: Federation, runs: Sequence[Path], out: Path, passphrase: str
) -> BackupManifest:
    """Write a backup of a server of `silofl up`. ``runs``: run directories. Raises UserError if there is no server."""
    folder = state_root() / federation.name
    if not (folder / "credentials/ca.key").exists():
        raise UserError(
            f"{folder} has no CA: `silofl up` makes one; of containers see docs/deployment.md, Backup"
        )
    files = {"federation.yaml": federation.path}
    for name in KEPT:
        kept = folder / name
        files |= (
            files_below(kept, name) if kept.is_dir() else {name: kept} if kept.exists() else {}
        )
    for run in runs:
        if not (run / "config.toml").is_file():
            raise UserError(f"--include {run}: is no run directory")
        files |= files_below(run, f"runs/{run.absolute().name}")
    # As they are now, for the server goes on; here, where the keys are
    with tempfile.TemporaryDirectory(prefix=".backup-", dir=folder) as place:
        now = {
            name: Path(place, f"{n}{path.suffix}")
            for n, (name, path) in enumerate(files.items())
        }
        for name, path in files.items():
            copy_now(str(path), str(now[name]))
        now = {name: path for name, path in now.items() if path.exists()}
        return write_backup(out, "server", federation.name, now, passphrase)


def restore_server(manifest: BackupManifest, folder: Path, here: Path) -> Path:
    """Put a server's files in place, its federation file and runs below ``here``; return the state directory.

    Raises DataError if something is there already.
    """
    state = state_root() / manifest.name
    moves = {
        path: here / path.name if path.name == "federation.yaml" else state / path.name
        for path in folder.iterdir()
        if path.name != "runs"
    }
    moves |= {path: here / "runs" / path.name for path in (folder / "runs").glob("*")}
    put_in_place(moves)
    state.chmod(0o700)
    return state
