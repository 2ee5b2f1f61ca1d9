"""Logs of a local federation's parts: each begins anew at a size, and what was before is kept once."""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

FOLDER = "SILOFL_LOGS"  # in the SuperLink's environment: the folder with the logs
LARGEST = 10 << 20  # bytes
LOOK_SECONDS = 60.0


def roll_logs(folder: Path) -> None:
    """Copy each log that is too large to PART.log.1, and empty it: all of its processes append to it."""
    for log in folder.glob("*.log"):
        with suppress(OSError):  # a full disk: nothing is lost, and the next look tries again
            if log.stat().st_size > LARGEST:
                shutil.copyfile(log, f"{log}.1")
                os.truncate(log, 0)


def keep_rolling(folder: Path) -> None:
    """Roll the logs of a folder until the process ends."""
    while True:
        roll_logs(folder)
        time.sleep(LOOK_SECONDS)
