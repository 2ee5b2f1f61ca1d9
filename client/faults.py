"""Classes of errors: what the user, the server and the log get of each.

The user or the hospital can fix ``UserError``, ``DataError``, ``SiteError`` and ``OSError``: the server gets their
line. ``RunFailedError`` is a run that cannot go on. Any other error is a fault of the program. Its text may contain a
path or a value of the silo's file. So the server gets only its type and its place in our code; the traceback goes to
the silo's log.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR
from pathlib import Path

from flwr.common import log

from client.protocol.parsed import SiteError
from partitions.common.errors import DataError, NoAnswerError, RunFailedError, UserError
from partitions.common.memory import is_out_of_memory

ROOT = Path(__file__).resolve().parents[1]
FAULT = "a fault of the program"  # its name in the log and in the server's line
OURS = ("client", "models", "partitions", "server", "strategies")  # folders of ROOT


ASKED = re.compile(r"allocate ([\d.]+ ?[KMGT]?i?B|\d+ bytes)")


def is_users(error: BaseException) -> bool:
    """Return whether the user can fix the error: one line, exit code 2."""
    return isinstance(error, UserError | DataError | SiteError | OSError) or ran_out(error)


def ran_out(error: BaseException) -> bool:
    """Return whether memory ran out in this process; the reason of a run that failed may name another's."""
    return not isinstance(error, RunFailedError) and is_out_of_memory(error)


def line_of(error: BaseException, batch_size: int | None = None) -> str:
    """Return the user's line for an error; for memory that ran out, with the device and what to lower."""
    text = str(error)
    if not ran_out(error):
        return text
    gpu = re.search(r"cuda|cublas|cudnn|gpu", text, re.I)
    device = (
        "the GPU (device = cuda)"
        if gpu
        else "this machine, or its container or job (device = cpu)"
    )
    batches = "batch-size" if batch_size is None else f"batch-size (it is {batch_size})"
    return (
        f"out of memory on {device}: lower {batches}, take a smaller network or smaller samples, run fewer processes "
        f"at a time{', or take device = cpu' if gpu else ', or give it more memory'}"
    )


@contextmanager
def as_user_error(where: str = "") -> Iterator[None]:
    """Context that raises what is wrong with a file as the user's error, one line."""
    try:
        yield
    except DataError as error:
        raise UserError(f"{where}{error}") from None


def is_fault(error: BaseException) -> bool:
    """Return whether an error is a fault of the program: one that needs a traceback."""
    return not is_users(error) and not isinstance(error, RunFailedError)


def explain(error: Exception) -> tuple[int, str]:
    """Return the exit code and the user's line for an error; a fault's traceback is logged.

    2: the user can fix it. 1: a run failed, or a fault of the program. 3: a run may go on, but its server is silent.
    """
    if is_fault(error):
        logging.getLogger("silofl").error(
            "a fault of silofl; please report it with these lines", exc_info=error
        )
        return 1, f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and not ran_out(error):
        return 2, ": ".join(
            str(part) for part in (error.filename, error.strerror or error) if part
        )
    code = 3 if isinstance(error, NoAnswerError) else 1
    return 2 if is_users(error) else code, line_of(error)


def report(error: Exception, batch_size: int | None = None) -> str:
    """Log an error at ERROR, a fault of the program with its traceback; return the server's line."""
    # The server is not told how much was asked for: it may follow from the data's size
    if ran_out(error):
        wanted = ASKED.search(str(error))
        log(
            ERROR,
            "%s%s",
            line := line_of(error, batch_size),
            f" (it asked for {wanted[1]})" if wanted else "",
        )
        return line
    if is_users(error):
        log(ERROR, "%s", error)
        return f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error)
    log(ERROR, "%s: %s", FAULT, error, exc_info=error)
    return (
        f"{type(error).__name__}{place_of(error)}: {FAULT}; its traceback is in the silo's log"
    )


def place_of(error: BaseException) -> str:
    """Return `` in MODULE:LINE``, the last place in our own code that the error passed; empty where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in OURS:
            return f" in {file.relative_to(ROOT).as_posix()}:{frame.lineno}"
    return ""
