"""`flower-superlink` with our Fleet API (``client/flower/service.py``).

Run as ``python -P -m server.deploy.superlink`` with the arguments of `flower-superlink`.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from client.flower.service import run_superlink
from partitions.common.memory import share_heap
from server.deploy.access.gate import gate_of
from server.deploy.logs import FOLDER, keep_rolling
from server.deploy.room.queue import Queue
from server.run.limits import most_bytes, too_large


def in_place_of(command: Sequence[str]) -> list[str]:
    """Return the command line of this SuperLink for one that begins with `flower-superlink`."""
    return [sys.executable, "-P", "-m", "server.deploy.superlink", *command[1:]]


def start_superlink() -> None:
    """Start Flower's SuperLink with queue and operators' gate; in a local federation it also rolls the parts' logs."""
    share_heap()
    if folder := os.environ.get(FOLDER):
        Thread(target=keep_rolling, args=(Path(folder),), daemon=True).start()
    run_superlink(most_bytes, too_large, Queue.from_environment().attach, gate_of(os.environ))


if __name__ == "__main__":
    start_superlink()
