"""KU-HAR, signals of accelerometer and gyroscope, as in FedMultimodal (KDD 2023) and FedAPM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.datasets.download import decoded, require
from partitions.splits import Array, Dataset, split_table, together

# KU-HAR

KUHAR_FOLDER = "Trimmed_interpolated_data"
KUHAR_PLACES = ("ku-har", "ku_har", "KU-HAR", "kuhar")
KUHAR_CLASSES = ("0.Stand", "1.Sit", "11.Walk", "5.Lay", "8.Jump", "14.Run", "15.Stair-up", "16.Stair-down")
KUHAR_COLUMNS = 8  # time, acceleration (3), time, angular velocity (3)
KUHAR_WITHOUT = "1101"  # a participant whom FedMultimodal leaves out
STEPS, STRIDE, FEWEST = 128, 2, 10  # of a window; every second row is taken; windows of a participant


def load_ku_har(name: str, data_dir: str) -> Dataset:
    """KU-HAR: eight activities of 63 participants, ``acc`` and ``gyro``, float32 (n, 128, 3) each.

    Windows are cut as in FedMultimodal and FedAPM, from 100 rows a second. Window k is every second one of the rows
    256 k to 256 k + 128, 64 steps, padded with zeros to 128. Each channel of a window has mean 0 and standard deviation
    1. Participants with fewer than ten windows are left out. For partitions other than `natural`, 20 % of each class
    are the test samples. The files are read once, then mapped from the cache.
    """
    whence = "unpack 2.Trimmed_interpolated_data.zip of KU-HAR (Mendeley Data, 45f952y38r, version 5)"
    root = require(name, [KUHAR_FOLDER], KUHAR_PLACES, data_dir, whence)
    files: list[tuple[Path, int]] = []
    for label, folder in enumerate(KUHAR_CLASSES):
        found = sorted((root / folder).glob("*.csv"))
        if not found:
            raise DataError(f"{name}: there are no csv files in {root / folder}; {whence}")
        files += [(path, label) for path in found]

    def decode() -> dict[str, Array]:
        windows, labels, who = [], [], []
        for path, label in tqdm(files, desc=name, unit=""):
            person = path.name.partition("_")[0]
            own = [] if person == KUHAR_WITHOUT else kuhar_windows(name, path)
            windows += own
            labels += [label] * len(own)
            who += [person] * len(own)
        people = [person for person in sorted(set(who)) if who.count(person) >= FEWEST]
        order = [i for person in people for i, one in enumerate(who) if one == person]
        if not order:
            raise DataError(f"{name}: no participant in {root} has {FEWEST} windows; unpack the whole archive")
        return {"x": np.stack(windows)[order], "y": np.array(labels)[order], "who": np.array(who)[order]}

    arrays = decoded(name, [path for path, _ in files], decode)
    x = together({"acc": arrays["x"][..., :3], "gyro": arrays["x"][..., 3:]})
    who = np.char.add("participant-", arrays["who"])
    return split_table(name, x, arrays["y"].astype(np.int64), len(KUHAR_CLASSES), who)


def kuhar_windows(name: str, path: Path) -> list[Array]:
    """Return all windows of a file, float32 (128, 6) each."""
    try:
        if not path.stat().st_size:
            raise DataError("it is empty")
        rows = np.loadtxt(path, delimiter=",", ndmin=2, dtype=np.float64)
        if rows.shape[1] != KUHAR_COLUMNS or not np.isfinite(rows).all():
            raise DataError(f"{rows.shape[1]} columns in place of {KUHAR_COLUMNS}, or a value that is no number")
    except (OSError, ValueError) as error:
        raise DataError(f"{name}: {path} cannot be read ({error}); unpack it again") from error
    values = rows[:, [1, 2, 3, 5, 6, 7]]
    windows = []
    for k in range(-(-len(values) // STRIDE) // STEPS):
        start = k * STEPS * STRIDE
        cut = values[start : start + STEPS : STRIDE]
        window = np.zeros((STEPS, values.shape[1]), np.float32)
        window[: len(cut)] = (cut - cut.mean(axis=0)) / (cut.std(axis=0) + 1e-5)
        windows.append(window)
    return windows
