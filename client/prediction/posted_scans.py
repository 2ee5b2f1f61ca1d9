"""One picture, one scan, or a zip of a series, for ``silofl predict --serve``: with the same checks as a folder.

A request's body is written to a folder of its own, readable by its owner only and removed after the answer. Members of
a zip are written as 000001, 000002, ...: of their names only the endings of pictures and volumes are used. So none of
them can leave the folder, and none is a link.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from client.prediction.predict import answer
from client.tables.new_pictures import FILE, KEYS, read_new_pictures
from client.tables.new_samples import INDEX, asked_pictures
from models.flat import FlatModel
from partitions.common.errors import DataError, UserError
from partitions.common.names import unknown_name
from partitions.common.sizes import BLOCK, check_size
from partitions.importing.images import NIFTI, PICTURES
from partitions.recipes.pictures import PictureRecipe

MOST_BYTES = 1 << 28  # of a request
MOST_FILES = 10_000  # in a zip
LARGEST_UNPACKED, MOST_TIMES = 1 << 27, 100  # a zip that unpacks to more, and to that many times its size, is refused
ZIP, GZIP = b"PK", b"\x1f\x8b"
NIFTI_MAGIC = {344: (b"ni1\0", b"n+1\0"), 4: (b"ni2\0", b"n+2\0")}
THE_REQUEST = "the request"


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """Yield a folder for one request, in TMPDIR or the machine's default; it is removed in any case."""
    with tempfile.TemporaryDirectory(prefix="silofl-serve-") as folder:
        yield Path(folder)


def predict_scans(
    card: Mapping[str, Any], net: FlatModel, recipe: PictureRecipe, body: Path, key: str = ""
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
            found = read_new_pictures(source, recipe, key)
            answers = answer(card, net, asked_pictures(found), THE_REQUEST, "the model")
    except (UserError, DataError) as error:
        text = str(error).replace(str(source), THE_REQUEST).replace(str(body.parent), THE_REQUEST)
        raise UserError(text) from None
    column = INDEX if found.column == FILE else found.column
    keys = [str(i) for i in range(len(found.keys))] if found.column == FILE else found.keys
    rows = [
        {column: own, **dict(zip(answers.columns, row, strict=True))}
        for own, row in zip(keys, answers.rows, strict=True)
    ]
    return {"rows": rows, "notes": [note.replace(str(source), THE_REQUEST) for note in found.notes]}


def laid_out(body: Path, source: Path) -> Path:
    """Write the body as files for the importers: a picture, a scan, or a folder. Raises DataError, UserError."""
    with body.open("rb") as file:
        start = file.read(352)
    if start.startswith(ZIP):
        source.mkdir()
        unpack(body, source)
        return source
    volume = any(start[at : at + 4] in magic for at, magic in NIFTI_MAGIC.items())
    ending = ".nii.gz" if start.startswith(GZIP) else ".nii" if volume else ""
    return body.rename(source.with_suffix(ending))


def unpack(body: Path, folder: Path) -> None:
    """Unpack a zip's files into a folder, after checking their total size. Raises DataError, UserError."""
    try:
        with zipfile.ZipFile(body) as archive:
            members = [member for member in archive.infolist() if is_wanted(member)]
            check_archive(members, body)
            for number, member in enumerate(members, 1):
                name = member.filename.lower()
                ending = next((own for own in (*NIFTI, *PICTURES) if name.endswith(own)), "")
                with archive.open(member) as file, (folder / f"{number:06}{ending}").open("xb") as out:
                    shutil.copyfileobj(file, out, BLOCK)  # raises if there is more than the directory states
    except (UserError, DataError):
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError) as error:
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
        raise UserError(f"the request's zip has {len(members)} files; 1 to {MOST_FILES} are read")
    size, packed = sum(member.file_size for member in members), body.stat().st_size
    if size > LARGEST_UNPACKED and size > MOST_TIMES * packed:
        raise UserError(f"the request's zip would unpack to {size / packed:.0f} times its size")
    check_size(size, "the request's zip, unpacked,")
    if size > (free := shutil.disk_usage(body.parent).free):
        raise UserError(f"the request's zip would take {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free here")
