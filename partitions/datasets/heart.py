"""UCI Heart Disease: the tables of four hospitals, from which two data sets are made."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from partitions.common.errors import DataError
from partitions.datasets.download import RemoteFile, download, find, places
from partitions.splits import Array

URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
MD5 = {
    "cleveland": "2d91a8ff69cfd9616aa47b59d6f843db",
    "hungarian": "22e96bee155b5973568101c93b3705f6",
    "switzerland": "9a87f7577310b3917730d06ba9349e20",
    "va": "4249d03ca7711e84f4444768c9426170",
}
FEATURES = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")


def read_tables(name: str, data_dir: str) -> dict[str, Array]:
    """Read each hospital's table (:func:`read_table`); missing files are downloaded. ``name``: for messages."""
    folders = places(data_dir, ("heart_disease", "heart-disease", "fed_heart_disease"))
    tables = {}
    for hospital, md5 in MD5.items():
        file_name = f"processed.{hospital}.data"
        path = find([file_name], folders)
        if path is None:
            path = download(name, RemoteFile(file_name, URL + file_name, md5), data_dir, "heart_disease")
        tables[hospital] = read_table(path)
    return tables


def read_table(path: Path) -> Array:
    """Read one hospital's table, float64 (n, 11): 10 features and the label 0..4, rows without a missing value."""
    rows = []
    for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
        cells = [cell.strip() for cell in line.split(",")]
        if cells == [""]:
            continue
        kept = [*cells[: len(FEATURES)], cells[-1]]
        if "?" in kept:
            continue
        try:
            if len(cells) != 14:
                raise DataError(f"{len(cells)} columns instead of 14")
            rows.append([float(cell) for cell in kept])
            if rows[-1][-1] not in range(5):
                raise DataError(f"the label is {kept[-1]}, not 0..4")
        except ValueError as error:
            raise DataError(f"heart-disease: {path}, line {number}: {error}; replace or delete the file") from error
    return np.array(rows).reshape(-1, len(FEATURES) + 1)
