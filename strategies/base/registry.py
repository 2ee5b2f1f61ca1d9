"""The methods by name: importing a file of the folder ``strategies`` registers the methods in it.

Other packages' methods come as entry points of the group ``silofl.strategies``, each a class with an ``info``.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path

from partitions.common.errors import UserError
from partitions.common.plugins import STRATEGIES, plugins
from strategies.base import evaluation, survey
from strategies.base.strategy import _EVALUATIONS, _REGISTRY, PersonalizedStrategy


@functools.cache
def _import_all() -> None:
    folder = Path(__file__).resolve().parents[1]
    for module in pkgutil.iter_modules([str(folder)]):
        importlib.import_module(f"{folder.name}.{module.name}")
    own = dict(_REGISTRY)
    for name, package, found in plugins(STRATEGIES):
        changed = [key for key, method in own.items() if _REGISTRY[key] is not method]
        if changed or _REGISTRY.get(name) is not found:
            _REGISTRY.update(own)
            what = f"takes the name {changed[0]!r} of a method of silofl" if changed else "is no method of that name"
            raise UserError(f"{name} of {package} ({STRATEGIES}) {what}; update {package}, or uninstall it")


def strategies() -> dict[str, type[PersonalizedStrategy]]:
    """Return every method by its name on the command line."""
    _import_all()
    return dict(sorted(_REGISTRY.items()))


def method_named(name: str) -> type[PersonalizedStrategy]:
    """Return the class that the setting ``strategy`` names; raise KeyError if there is none."""
    _import_all()
    return _REGISTRY[name] if name in _REGISTRY else _EVALUATIONS[name]


def runnable() -> dict[str, type[PersonalizedStrategy]]:
    """Return all values of the setting ``strategy``: the methods, the evaluation of given models, and a survey."""
    return {**strategies(), **{name: _EVALUATIONS[name] for name in (evaluation.EVALUATE, survey.SURVEY)}}
