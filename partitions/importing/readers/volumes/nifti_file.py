"""NIfTI files: headers, values and classes along a file's own axes; nothing else in a header is used.

Source: https://nifti.nimh.nih.gov, the headers of NIfTI-1 (348 bytes) and NIfTI-2 (540).
"""

from __future__ import annotations

import gzip
import io
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from partitions.common.sizes import MOST_BEFORE, TooLargeError, check_picture
from partitions.importing.readers.reader import ScanError, load_library, redacted_errors
from partitions.importing.readers.volumes.grid import RAS, Grid, check_grid
from partitions.splits import Array, Shape

ENDINGS = (".nii", ".nii.gz")
GZIP = b"\x1f\x8b"
MAGIC = {344: (b"ni1\0", b"n+1\0"), 4: (b"ni2\0", b"n+2\0")}  # by its place in a header

MM = {1: 1e3, 3: 1e-3}  # of a header's units of length: metres and micrometres; others are mm
CODES = ("qform_code", "sform_code")  # whether a header says how the patient lies
LONGEST_HEADER = 540  # bytes, of NIfTI-2


def begins_nifti(start: bytes) -> bool:
    """Return whether a file that begins so is NIfTI, also a compressed one."""
    if start.startswith(GZIP):
        try:
            start = zlib.decompressobj(31).decompress(start, LONGEST_HEADER)
        except zlib.error:
            return False
    return any(start[at : at + 4] in magic for at, magic in MAGIC.items())


def read_stored(path: Path, where: str) -> Array:
    """Read a volume's values along the file's own axes, float32 (i, j, k)."""
    with redacted_errors(where, "NIfTI"):
        image = load_nifti(path)
        if len(nifti_shape(image)) != 3:
            raise ScanError("its file is a series in time")
        return stored_values(image)


def load_nifti(path: Path) -> Any:
    """Open a volume and read its header; values are read on access. Its size is checked before it is unpacked."""
    nibabel = load_library("a volume", "nibabel")
    if not path.name.lower().endswith(ENDINGS):
        raise ScanError("it is NIfTI by its first bytes: let its name end in .nii or .nii.gz")
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        start = file.read(LONGEST_HEADER)
    # In either byte order
    length = min(int.from_bytes(start[:4], "little"), int.from_bytes(start[:4], "big"))
    kind = nibabel.Nifti2Header if length == LONGEST_HEADER else nibabel.Nifti1Header
    header = kind.from_fileobj(io.BytesIO(start), check=False)
    check_picture(header.get_data_shape()[:3], "its volume")
    if not 0 <= header.get_data_offset() <= MOST_BEFORE:
        raise TooLargeError(
            f"its header says that the voxels begin after {MOST_BEFORE >> 20} MiB or more"
        )
    image = nibabel.load(path)
    if (
        len(nifti_shape(image)) not in (3, 4)
        or 0 in image.shape
        or image.get_data_dtype().names
    ):
        raise ScanError(
            f"its file is no volume of grey values, but {' x '.join(map(str, image.shape))}"
        )
    if (mm := MM.get(int(image.header["xyzt_units"]) & 7, 1.0)) != 1:
        image = type(image)(
            image.dataobj, np.diag([mm, mm, mm, 1]) @ image.affine, image.header
        )
        for code in CODES:  # nibabel sets both with an affine
            image.header[code] = header[code]
    return image


def nifti_shape(image: Any) -> Shape:
    """Return a volume's shape without axes of length 1 behind the third."""
    shape: Shape = image.shape
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def says_how_it_lies(image: Any) -> bool:
    """Return whether a header places the patient; without both codes, nibabel's affine is a guess from the sides."""
    return any(int(image.header[code]) > 0 for code in CODES)


def nifti_grid(image: Any, *, straight: bool) -> Grid:
    """Return the grid of a volume, or of the first one. Raises ScanError where it is none."""
    grid = Grid(image.shape[:3], RAS @ np.asarray(image.affine, float))
    check_grid(grid, straight=straight)
    return grid


def stored_values(image: Any) -> Array:
    """Return a volume's values along the file's own axes, float32; of several times or channels the first."""
    more = len(image.shape) - 3
    values = image.dataobj[(..., *[0] * more)] if more else image.dataobj
    return np.require(np.asarray(values, np.float32), requirements="W")


# The scans of one patient, which are read consecutively, often have one mask
@lru_cache(maxsize=1)
def stored_classes(path: Path, changed: int) -> Array:
    """Read the classes of a mask along the file's own axes, uint8 (i, j, k). Raises ScanError for other values."""
    values = np.nan_to_num(stored_values(load_nifti(path)), copy=False)
    classes: Array = np.rint(values)
    if classes.min() < 0 or classes.max() > 255 or np.abs(values - classes).max() > 1e-3:
        raise ScanError(
            "its mask has values that are no classes 0, 1, 2, ... 254; 255 does not count"
        )
    return classes.astype(np.uint8)
