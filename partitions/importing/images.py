"""Pictures of a source one by one: their image info (``probe``) and their pixels (``read``).

An import probes all pictures first, from their headers alone. It then reads them one by one, so that at most one is in
memory. Messages contain the file names of PNG and similar pictures. They contain a line of a csv or a number for a scan
(DICOM, NIfTI), because hospitals write patients' names into file names.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from partitions.common.errors import DataError
from partitions.common.names import Names
from partitions.importing import dicom, signals
from partitions.importing.dicom_file import is_dicom
from partitions.importing.files import ImageInfo, fit, fitted_size
from partitions.importing.signals import ENDINGS as SIGNALS
from partitions.importing.signals import files_of, is_signal
from partitions.importing.volumes import volume
from partitions.labels import VOID
from partitions.recipes.reading import ReadOptions
from partitions.splits import Array

PICTURES = tuple(
    re.findall(
        r"\S+",
        ".png .apng .jpg .jpeg .jpe .jfif .jp2 .j2k .jpx .bmp .dib .tif .tiff .webp .gif .avif .pbm .pgm .ppm .pnm",
    )
)
FORMATS = re.findall(
    r"\w+", "PNG JPEG JPEG2000 BMP DIB TIFF WEBP GIF AVIF PPM"
)  # Pillow has more
MODES = re.findall(r"\S+", "1 L LA P PA RGB RGBA RGBX CMYK YCbCr HSV I;16 I;16B I;16L")
NIFTI = (".nii", ".nii.gz")
# Files with these endings are never named in messages, DICOM or not
DICOM = (".dcm", ".dicom", ".ima")
ORIENTATION = 0x0112  # of EXIF
LOSSY = ("JPEG", "MPO")  # formats whose pixels are not what was saved
# Tags of TIFF: whether 0 is white, and how many channels there are
PHOTOMETRIC, SAMPLES = 262, 277


@dataclass(frozen=True, slots=True)
class SampleSource:
    """One sample before it is read: its place, and its label, split and patient."""

    where: str  # for messages: "table.csv, line 7"
    labels: Names  # none where there is a mask
    split: str  # "" = not given
    patient: str  # "" = not given
    file: Path | None = None
    text: str = ""
    subgroup: str = ""  # "" = not known
    spelling: str = ""  # the hash of the patient's identifier as it is written
    # The csv's identifier of the patient, for predictions; no file of ours contains it
    key: str = ""
    part: int | None = None  # the slice of a volume; None: the middle one
    files: tuple[Path, ...] = ()  # of a whole volume: a NIfTI file, or all files of a series
    masks: tuple[
        Path, ...
    ] = ()  # a picture or NIfTI file; of a whole volume also SEG and RTSTRUCT objects


Samples = Sequence[SampleSource]


def kind_of(path: Path) -> str:
    """Return ``nifti`` or ``signal`` by a file's name, ``dicom`` or ``signal`` by its content, or else ``picture``."""
    if path.name.lower().endswith(NIFTI):
        return "nifti"
    if is_signal(path):
        return "signal"
    return "dicom" if path.name.lower().endswith(DICOM) or is_dicom(path) else "picture"


def is_picture(path: Path) -> bool:
    """Return whether a file is a picture by its ending or, without one, by its content."""
    if path.name.lower().endswith(PICTURES):
        return True
    if path.suffix:
        return False
    try:
        with open_picture(path, ""):
            return True
    except DataError:
        return False


def is_sample(path: Path) -> bool:
    """Return whether a file is a picture, a NIfTI volume or a signal."""
    return path.name.lower().endswith((*NIFTI, *SIGNALS)) or is_picture(path)


def paths_of(sample: SampleSource) -> list[Path]:
    """Return the files that a sample is read from, those that its header names included."""
    return [*(files_of(sample.file) if sample.file else ()), *sample.masks]


def probe(sample: SampleSource, reading: ReadOptions) -> ImageInfo:
    """Return the image info of a sample. Raises DataError, one line, where it cannot be read."""
    assert sample.file is not None
    if sample.file.is_dir():
        raise DataError(
            f"{sample.where}: its file is a folder; --volume takes one with a DICOM series as a volume"
        )
    if kind_of(sample.file) == "signal":
        return signals.probe(sample.file, sample.where, reading)
    if files := scan_files(sample, reading):
        return volume.probe(files, sample.where, reading)
    if kind_of(sample.file) == "dicom":
        return dicom.probe(sample.file, sample.where, reading, sample.part)
    with open_picture(sample.file, sample.where) as picture:
        if picture.mode not in MODES:
            what = "32-bit" if picture.mode in ("I", "F") else "of a kind that is not read"
            raise DataError(
                f"its pixels are {what} ({picture.mode}); convert it to 8 or 16 bit"
            )
        # Before EXIF is read, for which Pillow decodes a PNG
        notes = tuple(remarks_on(picture))
        width, height = picture.size
        if picture.getexif().get(ORIENTATION, 1) >= 5:  # rotated by 90 degrees
            width, height = height, width
        height, width = fitted_size(height, width, None, reading)
        deep = picture.mode.startswith("I;16")
        grey = deep or picture.mode in ("1", "L", "LA")
        return ImageInfo(height, width, 1 if grey else 3, deep, notes=notes)


def scan_files(sample: SampleSource, reading: ReadOptions) -> tuple[Path, ...]:
    """Return the files of a sample that is a volume, or a slice of a NIfTI volume; none for another one."""
    if reading.volume or sample.file is None:
        return sample.files
    return (sample.file,) if kind_of(sample.file) == "nifti" else ()


def remarks_on(picture: Image.Image) -> Iterator[str]:
    """Yield what is not taken of a picture, or taken otherwise than it looks; each as in ``ImageInfo.notes``."""
    tags = getattr(picture, "tag_v2", {})
    bands = len(picture.getbands())
    if getattr(picture, "is_animated", False):
        yield "have several frames or pages: the first is taken"
    if not picture.mode.startswith("I;16") and any(
        ";16" in str(tile[3]) for tile in getattr(picture, "tile", ())
    ):
        yield "have 16 bits for each colour: the upper 8 are taken"
    if picture.mode in ("LA", "PA", "RGBA") or "transparency" in picture.info:
        yield "have transparency: it is dropped, and what lies below it is seen"
    if picture.mode == "CMYK":
        yield "are CMYK, as for print: Pillow makes red, green and blue of it"
    if (channels := int(tags.get(SAMPLES, bands))) > bands:
        yield f"have {channels} channels: the first {bands} are taken"


def read(sample: SampleSource, reading: ReadOptions) -> Array:
    """Read a sample's picture: uint8 (h, w, 1 or 3), or float32 (h, w, 1) in 0..1 if it is grey of more than 8 bits.

    A volume is float32 (d, h, w, 1), a signal float32 (steps, channels). Raises DataError, one line.
    """
    assert sample.file is not None
    if kind_of(sample.file) == "signal":
        return signals.read(sample.file, sample.where, reading)
    if files := scan_files(sample, reading):
        return volume.read(files, sample.where, reading, sample.part)
    if kind_of(sample.file) == "dicom":
        return dicom.read(sample.file, sample.where, reading, sample.part)
    with open_picture(sample.file, sample.where) as opened:
        picture: Image.Image = ImageOps.exif_transpose(opened)
        if picture.mode.startswith("I;16"):
            values = np.asarray(picture).astype(np.float32) / 65535
            # Of TIFF: Pillow inverts 8 bits only
            white = getattr(opened, "tag_v2", {}).get(PHOTOMETRIC) == 0
            picture = Image.fromarray(1 - values if white else values)
        else:
            picture = picture.convert("L" if picture.mode in ("1", "L", "LA") else "RGB")
        array = np.asarray(fit(picture, None, reading, Image.Resampling.BILINEAR))
    return array[..., np.newaxis] if array.ndim == 2 else array


def read_mask(sample: SampleSource, reading: ReadOptions) -> Array:
    """Read a sample's mask of classes, uint8 (h, w) or (d, h, w); of binary masks 255 is class 1. Raises DataError."""
    mask = stored_mask(sample, reading)
    if not reading.binary_masks:
        return mask
    if not is_binary(mask):
        raise DataError(
            f"{sample.where}: its mask has values besides 0 and 255, and the recipe says binary-masks"
        )
    return np.asarray(mask == VOID, np.uint8)


def is_binary(mask: Array) -> bool:
    """Return whether a mask has no values besides 0 and 255."""
    return bool(((mask == 0) | (mask == VOID)).all())


def has_binary_masks(samples: Samples, reading: ReadOptions) -> bool:
    """Return whether all masks have 0 and 255 alone, so that 255 is what was drawn, and not what does not count."""
    drawn = False
    for sample in samples:
        try:
            mask = stored_mask(sample, reading)
        except DataError:  # named when all are read
            continue
        drawn |= bool(mask.any())
        if not is_binary(mask):
            return False
    return drawn


def stored_mask(sample: SampleSource, reading: ReadOptions) -> Array:
    """Read a mask's values as they are stored: a grey or palette picture, NIfTI, or outlines."""
    if reading.volume:
        return volume.read_mask(sample.files, sample.masks, sample.where, reading)
    assert sample.file is not None
    if kind_of(sample.masks[0]) == "nifti":
        return volume.read_mask(
            (sample.file,), sample.masks, sample.where, reading, sample.part
        )
    with open_picture(sample.masks[0], sample.where) as opened:
        if opened.format in LOSSY:
            raise DataError("JPEG changes the values of classes: save masks as PNG")
        mask: Image.Image = ImageOps.exif_transpose(opened)
        if mask.mode not in ("1", "L", "P"):
            raise DataError(
                f"its pixels are {mask.mode}; save classes 0, 1, 2, ... as 8-bit grey"
            )
        return np.asarray(fit(mask, None, reading, Image.Resampling.NEAREST)).astype(np.uint8)


def name_of(path: Path) -> str:
    """Return a file's name for messages."""
    return path.name if kind_of(path) == "picture" else "its file"


@contextmanager
def open_picture(path: Path, where: str) -> Iterator[Image.Image]:
    """Context with a picture of which only the header is read. Raises DataError, which names the file."""
    try:
        with warnings.catch_warnings():  # Pillow warns from half of the size that it refuses
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            picture = Image.open(path, formats=FORMATS)
        with picture:
            yield picture
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        # Without the name of a patient's folder
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, FileNotFoundError):
            reason = "there is no such file"
        elif isinstance(error, UnidentifiedImageError):
            empty = path.stat().st_size == 0
            reason = "it is empty" if empty else "it is no picture"
        raise DataError(f"{where}: {path.name} cannot be read ({reason})") from error
