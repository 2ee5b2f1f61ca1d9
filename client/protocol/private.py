"""Runs a module of `client` in a process that imports nothing of ours under the name `client`.

    python -P client/protocol/private.py MODULE ARGUMENTS      e.g. site.runtime.template SOCKET

The app that Flower ships contains a package `client` of its own. If `sys.modules` had ours already, Python would use
it instead: old code. So the folder `client` is loaded as the package `silofl_site`, and `MODULE`'s `main` runs with the
arguments. Modules loaded this way import their neighbours relatively, the standard library and third-party packages.
"""

import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "silofl_site"


def load_site() -> None:
    """Make the folder `client` importable as `silofl_site`."""
    folder = Path(__file__).resolve().parents[1]
    spec = spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[PACKAGE] = package = module_from_spec(spec)
    spec.loader.exec_module(package)


def load_ours(folder: str, name: str) -> Any:
    """Return a module of another folder of ours, such as `partitions/common`, under a name that no app uses.

    It and its neighbours import each other relatively, and nothing else of ours.
    """
    if __package__ != f"{PACKAGE}.protocol":
        return importlib.import_module(f"{folder.replace('/', '.')}.{name}")
    package = f"{PACKAGE}.{folder.replace('/', '_')}"
    if package not in sys.modules:
        sys.modules[package] = bare = ModuleType(package)
        bare.__path__ = [str(Path(__file__).resolve().parents[2] / folder)]
    return importlib.import_module(f"{package}.{name}")


def available_share() -> float:
    """Return the free share of this machine's or container's scarcest memory, from 0 to 1."""
    return float(load_ours("partitions/common", "memory").available_share())


def return_memory() -> None:
    """Give memory that is free in this process back to the system."""
    load_ours("partitions/common", "memory").return_memory()


if __name__ == "__main__":
    load_site()
    name = sys.argv.pop(1)
    importlib.import_module(f"{PACKAGE}.{name}").main()
