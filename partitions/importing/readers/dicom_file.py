"""DICOM files: the attributes of a header, whether pixels can be decoded, the stored values, and a frame's place.

An attribute that is there and empty is none. Files without the 128 bytes and DICM are read, too, as old exports are.
Everything that can make a file unreadable is checked by its header and size, before any pixel is decoded.

Source: DICOM PS3.5, 7.1 (elements) and 8.1 (stored bits), PS3.10, 7 (the file), PS3.3, C.7.6.3 (pixels).
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partitions.common.names import Names, words_in
from partitions.common.sizes import (
    BLOCK,
    MOST_FRAMES,
    TooLargeError,
    check_picture,
    check_size,
    unpack,
)
from partitions.importing.readers.reader import ScanError, first_bytes, load_library
from partitions.recipes.reading import Pair
from partitions.schema import few
from partitions.splits import Array

if TYPE_CHECKING:
    from pydicom import Dataset

GROUP_LENGTH = b"DICM\x02\0\0\0UL"  # the beginning of a header, before its length
DEFLATED = b"1.2.840.10008.1.2.1.99"
# Types of values at the beginning without DICM
BARE = (b"UL", b"CS", b"UI", b"DA", b"TM", b"SH", b"LO", b"OB")
# Types of values that are empty with blanks in them, too
TEXTS = words_in("DS IS CS LO SH UI")
REQUIRED = words_in(
    "SamplesPerPixel PhotometricInterpretation BitsAllocated BitsStored PixelRepresentation"
)
# Of JPEG-LS: height, width, components
START_OF_FRAME = re.compile(rb"\xff\xf7\x00.[\x02-\x10](.{5})", re.DOTALL)
GROUPS = words_in(  # of enhanced files: the sequences that describe a frame
    "PixelMeasuresSequence PlanePositionSequence PlaneOrientationSequence PixelValueTransformationSequence "
    "FrameVOILUTSequence SegmentIdentificationSequence"
)


def is_dicom(path: Path) -> bool:
    """Return whether a file is DICOM, by its first bytes."""
    return begins_dicom(first_bytes(path))


def begins_dicom(start: bytes) -> bool:
    """Return whether a file that begins so is DICOM: 128 bytes of any kind, then DICM; or at once with attributes."""
    return start[128:132] == b"DICM" or is_bare(start)


def is_bare(start: bytes) -> bool:
    """Return whether a file that begins so is DICOM without DICM: two attributes of its first groups, in order."""
    tags, at = list[tuple[int, int]](), 0
    while len(tags) < 2 and at + 12 <= len(start) and start[128:132] != b"DICM":
        group, element, length = struct.unpack_from("<HHL", start, at)
        if (kind := start[at + 4 : at + 6]) in BARE:
            length = (
                struct.unpack_from("<L", start, at + 8)[0] + 4
                if kind == b"OB"
                else length >> 16
            )
        elif group == 2:
            return False  # it always has types
        tags.append((group, element))
        at += 8 + length
    return (
        len(tags) == 2
        and tags[0] < tags[1] < (8, 0x1000)
        and {tags[0][0], tags[1][0]} <= {2, 8}
    )


def load(path: Path, tags: Names) -> Dataset:
    """Parse only these attributes, up to the pixels."""
    pydicom = load_library("DICOM", "pydicom")
    check_deflated(path)
    with path.open("rb") as file:
        bare = is_bare(file.read(BLOCK))
    dataset = pydicom.dcmread(
        path, stop_before_pixels=True, specific_tags=list(tags), force=bare
    )
    if bare and not dataset.file_meta.get("TransferSyntaxUID"):
        implicit, little = dataset.original_encoding
        kind = "Implicit" if implicit else "Explicit"
        order = "Little" if little or implicit else "Big"
        dataset.file_meta.TransferSyntaxUID = getattr(pydicom.uid, f"{kind}VR{order}Endian")
    return without_empty(dataset)


def check_deflated(path: Path) -> None:
    """Raise TooLargeError where the whole file is deflated (PS3.5, A.5) and would unpack to more than allowed.

    pydicom unpacks such a file at once. The first element of the header is the header's length.
    """
    with path.open("rb") as file:
        start = file.read(144)
        meta = file.read(min(int.from_bytes(start[140:144], "little"), BLOCK))
        if start[128:138] == GROUP_LENGTH and DEFLATED in meta:
            unpack(file, "its file", wbits=-15, keep=False)
        elif DEFLATED in start + meta:
            raise ScanError(
                "its file is deflated, and its header does not say where it ends; export it uncompressed"
            )


def without_empty(dataset: Dataset) -> Dataset:
    """Remove the attributes that are there and empty; none is converted for that."""
    from pydicom.datadict import dictionary_VR

    for tag in list(dataset.keys()):
        element = dataset.get_item(tag)
        blank = b" " if (element.VR or dictionary_VR(tag)) in TEXTS else b""
        if element.value is None or (
            isinstance(element.value, bytes) and not element.value.strip(blank)
        ):
            del dataset[tag]
    return dataset


def of_frame(dataset: Dataset, frame: int) -> Dataset:
    """Return the header of one frame: enhanced files have spacing, rescaling and window in functional groups.

    A frame's own group takes precedence over that of all frames.
    """
    header = dataset[:]  # `copy` would share its elements
    shared = dataset.get("SharedFunctionalGroupsSequence") or []
    per_frame = dataset.get("PerFrameFunctionalGroupsSequence") or []
    for groups in (*shared[:1], *per_frame[frame : frame + 1]):
        for name in GROUPS:
            for item in (groups.get(name) or [])[:1]:
                header.update(without_empty(item))
    return header


def attribute_text(dataset: Dataset, keyword: str) -> str:
    """Return an attribute as text, "" without one."""
    return str(dataset.get(keyword) or "").strip()


def frames_of(dataset: Dataset) -> int:
    return int(dataset.get("NumberOfFrames") or 1)


def is_grey(dataset: Dataset) -> bool:
    return dataset.PhotometricInterpretation in ("MONOCHROME1", "MONOCHROME2")


def is_compressed(dataset: Dataset) -> bool:
    return bool(dataset.file_meta.TransferSyntaxUID.is_encapsulated)


def check_pixels(dataset: Dataset) -> None:
    """Raise TooLargeError where a frame, or their number, is too large to be decoded."""
    check_picture((dataset.Rows, dataset.Columns, dataset.get("SamplesPerPixel") or 1))
    if frames_of(dataset) > MOST_FRAMES:
        raise TooLargeError(f"its file says that it has more than {MOST_FRAMES} frames")


def check_readable(dataset: Dataset, path: Path) -> None:
    """Raise ScanError where pixels cannot be decoded, as far as a header and a file's size tell, before any is.

    Raises TooLargeError for pixels that would become too large.
    """
    check_pixels(dataset)
    bits = int(dataset.get("BitsAllocated") or 0)
    if bits not in (32, 64) and (
        missing := [name for name in REQUIRED if dataset.get(name) is None]
    ):
        raise ScanError(
            f"its header has no {few(missing)}, without which pixels have no meaning"
        )
    check_decoder(dataset, path)
    if not is_compressed(dataset):
        shift_of(dataset)
        size = dataset.Rows * dataset.Columns * bits * frames_of(dataset) // 8
        if is_grey(dataset) and path.stat().st_size < size:
            raise ScanError(
                f"its file is cut short: {path.stat().st_size} bytes, and its pixels are {size}"
            )


def shift_of(dataset: Dataset) -> int:
    """Return how many bits lie below the values, in old files. Raises ScanError where the header contradicts itself."""
    allocated, stored, high = (
        dataset.get(name) for name in ("BitsAllocated", "BitsStored", "HighBit")
    )
    if high is None or stored is None:
        return 0
    if not stored - 1 <= high < allocated:
        raise ScanError(
            f"its header has HighBit {high} with {stored} of {allocated} bits: no values are there"
        )
    return int(high) + 1 - int(stored)


def check_decoder(dataset: Dataset, path: Path) -> None:
    """Raise ScanError for a compression without an installed decoder, before hours of reading.

    Raises TooLargeError for pixels that would become too large.
    """
    from pydicom.pixels import get_decoder
    from pydicom.uid import UID

    syntax = UID(dataset.file_meta.TransferSyntaxUID)
    try:
        available = get_decoder(syntax).is_available
    except NotImplementedError:
        raise ScanError(
            "its file is compressed in a way that cannot be read; export it uncompressed"
        ) from None
    if not available:
        raise ScanError(
            f"its file is compressed ({syntax.name}), which needs one more package: pip install python-gdcm"
        )
    if is_compressed(dataset):
        check_encoded(dataset, path, syntax.name)


def check_encoded(dataset: Dataset, path: Path, syntax: str) -> None:
    """Raise TooLargeError where compressed pixels would become larger than allowed, independent of the header.

    Pillow limits JPEG and JPEG 2000 itself. In RLE two bytes become up to 128 (PS3.5, annex G), and an encoder hardly
    ever needs more bytes than there are pixels. JPEG-LS has its size in its own header (ITU-T T.87, C.2.2).
    """
    size = path.stat().st_size
    bits = int(dataset.get("BitsAllocated") or 8)
    pixels = dataset.Rows * dataset.Columns * (dataset.get("SamplesPerPixel") or 1)
    plain = pixels * bits // 8 * frames_of(dataset)
    if "RLE" in syntax and size > 2 * plain + BLOCK:
        check_size(64 * size, "its picture, unpacked,")
    if "JPEG-LS" in syntax:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            for start in START_OF_FRAME.finditer(content):
                check_picture(struct.unpack(">HHB", start[1]))


def pixels_of(path: Path, dataset: Dataset, frame: int | None) -> Array:
    """Decode the stored values of a frame; None: of all."""
    from pydicom.pixels import pixel_array

    shift = 0 if is_compressed(dataset) else shift_of(dataset)
    # Else pydicom takes the lowest bits
    bits = {"bits_stored": dataset.BitsAllocated} if shift else {}
    stored = pixel_array(
        path, index=frame, transfer_syntax_uid=dataset.file_meta.TransferSyntaxUID, **bits
    )
    return np.asarray(stored >> shift if shift else stored)


def spacing_of(header: Dataset, *, ratio: bool = False) -> Pair | None:
    """Return the distances of rows and of columns in mm; without these, their ratio if that is enough."""
    for name in ("PixelSpacing", "ImagerPixelSpacing", *("PixelAspectRatio",) * ratio):
        values = header.get(name)
        if not values or len(values) != 2:
            continue
        rows, columns = map(float, values)
        if 0 < rows < 1000 and 0 < columns < 1000:
            return rows, columns
    return None


@dataclass(frozen=True)
class Place:
    """Where a frame lies, in DICOM's patient coordinates; None: its header does not say it.

    ``position``: mm of its first pixel; ``directions``: along a row and along a column, (2, 3); ``spacing``: mm from
    row to row, and from column to column.
    """

    position: Any
    directions: Any
    spacing: Any

    @property
    def is_stated(self) -> bool:
        """Whether the header has all of it."""
        return all(part is not None for part in (self.position, self.directions, self.spacing))

    @property
    def normal(self) -> Array:
        """The direction from slice to slice, (3,)."""
        return np.asarray(np.cross(*self.directions))

    @property
    def along(self) -> float | None:
        """The mm of the frame along its normal."""
        stated = self.position is not None and self.directions is not None
        return float(self.normal @ self.position) if stated else None

    @property
    def plane(self) -> str:
        """The plane of the body that is nearest; "" where it is not stated."""
        if self.directions is None:
            return ""
        return ("sagittal", "coronal", "axial")[int(np.abs(self.normal).argmax())]

    @property
    def steps(self) -> Array:
        """The mm from row to row and from column to column, as columns of an affine, (3, 2)."""
        row, column = self.directions
        return np.column_stack([column * self.spacing[0], row * self.spacing[1]])


def frame_place(header: Dataset) -> Place:
    """Return the place of a frame by its header."""
    position, directions = (
        np.array(header.get(f"Image{which}Patient") or (), float)
        for which in ("Position", "Orientation")
    )
    return Place(
        position if position.size == 3 else None,
        directions.reshape(2, 3) if directions.size == 6 else None,
        spacing_of(header),
    )
