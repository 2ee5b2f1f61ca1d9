"""The code of a network, a trainer or a data set that a hospital has of its own: its SHA-256, and its import.

What was summed is what runs: the files of the folder on Python's path are read once per process, summed, and compiled
from the bytes that were read. No ``.pyc`` there is read, and a module that was not summed is refused. Installed
packages are imported as always; their sum is over the package's ``.py`` files.

A hospital's own process loads this file, too (`client/protocol/code.py`): it imports the standard library only.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any

INSTALLED = frozenset(sysconfig.get_paths().values())
THIS = "partitions/common/source_sum.py"  # the folder that has it is silofl's


def source_sum(module: str, file: Path) -> str:
    """Return the sum over all code in the folder on Python's path from which ``file`` defines ``module``.

    Of an installed package and of silofl's own it is over the modules of that package, or over ``file`` alone.
    """
    depth = module.count(".") + (file.name == "__init__.py")
    folder = file.parents[depth]
    if is_own(folder):
        return sum_of(read_code(folder))
    paths = sorted(file.parents[depth - 1].rglob("*.py")) if depth else [file]
    base = file.parents[max(depth - 1, 0)]
    return sum_of({path.relative_to(base).as_posix(): path.read_bytes() for path in paths})


def is_own(folder: Path) -> bool:
    """Return whether a folder on Python's path holds a hospital's own code."""
    installed = str(folder) in INSTALLED or folder.name in ("site-packages", "dist-packages")
    return not installed and not (folder / THIS).is_file()


def read_code(folder: Path) -> dict[str, bytes]:
    """Return the files that an import can reach in a folder, by relative path: ``.py`` and ``.so``, not by a link."""
    files = {}
    for where, below, names in os.walk(folder):
        below[:] = [name for name in below if name.isidentifier() and name != "__pycache__"]
        for name in names:
            path = Path(where, name)
            if path.suffix in (".py", ".so") and path.is_file():
                files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return dict(sorted(files.items()))


def sum_of(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 over paths and contents."""
    total = hashlib.sha256()
    for path, content in files.items():
        total.update(f"{path}\n".encode())
        total.update(hashlib.sha256(content).digest())
    return total.hexdigest()


class SummedLoader(SourceFileLoader):
    """A loader of a module from bytes."""

    files: Mapping[str, bytes]  # by their absolute paths

    def get_data(self, path: str) -> bytes:
        return self.files[path] if path in self.files else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        """Compile the bytes that were read; SourceFileLoader would look for a ``.pyc``."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.files[path], path)


class Summed:
    """A finder of the modules in a folder of own code, which are made of the bytes that were read.

    It holds for imports at any later time, too. What Python would import of the folder and was not read is refused.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, files = folder, read_code(folder)
        self.sum = sum_of(files)
        self.files = {str(folder / path): content for path, content in files.items()}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _: Any = None
    ) -> ModuleSpec | None:
        """Return a module of the folder; None for another one. Raises ImportError for one that was not read."""
        usual = PathFinder.find_spec(name, path)
        if usual is None:
            return None
        place = str(self.folder.joinpath(*name.split(".")))
        where = usual.origin or next(iter(usual.submodule_search_locations or ()), "")
        if where != place and not where.startswith((place + os.sep, place + ".")):
            return None
        for file in (f"{place}{os.sep}__init__.py", f"{place}.py"):
            if file in self.files:
                loader = SummedLoader(name, file)
                loader.files = self.files
                return spec_from_file_location(name, file, loader=loader)
        if where in self.files:  # a library, which is loaded from a copy in memory
            with open(os.memfd_create(name), "wb", closefd=False) as copy:
                copy.write(self.files[where])
                file = f"/proc/self/fd/{copy.fileno()}"
            library = ExtensionFileLoader(name, file)
            library.files = self.files  # type: ignore[attr-defined]
            return spec_from_file_location(name, file, loader=library)
        if usual.loader is None and any(file.startswith(place + os.sep) for file in self.files):
            return usual  # a package without __init__.py
        raise ImportError(
            f"{name} is not among the .py and .so files of {self.folder} whose SHA-256 was taken",
            name=name,
        )

    def is_loaded(self) -> bool:
        """Return whether a module of the folder is imported."""
        loaders = (getattr(module, "__loader__", None) for module in list(sys.modules.values()))
        return any(getattr(loader, "files", None) is self.files for loader in loaders)


def read_once(name: str) -> str:
    """Read the code from which a module is imported, if it is own code; return its SHA-256, "" for other modules.

    It is read again only when no module of it is imported.
    """
    spec = PathFinder.find_spec(name.partition(".")[0])
    where = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), ""))
    if not where:
        return ""
    file = Path(where)
    folder = file.parents[file.name == "__init__.py"]
    known = [
        finder
        for finder in sys.meta_path
        if isinstance(finder, Summed) and finder.folder == folder
    ]
    if known and known[0].is_loaded():
        return known[0].sum
    if not is_own(folder) or name.partition(".")[0] in sys.modules:
        return ""
    for finder in known:
        sys.meta_path.remove(finder)
    summed = Summed(folder)
    sys.meta_path.insert(0, summed)
    return summed.sum
