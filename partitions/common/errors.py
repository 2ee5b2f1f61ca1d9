"""Errors that a user causes and can mend: one clear line, exit code 2. Every other error is a fault of the program."""


class UserError(ValueError):
    """A setting, a command line or a run directory cannot be used: the text says which, why, and the next step."""


class DataError(ValueError):
    """A file, or a message of another party, cannot be used: the text says which, why, and the next step."""


class RunFailedError(RuntimeError):
    """A run cannot go on, for a reason that is no fault of the program: too few silos, or no reply in time."""
