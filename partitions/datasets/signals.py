"""Data sets of signals and precomputed features as in FedMultimodal (KDD 2023) and FedAPM.

They are KU-HAR, Crema-D and CrisisMMD. Each sample has two inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.datasets.pickles import read_pickle
from partitions.datasets.registry import Source
from partitions.splits import Array, Arrays, Dataset, Split
from partitions.stored import together

# KU-HAR

KUHAR_COLUMNS = 8  # time, acceleration (3), time, angular velocity (3)
KUHAR_WITHOUT = "1101"  # a participant whom FedMultimodal leaves out
# Of a window; every second row is taken; windows of a participant
STEPS, STRIDE, FEWEST = 128, 2, 10


def load_ku_har(source: Source) -> Dataset:
    """KU-HAR: eight activities of 63 participants, ``acc`` and ``gyro``, float32 (n, 128, 3) each.

    Windows are cut as in FedMultimodal and FedAPM, from 100 rows a second. Window k is every second one of the rows
    256 k to 256 k + 128, 64 steps, padded with zeros to 128. Each channel of a window has mean 0 and standard deviation
    1. Participants with fewer than ten windows are left out. For partitions other than `natural`, 20 % of each class
    are the test samples. The files are read once, then mapped from the cache.
    """
    root = source.require("Trimmed_interpolated_data")
    files: list[tuple[Path, int]] = []
    for label, folder in enumerate(source.about["classes"]):
        paths = sorted((root / folder).glob("*.csv"))
        if not paths:
            raise source.fault(
                f"there are no csv files in {root / folder}; {source.described.whence}"
            )
        files += [
            (path, label) for path in paths if path.name.partition("_")[0] != KUHAR_WITHOUT
        ]

    def decode() -> Arrays:
        windows = [
            (path.name.partition("_")[0], label, window)
            for path, label in tqdm(files, desc=source.name, unit="")
            for window in kuhar_windows(source, path)
        ]
        counts = Counter(person for person, _, _ in windows)
        windows = [window for window in windows if counts[window[0]] >= FEWEST]
        if not windows:
            raise source.fault(
                f"no participant in {root} has {FEWEST} windows; unpack the whole archive"
            )
        windows.sort(key=itemgetter(0))
        who, y, x = map(np.array, zip(*windows, strict=True))
        return {"x": x, "y": y, "who": who}

    arrays = source.once([path for path, _ in files], decode)
    x = together({"acc": arrays["x"][..., :3], "gyro": arrays["x"][..., 3:]})
    who = np.char.add("participant-", arrays["who"])
    return source.divide_table(x, arrays["y"].astype(np.int64), who)


def kuhar_windows(source: Source, path: Path) -> list[Array]:
    """Return all windows of a file, float32 (128, 6) each."""
    with source.reading(path):
        if not path.stat().st_size:
            raise DataError("it is empty")
        rows = np.loadtxt(path, delimiter=",", ndmin=2, dtype=np.float64)
        if rows.shape[1] != KUHAR_COLUMNS or not np.isfinite(rows).all():
            raise DataError(
                f"{rows.shape[1]} columns in place of {KUHAR_COLUMNS}, or a value that is no number"
            )
    values, windows = rows[:, [1, 2, 3, 5, 6, 7]], []
    for k in range(-(-len(values) // STRIDE) // STEPS):
        start = k * STEPS * STRIDE
        cut = values[start : start + STEPS : STRIDE]
        window = np.zeros((STEPS, values.shape[1]), np.float32)
        window[: len(cut)] = (cut - cut.mean(axis=0)) / (cut.std(axis=0) + 1e-5)
        windows.append(window)
    return windows


# Features that FedMultimodal's scripts make: feature/MODALITY/KIND/DATASET/FOLDER/CLIENT.pkl


def load_crema_d(source: Source) -> Dataset:
    """Crema-D: four emotions of the 72 speakers of FedMultimodal's first fold, ``audio`` and ``video``.

    It needs precomputed features, a pickle per speaker: ``feature/audio/mfcc/crema_d/fold1`` (80 values per frame) and
    ``feature/video/mobilenet_v2/crema_d/fold1`` (1280 per picture). ``dev`` and ``test`` there, which are of several
    speakers, are left out, as in FedAPM. Samples are padded with zeros to the longest. For partitions other than
    `natural`, 20 % of each class are the test samples. The files are read once, then mapped from the cache.
    """
    folders = feature_folders(source)
    clients = [name for name in feature_clients(source, folders) if name not in ("dev", "test")]
    arrays = read_clients(source, folders, clients)
    who = np.repeat([f"speaker-{client}" for client in clients], arrays["size"])
    return source.divide_table(np.asarray(arrays["x"]), arrays["y"], who)


def load_crisis_mmd(source: Source) -> Dataset:
    """CrisisMMD: tweets of disasters, eight humanitarian classes by the picture, ``image`` and ``text``.

    It needs precomputed features: ``feature/img/mobilenet_v2/crisis_mmd/alpha10`` (1280 values of a picture) and
    ``feature/text/mobilebert/crisis_mmd/alpha10`` (512 per token, padded with zeros to the longest), or another
    ``alpha``. The pickles of all clients are joined: ``test`` gives the test samples, all others and ``dev`` the
    training samples. The files are read once, then mapped from the cache.
    """
    folders = feature_folders(source)
    clients = feature_clients(source, folders)
    if "test" not in clients or len(clients) < 2:
        raise source.fault(
            f"there is no test.pkl, or nothing else, in {folders['image']}; {source.described.mend}"
        )
    clients.append(clients.pop(clients.index("test")))
    arrays = read_clients(source, folders, clients, single=("image",))
    x, y, n = arrays["x"], arrays["y"], int(arrays["size"][:-1].sum())
    return source.in_parts(Split(x[:n], y[:n]), Split(x[n:], y[n:]))


def feature_folders(source: Source) -> dict[str, Path]:
    """Return the folder of pickles of each input: of the second one that with the same name as the first one's."""
    folders, first = dict[str, Path](), ""
    for name, kind in source.about["kinds"].items():
        below = [f"feature/{kind}/{folder}" for folder in source.about["below"]]
        folders[name] = source.require(*(path for path in below if path.endswith(first)))
        first = folders[name].name
    return folders


def feature_clients(source: Source, folders: Mapping[str, Path]) -> list[str]:
    """Return the clients with pickles in all folders, in alphabetical order. Raises DataError for different files."""
    names = [sorted(path.stem for path in folder.glob("*.pkl")) for folder in folders.values()]
    if not names[0] or names[0] != names[1]:
        first, second = folders.values()
        raise source.fault(
            f"{first} and {second} have not the same files *.pkl, or none; {source.described.mend}"
        )
    return names[0]


class FeatureEntry(NamedTuple):
    """One entry of a file of features. ``values``: float32 (steps, channels), None where the modality is missing."""

    key: str
    label: int
    values: Array | None


def read_clients(
    source: Source,
    folders: Mapping[str, Path],
    clients: Sequence[str],
    single: Sequence[str] = (),
) -> Arrays:
    """Return both inputs of all clients' samples (n,), labels int64 (n,), and each client's sample count; read once.

    ``single``: inputs with one step only, which become tables.
    """

    def decode() -> Arrays:
        parts: dict[str, list[FeatureEntry]] = {name: [] for name in folders}
        sizes = []
        for client in tqdm(clients, desc=source.name, unit=""):
            read = [
                read_feature_file(source, folder / f"{client}.pkl")
                for folder in folders.values()
            ]
            for name, features in zip(parts, read, strict=True):
                if [entry[:2] for entry in features] != [entry[:2] for entry in read[0]]:
                    raise source.fault(
                        f"{client}.pkl has other samples in {folders[next(iter(folders))]} than beside it"
                    )
                parts[name] += features
            sizes.append(len(read[0]))
        x = together(
            {
                name: pad_features(source, folders[name], features, name in single)
                for name, features in parts.items()
            }
        )
        y = np.array([feature.label for feature in next(iter(parts.values()))], np.int64)
        return {"x": x, "y": y, "size": np.array(sizes)}

    files = [folder / f"{client}.pkl" for folder in folders.values() for client in clients]
    return source.once(files, decode)


def pad_features(
    source: Source, folder: Path, features: Sequence[FeatureEntry], single: bool
) -> Array:
    """Return the features, padded with zeros, float32 (n, steps, channels), or (n, channels) for a single step."""
    there = [feature.values.shape for feature in features if feature.values is not None]
    if not there or len({channels for _, channels in there}) > 1:
        raise source.fault(
            f"features in {folder} have different numbers of values, or there are none; {source.described.whence}"
        )
    steps = max(steps for steps, _ in there)
    if single and steps > 1:
        raise source.fault(
            f"a sample in {folder} has {steps} steps in place of one; {source.described.mend}"
        )
    x = np.zeros((len(features), steps, there[0][1]), np.float32)
    for row, feature in zip(x, features, strict=True):
        if feature.values is not None:
            row[: len(feature.values)] = feature.values
    return x[:, 0] if single else x


def read_feature_file(source: Source, path: Path) -> list[FeatureEntry]:
    """Read a pickle of entries ``[key, path, label, array]`` without running its code (``pickles.py``)."""
    read, classes = [], source.described.classes
    with source.reading(path):
        entries = read_pickle(path.read_bytes())
        if not isinstance(entries, list) or not entries:
            raise DataError("it holds no list of samples")
        for entry in entries:
            if not isinstance(entry, list) or len(entry) != 4:
                raise DataError("an entry is not key, path, label, array")
            key, _, label, values = entry
            if not isinstance(label, int) or not 0 <= label < classes:
                raise DataError(f"a label is not one of 0 to {classes - 1}")
            if values is not None:
                shaped = isinstance(values, np.ndarray) and values.ndim in (1, 2, 3)
                if not shaped or not values.size:
                    raise DataError("features are no array of steps and channels")
                values = np.atleast_2d(values[0] if values.ndim == 3 else values)
                values = values.astype(np.float32)
                if not np.isfinite(values).all():
                    raise DataError("features have a value that is no finite number")
            read.append(FeatureEntry(str(key), label, values))
    return read
