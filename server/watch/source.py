"""Find and follow ``progress.jsonl``: of a run, of the newest run of a folder, or of a site's own silo."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from client.site.node import Site
from client.site.trust.bundle import read_bundle, site_of
from client.site.trust.keys import site_root
from partitions.common.errors import UserError
from server.deploy.containers import find_deployed
from server.deploy.control import read_connection
from server.watch.board import Board

PROGRESS = "progress.jsonl"
RUNS = Path("runs")  # where runs land if nothing else is said
FIRST = 512  # bytes at the beginning, by which two files differ
LARGEST = 1 << 24  # bytes that are read at once


class Source:
    """The file that is followed.

    ``folder``: a run's directory, or one whose newest run is followed. With ``silo``, a site's own name, it is the
    site's state directory.
    """

    def __init__(self, folder: Path, silo: str = "") -> None:
        self.folder, self.silo = folder, silo
        self.board = Board(silo)
        self.file: Path | None = None
        self._stamp: tuple[int, int] | None = None  # device and inode, which a new file may have again
        self._begins = b""  # the first bytes
        self._read = 0

    def newest(self) -> Path | None:
        """Return the file to follow now; None where there is none yet."""
        if self.silo:
            found = list(self.folder.glob(f"*/*/{glob.escape(self.silo)}/run-*/{PROGRESS}"))
        elif (self.folder / "config.toml").is_file() or (self.folder / PROGRESS).is_file():
            return self.folder / PROGRESS
        else:
            found = list(self.folder.glob(f"*/{PROGRESS}"))
        return max(found, key=_modified, default=None)

    def look(self) -> bool:
        """Take in what is new, and return whether something is. Raises OSError where the folder cannot be read."""
        os.stat(self.folder)
        file = self.newest()
        if file is None or not file.exists():
            return False
        found = file.stat()
        stamp = found.st_dev, found.st_ino
        begins = first_bytes(file)
        other = stamp != self._stamp or not begins.startswith(self._begins)
        if again := other or found.st_size < self._read:  # another file, or one that was written anew
            self.file, self._stamp, self._read, self.board = file, stamp, 0, Board(self.silo)
        self._begins = begins
        news = False
        for event in self._events(file):
            self.board.take(event)
            news = True
        return news or again

    def _events(self, file: Path) -> Iterator[dict[str, Any]]:
        """Yield the new whole lines; what is no event is passed over."""
        while True:
            with file.open("rb") as reading:
                reading.seek(self._read)
                data = reading.read(LARGEST)
            end = data.rfind(b"\n") + 1
            if not end and len(data) == LARGEST:
                end = LARGEST  # a line that no process of ours writes
            if not end:
                return
            self._read += end
            for text in data[:end].splitlines():
                try:
                    event = json.loads(text)
                except (ValueError, RecursionError):
                    continue
                if isinstance(event, dict):
                    yield event

    @property
    def title(self) -> str:
        """Return the name of what is watched: of the run directory, or of the silo."""
        return self.silo or (self.file.parent.name if self.file else self.folder.name)


def first_bytes(file: Path) -> bytes:
    with file.open("rb") as reading:
        return reading.read(FIRST)


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def find_source(what: str) -> Source:
    """Return what to follow: a run directory, a folder of runs, a silo's bundle, folder or state, or a connection.

    Without a name: in a silo's container its own, else the newest run in `runs/`, else the only silo that joined from
    this machine. Raises UserError, one line, where there is no such thing.
    """
    if not what:
        return _default()
    path = Path(what).expanduser()
    if path.is_file() or (path / ".env").is_file():
        site = site_of(read_bundle(path), Path())
        return _of_site(site.name, site.state)
    if path.is_dir():
        if any(path.glob("*/*/*/run-*")) or (path / "audit").is_dir():
            return _of_site(_silo_in(path), path)
        return Source(path.absolute())
    return _of_connection(what)


def _default() -> Source:
    if os.environ.get("SILOFL_NAME"):
        site = Site.from_environment(os.environ)
        return _of_site(site.name, site.state)
    if RUNS.is_dir():
        return Source(RUNS.absolute())
    sites = sorted(path for path in site_root().glob("*/state") if path.is_dir())
    if len(sites) == 1:
        return _of_site(sites[0].parent.name, sites[0])
    raise UserError("there is no folder runs here: name a run directory, a connection, or a silo's bundle or state")


def _of_site(name: str, state: Path) -> Source:
    if not state.is_dir():
        raise UserError(f"{name} has no state directory {state} on this machine: it has not joined from here")
    return Source(state.absolute(), name)


def _silo_in(state: Path) -> str:
    """Return the only silo that keeps states below a state directory. Raises UserError where there are several."""
    names = {file.parent.name for file in state.glob("*/*/*/run-*")}
    if len(names) != 1:
        found = f"several silos: {', '.join(sorted(names))}" if names else "no run of a silo yet: name its bundle"
        raise UserError(f"{state} holds the states of {found}")
    return names.pop()


def _of_connection(name: str) -> Source:
    """Return the folder in which runs of a connection land. Raises UserError where there is no such connection."""
    try:
        read_connection(name)
    except ValueError as error:
        raise UserError(f"there is no run directory {name}; and {error}") from None
    deployed = find_deployed(name)
    folder = Path(deployed.runs) if deployed else RUNS.absolute()
    if not folder.is_dir():
        raise UserError(f"{name} has no runs in {folder} yet: start one, or name its directory")
    return Source(folder)
