"""Files of a source: all below a folder, those that are passed over, and those that cannot be read.

Messages name a file by its number among all paths in order, where paths may contain patients' names
(``find FOLDER -xtype f | LC_ALL=C sort | sed -n 17p`` is file 17).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.common.names import Names, words_in
from partitions.importing.readers.reader import Unavailable

MOST_NAMED = 3  # files in a message
LINK_OUT = "is a link that leads out of the folder: copy what it points to into its place, or take it out"
SYSTEM = ("thumbs.db", "desktop.ini", "__macosx")  # files and folders that systems make
# Beside scans, where any other text after a point may be a name's
ENDINGS = words_in(
    ".bmp .csv .db .dll .doc .docx .exe .gif .gz .htm .html .inf .ini .jar .jpeg .jpg .js .json .log .md .nii .pdf "
    ".png .tif .tiff .txt .xls .xlsx .xml .zip"
)
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class Faults:
    """Files that cannot be read. ``skip``: they are left out and named (--skip-bad); None: there is no such option."""

    skip: bool | None = False
    messages: list[str] = field(default_factory=list)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Context that adds the fault of a file."""
        try:
            yield
        except Unavailable:
            raise
        except DataError as error:
            self.messages.append(str(error))

    def check(self, total: int) -> None:
        """Raise DataError that names the first of ``total`` files that cannot be read, unless they are left out."""
        if not self.messages or self.skip:
            return
        advice = "" if self.skip is None else "; --skip-bad leaves such files out"
        if len(self.messages) == 1:
            raise DataError(self.messages[0] + advice)
        count, named = len(self.messages), name_first(self.messages)
        raise DataError(f"{count} of {total} files cannot be read: {named}{advice}")

    def good(
        self, items: Sequence[Item], work: Callable[[Item], Result], doing: str
    ) -> list[tuple[Item, Result]]:
        """Return the items that can be read, each with its result. Raises DataError as above, and where none can."""
        results: list[tuple[Item, Result]] = []
        for item in tqdm(items, desc=doing, unit=""):
            with self.collect():
                results.append((item, work(item)))
        self.check(len(items))
        if items and not results:
            raise DataError(f"none of the {len(items)} files can be read: {self.messages[-1]}")
        return results

    @property
    def notes(self) -> Names:
        """Return the number of files that are left out, and each of them."""
        if not self.messages:
            return ()
        return f"{len(self.messages)} files cannot be read: left out (--skip-bad)", *(
            f"left out: {f}" for f in self.messages
        )


def name_first(faults: Sequence[str]) -> str:
    """Return the first faults as text for a message, and the number of further ones."""
    more = len(faults) - MOST_NAMED
    return "; ".join(faults[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, in the order of their paths as bytes; links to folders are not followed."""
    yield from sorted(filter(os.path.isfile, folder.rglob("*")), key=os.fsencode)


def placed_files(source: Path) -> list[tuple[str, Path]]:
    """Return all files below a folder in their order, each with its name for messages."""
    files = list(files_below(source))
    return [(f"{source}, file {i} of {len(files)}", path) for i, path in enumerate(files, 1)]


def check_inside(folder: Path, files: Iterable[tuple[str, Path]], what: str = LINK_OUT) -> None:
    """Raise DataError where a file is outside the folder after following links.

    ``files``: name for messages, and path; ``what``: what such a file is, and how to mend it.
    """
    inside = os.path.realpath(folder)
    for where, path in files:
        if not Path(os.path.realpath(path)).is_relative_to(inside):
            raise DataError(f"{where} {what}")


def is_hidden(path: Path, source: Path) -> bool:
    """Return whether a file, or a folder between it and the source, is hidden or made by a system."""
    return any(
        name.startswith(".") or name.lower() in SYSTEM
        for name in path.relative_to(source).parts
    )


def kind_of_other(path: Path, source: Path, *, named: bool) -> str:
    """Return what a file is that is no picture. ``named``: whether its name may be shown."""
    ending = path.suffix.lower()
    if is_hidden(path, source):
        return "hidden or of the system"
    if not ending:
        return "without an ending"
    return ending if (named and len(ending) < 12) or ending in ENDINGS else "others"


def list_kinds(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def passed_over(source: Path, taken: Collection[Path | None], *, named: bool) -> Names:
    """Return the note on files below a folder that are not ``taken``, and on links."""
    files = list(files_below(source))
    others = set(files).difference(taken)
    kinds = Counter(kind_of_other(path, source, named=named) for path in others)
    notes = [
        f"{kinds.total()} of {len(files)} files are passed over: {list_kinds(kinds)}"
    ] * bool(kinds)
    return *notes, *link_notes(source)


def link_notes(source: Path) -> Names:
    """Return the note on links that are not followed: those to folders, and those to nothing."""
    count = sum(link.is_symlink() and not os.path.isfile(link) for link in source.rglob("*"))
    return (f"{count} links to folders, or to nothing, are passed over",) if count else ()
