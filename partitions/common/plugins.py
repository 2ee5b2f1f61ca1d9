"""Methods and networks of other installed packages, found by their entry points."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

from partitions.common.errors import UserError

STRATEGIES, NETWORKS = "silofl.strategies", "silofl.networks"  # groups of entry points


def plugins(group: str) -> Iterator[tuple[str, str, Any]]:
    """Yield name, package and object of each entry point, in the order of the names.

    Raises UserError for one that cannot be loaded.
    """
    for entry in sorted(entry_points(group=group), key=lambda own: own.name):
        package = entry.dist.name if entry.dist else "a package"
        try:
            yield entry.name, package, entry.load()
        except Exception as error:
            raise UserError(
                f"{entry.name} of {package} ({group}) cannot be loaded: {' '.join(repr(error).split())[:300]}; update "
                f"{package}, or uninstall it"
            ) from None
