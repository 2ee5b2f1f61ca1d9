"""KU-HAR as it is published, and FedMultimodal's features as the documents convert them."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partitions.datasets.registry import _load, load_dataset
from partitions.datasets.signals import KUHAR_CLASSES
from partitions.schemes.registry import partition
from partitions.simulated import open_dataset
from partitions.splits import take

DOCS = Path(__file__).resolve().parents[2] / "docs" / "data-sets.md"


@pytest.fixture(autouse=True)
def own_places(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SILOFL_DATA", raising=False)


# KU-HAR


def kuhar_file(root: Path, label: int, person: int, rows: int, number: int = 1) -> Path:
    """Eight columns, no header; row r has its time, r, r^2, -r, the time again, person, 3 r, label + r."""
    path = root / KUHAR_CLASSES[label] / f"{person}_A_{number}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    r = np.arange(rows, dtype=np.float64)
    table = np.stack([r / 100, r, r**2, -r, r / 100 + 5, np.full(rows, person), 3 * r, label + r], 1)
    np.savetxt(path, table, delimiter=",", fmt="%.6f")
    return path


def kuhar(root: Path) -> Path:
    """1001 and 1005 have ten windows or more, 1003 has nine, 1101 is left out."""
    for label in range(8):
        kuhar_file(root, label, 1001, 512 if label < 4 else 511)  # 512 rows: 256 taken, two windows; 511: also 256
        kuhar_file(root, label, 1005, 509 + 256)  # 383 taken: two windows
        kuhar_file(root, label, 1003, 300 if label else 600)  # 150 taken: one window; 300: two
        kuhar_file(root, label, 1101, 2000)
    return root


def test_windows_of_ku_har(tmp_path):
    root = kuhar(tmp_path / "KU-HAR" / "Trimmed_interpolated_data")
    for _ in range(2):  # the second time out of the cache
        data = load_dataset("ku-har", str(tmp_path))
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
    np.testing.assert_allclose(acc[0, :64, 0], line, atol=1e-5)
    np.testing.assert_allclose(acc[:, :64, 2], np.broadcast_to(-line, (16, 64)), atol=1e-5)
    np.testing.assert_allclose(gyro[:, :64, 1:], np.broadcast_to(line[:, None], (16, 64, 2)), atol=1e-5)
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
    with pytest.raises(ValueError, match=r"ku-har: there is no Trimmed_interpolated_data; unpack 2\.Trimmed"):
        load_dataset("ku-har", str(tmp_path))
    root = kuhar(tmp_path / "Trimmed_interpolated_data")
    path = root / "5.Lay" / "1001_A_1.csv"
    for content in ("1,2,3\n4,5,6\n", "", "a,b\n", "0,1,2,nan,0,1,2,3\n"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"ku-har: .*5\.Lay.*1001_A_1\.csv cannot be read \(.*unpack it") as caught:
            load_dataset("ku-har", str(tmp_path))
        assert "\n" not in str(caught.value)
    for path in (root / "5.Lay").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"ku-har: there are no csv files in .*5\.Lay; unpack"):
        load_dataset("ku-har", str(tmp_path))


def test_ku_har_with_few_windows(tmp_path):
    for label in range(8):
        kuhar_file(tmp_path / "Trimmed_interpolated_data", label, 1001, 300)
    with pytest.raises(ValueError, match=r"no participant in .* has 10 windows"):
        load_dataset("ku-har", str(tmp_path))


# FedMultimodal's features


def write_features(kind: str, client: str, entries: list[Any]) -> None:
    path = Path("feature", kind, f"{client}.pkl")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(entries))


def test_the_documented_conversion_of_crema_d(tmp_path, monkeypatch):
    """Clip i of eight has 5 + i frames and, but for the last, one or two pictures; its class is i mod 4."""
    monkeypatch.chdir(tmp_path)
    for client in ("1001", "1002", "dev", "test"):
        for kind, channels in (("audio/mfcc", 80), ("video/mobilenet_v2", 1280)):
            entries: list[Any] = []
            for i in range(8):
                steps = 5 + i if channels == 80 else 1 + i % 2
                values = np.full((1, steps, channels), i + 1, np.float64)
                entries.append([f"{client}/{i}", f"{i}.wav", i % 4, None if channels == 1280 and i == 7 else values])
            write_features(f"{kind}/crema_d/fold1", client, entries)
    code = re.search(r"```python\n(import pickle\n.*?)```", DOCS.read_text("utf-8"), re.S)
    assert code
    exec(code[1], {})
    data = open_dataset(str(tmp_path / "crema-d"), "", 0)
    assert data.input_shape == (("audio", (80, 12)), ("video", (1280, 2))) and data.classes == 4
    assert data.groups is not None and list(data.groups) == ["speaker-1001", "speaker-1002"]
    mine = take(data, data.groups["speaker-1002"])
    order = np.argsort(mine.x["audio"][:, 0, 0])
    audio, video, y = mine.x["audio"][order], mine.x["video"][order], mine.y[order]
    assert y.tolist() == [0, 1, 2, 3] * 2
    for i in range(8):
        assert (audio[i, : 5 + i] == i + 1).all() and not audio[i, 5 + i :].any()
        assert (video[i, 0] == (i + 1) * (i < 7)).all() and (video[i, 1] == (i + 1) * (i % 2) * (i < 7)).all()


def test_many_silos_are_not_all_named(tmp_path):
    root = kuhar(tmp_path / "KU-HAR" / "Trimmed_interpolated_data")
    for person in range(2001, 2007):
        for label in range(8):
            kuhar_file(root, label, person, 600)
    data = load_dataset("ku-har", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"comes with 8 silos \(participant-1001, .*participant-2004, \.\.\.\), not 63; set silos=8"
    ):
        partition(data, "natural", silos=63, seed=0)
