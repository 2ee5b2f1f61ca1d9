"""Data sets of signals and precomputed features as in FedMultimodal (KDD 2023) and FedAPM.

They are KU-HAR, Crema-D and CrisisMMD. Each sample has two inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.datasets.download import decode_once, require
from partitions.datasets.pickles import read_pickle
from partitions.splits import Array, Dataset, Split, split_table
from partitions.stored import together

# KU-HAR

KUHAR_FOLDER = "Trimmed_interpolated_data"
KUHAR_PLACES = ("ku-har", "ku_har", "KU-HAR", "kuhar")
KUHAR_CLASSES = (
    "0.Stand",
    "1.Sit",
    "11.Walk",
    "5.Lay",
    "8.Jump",
    "14.Run",
    "15.Stair-up",
    "16.Stair-down",
)
KUHAR_COLUMNS = 8  # time, acceleration (3), time, angular velocity (3)
KUHAR_WITHOUT = "1101"  # a participant whom FedMultimodal leaves out
# Of a window; every second row is taken; windows of a participant
STEPS, STRIDE, FEWEST = 128, 2, 10


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
            raise DataError(
                f"{name}: no participant in {root} has {FEWEST} windows; unpack the whole archive"
            )
        return {
            "x": np.stack(windows)[order],
            "y": np.array(labels)[order],
            "who": np.array(who)[order],
        }

    arrays = decode_once(name, [path for path, _ in files], decode)
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
            raise DataError(
                f"{rows.shape[1]} columns in place of {KUHAR_COLUMNS}, or a value that is no number"
            )
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


# Features that FedMultimodal's scripts make: feature/MODALITY/KIND/DATASET/FOLDER/CLIENT.pkl

FEATURE_PLACES = ("fed-multimodal", "fedmultimodal", "output")
WHENCE = "make it with FedMultimodal's scripts"


class FeatureEntry(NamedTuple):
    """One entry of a file of features. ``values``: float32 (steps, channels), None where the modality is missing."""

    key: str
    label: int
    values: Array | None


def load_crema_d(name: str, data_dir: str) -> Dataset:
    """Crema-D: four emotions of the 72 speakers of FedMultimodal's first fold, ``audio`` and ``video``.

    It needs precomputed features, a pickle per speaker: ``feature/audio/mfcc/crema_d/fold1`` (80 values per frame) and
    ``feature/video/mobilenet_v2/crema_d/fold1`` (1280 per picture). ``dev`` and ``test`` there, which are of several
    speakers, are left out, as in FedAPM. Samples are padded with zeros to the longest. For partitions other than
    `natural`, 20 % of each class are the test samples. The files are read once, then mapped from the cache.
    """
    kinds = {"audio": "audio/mfcc", "video": "video/mobilenet_v2"}
    folders = feature_folders(name, data_dir, kinds, ("crema_d", "crema-d"), "fold1")
    clients = [
        client for client in feature_clients(name, folders) if client not in ("dev", "test")
    ]
    files = [folder / f"{client}.pkl" for folder in folders.values() for client in clients]

    def decode() -> dict[str, Array]:
        x, y, sizes = read_clients(name, folders, clients, classes=4)
        return {"x": x, "y": y, "size": np.array(sizes)}

    arrays = decode_once(name, files, decode)
    who = np.repeat([f"speaker-{client}" for client in clients], arrays["size"])
    return split_table(name, np.asarray(arrays["x"]), arrays["y"], 4, who)


def load_crisis_mmd(name: str, data_dir: str) -> Dataset:
    """CrisisMMD: tweets of disasters, eight humanitarian classes by the picture, ``image`` and ``text``.

    It needs precomputed features: ``feature/img/mobilenet_v2/crisis_mmd/alpha10`` (1280 values of a picture) and
    ``feature/text/mobilebert/crisis_mmd/alpha10`` (512 per token, padded with zeros to the longest), or another
    ``alpha``. The pickles of all clients are joined: ``test`` gives the test samples, all others and ``dev`` the
    training samples. The files are read once, then mapped from the cache.
    """
    kinds = {"image": "img/mobilenet_v2", "text": "text/mobilebert"}
    folders = feature_folders(
        name, data_dir, kinds, ("crisis_mmd", "crisis-mmd"), "alpha10", "alpha50", "alpha01"
    )
    clients = feature_clients(name, folders)
    if "test" not in clients or len(clients) < 2:
        raise DataError(
            f"{name}: there is no test.pkl, or nothing else, in {folders['image']}; {WHENCE} again"
        )
    clients = [*(client for client in clients if client != "test"), "test"]
    files = [folder / f"{client}.pkl" for folder in folders.values() for client in clients]

    def decode() -> dict[str, Array]:
        x, y, sizes = read_clients(name, folders, clients, classes=8, single=("image",))
        return {"x": x, "y": y, "size": np.array(sizes)}

    arrays = decode_once(name, files, decode)
    n = int(arrays["size"][:-1].sum())
    return Dataset(
        name,
        Split(arrays["x"][:n], arrays["y"][:n]),
        Split(arrays["x"][n:], arrays["y"][n:]),
        8,
    )


def feature_folders(
    name: str, data_dir: str, kinds: dict[str, str], sets: Sequence[str], *folders: str
) -> dict[str, Path]:
    """Return the folder of pickles of each input."""
    found: dict[str, Path] = {}
    for own, kind in kinds.items():
        wanted = [f"feature/{kind}/{one}/{folder}" for folder in folders for one in sets]
        if found:  # beside the first input's, of the same folder
            first = next(iter(found.values()))
            wanted = [f"feature/{kind}/{one}/{first.name}" for one in sets]
        found[own] = require(name, wanted, (*sets, *FEATURE_PLACES), data_dir, WHENCE)
    return found


def feature_clients(name: str, folders: dict[str, Path]) -> list[str]:
    """Return the clients with pickles in all folders, in alphabetical order. Raises DataError for different files."""
    names = [sorted(path.stem for path in folder.glob("*.pkl")) for folder in folders.values()]
    if not names[0] or names[0] != names[1]:
        first, second = folders.values()
        raise DataError(
            f"{name}: {first} and {second} have not the same files *.pkl, or none; {WHENCE} again"
        )
    return names[0]


def read_clients(
    name: str,
    folders: dict[str, Path],
    clients: Sequence[str],
    classes: int,
    single: Sequence[str] = (),
) -> tuple[Array, Array, list[int]]:
    """Return both inputs of all clients' samples as one array (n,), labels int64 (n,), and each client's sample count.

    ``single``: inputs with one step only, which become tables.
    """
    parts: dict[str, list[FeatureEntry]] = {own: [] for own in folders}
    sizes = []
    for client in tqdm(clients, desc=name, unit=""):
        found = {
            own: read_features(name, folder / f"{client}.pkl", classes)
            for own, folder in folders.items()
        }
        first, second = (
            [(feature.key, feature.label) for feature in features]
            for features in found.values()
        )
        if first != second:
            raise DataError(
                f"{name}: {client}.pkl has other samples in {folders[next(iter(found))]} than beside it"
            )
        sizes.append(len(first))
        for own, features in found.items():
            parts[own] += features
    inputs = {
        own: pad_features(name, folders[own], features, own in single)
        for own, features in parts.items()
    }
    labels = np.array([feature.label for feature in next(iter(parts.values()))], np.int64)
    return together(inputs), labels, sizes


def pad_features(
    name: str, folder: Path, features: Sequence[FeatureEntry], single: bool
) -> Array:
    """Return the features, padded with zeros, float32 (n, steps, channels), or (n, channels) for a single step."""
    there = [feature.values.shape for feature in features if feature.values is not None]
    if not there or len({channels for _, channels in there}) > 1:
        raise DataError(
            f"{name}: features in {folder} have different numbers of values, or there are none; {WHENCE}"
        )
    steps = max(steps for steps, _ in there)
    if single and steps > 1:
        raise DataError(
            f"{name}: a sample in {folder} has {steps} steps in place of one; {WHENCE} again"
        )
    x = np.zeros((len(features), steps, there[0][1]), np.float32)
    for row, feature in zip(x, features, strict=True):
        if feature.values is not None:
            row[: len(feature.values)] = feature.values
    return x[:, 0] if single else x


def read_features(name: str, path: Path, classes: int) -> list[FeatureEntry]:
    """Read a pickle of entries ``[key, path, label, array]`` without running its code (``pickles.py``)."""
    found = []
    try:
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
                if (
                    not isinstance(values, np.ndarray)
                    or values.ndim not in (1, 2, 3)
                    or not values.size
                ):
                    raise DataError("features are no array of steps and channels")
                values = np.atleast_2d(values[0] if values.ndim == 3 else values).astype(
                    np.float32
                )
                if not np.isfinite(values).all():
                    raise DataError("features have a value that is no finite number")
            found.append(FeatureEntry(str(key), label, values))
    except (OSError, ValueError) as error:
        raise DataError(f"{name}: {path} cannot be read ({error}); {WHENCE} again") from error
    return found
