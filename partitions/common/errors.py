"""Errors that a user causes and can mend: one clear line, exit code 2. Every other error is a fault of the program."""


class UserError(ValueError):
    """An unusable setting, command line or run directory; the text names it, the reason and the next step."""


class DataError(ValueError):
    """An unusable file, or message of another party; the text names it, the reason and the next step."""


class RunFailedError(RuntimeError):
    """A run that cannot continue, without a fault of the program: too few silos, or no reply in time."""
