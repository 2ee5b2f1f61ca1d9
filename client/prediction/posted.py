"""New patients for ``silofl predict --serve``: one scan, a zip of a series, or rows, with the same checks as files.

Rows are JSON: ``{"rows": [{"Patient-ID": "P1", "age": "81,5", "dose": 3, "sex": null}]}``. A cell is a text as in a
csv, a number, or null for a gap. The body of a request with scans is written to a folder of its own, readable by its
owner only and removed after the answer. Members of a zip are written as 000001, 000002, ...: of their names only the
endings of pictures and volumes are used. So none of them can leave the folder, and none is a link.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from client.exporting.model_card import Card
from client.prediction.new_samples import FILE, INDEX, KEYS, asked_of, asked_pictures
from client.prediction.predict import ModelAnswers, answer_samples
from models.flat import FlatModel
from partitions.common.errors import DataError, UserError
from partitions.common.names import unknown_name
from partitions.common.parsed import parse_json
from partitions.common.sizes import BLOCK, check_size, trap_of
from partitions.importing.readers import nifti, pictures
from partitions.importing.table_source import check_recipe_columns, table_rows
from partitions.recipes.lines import Lines
from partitions.recipes.pictures import PictureRecipe
from partitions.recipes.recipe import Recipe

MOST_SCAN_BYTES = 1 << 28  # of a request
MOST_FILES = 10_000  # in a zip
ZIP, GZIP = b"PK", b"\x1f\x8b"
THE_REQUEST = "the request"


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """Yield a folder for one request, in TMPDIR or the machine's default; it is removed in any case."""
    with tempfile.TemporaryDirectory(prefix="silofl-serve-") as folder:
        yield Path(folder)


def predict_scans(
    card: Card, net: FlatModel, recipe: PictureRecipe, body: Path, key: str = ""
) -> dict[str, Any]:
    """Return ``{"rows": [{key, answers...}], "notes": [...]}`` for a request's body, a file in a work folder.

    ``key``: patient, study or accession of DICOM; "": the patient for DICOM, otherwise ``index``. Raises UserError, one
    line without a path, for a body that is no picture or does not fit the recipe.
    """
    if key and key not in (allowed := [name for name in KEYS if name != FILE]):
        raise unknown_name("key", key, allowed)
    source = body.parent / "scans"
    try:
        source = laid_out(body, source)
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars
            samples = asked_pictures(source, recipe, key)
            answers = answer_samples(card, net, samples, THE_REQUEST, "the model")
    except (UserError, DataError) as error:
        text = (
            str(error).replace(str(source), THE_REQUEST).replace(str(body.parent), THE_REQUEST)
        )
        raise UserError(text) from None
    notes = [note.replace(str(source), THE_REQUEST) for note in samples.notes]
    if samples.key == FILE:
        return as_rows(INDEX, map(str, range(len(samples.keys))), answers, notes)
    return as_rows(samples.key, samples.keys, answers, notes)


def as_rows(
    key: str, keys: Iterable[str], answers: ModelAnswers, notes: Sequence[str]
) -> dict[str, Any]:
    """Return the content of a response: a row for each sample, with its key."""
    rows = [
        {key: key_of_row, **dict(zip(answers.columns, row, strict=True))}
        for key_of_row, row in zip(keys, answers.rows, strict=True)
    ]
    return {"rows": rows, "notes": [*notes]}


def laid_out(body: Path, source: Path) -> Path:
    """Write the body as files for the importers: a picture, a scan, or a folder. Raises DataError, UserError."""
    with body.open("rb") as file:
        start = file.read(352)
    if start.startswith(ZIP):
        source.mkdir()
        unpack_zip(body, source)
        return source
    ending = (
        ".nii.gz"
        if start.startswith(GZIP)
        else ".nii"
        if nifti.READER.recognises(start)
        else ""
    )
    return body.rename(source.with_suffix(ending))


def unpack_zip(body: Path, folder: Path) -> None:
    """Unpack a zip's files into a folder, after checking their total size. Raises DataError, UserError."""
    try:
        with zipfile.ZipFile(body) as archive:
            members = [member for member in archive.infolist() if is_wanted(member)]
            check_archive(members, body)
            for number, member in enumerate(members, 1):
                name = member.filename.lower()
                ending = next(
                    (
                        known
                        for known in (*nifti.ENDINGS, *pictures.ENDINGS)
                        if name.endswith(known)
                    ),
                    "",
                )
                with (
                    archive.open(member) as file,
                    (folder / f"{number:06}{ending}").open("xb") as out,
                ):
                    # Raises if there is more than the directory states
                    shutil.copyfileobj(file, out, BLOCK)
    except (UserError, DataError):
        raise
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        RuntimeError,
        NotImplementedError,
        ValueError,
    ) as error:
        raise UserError(
            f"the request's zip cannot be read ({type(error).__name__}): pack it anew, unencrypted"
        ) from None


def is_wanted(member: zipfile.ZipInfo) -> bool:
    """Return whether this is a file, and not one of those that file managers add."""
    parts = member.filename.split("/")
    return not member.is_dir() and "__MACOSX" not in parts and not parts[-1].startswith(".")


def check_archive(members: list[zipfile.ZipInfo], body: Path) -> None:
    """Raise DataError or UserError if a zip contains too much, or nothing."""
    if not 0 < len(members) <= MOST_FILES:
        raise UserError(
            f"the request's zip has {len(members)} files; 1 to {MOST_FILES} are read"
        )
    size, packed = sum(member.file_size for member in members), body.stat().st_size
    if why := trap_of(members, packed):
        raise UserError(f"the request's zip {why}")
    check_size(size, "the request's zip, unpacked,")
    if size > (free := shutil.disk_usage(body.parent).free):
        raise UserError(
            f"the request's zip would take {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free here"
        )


# Rows


MOST_ROWS = 1000
MOST_BYTES = 2**20


def predict_rows(
    card: Card, net: FlatModel, recipe: Recipe, body: bytes, as_gaps: bool = False
) -> dict[str, Any]:
    """Return ``{"rows": [{key, answers...}], "notes": [...]}`` for the rows in a request's body.

    Raises UserError, one line without a path, for a body that is no such JSON or does not fit the recipe.
    """
    try:
        samples = asked_of(table_rows(lines_of(body, recipe), recipe, (), as_gaps), recipe)
    except DataError as error:
        raise UserError(str(error).replace("with --as-gaps", "with ?as-gaps=1")) from None
    answers = answer_samples(card, net, samples, THE_REQUEST, "the model")
    return as_rows(samples.key, samples.keys, answers, samples.notes)


def lines_of(body: bytes, recipe: Recipe) -> Lines:
    """Return the rows of a request as a csv's lines. Raises DataError, one line."""
    try:
        content = parse_json(
            body, parse_constant=refuse_constant, object_pairs_hook=without_repeats
        )
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise DataError(f"the request is no JSON ({str(reason)[:80]})") from None
    rows = (
        content.get("rows") if isinstance(content, dict) and set(content) == {"rows"} else None
    )
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row for row in rows):
        raise DataError('the request is no {"rows": [{"COLUMN": cell, ...}, ...]}')
    if not 0 < len(rows) <= MOST_ROWS:
        raise DataError(
            f"the request has {len(rows)} rows; 1 to {MOST_ROWS} are answered at once"
        )
    signs = {column.origin: column.decimal for column in recipe.used}
    read = list[dict[str, str]]()
    for number, row in enumerate(rows, 1):
        check_recipe_columns(f"row {number}", list(row), recipe)
        cells = {
            name: cell_of(cell, signs.get(name, "."), f"row {number}, {name[:40]}")
            for name, cell in row.items()
        }
        read.append(cells)
    names = dict.fromkeys(name for cells in read for name in cells)
    columns = {name: [cells.get(name, "") for cells in read] for name in names}
    return Lines(Path(), columns, range(1, len(rows) + 1), "row")


def cell_of(cell: object, decimal: str, where: str) -> str:
    """Return a cell as csv text. Raises DataError for a list, an object, true or false."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell.strip()
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return repr(cell).replace(".", decimal)
    raise DataError(f"{where} is no text, number or null")


def refuse_constant(name: str) -> NoReturn:
    raise DataError(f"{name} is no number")


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object from its pairs. Raises DataError for a repeated key."""
    if len(unique := dict(pairs)) < len(pairs):
        raise DataError("a column is named twice in one row")
    return unique
