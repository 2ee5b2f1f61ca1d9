"""Reader of PNG and similar pictures, with Pillow. Messages contain their file names, and those of no other format."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from partitions.common.errors import DataError
from partitions.common.names import words_in
from partitions.importing.readers.reader import (
    FileSummary,
    ImageInfo,
    Reader,
    SampleSource,
    fit_picture,
    fitted_size,
)
from partitions.recipes.reading import ReadOptions
from partitions.splits import Array

ENDINGS = tuple(
    words_in(
        ".png .apng .jpg .jpeg .jpe .jfif .jp2 .j2k .jpx .bmp .dib .tif .tiff .webp .gif .avif .pbm .pgm .ppm .pnm"
    )
)
FORMATS = words_in("PNG JPEG JPEG2000 BMP DIB TIFF WEBP GIF AVIF PPM")  # Pillow has more
MODES = words_in("1 L LA P PA RGB RGBA RGBX CMYK YCbCr HSV I;16 I;16B I;16L")
ORIENTATION = 0x0112  # of EXIF
LOSSY = ("JPEG", "MPO")  # formats whose pixels are not what was saved
# Tags of TIFF: whether 0 is white, and how many channels there are
PHOTOMETRIC, SAMPLES = 262, 277
COLOURS = {"P": "palette", **dict.fromkeys(("1", "L", "LA", "I", "F"), "grey")}
OTHER_BITS = {"1": 1, "I": 32, "F": 32}  # all others have 8


def is_picture(path: Path) -> bool:
    """Return whether a file is a picture by its ending or, without one, by its content."""
    if path.name.lower().endswith(ENDINGS):
        return True
    if path.suffix:
        return False
    try:
        with open_picture(path, ""):
            return True
    except DataError:
        return False


def read_stored_classes(path: Path, where: str, reading: ReadOptions) -> Array:
    """Read a mask's values as they are stored, uint8 (h, w): a grey or palette picture."""
    with open_picture(path, where) as opened:
        if opened.format in LOSSY:
            raise DataError("JPEG changes the values of classes: save masks as PNG")
        mask: Image.Image = ImageOps.exif_transpose(opened)
        if mask.mode not in ("1", "L", "P"):
            raise DataError(
                f"its pixels are {mask.mode}; save classes 0, 1, 2, ... as 8-bit grey"
            )
        return fit_picture(mask, None, reading, Image.Resampling.NEAREST).astype(np.uint8)


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


def _probe(sample: SampleSource, reading: ReadOptions) -> ImageInfo:
    """Return the image info of a picture."""
    with open_picture(sample.path, sample.where) as picture:
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


def _read(sample: SampleSource, reading: ReadOptions) -> Array:
    """Read a picture: uint8 (h, w, 1 or 3), or float32 (h, w, 1) in 0..1 if it is grey of more than 8 bits."""
    with open_picture(sample.path, sample.where) as opened:
        picture: Image.Image = ImageOps.exif_transpose(opened)
        if picture.mode.startswith("I;16"):
            values = np.asarray(picture).astype(np.float32) / 65535
            # Of TIFF: Pillow inverts 8 bits only
            white = getattr(opened, "tag_v2", {}).get(PHOTOMETRIC) == 0
            picture = Image.fromarray(1 - values if white else values)
        else:
            picture = picture.convert("L" if picture.mode in ("1", "L", "LA") else "RGB")
        return np.atleast_3d(fit_picture(picture, None, reading, Image.Resampling.BILINEAR))


def _describe(path: Path, where: str) -> FileSummary:
    """Return format, size and bits of a picture."""
    try:
        with open_picture(path, where) as picture:
            kind, mode, (width, height) = picture.format or "?", picture.mode, picture.size
            frames = getattr(picture, "n_frames", 1)
            if kind == "PNG":
                picture.verify()  # its parts have check sums; nothing is decoded
    except DataError as error:
        raise DataError(str(error).replace(f"{path.name} ", "it ", 1)) from None
    mode, *deep = mode.split(";")  # I;16B is grey of 16 bits
    bits = 16 if deep else OTHER_BITS.get(mode, 8)
    colour = COLOURS.get(mode, "colour")
    values = [
        ("format", kind),
        ("size", f"{width} x {height}"),
        ("bits", f"{bits}-bit {colour}"),
    ]
    values += [("pages", "several, of which the first is read")] * (frames > 1)
    return FileSummary("pictures", values)


# A file that is called like a scan is none, and pictures alone are named in messages: none is known by its first bytes
READER = Reader("picture", ENDINGS, lambda start: False, _probe, _read, _describe)
