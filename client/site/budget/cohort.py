"""The people that a data file is about: counted once per version of the file, and linked to earlier versions.

The record (`../record.py`) has each version with its units, declared cohort, digests of its samples, and the earlier
versions that share one. Two versions belong to one cohort if they share a sample, or if they declare the same
``cohort``. If both declare none, the cohort is the silo's own. So editing a file does not give a new budget.

A separate process reads the file, with the site's own code.
"""

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SiteError
from ..record import Record
from ..takeover import DATA_FILE

ROOT = Path(__file__).resolve().parents[3]
READ = "import sys; sys.path.insert(0, sys.argv[1]); from partitions.units import main; main(sys.argv[2:])"
Reader = Callable[[Path], Mapping[str, Any]]


@dataclass(frozen=True)
class DataFile:
    """One version of a silo's data file. ``patients``: None if the file names none."""

    sha256: str
    silo: str
    cohort: str
    records: int
    patients: int | None
    links: tuple[str, ...]  # earlier versions that share a sample with it

    @property
    def name(self) -> str:
        """Return the name that links versions: the declared cohort, or the silo's own."""
        return f"cohort {self.cohort}" if self.cohort else f"silo {self.silo}"

    def units(self, unit: str) -> int:
        """Return the number of training records or patients. Raises SiteError if patients are not named."""
        if unit == "record":
            return self.records
        if self.patients is None:
            raise SiteError(
                "dp.unit = patient, and its data file names no patients: silofl import --patient COLUMN"
            )
        return self.patients


def read_by_process(path: Path) -> Mapping[str, Any]:
    """Read a data file with the site's own code in a separate process. Raises SiteError with its error line."""
    command = [sys.executable, "-P", "-c", READ, str(ROOT), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout:  # the exit code is 0 if SIGCHLD is ignored, as here
        line = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SiteError(f"its data file cannot be counted: {line}")
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


def data_file(
    state: Path, sha256: str, silo: str, path: Path, read: Reader = read_by_process
) -> DataFile:
    """Return the version of the data file with this SHA-256; a new one is read and noted.

    Raises OSError or SiteError if it cannot be read, or noted.
    """
    record = Record(state)
    with record.reading() as db:
        if known := find_data_file(db, sha256):
            return known
    try:
        found = read(path)
    except SiteError:
        raise
    except ValueError as error:
        raise SiteError(f"its data file cannot be counted: {error}") from None
    own = {*found["samples"]}
    with record.write() as db:
        earlier = db.execute("SELECT sha256, samples FROM data_files ORDER BY sha256")
        links = " ".join(
            name for name, samples in earlier if not own.isdisjoint(samples.split())
        )
        counts = found["cohort"], found["records"], found["patients"]
        samples = " ".join(found["samples"])
        db.execute(DATA_FILE, (sha256, silo, *counts, links, samples))
        return load_data_file(db, sha256)


def load_data_file(db: sqlite3.Connection, sha256: str) -> DataFile:
    """Return a version that the record has. Raises SiteError if it has not."""
    if (found := find_data_file(db, sha256)) is None:
        raise SiteError(
            f"the record has no data file {sha256[:16]}, which was charged: restore the state directory"
        )
    return found


def find_data_file(db: sqlite3.Connection, sha256: str) -> DataFile | None:
    """Return a version from the record; None if it has none."""
    names = "sha256, silo, cohort, records, patients, links"
    row = db.execute(f"SELECT {names} FROM data_files WHERE sha256 = ?", (sha256,)).fetchone()
    if row is None:
        return None
    links = tuple(row[5].split())
    sha256, silo, cohort, records, patients, _ = row
    return DataFile(sha256, silo, cohort, records, patients, links)


def cohort_of(own: DataFile, charged: Mapping[str, DataFile]) -> set[str]:
    """Return the charged versions of the data file, by SHA-256, that are about the same people as ``own``."""
    every = {**charged, own.sha256: own}
    found = set[str]()
    new = {own.sha256}
    while new:
        found |= new
        names = {every[sha256].name for sha256 in found}
        links = {link for sha256 in found for link in every[sha256].links}
        same = {
            sha256
            for sha256, file in every.items()
            if file.name in names or sha256 in links or not found.isdisjoint(file.links)
        }
        new = same - found
    return found & charged.keys()


def label(files: Sequence[DataFile]) -> str:
    """Return a cohort's name: what its files declare, or the silo."""
    declared = sorted({file.cohort for file in files if file.cohort})
    return " + ".join(declared or sorted({file.silo for file in files}))
