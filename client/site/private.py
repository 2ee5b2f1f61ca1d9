"""Runs a module of this folder in a process that imports nothing of ours under the name `client`.

    python -P client/site/private.py MODULE ARGUMENTS      e.g. runtime.template SOCKET

The app that Flower ships contains a package `client` of its own. If `sys.modules` had ours already, Python would use
it instead: old code. So this folder is loaded as the package `silofl_site`, and `MODULE`'s `main` runs with the
arguments. Modules loaded this way import their neighbours relatively, the standard library and third-party packages.
"""

import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

PACKAGE = "silofl_site"


def load_site() -> None:
    """Make this folder importable as `silofl_site`."""
    folder = Path(__file__).resolve().parent
    spec = spec_from_file_location(PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    sys.modules[PACKAGE] = package = module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    load_site()
    name = sys.argv.pop(1)
    importlib.import_module(f"{PACKAGE}.{name}").main()
