"""Code that is not ours: a function named as ``package.module:function``, its source's SHA-256, installed plug-ins."""

from __future__ import annotations

import importlib
import locale
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError
from partitions.common.source_sum import read_once, source_sum

STRATEGIES, NETWORKS = "silofl.strategies", "silofl.networks"  # groups of entry points
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


@contextmanager
def put_back(*, environment: bool = True) -> Iterator[None]:
    """Context after which working directory, locale and environment of the process are what they were before.

    silofl's own paths may be relative, and code that is not ours may leave the process somewhere else.
    """
    folder = os.open(".", os.O_RDONLY)
    language, variables = locale.setlocale(locale.LC_ALL), dict(os.environ)
    try:
        yield
    finally:
        os.fchdir(folder)
        os.close(folder)
        if locale.setlocale(locale.LC_ALL) != language:
            locale.setlocale(locale.LC_ALL, language)
        if environment and dict(os.environ) != variables:
            os.environ.clear()
            os.environ.update(variables)


def load_function(setting: str, name: str, arguments: str) -> Callable[..., Any]:
    """Return the function of this name. Its module must define it: one that it only imports is refused.

    ``setting``: what names it, for messages; ``arguments``: what it is called with. Raises UserError, one line.
    """
    module, _, function = name.partition(":")
    try:
        read_once(module)
        with put_back(
            environment=False
        ):  # what a module sets for libraries as it is imported stays
            loaded = getattr(importlib.import_module(module), function, None)
    except Exception as error:
        hint = (
            "; in a simulation PYTHONPATH says where it is"
            if isinstance(error, ImportError)
            else ""
        )
        raise UserError(
            f"{setting} = {name!r}: {module} cannot be imported: {line_of(error)}{hint}"
        ) from None
    if not callable(loaded) or getattr(loaded, "__module__", None) != module:
        raise UserError(
            f"{setting} = {name!r}: {module} defines no function {function}({arguments})"
        )
    return loaded  # type: ignore[no-any-return]


def import_file(module: str, file: Path) -> None:
    """Import a module of a method or another part. Raises UserError with the file and the line of its fault."""
    try:
        importlib.import_module(module)
    except Exception as error:
        places = traceback.extract_tb(error.__traceback__)
        lines = [place.lineno for place in places if place.filename == str(file)]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else 1)
        raise UserError(f"{file}, line {line}: {line_of(error)}") from error


def line_of(error: BaseException) -> str:
    """Return an error's type and text in one line."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def code_sum(function: Callable[..., Any]) -> str:
    """Return the SHA-256 of the code that a function was imported from (:mod:`source_sum`)."""
    module = function.__module__
    summed = read_once(module)
    if summed:
        return summed
    file = sys.modules[module].__file__
    return source_sum(module, Path(str(file)))


def by_entry_point(group: str, name: str) -> str:
    """Return what an installed package's entry point of this name stands for, MODULE:FUNCTION; "" without one."""
    entries = entry_points(group=group, name=name)
    return next((entry.value for entry in entries), "")


def plugins(group: str) -> Iterator[tuple[str, str, Any]]:
    """Yield name, package and object of each entry point, in the order of the names.

    Raises UserError for one that cannot be loaded.
    """
    entries = entry_points(group=group)
    for entry in sorted(entries, key=lambda point: point.name):
        package = entry.dist.name if entry.dist else "a package"
        try:
            yield entry.name, package, entry.load()
        except Exception as error:
            reason = " ".join(repr(error).split())
            raise UserError(
                f"{entry.name} of {package} ({group}) cannot be loaded: {reason[:300]}; update "
                f"{package}, or uninstall it"
            ) from None
