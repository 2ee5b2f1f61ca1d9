"""Lines of a csv in the formats of hospitals' programs."""

from __future__ import annotations

import codecs
import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO

import numpy as np

from partitions.common.errors import DataError, Problems
from partitions.common.names import composed
from partitions.common.sizes import MOST_LINE, bounded_lines, check_column_count, check_size
from partitions.importing.options import ALL_COLUMNS, Take
from partitions.importing.readers.formats import TableFormat, read_table_frame, table_format
from partitions.importing.table_labels import WITH_COMMA
from partitions.recipes.cells import is_number
from partitions.recipes.lines import CELL_BYTES, Coded, ColumnReader, Lines
from partitions.recipes.recipe import FileFormat
from partitions.schema import few
from partitions.splits import Array

SEPARATOR_LINE = re.compile(r'"?sep=([,;|\t])"?')  # before the header, as in Excel
UTF8 = "utf-8-sig"  # with or without a byte order mark
FALLBACK = "cp1252"  # of programs of Windows in Western Europe and America
ONE_BYTE = ("cp125", "iso8859", "latin", "mac")  # encodings that decode any UTF-8, but wrongly
MARKS = {  # byte order marks, the longer one first
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

BLOCK_CELLS = 1 << 20  # cells that are read before they go into columns


@contextmanager
def long_cells() -> Iterator[None]:
    """Context in which a csv's cells may be long; afterwards the library's limit is restored."""
    # Some hospitals' notes exceed the library's own limit
    before = csv.field_size_limit(MOST_LINE)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def find_encoding(path: Path, wanted: str, *, or_utf8: bool) -> str:
    """Return the encoding of a text file: as requested, by its byte order mark, UTF-8, or else Windows-1252.

    ``or_utf8``: a recipe, and not the user, requests it. A file that is evidently UTF-8 is then read as such.

    Raises DataError where the file cannot be decoded so, or evidently has another encoding.
    """
    with path.open("rb") as file:
        start = file.read(64)
    marked = next((encoding for mark, encoding in MARKS.items() if start.startswith(mark)), "")
    tried = [wanted] if wanted else [marked] if marked else [UTF8, FALLBACK]
    tried = [UTF8 if encoding.lower() in ("utf-8", "utf8") else encoding for encoding in tried]
    for encoding in tried:
        try:
            name = codecs.lookup(encoding).name
            check_text(path, encoding, start)
        except LookupError:
            raise DataError(
                f"--encoding is {encoding[:40]!r}, which is none; for example utf-8, cp1252"
            ) from None
        except UnicodeError:
            continue
        if name.startswith(ONE_BYTE) and is_utf8(path, wanted):
            if or_utf8:
                return UTF8
            raise DataError(
                f"{path} is UTF-8, and --encoding or the recipe says {wanted}: save it so, or change that"
            )
        return encoding
    if wanted:
        raise DataError(
            f"{path} is no text in {wanted}, as --encoding or the recipe says: save it so, or change that"
        )
    raise DataError(
        f"{path} cannot be read: it is no text in {' or '.join(tried)}; name its --encoding"
    )


def check_text(path: Path, encoding: str, start: bytes) -> None:
    """Raise UnicodeError where a file is not text in this encoding, and DataError at a zero byte, which is never text.

    ``start``: the file's first bytes.
    """
    line = 1
    with path.open(encoding=encoding, newline="") as text:
        while part := text.read(1 << 20):
            if (at := part.find("\0")) >= 0:
                line += part.count("\n", 0, at)
                order = "be" if start[:1] == b"\0" else "le"
                utf16 = f"read UTF-16 with --encoding utf-16-{order}, or export it again"
                mend = utf16 if b"\0" in start[:4] else "the file is damaged; export it again"
                raise DataError(f"{path}, line {line} has a zero byte: {mend}")
            line += part.count("\n")


def is_utf8(path: Path, wanted: str) -> bool:
    """Return whether lines are UTF-8, and so would be decoded wrongly in an encoding of one byte per letter.

    Where other lines are not UTF-8, a requested encoding (``wanted``) is accepted: a line may be UTF-8 by
    chance. Raises DataError for such a file without a requested encoding.
    """
    utf8 = other = 0  # the first line of each kind
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), b""), 1):
            try:
                line.decode()
                utf8 = utf8 or number * (not line.isascii())
            except UnicodeDecodeError:
                other = other or number
    if utf8 and other and not wanted:
        raise DataError(
            f"{path}: line {utf8} is UTF-8, and line {other} is not: save all of the file in one encoding, or name it "
            "with --encoding"
        )
    return bool(utf8 and not other)


def find_separator(path: Path, encoding: str) -> str:
    """Return the separator of cells: that of Excel's line ``sep=;``, or the most frequent one in the first line.

    The latter is one of comma, semicolon, tab and bar.
    """
    with path.open(encoding=encoding, newline="") as file:
        first = next(bounded_lines(file, path), "")
    declared = SEPARATOR_LINE.fullmatch(first.strip())
    return declared[1] if declared else max(",;\t|", key=first.count)


def records(file: IO[str], path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows with cells, each with its first line's number. Raises DataError at a misplaced quote."""
    reader = csv.reader(bounded_lines(file, path), delimiter=separator, strict=True)
    start = 1
    try:
        for cells in reader:
            if any(cells):
                yield start, cells
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}, line {start}: {error}: a quote is missing or out of place; write two for one within a cell"
        ) from None


def csv_rows(path: Path, separator: str, encoding: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the header and the rows of a csv, each with its first line's number; cells have blanks around them."""
    with path.open(encoding=encoding, newline="") as file:
        starts = bounded_lines(file, path)
        declared = SEPARATOR_LINE.fullmatch((first := next(starts, "")).strip())
        check_column_count((next(starts, "") if declared else first).count(separator) + 1, path)
        file.seek(0)
        yield from islice(records(file, path, separator), 1 if declared else 0, None)


Rows = Callable[[], Iterator[tuple[int, list[str]]]]


def read_column(path: Path, rows: Rows, skipped: int, place: int) -> Coded:
    """Return all different cells of a column, and their codes. ``skipped``: rows that are the header."""
    reader = ColumnReader(numbers=False)
    blocks = islice(rows(), skipped, None)
    with long_cells():
        while block := [
            cells[place] if place < len(cells) else ""
            for _, cells in islice(blocks, BLOCK_CELLS)
        ]:
            reader.add(block)
            check_size(reader.size, f"{path}, with {reader.lines} cells or more,")
    return reader.make_column().coded


def read_blocks(
    path: Path, rows: Iterator[tuple[int, list[str]]], readers: Sequence[ColumnReader]
) -> tuple[list[Array], dict[int, list[str]]]:
    """Read rows into a reader for each column; return the lines' numbers, and the cells of lines of other lengths."""
    width, numbers, ragged = len(readers), list[Array](), dict[int, list[str]]()
    while block := [*islice(rows, max(BLOCK_CELLS // width, 1))]:
        numbers.append(np.array([number for number, _ in block]))
        for i, (number, cells) in enumerate(block):
            if len(cells) != width:
                ragged[number] = cells
                block[i] = number, [*cells, *[""] * width][:width]
        columns = zip(*(cells for _, cells in block), strict=True)
        for reader, column in zip(readers, columns, strict=True):
            reader.add(column)
        size = sum(reader.size for reader in readers)
        size += CELL_BYTES * sum(map(len, ragged.values()))
        check_size(size, f"{path}, with {width * readers[0].lines} cells or more,")
    return numbers, ragged


def read_lines(
    path: Path, form: Take | FileFormat = ALL_COLUMNS, *, or_utf8: bool = False
) -> Lines:
    """Return the lines of a csv, or of another table that pandas reads. Columns without a header get names here.

    ``form``: separator, "" for :func:`find_separator`; encoding, as for :func:`find_encoding`, like ``or_utf8``; gaps,
    which are no numbers even if they look so.
    """
    if known := table_format(path):
        return frame_lines(path, known)
    encoding = find_encoding(path, form.encoding, or_utf8=or_utf8)
    separator = form.separator or find_separator(path, encoding)
    rows = partial(csv_rows, path, separator, encoding)
    with long_cells():
        cell_rows = rows()
        if (first := next(cell_rows, None)) is None:
            raise DataError(f"{path} is empty")
        header = [composed(name.strip()) for name in first[1]]
        unnamed = all(is_number(cell) or WITH_COMMA.fullmatch(cell) for cell in header if cell)
        cell_rows = chain([first], cell_rows) if unnamed else cell_rows
        readers = [ColumnReader(gaps=form.gaps) for _ in header]
        numbers, ragged = read_blocks(path, cell_rows, readers)
    # Excel ends lines with separators: columns that have neither a name nor a value are none.
    kept = [k for k, r in enumerate(readers) if header[k] or r.values or any(r.different)]
    lost = set(range(len(readers))).difference(kept)
    header = [header[k] for k in kept]
    if unnamed and all(header):
        header = [f"column{i}" for i in range(1, len(header) + 1)]
    if not numbers:
        raise DataError(f"{path} has a header but no rows")
    counts = {number: len({*range(len(cells))} - lost) for number, cells in ragged.items()}
    check_structure(path, header, counts, separator)
    columns = {
        name: readers[k].make_column(partial(read_column, path, rows, int(not unnamed), k))
        for name, k in zip(header, kept, strict=True)
    }
    return Lines(path, columns, np.concatenate(numbers), separator=separator, encoding=encoding)


def frame_lines(path: Path, known: TableFormat) -> Lines:
    """Return the rows of a table in another format."""
    columns = read_table_frame(path, known)
    check_structure(path, [*columns], {}, ",")
    count = len(next(iter(columns.values()), []))
    if not count:
        raise DataError(f"{path} has a header but no rows")
    return Lines(path, columns, range(1, count + 1), f"{path}, row", ",", UTF8)


def check_structure(
    path: Path, header: list[str], counts: Mapping[int, int], separator: str
) -> None:
    """Raise DataError where columns have no name or the same one, or lines another number of cells (``counts``)."""
    problems = Problems()
    if any(cell.lower() in ("", "?", "nan", "na") for cell in header):
        title = "; delete the lines above the header"
        title *= 2 * sum(map(bool, header)) <= len(header)
        problems.add(
            f"{path}: a column has no name in the first line; write a header that names each{title}"
        )
    if twice := sorted(name for name, times in Counter(header).items() if name and times > 1):
        problems.add(
            f"{path} has two columns named {few(map(repr, twice))}; rename or remove one"
        )
    for count in dict.fromkeys(counts.values()):
        if count == len(header):
            continue
        numbers = [str(number) for number, count_here in counts.items() if count_here == count]
        more = f"; so has line {few(numbers[1:])}" if numbers[1:] else ""
        problems.add(
            f"{path}, line {numbers[0]} has {count} cells, the header {len(header)}; "
            f"{mend_cells(count, len(header), separator)}{more}"
        )
    problems.refuse(path)


def mend_cells(count: int, columns: int, separator: str) -> str:
    """Return how to mend a line of ``count`` cells below a header of another number of ``columns``."""
    if columns == 1:
        return (
            "delete a title above the header, or name what separates its cells with --separator"
        )
    if separator == "," and count > columns:
        return "if its numbers have decimal commas, save it separated by semicolons and add --decimal ,"
    if count > columns:
        return f"a cell that has a {separator!r} stands in quotes"
    return "fill its cells, or delete it if it is no row of the table"
