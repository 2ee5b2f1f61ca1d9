"""Whose an error is: that decides what is logged about it."""

from __future__ import annotations

from client.site.errors import SiteError
from partitions.common.errors import DataError, RunFailedError, UserError


def is_users(error: BaseException) -> bool:
    """Return whether the user can mend the error: one line, exit code 2."""
    return isinstance(error, UserError | DataError | SiteError | OSError)


def is_fault(error: BaseException) -> bool:
    """Return whether an error is a fault of the program: one that needs a traceback."""
    return not is_users(error) and not isinstance(error, RunFailedError)
