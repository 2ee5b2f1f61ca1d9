"""Errors of a silo, as the server and the silo's log see them.

``UserError``, ``DataError``, ``SiteError`` and ``OSError`` are the user's or the hospital's to mend: the server gets
their line. Any other error is a fault of the program. Its text may hold a path or a value of the silo's file, so that
the server gets its type and the place in our code, and the silo's log the traceback.
"""

from __future__ import annotations

import traceback
from logging import ERROR
from pathlib import Path

from flwr.common import log

from client.site.errors import SiteError
from partitions.common.errors import DataError, UserError

ROOT = Path(__file__).resolve().parents[1]
FAULT = "a fault of the program"  # how the log, and the line for the server, name it
OURS = ("client", "models", "partitions", "server", "strategies")  # folders of ROOT


def report(error: Exception) -> str:
    """Log an error at ERROR, a fault of the program with its traceback; return the server's line."""
    if isinstance(error, UserError | DataError | SiteError):
        log(ERROR, "%s", error)
        return str(error)
    if isinstance(error, OSError):
        log(ERROR, "%s", error)
        return f"{type(error).__name__}: {error}"
    log(ERROR, "%s: %s", FAULT, error, exc_info=error)
    return f"{type(error).__name__}{place_of(error)}: {FAULT}; its traceback is in the silo's log"


def place_of(error: BaseException) -> str:
    """Return `` in MODULE:LINE``, the last place in our own code that the error passed; empty where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in OURS:
            return f" in {file.relative_to(ROOT).as_posix()}:{frame.lineno}"
    return ""
