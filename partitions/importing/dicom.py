"""DICOM: what `silofl import` reads of a file's header, and its pixels as a picture.

Of the header only the attributes below are parsed, and none of their values is passed on: identifiers become
pseudonyms, the rest decides how the pixels are shown. Grey values go through the rescale slope and intercept (or the
modality table), then the requested window, or else the header's own VOI table or first window, or else from the lowest
to the highest of the picture (8 bits without a window stay as they are); MONOCHROME1 is inverted, padding is black. YBR
and palettes become RGB of 8 bits. Of a file of several frames the middle one is taken. Pixels are made square.

Source: DICOM PS3.3, C.7.6.3 (pixels), C.11.1 (modality table), C.11.2 (VOI table and window), as pydicom has them.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from partitions.common.sizes import BLOCK, MOST_FRAMES, TooLargeError, check_picture, check_size, unpacked
from partitions.importing.scans import ImageInfo, ScanError, Unavailable, fit, fitted, pseudonym, redacted_errors
from partitions.recipes.pictures import MODALITIES, PHOTOMETRIC
from partitions.recipes.reading import Acquisition, ReadOptions
from partitions.splits import Array

if TYPE_CHECKING:
    from pydicom import Dataset

IDENTITY = {
    "study": "StudyInstanceUID",
    "accession": "AccessionNumber",
    "patient": "PatientID",
    "series": "SeriesInstanceUID",
}
PLACE = ("SeriesDescription", "InstanceNumber", "ImagePositionPatient", "ImageOrientationPatient")
GROUP_LENGTH = b"DICM\x02\0\0\0UL"  # what a header begins with, before how long it is
DEFLATED = b"1.2.840.10008.1.2.1.99"
KIND = ("Modality", "Rows", "Columns", "NumberOfFrames", "PhotometricInterpretation", "ImageOrientationPatient")
PALETTE = tuple(
    f"{segmented}{colour}PaletteColorLookupTable{what}"
    for colour in ("Red", "Green", "Blue")
    for segmented, what in (("", "Descriptor"), ("", "Data"), ("Segmented", "Data"))
)
PIXELS = (
    *("SamplesPerPixel", "PlanarConfiguration", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation"),
    *("PixelSpacing", "ImagerPixelSpacing", "PixelAspectRatio", "PixelPaddingValue", "PixelPaddingRangeLimit"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"),
    *("WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence", *PALETTE),
    *("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"),  # where enhanced files have the above
    *("BurnedInAnnotation", "ConversionType"),
)
START_OF_FRAME = re.compile(rb"\xff\xf7\x00.[\x02-\x10](.{5})", re.DOTALL)  # of JPEG-LS: height, width, components
GROUPS = (  # of enhanced files: what says something of a frame
    *("PixelMeasuresSequence", "PlanePositionSequence", "PlaneOrientationSequence"),
    *("PixelValueTransformationSequence", "FrameVOILUTSequence"),
)
NO_PICTURES = ("SEG", "PR", "KO", "SR", "REG", "RTDOSE", "RTSTRUCT", "RTPLAN")
# Modalities whose machines, or whose exports, write names into the picture itself.
OFTEN_BURNT = ("US", "IVUS", "XA", "XC", "ES", "GM", "SM", "OT", "DOC", "SC", "RF", "ECG", "OP")
BURNT = "say that text is burnt into them: look at them, nothing is taken out"
MAYBE_BURNT = "do not say whether text is burnt into them, and are of a kind that often has it: look at them"
NO_WINDOW = "have no window: they reach from their lowest to their highest value; --window gives all the same"


@dataclass(frozen=True)
class Header:
    """Header of a file. ``identity``: pseudonyms of :data:`IDENTITY`, "" where the header says nothing."""

    identity: Mapping[str, str]
    description: str  # of its series; for matching only, it is not kept
    position: float | None  # mm along the normal of its plane
    number: int  # in its series
    frames: int


def load(path: Path, tags: tuple[str, ...]) -> Dataset:
    """Parse these attributes alone, up to the pixels."""
    try:
        import pydicom
    except ImportError:
        raise Unavailable("DICOM", "pydicom") from None
    check_deflated(path)
    return pydicom.dcmread(path, stop_before_pixels=True, specific_tags=list(tags))


def check_deflated(path: Path) -> None:
    """Raise TooLargeError where the whole file is deflated (PS3.5, A.5), and to more than may be.

    pydicom unpacks all of such a file at once; its header ends where the first element, its length, says.
    """
    with path.open("rb") as file:
        start = file.read(144)
        meta = file.read(min(int.from_bytes(start[140:144], "little"), BLOCK))
        if start[128:138] == GROUP_LENGTH and DEFLATED in meta:
            unpacked(file, "its file", wbits=-15, keep=False)
        elif DEFLATED in start + meta:
            raise ScanError("its file is deflated, and its header does not say where it ends; export it uncompressed")


def check_pixels(dataset: Dataset) -> None:
    """Raise TooLargeError where a frame, or their number, is too large to be decoded."""
    check_picture((dataset.Rows, dataset.Columns, dataset.get("SamplesPerPixel") or 1))
    if int(dataset.get("NumberOfFrames") or 1) > MOST_FRAMES:
        raise TooLargeError(f"its file says that it has more than {MOST_FRAMES} frames")


def read_header(path: Path, where: str) -> Header | None:
    """Read a header; None where it holds no picture (a report, a plan, an outline)."""
    with redacted_errors(where, "DICOM"):
        dataset = load(path, (*IDENTITY.values(), *PLACE, *KIND))
        if dataset.get("Modality") in NO_PICTURES or not dataset.get("Rows"):
            return None
        check_pixels(dataset)
        identity = {key: pseudonym(_text(dataset, keyword)) for key, keyword in IDENTITY.items()}
        number = dataset.get("InstanceNumber")
        return Header(
            identity,
            _text(dataset, "SeriesDescription"),
            _position(dataset),
            int(number) if number is not None else 0,
            int(dataset.get("NumberOfFrames") or 1),
        )


def read_key(path: Path, where: str, kind: str) -> str:
    """What a file says of :data:`IDENTITY`, as it is: for the hospital's own list of predictions, and nothing else."""
    with redacted_errors(where, "DICOM"):
        return _text(load(path, (IDENTITY[kind],)), IDENTITY[kind])


def probe(path: Path, where: str, reading: ReadOptions, frame: int | None = None) -> ImageInfo:
    """Return the image info of a picture; nothing is decoded."""
    with redacted_errors(where, "DICOM"):
        dataset = load(path, (IDENTITY["patient"], *KIND, *PIXELS))
        if not dataset.get("Rows") or not dataset.get("Columns"):
            raise ScanError("its file holds no picture")
        check_pixels(dataset)
        check_decoder(dataset, path)
        header = of_frame(dataset, _frame(dataset, frame))
        height, width = fitted(dataset.Rows, dataset.Columns, spacing_of(header, reading), reading)
        grey = is_grey(dataset)
        deep = grey and int(dataset.get("BitsStored") or 32) > 8
        notes = [
            *warnings_of(dataset),
            *([NO_WINDOW] if deep and not reading.window and not has_window(header) else []),
        ]
        whose, taken = pseudonym(_text(dataset, "PatientID")), acquired(dataset, header)
        return ImageInfo(height, width, 1 if grey else 3, deep, whose, tuple(notes), taken)


def acquired(dataset: Dataset, header: Dataset) -> Acquisition:
    """What other pictures must be alike in: codes that DICOM defines, and a pixel's size. ``header``: a frame's."""
    modality, colours = _text(dataset, "Modality"), _text(dataset, "PhotometricInterpretation")
    spacing = spacing_of(header, ReadOptions(spacing=1.0))  # in mm, or not at all
    return Acquisition(
        format="dicom",
        modality=modality if modality in MODALITIES else "other" if modality else "",
        plane=_plane(header),
        photometric=colours if colours in PHOTOMETRIC else "other",
        rescaled=bool(header.get("ModalityLUTSequence")) or "RescaleSlope" in header,
        pixel=min(spacing) if spacing else None,
    )


def read(path: Path, where: str, reading: ReadOptions, frame: int | None = None) -> Array:
    """The picture: uint8 (h, w, 1 or 3), or float32 (h, w, 1) in 0..1 where more than 8 bits are stored."""
    with redacted_errors(where, "DICOM", "; where it is compressed, `pip install python-gdcm` may help"):
        from pydicom.pixels import pixel_array

        dataset = load(path, (*KIND, *PIXELS))
        check_pixels(dataset)
        check_decoder(dataset, path)
        frame = _frame(dataset, frame)
        array = pixel_array(path, index=frame)
        header = of_frame(dataset, frame)
        if is_grey(dataset):
            values = show(array, header, reading.window)
            deep = int(dataset.get("BitsStored") or 32) > 8
            picture = Image.fromarray(values if deep else np.rint(values * 255).astype(np.uint8))
        else:
            picture = Image.fromarray(_coloured(array, dataset))
        made = np.asarray(fit(picture, spacing_of(header, reading), reading, Image.Resampling.BILINEAR))
        return made[..., np.newaxis] if made.ndim == 2 else made


def show(stored: Array, header: Dataset, window: tuple[float, float] | None) -> Array:
    """Stored grey values (h, w) as a display has them: float32 (h, w), 0 is black and 1 white."""
    from pydicom.pixels import apply_modality_lut

    padding = padding_of(stored, header)
    values = apply_modality_lut(stored, header).astype(np.float64)
    if window:
        shown = _windowed(values, *window, "LINEAR_EXACT")
    elif header.get("VOILUTSequence"):
        shown = _by_table(values, header)
    elif (given := _window_of(header)) is not None:
        shown = _windowed(values, *given, str(header.get("VOILUTFunction") or "LINEAR"))
    elif int(header.get("BitsStored") or 32) <= 8 and "RescaleSlope" not in header:
        shown = values / (2.0**header.BitsStored - 1)
    else:
        seen = values[~padding]
        low, high = (seen.min(), seen.max()) if seen.size else (0.0, 0.0)
        shown = (values - low) / (high - low) if high > low else np.zeros_like(values)
    if header.PhotometricInterpretation == "MONOCHROME1":
        shown = 1 - shown
    return np.where(padding, 0, np.clip(shown, 0, 1)).astype(np.float32)


def _windowed(values: Array, centre: float, width: float, function: str) -> Array:
    """pydicom's windowing, onto 0..1: the data set declares 16 unsigned bits, so that is the output range."""
    from pydicom import Dataset
    from pydicom.pixels import apply_windowing

    screen = Dataset()
    screen.PhotometricInterpretation, screen.BitsStored, screen.PixelRepresentation = "MONOCHROME2", 16, 0
    screen.WindowCenter, screen.WindowWidth, screen.VOILUTFunction = f"{centre:.8g}", f"{width:.8g}", function
    return apply_windowing(values, screen) / 65535


def _by_table(values: Array, header: Dataset) -> Array:
    """Values by the header's VOI table, onto 0..1.

    pydicom's own function keeps the place in the table in the type of the table's entries, and so wraps around in
    one of 8 bits with more than 256 of them.
    """
    item = header.VOILUTSequence[0]
    count, first, bits = (int(number) for number in item.LUTDescriptor)
    entries = item.LUTData
    if isinstance(entries, bytes):
        entries = np.frombuffer(entries, "<u2" if header.original_encoding[1] else ">u2")
    table = np.asarray(entries, np.float64)[: count or 1 << 16] / (2.0**bits - 1)
    return np.asarray(table[np.clip(np.rint(values).astype(np.int64) - first, 0, len(table) - 1)])


def _window_of(header: Dataset) -> tuple[float, float] | None:
    """Centre and width of the header's first window, or None where it has none that can be used."""
    centre, width = (_first(header.get(name)) for name in ("WindowCenter", "WindowWidth"))
    if centre is None or width is None:
        return None
    return (centre, width) if width >= (1 if header.get("VOILUTFunction", "LINEAR") == "LINEAR" else 1e-6) else None


def has_window(header: Dataset) -> bool:
    """Return whether a header says which values are black and white."""
    return bool(header.get("VOILUTSequence")) or _window_of(header) is not None


def padding_of(stored: Array, header: Dataset) -> Array:
    """Which pixels are no part of the picture, bool (h, w)."""
    if header.get("PixelPaddingValue") is None:
        return np.zeros(stored.shape, bool)
    ends = sorted((header.PixelPaddingValue, header.get("PixelPaddingRangeLimit", header.PixelPaddingValue)))
    return np.asarray((stored >= ends[0]) & (stored <= ends[1]))


def _coloured(array: Array, dataset: Dataset) -> Array:
    """RGB as pydicom decodes it, or by its palette, uint8 (h, w, 3)."""
    if dataset.PhotometricInterpretation == "PALETTE COLOR":
        from pydicom.pixels import apply_color_lut

        array = apply_color_lut(array, dataset)[..., :3]
        bits = 8 * array.dtype.itemsize
    else:
        bits = int(dataset.BitsStored)
    return (array >> max(bits - 8, 0)).astype(np.uint8)


def is_grey(dataset: Dataset) -> bool:
    return dataset.PhotometricInterpretation in ("MONOCHROME1", "MONOCHROME2")


def _frame(dataset: Dataset, wanted: int | None) -> int:
    return int(dataset.get("NumberOfFrames") or 1) // 2 if wanted is None else wanted


def of_frame(dataset: Dataset, frame: int) -> Dataset:
    """The header of one frame: enhanced files have spacing, rescaling and window in functional groups."""
    header = dataset.copy()
    shared = dataset.get("SharedFunctionalGroupsSequence") or []
    per_frame = dataset.get("PerFrameFunctionalGroupsSequence") or []
    for groups in (*shared[:1], *per_frame[frame : frame + 1]):
        for name in GROUPS:
            for item in (groups.get(name) or [])[:1]:
                header.update(item)
    return header


def spacing_of(header: Dataset, reading: ReadOptions) -> tuple[float, float] | None:
    """mm from row to row and from column to column; a ratio where nothing else is known, and no mm are asked for."""
    for name in ("PixelSpacing", "ImagerPixelSpacing", *(() if reading.spacing else ("PixelAspectRatio",))):
        values = header.get(name)
        if values and len(values) == 2 and all(0 < float(value) < 1000 for value in values):
            return float(values[0]), float(values[1])
    return None


def _position(dataset: Dataset) -> float | None:
    position, plane = dataset.get("ImagePositionPatient"), dataset.get("ImageOrientationPatient")
    if not position or not plane or len(position) != 3 or len(plane) != 6:
        return None
    rows, columns = np.array(plane, float).reshape(2, 3)
    return float(np.cross(rows, columns) @ np.array(position, float))


def _plane(header: Dataset) -> str:
    """Axial, coronal or sagittal, as the nearest of them; "" where the header does not say."""
    plane = header.get("ImageOrientationPatient")
    if not plane or len(plane) != 6:
        return ""
    rows, columns = np.array(plane, float).reshape(2, 3)
    return ("sagittal", "coronal", "axial")[int(np.abs(np.cross(rows, columns)).argmax())]


def warnings_of(dataset: Dataset) -> tuple[str, ...]:
    burned = _text(dataset, "BurnedInAnnotation").upper()
    if burned == "YES":
        return (BURNT,)
    often = dataset.get("Modality") in OFTEN_BURNT or "ConversionType" in dataset
    return (MAYBE_BURNT,) if often and burned != "NO" else ()


def check_decoder(dataset: Dataset, path: Path) -> None:
    """Refuse a compression that nothing here unpacks, before hours of reading, or that unpacks to too much."""
    from pydicom.pixels import get_decoder
    from pydicom.uid import UID

    syntax = UID(dataset.file_meta.TransferSyntaxUID)
    try:
        available = get_decoder(syntax).is_available
    except NotImplementedError:
        raise ScanError("its file is compressed in a way that cannot be read; export it uncompressed") from None
    if not available:
        raise ScanError(
            f"its file is compressed ({syntax.name}), which needs one more package: pip install python-gdcm"
        )
    if syntax.is_encapsulated:
        check_encoded(dataset, path, syntax.name)


def check_encoded(dataset: Dataset, path: Path, syntax: str) -> None:
    """Raise TooLargeError where compressed pixels would become more than may be, whatever the header says.

    Pillow looks after JPEG and JPEG 2000 itself. Of RLE two bytes become up to 128 (PS3.5, annex G), and an encoder
    hardly ever needs more bytes than there are pixels; JPEG-LS says its size in its own header (ITU-T T.87, C.2.2).
    """
    size, bits = path.stat().st_size, int(dataset.get("BitsAllocated") or 8)
    pixels = dataset.Rows * dataset.Columns * (dataset.get("SamplesPerPixel") or 1)
    plain = pixels * bits // 8 * int(dataset.get("NumberOfFrames") or 1)
    if "RLE" in syntax and size > 2 * plain + BLOCK:
        check_size(64 * size, "its picture, unpacked,")
    if "JPEG-LS" in syntax:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for start in START_OF_FRAME.finditer(content):
                check_picture(struct.unpack(">HHB", start[1]))


def _first(value: Any) -> float | None:
    """The first of several numbers, or the number itself."""
    if value is None or value == "":
        return None
    return float(value[0] if isinstance(value, Sequence) else value)


def _text(dataset: Dataset, keyword: str) -> str:
    return str(dataset.get(keyword) or "").strip()
