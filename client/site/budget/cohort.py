"""The people that a data file is about: counted once per version of the file, and linked to earlier versions.

    STATE_DIR/budget/data/SHA256.json       units, declared cohort, earlier versions that share a sample
    STATE_DIR/budget/data/SHA256.samples    the digests of its samples, one per line

Two versions belong to one cohort if they share a sample, or if they declare the same ``cohort``. If both declare none,
the cohort is the silo's own. So editing a file does not give a new budget.

Standard library only, as in trust/policy.py: a separate process reads the file, with the site's own code.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SiteError
from ..trust.chain import digest, write_whole

FOLDER = "budget"  # in the state directory
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
    note: str = ""  # SHA-256 of the note; a charge contains it, so that an edited note gives no new budget

    @property
    def name(self) -> str:
        """Return the name that links versions: the declared cohort, or the silo's own."""
        return f"cohort {self.cohort}" if self.cohort else f"silo {self.silo}"

    def units(self, unit: str) -> int:
        """Return the number of training records or patients. Raises SiteError if patients are not named."""
        if unit == "record":
            return self.records
        if self.patients is None:
            raise SiteError("dp.unit = patient, and its data file names no patients: silofl import --patient COLUMN")
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


def data_file(state: Path, sha256: str, silo: str, path: Path, read: Reader = read_by_process) -> DataFile:
    """Return the version of the data file with this SHA-256; a new one is read and noted.

    Raises OSError or SiteError if it cannot be read, or noted.
    """
    folder = state / FOLDER / "data"
    if not (folder / f"{sha256}.json").exists():
        try:
            found = read(path)
        except SiteError:
            raise
        except ValueError as error:
            raise SiteError(f"its data file cannot be counted: {error}") from None
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        own, listed = set(found["samples"]), "\n".join(found["samples"]) + "\n"
        earlier = {file.stem for ending in ("json", "samples") for file in folder.glob(f"*.{ending}")}
        links = [name for name in sorted(earlier) if not own.isdisjoint(samples_in(folder / f"{name}.samples"))]
        write_whole(folder / f"{sha256}.samples", listed)
        fields = {key: found[key] for key in ("cohort", "records", "patients")}
        fields |= {"silo": silo, "links": links, "samples": digest(listed.encode())}
        write_whole(folder / f"{sha256}.json", json.dumps(fields) + "\n")
    return noted(state, sha256)


def samples_in(file: Path) -> list[str]:
    """Return the digests of an earlier version's samples. Raises SiteError if they are missing or changed."""
    try:
        text, note = file.read_text(), file.with_suffix(".json")
    except FileNotFoundError:
        raise SiteError(f"{FOLDER}/data/{file.name} is missing: restore the state directory") from None
    if note.exists() and digest(text.encode()) != json.loads(note.read_text()).get("samples", digest(text.encode())):
        raise SiteError(f"{FOLDER}/data/{file.name} was changed: restore the state directory")
    return text.split()


def noted(state: Path, sha256: str) -> DataFile:
    """Return a version from its note. Raises SiteError if the note is missing or damaged."""
    file = state / FOLDER / "data" / f"{sha256}.json"
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text)
        patients = found["patients"]
        counts = int(found["records"]), None if patients is None else int(patients)
        names, links = (str(found["silo"]), str(found["cohort"])), tuple(map(str, found["links"]))
        return DataFile(sha256, *names, *counts, links, digest(text.encode()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SiteError(
            f"{FOLDER}/data/{file.name} is missing or damaged ({type(error).__name__}): restore the state directory"
        ) from None


def cohort_of(own: DataFile, charged: Mapping[str, DataFile]) -> set[str]:
    """Return the charged versions of the data file, by SHA-256, that are about the same people as ``own``."""
    every = {**charged, own.sha256: own}
    found, new = set[str](), {own.sha256}
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


def label(state: Path, versions: set[str]) -> str:
    """Return a cohort's name: what its files declare, or the silo."""
    files = [noted(state, sha256) for sha256 in sorted(versions)]
    declared = sorted({file.cohort for file in files if file.cohort})
    return " + ".join(declared or sorted({file.silo for file in files}))
