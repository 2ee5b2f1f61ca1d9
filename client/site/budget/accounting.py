"""The cost of a training message under differential privacy, computed by this site itself, and whose data it is about.

The people that a data file is about are counted once per version of the file. The record (`../record.py`) has each
version with its units, declared cohort, digests of its samples, and the earlier versions that share one. Two versions
belong to one cohort if they share a sample, or if they declare the same ``cohort``. If both declare none, the cohort is
the silo's own. So editing a file does not give a new budget. A separate process reads the file, with the site's code.

Inputs are the run's settings, the units that this site counts, and the method's declaration (`methods.json`). The
app that the message is for cannot influence them, and it takes at most that many noised steps.

The accountant (`models/privacy/accountant.py`) is loaded from its file, since `models` is the app's package.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...protocol.methods import DEFAULTS, METHODS
from ...protocol.parsed import SiteError
from ...protocol.policy import UNITS
from ...protocol.private import load_ours
from ...protocol.run_settings import number
from ..record import DATA_FILE, Record

ROOT = Path(__file__).resolve().parents[3]
READ = "import sys; sys.path.insert(0, sys.argv[1]); from partitions.units import main; main(sys.argv[2:])"


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
    counted: Mapping[str, Any] = json.loads(done.stdout)
    return counted


def data_file(state: Path, sha256: str, silo: str, path: Path) -> DataFile:
    """Return the version of the data file with this SHA-256; a new one is read and noted.

    Raises OSError or SiteError if it cannot be read, or noted.
    """
    record = Record(state)
    with record.reading() as db:
        if known := find_data_file(db, sha256):
            return known
    counted = read_by_process(path)
    digests = {*counted["samples"]}
    with record.write() as db:
        earlier = db.execute("SELECT sha256, samples FROM data_files ORDER BY sha256")
        links = " ".join(
            name for name, samples in earlier if not digests.isdisjoint(samples.split())
        )
        counts = counted["cohort"], counted["records"], counted["patients"]
        samples = " ".join(counted["samples"])
        db.execute(DATA_FILE, (sha256, silo, *counts, links, samples))
        return load_data_file(db, sha256)


def load_data_file(db: sqlite3.Connection, sha256: str) -> DataFile:
    """Return a version that the record has. Raises SiteError if it has not."""
    if (version := find_data_file(db, sha256)) is None:
        raise SiteError(
            f"the record has no data file {sha256[:16]}, which was charged: restore the state directory"
        )
    return version


def find_data_file(db: sqlite3.Connection, sha256: str) -> DataFile | None:
    """Return a version from the record; None if it has none."""
    names = "sha256, silo, cohort, records, patients, links"
    row = db.execute(f"SELECT {names} FROM data_files WHERE sha256 = ?", (sha256,)).fetchone()
    if row is None:
        return None
    links = tuple(row[5].split())
    sha256, silo, cohort, records, patients, _ = row
    return DataFile(sha256, silo, cohort, records, patients, links)


def label(files: Sequence[DataFile]) -> str:
    """Return a cohort's name: what its files declare, or the silo."""
    declared = sorted({file.cohort for file in files if file.cohort})
    return " + ".join(declared or sorted({file.silo for file in files}))


MOST_DELTA = 1e-5  # if neither the site nor the run sets one


@dataclass(frozen=True)
class MessageCost:
    """The noised steps of one message: number of units, share per step, and noise."""

    unit: str
    units: int
    rate: float  # mean share of the units in a step's batch
    noise: float  # noise multiplier: standard deviation in clip norms
    steps: int
    delta: float  # of the run

    @property
    def fields(self) -> dict[str, Any]:
        """Return the values as in a line of the ledger."""
        return {name: value for name, value in vars(self).items() if name != "delta"}


def accountant() -> Any:
    """Return the module with the accountant, which imports NumPy."""
    return load_ours("models/privacy", "accountant")


def epsilon_of(lines: Iterable[Mapping[str, Any]], delta: float) -> float:
    """Return the epsilon of all charges together."""
    return float(accountant().epsilon_of(lines, delta))


def default_delta(units: int) -> float:
    """Return the default delta: at most one tenth of a unit's share."""
    return min(MOST_DELTA, 1 / (10 * max(units, 1)))


def cost_of(run: Mapping[str, Any], data: DataFile) -> MessageCost:
    """Compute the cost of a training message of this run. Raises SiteError if it cannot be computed.

    With ``dp.target-epsilon`` the noise is such that all rounds of the run together cost that epsilon. A patient is
    sampled at the rate of a record.
    """

    def value(key: str) -> float:
        setting = number(run.get(key, DEFAULTS[key]))
        if setting is None or setting < 0:
            raise SiteError(f"{key} = {run.get(key)!r:.40}: no cost can be computed")
        return setting

    unit = str(run.get("dp.unit", DEFAULTS["dp.unit"]))
    if unit not in UNITS:
        raise SiteError(f"dp.unit = {unit:.40}: one of {', '.join(UNITS)} is needed here")
    units = data.units(unit)
    sums = METHODS[str(run.get("strategy"))]["dp"] == "sums"  # of all records, once a message
    batch = data.records if sums else min(value("batch-size"), data.records)
    if batch < 1:
        raise SiteError(
            f"batch-size = {run.get('batch-size')!r:.40} of {data.records} records: no cost can be computed"
        )
    rate, steps = batch / data.records, steps_of(run, data.records / batch, value)
    delta = value("dp.delta") or default_delta(units)
    noise, target = value("dp.noise-multiplier"), value("dp.target-epsilon")
    try:
        if target and steps:
            noise = accountant().noise_multiplier_for(
                target, rate, steps * int(value("rounds")), delta
            )
        epsilon_of([{"noise": noise, "rate": rate, "steps": steps}], delta)
    except ValueError as error:
        raise SiteError(str(error)) from None
    return MessageCost(unit=unit, units=units, rate=rate, noise=noise, steps=steps, delta=delta)


def steps_of(run: Mapping[str, Any], per_epoch: float, value: Callable[[str], float]) -> int:
    """Return the number of noised steps of one training message, over all epochs of each training with noise.

    The policy refuses a method without a declaration of differential privacy (`privacy_faults`).
    """
    declared = METHODS[str(run.get("strategy"))]["dp"]
    if isinstance(declared, str):  # else nothing computed from the data leaves
        return int(declared == "sums")
    epochs = (count for training in declared for count in epochs_of(training, run, value))
    return sum(max(round(count * per_epoch), 1) for count in epochs if count)


def epochs_of(
    training: Mapping[str, Any], run: Mapping[str, Any], value: Callable[[str], float]
) -> list[float]:
    """Return the epochs of each training with noise, as ``NoisedEpochs`` declares it (`strategies/base/info.py`)."""
    if key := training.get("where"):
        setting = run.get(key, DEFAULTS[key])
        equals = training.get("equals")
        if str(setting) != equals if equals else not number(setting):
            return []
    count = training["epochs"]
    if isinstance(count, str):
        count = value(count) or value("local-epochs")
    return [1.0] * int(count) if training.get("each") else [float(count)]
