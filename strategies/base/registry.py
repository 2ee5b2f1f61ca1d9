"""The methods by name: importing a file of the folder ``strategies`` registers the methods in it."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path

from strategies.base import evaluation
from strategies.base.strategy import _EVALUATIONS, _REGISTRY, PersonalizedStrategy


@functools.cache
def _import_all() -> None:
    folder = Path(__file__).resolve().parents[1]
    for module in pkgutil.iter_modules([str(folder)]):
        importlib.import_module(f"{folder.name}.{module.name}")


def strategies() -> dict[str, type[PersonalizedStrategy]]:
    """Every method by its name on the command line."""
    _import_all()
    return dict(sorted(_REGISTRY.items()))


def runnable() -> dict[str, type[PersonalizedStrategy]]:
    """Everything that ``strategy`` may name: the methods, and the evaluation of given models."""
    return {**strategies(), evaluation.EVALUATE: _EVALUATIONS[evaluation.EVALUATE]}
