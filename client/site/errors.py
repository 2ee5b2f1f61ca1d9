"""Errors that the hospital can mend, in the site's own process. Standard library only, as in trust/policy.py."""


class SiteError(ValueError):
    """A rule, a key or a file of this site cannot be used, or forbids what is asked: the text says which and why."""
