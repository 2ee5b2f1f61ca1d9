"""Source of ``silofl watch``: ``progress.jsonl`` of a run, of the newest run in a folder, or of a site's silo.

A run in a terminal as one plain table: once, or again after each news until Ctrl-C.
"""

from __future__ import annotations

import glob
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from client.cli import silo_of_bundle
from client.protocol.keys import site_root
from client.protocol.node import Site
from partitions.common.errors import UserError
from partitions.common.output import columns, output_fault
from server.deploy.control import Connection, read_connection
from server.deploy.credentials import Expiry, expiries
from server.deploy.local.record import find_deployed, find_federation
from server.rendering import fill
from server.results.reading import Tail, run_name
from server.watch.board import Board

PROGRESS = "progress.jsonl"
RUNS = Path("runs")  # the default folder of runs
FIRST = 512  # bytes at the beginning that identify a file
# Maximum bytes read at once, so that the page stays responsive with a long file
LARGEST = 1 << 22
LOOK_SECONDS = 60.0  # between two looks at the server's certificate


class Followed(Tail):
    """Reader of a file that may be replaced."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, largest=LARGEST)
        self._stamp, self._begins = self._look()

    def _look(self) -> tuple[tuple[int, int], bytes]:
        """Return the file's device and inode, which a new file may reuse, and its first bytes."""
        with self.file.open("rb") as reading:
            status = os.fstat(reading.fileno())
            return (status.st_dev, status.st_ino), reading.read(FIRST)

    def is_new(self) -> bool:
        """Return whether the file was replaced or rewritten since the last call."""
        try:
            (stamp, begins), shrunk = self._look(), self.file.stat().st_size < self.position
        except FileNotFoundError:  # begun anew just now
            return True
        other = stamp != self._stamp or not begins.startswith(self._begins) or shrunk
        self._stamp, self._begins = stamp, begins
        return other


@dataclass
class WatchSource:
    """The followed file; at a site the files of all methods and seeds of its newest run.

    ``folder``: a run directory, or a folder whose newest run is followed. With ``silo``, a site's own name, it is the
    site's state directory. ``expected``: the folder is made by the first run. ``connection``: whose certificates are
    shown.
    """

    folder: Path
    silo: str = ""
    expected: bool = False
    connection: Connection | None = None
    looked: float = -math.inf

    def __post_init__(self) -> None:
        self.expiries: list[Expiry] = []
        self.board = Board(self.silo)
        self.tails: list[Followed] = []

    def files(self) -> list[Path]:
        """Return the files to follow now, the newest last; empty if there is none yet."""
        if self.silo:
            files = self.folder.glob(f"*/*/{glob.escape(self.silo)}/run-*/{PROGRESS}")
            # Of each method and seed
            newest = {file.parents[2]: file for file in sorted(files, key=_modified_at)}
            ordered = sorted(newest.values(), key=_modified_at)
            return [file for file in ordered if file.parents[3] == ordered[-1].parents[3]]
        if (self.folder / "config.toml").is_file() or (self.folder / PROGRESS).is_file():
            return [file for file in [self.folder / PROGRESS] if file.exists()]
        return sorted(self.folder.glob(f"*/{PROGRESS}"), key=_modified_at)[-1:]

    def poll(self) -> bool:
        """Process new events; return whether there were any. Raises OSError if the folder cannot be read."""
        if self.expected and not self.folder.exists():
            return False
        os.stat(self.folder)
        if not (files := self.files()):
            return False
        news = any(tail.file not in files or tail.is_new() for tail in self.tails)
        if news:
            self.board, self.tails = Board(self.silo), []
        followed = [tail.file for tail in self.tails]
        with suppress(FileNotFoundError):  # the next look finds it
            self.tails += [Followed(file) for file in files if file not in followed]
        for tail in self.tails:
            before = tail.position
            for event in tail.events():
                self.board.take(event)
            news |= tail.position != before
        return news

    def picture(self) -> dict[str, Any]:
        """Return the board's picture, with the title and the ends of the server's certificates."""
        if self.connection and time.monotonic() - self.looked > LOOK_SECONDS:
            self.expiries, self.looked = expiries(self.connection), time.monotonic()
        ends = [asdict(end) for end in self.expiries]
        return {**self.board.picture(), "title": self.title, "certificates": ends}

    @property
    def title(self) -> str:
        """The name of the watched run or silo."""
        return self.silo or run_name(self.tails[-1].file.parent if self.tails else self.folder)


def _modified_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def find_source(what: str) -> WatchSource:
    """Return the source for a run directory, a folder of runs, a silo's bundle, folder or state, or a connection.

    Without a name: in a silo's container its own state, else the newest run in `runs/`, else the only silo that joined
    from this machine. Raises UserError if there is no such source.
    """
    if not what:
        return _default()
    path = Path(what).expanduser()
    if path.is_file() or (path / ".env").is_file():
        site = silo_of_bundle(path)
        return _of_site(site.name, site.state)
    if path.is_dir():
        if any(path.glob("*/*/*/run-*")) or (path / "audit").is_dir():
            return _of_site(_silo_in(path), path)
        return WatchSource(path.absolute(), connection=_running())
    return _of_connection(what)


def _default() -> WatchSource:
    if os.environ.get("SILOFL_NAME"):
        site = Site.from_environment(os.environ)
        return _of_site(site.name, site.state)
    if RUNS.is_dir():
        return WatchSource(RUNS.absolute(), connection=_running())
    sites = sorted(path for path in site_root().glob("*/state") if path.is_dir())
    if len(sites) == 1:
        return _of_site(sites[0].parent.name, sites[0])
    raise UserError(
        "there is no folder runs here: name a run directory, a connection, or a silo's bundle or state"
    )


def _running() -> Connection | None:
    up = find_federation()
    return up.connection if up else None


def _of_site(name: str, state: Path) -> WatchSource:
    if not state.is_dir():
        raise UserError(
            f"{name} has no state directory {state} on this machine: it has not joined from here"
        )
    return WatchSource(state.absolute(), name)


def _silo_in(state: Path) -> str:
    """Return the only silo with states in a state directory. Raises UserError for none or several."""
    names = {file.parent.name for file in state.glob("*/*/*/run-*")}
    if len(names) != 1:
        text = (
            f"several silos: {', '.join(sorted(names))}"
            if names
            else "no run of a silo yet: name its bundle"
        )
        raise UserError(f"{state} holds the states of {text}")
    return names.pop()


def _of_connection(name: str) -> WatchSource:
    """Return the source of a connection's runs, also before the first. Raises UserError for no such connection."""
    try:
        connection = read_connection(name)
    except ValueError as error:
        raise UserError(f"there is no run directory {name}; and {error}") from None
    deployed = find_deployed(name)
    folder = Path(deployed.runs) if deployed else RUNS.absolute()
    return WatchSource(folder, expected=True, connection=connection)


REFRESH_SECONDS = 0.5
QUIET_SECONDS = 60.0  # after which a site that hears nothing says so anew


def show_run(source: WatchSource, *, once: bool) -> None:
    """Print the table; without ``once``, again whenever something has happened, at a site each minute, until Ctrl-C."""
    while source.poll():  # a long file is read in parts
        pass
    while True:
        print("\n".join(lines(source.picture(), source.title)), flush=True)
        if once or output_fault():
            return
        printed = time.monotonic()
        while not source.poll():
            if source.silo and time.monotonic() - printed > QUIET_SECONDS:
                break
            time.sleep(REFRESH_SECONDS)
        print()


def lines(picture: Mapping[str, Any], title: str) -> list[str]:
    """Return a picture's lines. Text from silos or the server is escaped: it cannot control the terminal."""
    rows_of_text = [
        line.split("\t")
        for line in fill("watch/page.txt", picture=picture, title=title).split("\n")[:-1]
    ]
    rows = [cells for cells in rows_of_text if len(cells) > 1]
    table = columns(cells[:-1] for cells in rows) if rows else []
    return [
        *(line for line, *cells in rows_of_text if not cells),
        *(f"{line}  {cells[-1]}".rstrip() for line, cells in zip(table, rows, strict=True)),
    ]
