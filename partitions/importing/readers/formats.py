"""Formats of tables, by their first bytes: those that pandas reads, and those that are refused by their name.

A column becomes cells as a csv has them: labels of values (Stata, SPSS) in place of their codes, dates as 2024-05-31,
numbers with a point, "" for a missing value. Labels of SAS are in a file of their own, so that codes stay.

Source: parquet.apache.org, arrow.apache.org; the files of Stata 8 to 18, of SPSS and of SAS.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import composed, words_in
from partitions.common.sizes import check_column_count, check_size
from partitions.importing.readers.reader import first_bytes, load_library
from partitions.recipes.lines import CELL_BYTES

SAS = bytes(12) + bytes.fromhex("c2ea8160b31411cfbd92080009c7318c181f1011")
STATA = (
    b"<stata_dta>",
    *(bytes([version, order, 1]) for version in (113, 114, 115) for order in (1, 2)),
)
ENDINGS = (*words_in(".csv .parquet .feather .arrow .dta .sav .zsav .sas7bdat .xpt"),)
PICTURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"II*\0", b"MM\0*")
LARGEST_WHOLE = 1 << 53  # of float64


@dataclass(frozen=True)
class TableFormat:
    """A format of tables. ``begins``: in lower case; ``read``: pandas's function; ``package``: what it needs beside."""

    title: str
    begins: tuple[bytes, ...]
    read: str
    package: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


OLD_SAS = {"format": "xport", "encoding": "cp1252"}
READ = (
    TableFormat("Parquet", (b"PAR1\x15",), "read_parquet", "pyarrow"),
    TableFormat("Feather (Arrow)", (b"ARROW1\0\0",), "read_feather", "pyarrow"),
    TableFormat("Stata", STATA, "read_stata"),
    TableFormat("SPSS", (b"$FL2@", b"$FL3@"), "read_spss", "pyreadstat"),
    TableFormat("SAS", (SAS,), "read_sas", "", {"format": "sas7bdat", "encoding": "infer"}),
    TableFormat("SAS transport", (b"HEADER RECORD*******LIB",), "read_sas", "", OLD_SAS),
)
FHIR = "make a table of it first, one line for each patient, for example with fhircrackr in R or Pathling in Python"
REFUSED = {  # the beginnings of other files, in lower case none of which a csv's header may be, and the remedy
    b"pk\3\4": "an Excel workbook or a zip archive: save the sheet as csv, or unpack it",
    b"\xd0\xcf\x11\xe0": "an Excel workbook: save the sheet as csv",
    b"\x1f\x8b": "compressed with gzip: unpack it",
    b"bzh9": "compressed with bzip2: unpack it",
    b"\xfd7zxz": "compressed with xz: unpack it",
    b"7z\xbc\xaf": "an archive of 7-Zip: unpack it",
    b"%pdf": "a PDF: export the table as csv",
    b"<html": "a web page: export the table as csv",
    b"<!doctype": "a web page: export the table as csv",
    b"<?xml": "XML: export the table as csv",
    b"{\\rtf": "a document of a word processor: export the table as csv",
    b"ascii spss port": "SPSS's portable file: save it as .sav or csv",
    b"sqlite format 3": "a database of SQLite: export the table as csv",
    b"\x89hdf": "HDF5: export the table as csv",
    b"rdx3\n": "data of R: write it with write.csv",
    b"\x93numpy": "an array of NumPy: save it as .npz (docs/inputs.md), or a table as csv",
    b"msh|^": "messages of HL7: make a table of them first, one line for each patient",
    **dict.fromkeys(
        PICTURES, "a picture: name the folder that it lies in, or a csv with a column file"
    ),
}


def table_format(path: Path) -> TableFormat | None:
    """Return the format of a table that pandas reads; None for a text. Raises DataError for any other format."""
    start = first_bytes(path)
    for known in READ:
        if start.startswith(known.begins):
            return known
    plain = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if b"".join(plain.split()).startswith((b'{"', b"[{")):
        kind = "FHIR in JSON" if b'"resourcetype"' in plain else "JSON"
        raise DataError(f"{path} is no csv, but {kind}: {FHIR}")
    for begin, what in REFUSED.items():
        if start.startswith(begin) or plain.startswith(begin):
            raise DataError(f"{path} is no csv, but {what} first")
    return None


def read_table_frame(path: Path, known: TableFormat) -> dict[str, list[str]]:
    """Return the cells of each column of a table that pandas reads. Raises DataError, one line without a cell."""
    pandas = load_library(known.title, "pandas")
    load_library(known.title, known.package or "pandas")
    try:
        frame = getattr(pandas, known.read)(path, **known.options)
    except Exception as error:
        raise DataError(
            f"{path} is {known.title}, and cannot be read ({type(error).__name__}): write it anew, or save it as csv"
        ) from None
    if frame.index.names != [None]:
        frame = frame.reset_index()
    check_column_count(len(frame.columns), path)
    check_size(CELL_BYTES * frame.size, f"{path}, with {frame.size} cells,")
    return {
        str(name).strip(): cells_of(path, str(name), frame.iloc[:, i])
        for i, name in enumerate(frame)
    }


def cells_of(path: Path, name: str, column: Any) -> list[str]:
    """Return the cells of a pandas column as texts. Raises DataError for values that are no cells."""
    missing = column.isna()
    if column.dtype.kind == "M":
        dates = column.dt.tz_localize(None)
        whole = (dates.dt.normalize() == dates)[~missing].all()
        form = "%Y-%m-%d" if whole else "%Y-%m-%dT%H:%M:%S"
        return list(dates.dt.strftime(form).astype(object).where(~missing, ""))
    values = column.astype(object).where(~missing, None)
    if column.dtype == np.float32:  # 0.1, not 0.10000000149011612
        values = [None if value is None else float(str(np.float32(value))) for value in values]
    return [cell_text(path, name, value) for value in values]


def cell_text(path: Path, name: str, value: Any) -> str:
    """Return a value as a csv's cell. Raises DataError for one that is none."""
    if value is None:
        return ""
    if isinstance(value, str):
        return composed(value.strip())
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    if isinstance(value, float) and value.is_integer() and abs(value) < LARGEST_WHOLE:
        return str(int(value))
    if isinstance(value, int | float | np.number | decimal.Decimal):
        return str(value)
    if isinstance(value, datetime.date):
        return value.isoformat()
    raise DataError(
        f"{path}: the column {name} holds values of type {type(value).__name__}, no cells: save numbers or texts"
    )
