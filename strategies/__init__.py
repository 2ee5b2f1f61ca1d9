"""Methods: one file each, both halves in it. Importing a file registers the methods in it."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from strategies.base.server import _REGISTRY, PersonalizedStrategy


@functools.cache
def _import_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def strategies() -> dict[str, type[PersonalizedStrategy]]:
    """Every method by its name on the command line."""
    _import_all()
    return dict(sorted(_REGISTRY.items()))


__all__ = ["PersonalizedStrategy", "strategies"]
