"""KU-HAR, Crema-D and CrisisMMD in the layouts in which they are published, or made by FedMultimodal."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
from failing import fails
from near import near
from public_data import cannot_load, load

from partitions.datasets.registry import DATASETS, _load
from partitions.schemes.registry import partition
from partitions.splits import take

pytestmark = pytest.mark.usefixtures("own_places")


# KU-HAR


def kuhar_file(root, label, person, rows, number=1):
    """Eight columns, no header; row r has its time, r, r^2, -r, the time again, person, 3 r, label + r."""
    path = root / DATASETS["ku-har"].about["classes"][label] / f"{person}_A_{number}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    r = np.arange(rows, dtype=np.float64)
    table = np.stack(
        [r / 100, r, r**2, -r, r / 100 + 5, np.full(rows, person), 3 * r, label + r], 1
    )
    np.savetxt(path, table, delimiter=",", fmt="%.6f")
    return path


def kuhar(root):
    """1001 and 1005 have ten windows or more, 1003 has nine, 1101 is left out."""
    for label in range(8):
        # 512 rows: 256 taken, two windows; 511: also 256
        kuhar_file(root, label, 1001, 512 if label < 4 else 511)
        kuhar_file(root, label, 1005, 509 + 256)  # 383 taken: two windows
        kuhar_file(root, label, 1003, 300 if label else 600)  # 150 taken: one window; 300: two
        kuhar_file(root, label, 1101, 2000)
    return root


def test_windows_of_ku_har(tmp_path):
    root = kuhar(tmp_path / "KU-HAR/Trimmed_interpolated_data")
    for _ in range(2):  # the second time out of the cache
        data = load("ku-har", tmp_path)
        assert data.input_shape == (("acc", (3, 128)), ("gyro", (3, 128))) and data.classes == 8
        assert data.groups is not None
        sizes = {name: len(rows) for name, rows in data.groups.items()}
        assert sizes == {"participant-1001": 16, "participant-1005": 16}
        _load.cache_clear()
    assert data.groups is not None
    mine = take(data, data.groups["participant-1001"])
    assert np.bincount(mine.y).tolist() == [2] * 8
    acc, gyro = mine.x["acc"], mine.x["gyro"]
    assert acc.dtype == np.float32 and acc.shape == (16, 128, 3)
    assert (acc[:, 64:] == 0).all() and (gyro[:, 64:] == 0).all()
    # 64 steps of a straight line, standardised: (i - 31.5) / std, std^2 = (64^2 - 1) / 12.
    line = (np.arange(64) - 31.5) / np.sqrt((64**2 - 1) / 12)
    near(acc[0, :64, 0], line, 1e-5)
    near(acc[:, :64, 2], np.broadcast_to(-line, (16, 64)), 1e-5)
    near(gyro[:, :64, 1:], np.broadcast_to(line[:, None], (16, 64, 2)), 1e-5)
    assert (gyro[:, :64, 0] == 0).all()  # constant
    # Rows 0, 2, ..., 126 and 256, 258, ..., 382 of r^2.
    for start, row in ((0, 0), (256, 1)):
        square = np.arange(start, start + 128, 2.0) ** 2
        wanted = (square - square.mean()) / square.std()
        window = [w for w in acc[mine.y == 0, :64, 1] if np.allclose(w, wanted, atol=1e-4)]
        assert len(window) == 1, row
    silos = partition(data, "natural", silos=2, seed=0)
    assert [silo.origin for silo in silos] == ["participant-1001", "participant-1005"]
    assert root.is_dir()


def test_faults_of_ku_har(tmp_path):
    cannot_load(
        "ku-har", tmp_path, r"ku-har: there is no Trimmed_interpolated_data; unpack 2\.Trimmed"
    )
    root = kuhar(tmp_path / "Trimmed_interpolated_data")
    path = root / "5.Lay/1001_A_1.csv"
    for content in ("1,2,3\n4,5,6\n", "", "a,b\n", "0,1,2,nan,0,1,2,3\n"):
        path.write_text(content)
        fails(
            ValueError,
            r"ku-har: .*5\.Lay.*1001_A_1\.csv cannot be read \(.*unpack it",
            load,
            "ku-har",
            tmp_path,
        )
    for path in (root / "5.Lay").iterdir():
        path.unlink()
    cannot_load("ku-har", tmp_path, r"ku-har: there are no csv files in .*5\.Lay; unpack")


def test_ku_har_with_few_windows(tmp_path):
    for label in range(8):
        kuhar_file(tmp_path / "Trimmed_interpolated_data", label, 1001, 300)
    cannot_load("ku-har", tmp_path, r"no participant in .* has 10 windows")


# FedMultimodal's features


def write_features(base, kind, folder, client, entries):
    path = base / "feature" / kind / folder / f"{client}.pkl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(entries, protocol=pickle.HIGHEST_PROTOCOL))
    return path


def crema(base, speakers=(1001, 1002, 1003)):
    """Of each speaker eight clips: clip i has 5 + i frames of audio and one or two pictures, and class i mod 4."""
    for client in (*map(str, speakers), "dev", "test"):
        for kind, channels in (("audio/mfcc", 80), ("video/mobilenet_v2", 1280)):
            entries = []
            for i in range(8):
                steps = 5 + i if channels == 80 else 1 + i % 2
                values = np.full(
                    (steps, channels), i + 1, np.float64 if channels == 80 else np.float32
                )
                entries.append([f"{client}/{i}", f"{i}.wav", i % 4, values])
            write_features(base, kind, "crema_d/fold1", client, entries)


def test_speakers_of_crema_d(tmp_path):
    """Zeros up to the longest, 12 frames and 2 pictures; dev and test are nobody's."""
    crema(tmp_path / "output")
    for _ in range(2):
        data = load("crema-d", tmp_path)
        assert (
            data.input_shape == (("audio", (80, 12)), ("video", (1280, 2)))
            and data.classes == 4
        )
        assert data.groups is not None and list(data.groups) == [
            "speaker-1001",
            "speaker-1002",
            "speaker-1003",
        ]
        _load.cache_clear()
    assert data.groups is not None
    mine = take(data, data.groups["speaker-1002"])
    order = np.argsort(mine.x["audio"][:, 0, 0])
    audio, video, y = mine.x["audio"][order], mine.x["video"][order], mine.y[order]
    assert y.tolist() == [0, 1, 2, 3] * 2
    for i in range(8):
        assert (audio[i, : 5 + i] == i + 1).all() and not audio[i, 5 + i :].any()
        assert (video[i, 0] == i + 1).all() and (video[i, 1] == (i + 1) * (i % 2)).all()


def test_many_silos_are_not_all_named(tmp_path):
    crema(tmp_path, tuple(range(1001, 1009)))
    data = load("crema-d", tmp_path)
    with pytest.raises(
        ValueError,
        match=r"comes with 8 silos \(speaker-1001, .*speaker-1006, \.\.\.\), not 72; set silos=8",
    ):
        partition(data, "natural", silos=72, seed=0)


def crisis(base, missing=False):
    for client, n in (("0", 3), ("1", 2), ("dev", 2), ("test", 4)):
        image, text = [], []
        for i in range(n):
            one = np.full((1, 1280), i + 1, np.float32)
            image.append([f"{client}_{i}", "a.jpg", i, None if missing and i == 1 else one])
            text.append(
                [f"{client}_{i}", "a.jpg", i, np.full((1, 3 + i, 512), i + 1, np.float32)]
            )
        write_features(base, "img/mobilenet_v2", "crisis_mmd/alpha10", client, image)
        write_features(base, "text/mobilebert", "crisis_mmd/alpha10", client, text)


@pytest.mark.parametrize("missing", [False, True])
def test_clients_of_crisis_mmd_are_taken_together(tmp_path, missing):
    """Three of client 0, two of client 1 and two of dev to train on; a picture that is missing is zeros."""
    crisis(tmp_path, missing)
    data = load("crisis-mmd", tmp_path)
    assert data.input_shape == (("image", (1280,)), ("text", (512, 6))) and data.classes == 8
    assert (data.train.y.tolist(), data.test.y.tolist()) == (
        [0, 1, 2, 0, 1, 0, 1],
        [0, 1, 2, 3],
    )
    assert data.train.x["image"][:, 7].tolist() == (
        [1, 0, 3, 1, 0, 1, 0] if missing else [1, 2, 3, 1, 2, 1, 2]
    )
    assert data.test.x["text"][:, :, 0].tolist() == [
        [1, 1, 1, 0, 0, 0],
        [2, 2, 2, 2, 0, 0],
        [3, 3, 3, 3, 3, 0],
        [4, 4, 4, 4, 4, 4],
    ]
    with pytest.raises(ValueError, match="crisis-mmd does not come with silos of its own"):
        partition(data, "natural", silos=2, seed=0)


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


GOOD = [["k", "p", 0, np.ones((2, 80), np.float32)]]


@pytest.mark.parametrize(
    "entries, fault",
    [
        (Evil(), "posix.system, which is not read"),
        ([["k", "p", 0, Evil()]], "posix.system, which is not read"),
        ({"k": 1}, "no list of samples"),
        ([], "no list of samples"),
        ([["k", "p", 0]], "is not key, path, label, array"),
        ([["k", "p", 4, np.ones((2, 80))]], "a label is not one of 0 to 3"),
        ([["k", "p", "A", np.ones((2, 80))]], "a label is not one of 0 to 3"),
        ([["k", "p", 0, [1.0, 2.0]]], "no array of steps and channels"),
        ([["k", "p", 0, np.ones((0, 80))]], "no array of steps and channels"),
        ([["k", "p", 0, np.full((2, 80), np.inf)]], "no finite number"),
        ([["other", "p", 0, np.ones((2, 80))]], "has other samples in"),
        (
            [["k", "p", 0, np.ones((2, 79))], ["l", "p", 0, np.ones((2, 80))]],
            "has other samples in",
        ),
    ],
)
def test_faulty_features_are_refused(tmp_path, entries, fault):
    write_features(tmp_path, "audio/mfcc", "crema_d/fold1", "1001", entries)
    write_features(tmp_path, "video/mobilenet_v2", "crema_d/fold1", "1001", GOOD)
    said = cannot_load("crema-d", tmp_path, fault)
    assert said.startswith("crema-d: ") and "1001.pkl" in said


def test_features_that_do_not_fit_together(tmp_path):
    cannot_load(
        "crema-d",
        tmp_path,
        r"there is no feature/audio/mfcc/crema_d/fold1 or .*; make it with FedMultim",
    )
    path = write_features(tmp_path, "audio/mfcc", "crema_d/fold1", "1001", GOOD)
    cannot_load("crema-d", tmp_path, r"there is no feature/video/mobilenet_v2/crema_d/fold1 or")
    write_features(tmp_path, "video/mobilenet_v2", "crema_d/fold1", "1002", GOOD)
    cannot_load("crema-d", tmp_path, r"have not the same files \*\.pkl")
    write_features(tmp_path, "video/mobilenet_v2", "crema_d/fold1", "1001", GOOD)
    write_features(
        tmp_path, "audio/mfcc", "crema_d/fold1", "1002", [["k", "p", 0, np.ones((2, 79))]]
    )
    cannot_load("crema-d", tmp_path, "have different numbers of values")
    path.write_bytes(path.read_bytes()[:-9])
    cannot_load("crema-d", tmp_path, r"1001\.pkl cannot be read")
    crisis(tmp_path)
    for folder in ("img/mobilenet_v2", "text/mobilebert"):
        (tmp_path / "feature" / folder / "crisis_mmd/alpha10/test.pkl").unlink()
    cannot_load("crisis-mmd", tmp_path, r"there is no test\.pkl")
