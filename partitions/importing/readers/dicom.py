"""Reader of DICOM files, with pydicom: attributes of the header, and pixels as a picture.

Only the header attributes below are parsed, and none of their values is passed on: identifiers become pseudonyms, the
others determine how pixels are converted:

* Grey values are converted by the rescale slope and intercept (or the modality table).
* Then the first of these is applied: the requested window, the header's VOI table, its first window, the range of the
  picture (8 bits without a window do not change).
* MONOCHROME1 is inverted, padding is black. YBR and palettes become RGB of 8 bits.
* Of several frames the middle one is used. Pixels are made square.

Source: DICOM PS3.3, C.7.6.3 (pixels), C.11.1 (modality table), C.11.2 (VOI table and window), as in pydicom.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from partitions.common.names import Names, words_in
from partitions.importing.readers.dicom_file import (
    attribute_text,
    begins_dicom,
    check_pixels,
    check_readable,
    frame_place,
    frames_of,
    is_compressed,
    is_grey,
    load,
    of_frame,
    pixels_of,
    spacing_of,
)
from partitions.importing.readers.reader import (
    FileSummary,
    ImageInfo,
    Reader,
    SampleSource,
    ScanError,
    first_bytes,
    fit_picture,
    fitted_size,
    hash_text,
    pseudonym,
    redacted_errors,
)
from partitions.importing.readers.waveform import begins_waveform
from partitions.recipes.pictures import MODALITIES, PHOTOMETRIC
from partitions.recipes.reading import Acquisition, Pair, ReadOptions
from partitions.splits import Array

if TYPE_CHECKING:
    from pydicom import Dataset

ENDINGS = (".dcm", ".dicom", ".ima")  # of files that are never named in messages
IDENTITY = {
    "study": "StudyInstanceUID",
    "accession": "AccessionNumber",
    "patient": "PatientID",
    "series": "SeriesInstanceUID",
}
PLACE = (
    "SeriesDescription",
    "InstanceNumber",
    "ImagePositionPatient",
    "ImageOrientationPatient",
)
HINT = ": pip install python-gdcm may help"
KIND = words_in(
    "Modality Rows Columns NumberOfFrames PhotometricInterpretation ImageOrientationPatient"
)
PALETTE = tuple(
    f"{segmented}{colour}PaletteColorLookupTable{what}"
    for colour in ("Red", "Green", "Blue")
    for segmented, what in (("", "Descriptor"), ("", "Data"), ("Segmented", "Data"))
)
PIXELS = words_in(
    "SamplesPerPixel PlanarConfiguration BitsAllocated BitsStored HighBit PixelRepresentation PixelSpacing "
    "ImagerPixelSpacing PixelAspectRatio PixelPaddingValue PixelPaddingRangeLimit RescaleSlope RescaleIntercept "
    "ModalityLUTSequence WindowCenter WindowWidth VOILUTFunction VOILUTSequence BurnedInAnnotation ConversionType "
    # Where enhanced files have the above
    "SharedFunctionalGroupsSequence PerFrameFunctionalGroupsSequence"
)
PIXELS += PALETTE
NO_PICTURES = words_in("SEG PR KO SR REG RTDOSE RTSTRUCT RTPLAN")
# Modalities whose machines or exports often write names into the pixels.
OFTEN_BURNT = words_in("US IVUS XA XC ES GM SM OT DOC SC RF ECG OP")
BURNT = "say that text is burnt into them: look at them, nothing is taken out"
MAYBE_BURNT = (
    "do not say whether text is burnt into them, "
    "and are of a kind that often has it: look at them"
)
MIDDLE = "have several frames: the middle one is taken"
NO_WINDOW = (
    "have no window: they reach from their lowest to their highest value; "
    "--window gives all the same"
)


@dataclass(frozen=True)
class Header:
    """Header of a file. ``identity``: pseudonyms of :data:`IDENTITY`, "" where the header has no value."""

    identity: Mapping[str, str]
    description: str  # of its series; for matching only, not stored
    position: float | None  # mm along the normal of its plane
    number: int  # in its series
    frames: int


def read_header(path: Path, where: str) -> Header | str:
    """Read a header; where it holds no picture, return DICOM's code of what it is (a report, a plan, an outline)."""
    with redacted_errors(where, "DICOM"):
        dataset = load(path, (*IDENTITY.values(), *PLACE, *KIND))
        modality = attribute_text(dataset, "Modality")
        picture = bool(dataset.get("Rows"))
        if modality in NO_PICTURES or not (picture or begins_waveform(first_bytes(path))):
            return (
                modality if modality in (*NO_PICTURES, *MODALITIES) else "DICOM without pixels"
            )
        if picture:
            check_pixels(dataset)
        place = frame_place(dataset)
        number = int(dataset.get("InstanceNumber") or 0)
        description = attribute_text(dataset, "SeriesDescription")
        identity = {
            key: pseudonym(attribute_text(dataset, tag)) for key, tag in IDENTITY.items()
        }
        return Header(identity, description, place.along, number, frames_of(dataset))


def read_key(path: Path, where: str, kind: str) -> str:
    """Return an attribute of :data:`IDENTITY` unchanged, for the hospital's own list of predictions only."""
    with redacted_errors(where, "DICOM"):
        return attribute_text(load(path, (IDENTITY[kind],)), IDENTITY[kind])


def info_of(dataset: Dataset, path: Path, reading: ReadOptions, part: int | None) -> ImageInfo:
    """Return the image info of a parsed header. Raises ScanError where its pixels cannot be read."""
    if not dataset.get("Rows") or not dataset.get("Columns"):
        raise ScanError("its file holds no picture")
    check_readable(dataset, path)
    header = of_frame(dataset, _frame(dataset, part))
    check_rescale(header)
    height, width = fitted_size(
        dataset.Rows, dataset.Columns, spacing_of(header, ratio=not reading.spacing), reading
    )
    grey = is_grey(dataset)
    deep = grey and int(dataset.get("BitsStored") or 32) > 8
    notes = [*warnings_of(dataset)]
    if part is None and frames_of(dataset) > 1:
        notes.append(MIDDLE)
    if deep and not reading.window and not has_window(header):
        notes.append(NO_WINDOW)
    whose = attribute_text(dataset, "PatientID")
    return ImageInfo(
        height,
        width,
        1 if grey else 3,
        deep,
        pseudonym(whose),
        notes=tuple(notes),
        acquired=read_acquisition(dataset, header),
        spelling=hash_text(whose),
    )


def describe_header(
    dataset: Dataset, header: Dataset, taken: Acquisition
) -> Iterator[tuple[str, str]]:
    """Yield (property, value) for the properties that pictures should share. ``header``: a frame's."""
    yield "modality", taken.modality or "none"
    known = "PhotometricInterpretation" in dataset
    yield "photometric interpretation", taken.photometric if known else "none"
    yield "size", f"{dataset.Columns} x {dataset.Rows}"
    stored, allocated = (
        int(dataset.get(f"Bits{which}") or 0) for which in ("Stored", "Allocated")
    )
    yield "bits", f"{stored} of {allocated} bits"
    yield "plane", taken.plane or "not stated"
    yield "values", "rescaled to a unit" if taken.rescaled else "not rescaled"
    yield "window", "their own" if has_window(header) else "none"
    for note in warnings_of(dataset):
        yield "text", note


def read_acquisition(dataset: Dataset, header: Dataset) -> Acquisition:
    """Return the properties that other pictures must share: DICOM's codes and the pixel size. ``header``: a frame's.

    A code that DICOM does not define is "other", because it may be a text.
    """
    colours = attribute_text(dataset, "PhotometricInterpretation")
    modality = attribute_text(dataset, "Modality")
    place = frame_place(header)
    return Acquisition(
        format="dicom",
        modality=modality if modality in (*MODALITIES, "") else "other",
        plane=place.plane,
        photometric=colours if colours in PHOTOMETRIC else "other",
        rescaled=bool(header.get("ModalityLUTSequence")) or "RescaleSlope" in header,
        pixel=min(place.spacing) if place.spacing else None,
    )


def show(stored: Array, header: Dataset, window: Pair | None) -> Array:
    """Convert stored grey values (h, w) to display values: float32 (h, w), 0 is black and 1 white."""
    values, padding = in_unit(stored, header)
    values = values.astype(np.float64)
    if window:
        shown = _apply_window(values, *window, "LINEAR_EXACT")
    elif header.get("VOILUTSequence"):
        shown = _by_table(values, header)
    elif (centre_width := _window_of(header)) is not None:
        shown = _apply_window(
            values, *centre_width, str(header.get("VOILUTFunction") or "LINEAR")
        )
    elif int(header.get("BitsStored") or 32) <= 8 and "RescaleSlope" not in header:
        shown = values / (2.0**header.BitsStored - 1)
    else:
        seen = values[~padding] if (~padding).any() else np.zeros(1)
        low, high = seen.min(), seen.max()
        shown = (values - low) / (high - low) if high > low else np.zeros_like(values)
    if header.PhotometricInterpretation == "MONOCHROME1":
        shown = 1 - shown
    clipped = np.clip(shown, 0, 1)
    return np.where(padding, 0, clipped).astype(np.float32)


def check_rescale(header: Dataset) -> None:
    """Raise ScanError for one of slope and intercept alone, which pydicom ignores, unless it changes nothing."""
    slope, intercept = header.get("RescaleSlope"), header.get("RescaleIntercept")
    if header.get("ModalityLUTSequence") or None not in (slope, intercept):
        return
    if slope not in (None, 1) or intercept not in (None, 0):
        has, lacks = ("Intercept", "Slope") if slope is None else ("Slope", "Intercept")
        raise ScanError(
            f"its header has Rescale{has} and no Rescale{lacks}: in which unit its values are is not known"
        )


def _apply_window(values: Array, centre: float, width: float, function: str) -> Array:
    """Apply pydicom's windowing, scaled to 0..1. Its output range is that of the declared 16 unsigned bits."""
    from pydicom import Dataset
    from pydicom.pixels import apply_windowing

    screen = Dataset()
    screen.PhotometricInterpretation = "MONOCHROME2"
    screen.BitsStored = 16
    screen.PixelRepresentation = 0
    screen.WindowCenter = f"{centre:.8g}"
    screen.WindowWidth = f"{width:.8g}"
    screen.VOILUTFunction = function
    return apply_windowing(values, screen) / 65535


def _by_table(values: Array, header: Dataset) -> Array:
    """Convert values by the header's VOI table to 0..1.

    pydicom's own function stores the index in the type of the table's entries. So it wraps around in a table of 8 bits
    with more than 256 entries.
    """
    item = header.VOILUTSequence[0]
    count, first, bits = (int(number) for number in item.LUTDescriptor)
    entries = item.LUTData
    if isinstance(entries, bytes):
        entries = np.frombuffer(entries, "<u2" if header.original_encoding[1] else ">u2")
    table = np.asarray(entries, np.float64)[: count or 1 << 16] / (2.0**bits - 1)
    return np.asarray(
        table[np.clip(np.rint(values).astype(np.int64) - first, 0, len(table) - 1)]
    )


def _window_of(header: Dataset) -> Pair | None:
    """Return centre and width of the header's first window, or None where it has no valid one."""
    centre, width = (_first(header.get(name)) for name in ("WindowCenter", "WindowWidth"))
    linear = header.get("VOILUTFunction", "LINEAR") == "LINEAR"
    if centre is None or width is None or width < (1 if linear else 1e-6):
        return None
    return centre, width


def has_window(header: Dataset) -> bool:
    """Return whether a header has a VOI table or a valid window."""
    return bool(header.get("VOILUTSequence")) or _window_of(header) is not None


def in_unit(stored: Array, header: Dataset) -> tuple[Array, Array]:
    """Return stored values (h, w) in the machine's unit, and which are padding, bool."""
    from pydicom.pixels import apply_modality_lut

    check_rescale(header)
    padding = np.zeros(stored.shape, bool)
    if (value := header.get("PixelPaddingValue")) is not None:
        ends = sorted((value, header.get("PixelPaddingRangeLimit", value)))
        padding = (stored >= ends[0]) & (stored <= ends[1])
    return np.asarray(apply_modality_lut(stored, header)), padding


def _to_rgb(array: Array, dataset: Dataset) -> Array:
    """Return RGB as decoded by pydicom, or by the palette, uint8 (h, w, 3)."""
    if dataset.PhotometricInterpretation == "PALETTE COLOR":
        from pydicom.pixels import apply_color_lut

        array = apply_color_lut(array, dataset)[..., :3]
        bits = 8 * array.dtype.itemsize
    else:
        bits = int(dataset.BitsStored)
    return (array >> max(bits - 8, 0)).astype(np.uint8)


def _frame(dataset: Dataset, wanted: int | None) -> int:
    return frames_of(dataset) // 2 if wanted is None else wanted


def warnings_of(dataset: Dataset) -> Names:
    burned = attribute_text(dataset, "BurnedInAnnotation").upper()
    often = dataset.get("Modality") in OFTEN_BURNT or "ConversionType" in dataset
    note = BURNT if burned == "YES" else MAYBE_BURNT
    return (note,) * (burned == "YES" or (often and burned != "NO"))


def _first(value: Any) -> float | None:
    """Return the first of several numbers, or the number itself; None for no value."""
    if isinstance(value, Sequence) and value:
        value = value[0]
    return None if value in (None, "") else float(value)


def _probe(sample: SampleSource, reading: ReadOptions) -> ImageInfo:
    """Return the image info of a picture from its header; no pixels are decoded."""
    with redacted_errors(sample.where, "DICOM"):
        dataset = load(sample.path, (IDENTITY["patient"], *KIND, *PIXELS))
        return info_of(dataset, sample.path, reading, sample.part)


def _read(sample: SampleSource, reading: ReadOptions) -> Array:
    """Read the picture: uint8 (h, w, 1 or 3), or float32 (h, w, 1) in 0..1 where more than 8 bits are stored."""
    path = sample.path
    with redacted_errors(sample.where, "DICOM"):
        dataset = load(path, (*KIND, *PIXELS))
        check_readable(dataset, path)
    with redacted_errors(sample.where, "DICOM", HINT * is_compressed(dataset)):
        frame = _frame(dataset, sample.part)
        array = pixels_of(path, dataset, frame)
        header = of_frame(dataset, frame)
        if is_grey(dataset):
            values = show(array, header, reading.window)
            deep = int(dataset.get("BitsStored") or 32) > 8
            if not deep:
                values = np.rint(values * 255).astype(np.uint8)
            picture = Image.fromarray(values)
        else:
            picture = Image.fromarray(_to_rgb(array, dataset))
        spacing = spacing_of(header, ratio=not reading.spacing)
        return np.atleast_3d(fit_picture(picture, spacing, reading, Image.Resampling.BILINEAR))


def _describe(path: Path, where: str) -> FileSummary:
    """Return identity and properties of a file, or what it is without a picture."""
    identified = read_header(path, where)
    if isinstance(identified, str):
        return FileSummary("DICOM files without a picture", without=identified)
    with redacted_errors(where, "DICOM"):
        dataset = load(path, (IDENTITY["patient"], *KIND, *PIXELS))
        taken = info_of(dataset, path, ReadOptions(), None).acquired
        header = of_frame(dataset, _frame(dataset, None))
        values = tuple(describe_header(dataset, header, taken))
    return FileSummary(
        "DICOM pictures", values, identified.identity, identified.frames, taken.pixel
    )


READER = Reader("dicom", ENDINGS, begins_dicom, _probe, _read, _describe)
