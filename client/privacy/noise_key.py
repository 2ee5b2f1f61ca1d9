"""The key of a silo's noise: a secret of the site, never derived from the run's seed, which the server has.

A deployed silo makes it once and keeps it in ``STATE_DIR/noise-key``: 32 bytes, readable by their owner only. With the
key the noise could be computed and subtracted from what was sent, so it must not leave the silo. In a simulation there
is nothing to protect: the key is derived from the seed, so that runs are repeatable, and the log notes this.
"""

from __future__ import annotations

import os
import secrets
from logging import INFO, WARNING
from pathlib import Path

from flwr.app import Context
from flwr.common import log

from client.local_data import is_own_file, silo_name
from models.privacy.noise import derived
from partitions.common.errors import DataError, UserError
from partitions.common.files import locked

FILE, LENGTH = "noise-key", 32
_LOGGED: set[str] = set()


def noise_key(context: Context, seed: int, run_id: str) -> bytes:
    """Return the silo's key for this run (32 bytes). Raises UserError or DataError if it cannot be saved or read."""
    name, state = silo_name(context), str(context.node_config.get("state-dir", ""))
    if state:
        return derived(kept_key(Path(state)), "run", run_id)
    if is_own_file(context):
        raise UserError(f"dp = true: {name} has no state-dir to keep the key of its noise in")
    if name not in _LOGGED:
        _LOGGED.add(name)
        log(INFO, "%s: a simulation, its noise is made of the seed: it protects no data that matter", name)
    return derived(b"", "simulation", seed, name)


def kept_key(state: Path) -> bytes:
    """Return the key in this state directory; create it if there is none."""
    file = state / FILE
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(state / f".{FILE}.lock", "another process of this silo makes the key of its noise"):
        if not file.exists():
            part = state / f".{FILE}.tmp"
            part.unlink(missing_ok=True)
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as out:
                out.write(secrets.token_bytes(LENGTH))
                out.flush()
                os.fsync(out.fileno())
            part.rename(file)
            log(WARNING, "%s: made the key of this silo's noise; it must not leave the site", file)
    key = file.read_bytes()
    if len(key) != LENGTH:
        raise DataError(f"{file} is damaged: {len(key)} bytes, not {LENGTH}; remove it, and a new key is made")
    return key
