"""Errors of the site's own process that the hospital can fix."""


class SiteError(ValueError):
    """A rule, a key or a file of this site cannot be used, or forbids the message; the text names it and the reason."""
