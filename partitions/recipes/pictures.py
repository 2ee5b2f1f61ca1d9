"""A recipe of pictures and scans: their conversion to inputs, the source of labels, and checks of other pictures.

    version = 1
    kind = "pictures"
    labels-by = "study"            # file (a csv), folder, study, accession, patient
    label = ["finding"]            # columns of the csv
    task = "multiclass"
    classes = ["no", "yes"]
    [pictures]                     # the result, with options as in `silofl import`
    shape = [224, 224, 1]          # height, width, channels; of whole volumes [depth, height, width, 1]
    dtype = "float32"
    window = [40.0, 400.0]
    spacing = 1.5
    resize = true                  # to the shape; otherwise pictures must have it
    [expected]                     # other pictures are refused where they differ
    formats = ["dicom"]
    modalities = ["CT"]
    planes = ["axial"]
    rescaled = ["yes"]
    pixel-mm = [0.3, 2.0]          # half of the smallest pixel to twice the largest, rounded

It contains no name, date, identifier or text of a header, only codes that DICOM defines, and rounded ranges.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from partitions.common.errors import DataError
from partitions.common.names import Names, composed, escape, words_in
from partitions.common.parsed import parse_content, parse_json
from partitions.labels import TASKS
from partitions.recipes.reading import Acquisition, Pair, ReadOptions
from partitions.recipes.recipe import (
    LONGEST_RECIPE,
    MEND,
    Recipe,
    RecipePart,
    Text,
    check_version,
    load_toml,
    one_of,
    parse_recipe,
)
from partitions.recipes.toml import NO_NOTES, as_toml
from partitions.schema import LONGEST_NAME, Feature, few, tidy

KIND, SIGNALS = "pictures", "signals"
WAVES = ("wfdb", "edf", "dicom-waveform")  # formats of signals
SCANS = ("dicom", "nifti")
LABELS_BY = words_in("file folder study accession patient outlines")
ANSWERS = ("yes", "no")
# Defined terms of (0008,0060), DICOM PS3.3, C.7.3.1.1.1. All other values become "other".
MODALITIES = frozenset(
    words_in(
        "AR AU BI BMD CD CF CR CT CTPROTOCOL DD DG DM DOC DS DX EC ECG EPS ES FA FID FS GM HC HD IO IVOCT IVUS KER LEN "
        "LP LS MA MG MR MS NM OAM OCT OP OPM OPR OPT OPV OSS OT PX RF RG RTIMAGE SM SMR SR ST TG TM US VA XA XC PT"
    )
)
GREY = ("MONOCHROME1", "MONOCHROME2")
YBR = words_in("YBR_FULL YBR_FULL_422 YBR_PARTIAL_420 YBR_ICT YBR_RCT")
PHOTOMETRIC = frozenset((*GREY, "PALETTE COLOR", "RGB", *YBR))
# Fields of ReadOptions and of [pictures]
SAME = words_in("window slices series outlines binary_masks channels rate seconds")
COMMENTS = {
    "pictures": "What is made of each picture or signal.",
    "expected": "What the pictures were. Others are refused where they differ: add what the model may be used for.",
}

Millimetres = tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]]  # from .. to


class Expected(RecipePart):
    """The properties of the recipe's pictures, each as a list of values; "" for a header without a value.

    ``pixel``, ``between``: mm of a pixel, and between slices, from .. to; None where they are not checked.
    ``rates``: Hz of signals; ``units``: of each channel, in order.
    """

    formats: tuple[Annotated[str, one_of("picture", "dicom", "nifti", *WAVES)], ...] = ()
    modalities: tuple[Annotated[str, one_of(*sorted(MODALITIES), "other", "")], ...] = ()
    planes: tuple[Annotated[str, one_of("axial", "coronal", "sagittal", "")], ...] = ()
    photometric: tuple[Annotated[str, one_of(*sorted(PHOTOMETRIC), "other", "")], ...] = ()
    rescaled: tuple[Annotated[str, one_of(*ANSWERS)], ...] = ()
    pixel: Millimetres | None = None
    between: Millimetres | None = None
    rates: tuple[Annotated[float, Field(gt=0)], ...] = ()
    units: Names = ()


class Made(RecipePart):
    """What is made of each picture. ``shape``: (h, w, c), of a volume (d, h, w, 1), of a signal (steps, channels)."""

    ALWAYS = ("shape", "dtype")

    shape: Annotated[
        tuple[Annotated[int, Field(ge=1, lt=1 << 31)], ...], Field(min_length=2, max_length=4)
    ]
    dtype: Annotated[str, one_of("uint8", "float32")]
    resize: bool = False
    window: Pair | None = None
    spacing: float | tuple[float, float, float] | None = None
    slices: int = 1
    series: str = ""
    outlines: tuple[Text, ...] = ()
    binary_masks: bool = False
    channels: tuple[Text, ...] = ()
    rate: float | None = None
    seconds: float | None = None

    @property
    def reading(self) -> ReadOptions:
        """The options for reading. Raises DataError where they do not fit together."""
        options: dict[str, Any] = {name: getattr(self, name) for name in SAME}
        options["voxel" if isinstance(self.spacing, tuple) else "spacing"] = self.spacing
        options["volume"] = self.shape[:3] if len(self.shape) == 4 else None
        return ReadOptions(size=self.shape[1] if self.resize else None, **options)


class PictureRecipe(RecipePart):
    """A recipe of pictures. ``questions``: what is open in a draft."""

    ALWAYS = ("version", "kind", "seed", "labels_by", "label", "task", "pictures", "expected")

    questions: tuple[Text, ...] = ()
    version: Literal[1] = 1
    kind: Annotated[str, one_of(KIND, SIGNALS)] = KIND
    seed: int = 42
    labels_by: Annotated[str, one_of(*LABELS_BY)] = "file"
    label: tuple[Text, ...] = ()
    task: Annotated[str, one_of("auto", *TASKS)] = "auto"
    classes: tuple[Text, ...] = ()
    outputs: int = 0
    patient: str = ""
    pictures: Made
    expected: Expected = Expected()

    @property
    def reading(self) -> ReadOptions:
        """The options for reading the pictures."""
        return self.pictures.reading

    @property
    def features(self) -> tuple[Feature, ...]:
        """No features, because pictures have no columns."""
        return ()

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        """The settings with which inputs are made, as the schema has them; no text but of channels and their units."""
        pictures, expected = self.pictures, self.expected
        stated: dict[str, Any] = {}
        if self.kind == SIGNALS:
            units = [unit or "none" for unit in expected.units]
            stated = {"rate": pictures.rate, "channels": pictures.channels, "units": units}
        elif not {*expected.formats}.isdisjoint(SCANS):
            stated = {
                "window": pictures.window or "none",
                "spacing": pictures.spacing or "none",
                "slices": pictures.slices,
            }
            if len(expected.planes) == 1 and expected.planes[0]:
                stated["orientation"] = expected.planes[0]
        if pictures.resize:
            stated["size"] = pictures.shape[0]
        return tuple(sorted((key, setting_text(value)) for key, value in stated.items()))

    def toml(self, about: str = "", reasons: Mapping[str, str] = NO_NOTES) -> str:
        """Return the recipe as TOML. ``reasons``: a comment above a key."""
        content = self.content
        if "patient" in (*self.questions, *reasons):  # asked about, or empty for a reason
            tables = {key: content.pop(key) for key in COMMENTS}
            content |= {"patient": self.patient} | tables
        return as_toml(content, about, {**COMMENTS, **reasons})


def setting_text(value: Any) -> str:
    """Return a setting as on the command line, ``40,400``; of many texts their number and digest."""
    values = value if isinstance(value, list | tuple) else [value]
    text = escape(tidy(",".join(v if isinstance(v, str) else f"{v:g}" for v in values)))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return text if len(text) <= LONGEST_NAME else f"{len(values)} names, SHA-256 {digest}"


def made_by(shape: Sequence[int], dtype: str, reading: ReadOptions) -> Made:
    """Return the section [pictures] for pictures of this shape that are read with these options."""
    same = {name: getattr(reading, name) for name in SAME}
    mm = reading.voxel or reading.spacing
    return Made(shape=tuple(shape), dtype=dtype, resize=bool(reading.size), spacing=mm, **same)


AnyRecipe = Recipe | PictureRecipe


def load_any(path: Path) -> AnyRecipe:
    """Load the recipe of a table or of pictures from a .toml file. Raises DataError, one line that names the file."""
    return load_toml(path, parse_any)


def read_any(text: str) -> AnyRecipe:
    """Read the recipe of a table or of pictures from JSON text. Raises DataError, one line."""
    try:
        if len(text) > LONGEST_RECIPE:
            raise DataError(f"a recipe has at most {LONGEST_RECIPE} characters")
        return parse_any(parse_json(composed(text)))
    except ValueError as error:
        raise DataError(
            f"the recipe cannot be used ({' '.join(str(error).split())[:300]})"
        ) from None


def parse_any(content: object) -> AnyRecipe:
    """Parse the recipe of a TOML or JSON mapping. Raises DataError, one line, for invalid content."""
    if isinstance(content, Mapping) and "kind" in content:
        check_version(content)
        return parse_content(PictureRecipe, content, MEND, check_pictures)
    return parse_recipe(content)


def check_pictures(recipe: PictureRecipe) -> None:
    """Raise DataError for a draft with questions, and where parts of the recipe do not fit together."""
    if recipe.questions:
        raise DataError(
            f"it is a draft with {len(recipe.questions)} open questions ({few(recipe.questions)}): answer each in it, "
            "then delete its name from `questions`"
        )
    shape = recipe.pictures.shape
    check_kind(recipe)
    if recipe.kind == KIND and shape[-1] not in ((1,) if len(shape) == 4 else (1, 3)):
        raise DataError(
            "shape is height, width and channels, for example [224, 224, 1]; of volumes depth before them"
        )
    if recipe.pictures.resize and shape[0] != shape[1]:
        raise DataError("resize makes squares; shape has another height than width")
    for key, mm in (("pixel-mm", recipe.expected.pixel), ("slice-mm", recipe.expected.between)):
        if mm and mm[0] > mm[1]:
            raise DataError(f"{key} is the smallest and the largest distance, in mm")
    _ = recipe.reading  # which raises for options that do not fit together


def kind_by(shape: Sequence[int]) -> str:
    """Return the kind of recipe that makes samples of this shape."""
    return SIGNALS if len(shape) == 2 else KIND


def check_kind(recipe: PictureRecipe) -> None:
    """Raise DataError where shape and options are of pictures in a recipe of signals, or the other way."""
    pictures = recipe.pictures
    if recipe.kind != kind_by(pictures.shape):
        raise DataError(
            f"pictures.shape = {list(pictures.shape)}: two numbers are of kind signals, more of pictures"
        )
    if recipe.kind == KIND:
        if max(pictures.shape) >= 1 << 15:
            raise DataError(
                f"shape is {list(pictures.shape)}; a side has at most {(1 << 15) - 1} pixels"
            )
        if pictures.channels or pictures.rate or pictures.seconds:
            raise DataError(
                "channels, rate and seconds are of signals, whose shape is steps and channels"
            )
        return
    if (
        len(pictures.channels) != pictures.shape[1]
        or pictures.rate is None
        or pictures.dtype != "float32"
    ):
        raise DataError(
            f"a recipe of signals has dtype float32, a rate, and {pictures.shape[1]} channels by its shape"
        )
    if pictures.seconds and round(pictures.seconds * pictures.rate) != pictures.shape[0]:
        raise DataError(f"shape has {pictures.shape[0]} steps; seconds times rate are others")


# Properties of pictures, and their check


def expect(seen: Sequence[Acquisition]) -> Expected:
    """Return the properties that a recipe expects of other pictures, from those of its own."""
    dicom = [acquired for acquired in seen if acquired.format == "dicom"]
    distinct: dict[str, set[Any]] = {
        "formats": {acquired.format for acquired in seen},
        "modalities": {acquired.modality for acquired in dicom},
        "planes": {acquired.plane for acquired in seen if acquired.format in SCANS},
        "photometric": {acquired.photometric for acquired in dicom},
        "rescaled": {ANSWERS[not acquired.rescaled] for acquired in dicom},
        "rates": {acquired.rate for acquired in seen if acquired.rate},
    }
    return Expected(
        **{key: tuple(sorted(values)) for key, values in distinct.items()},
        pixel=round_range([acquired.pixel for acquired in seen]),
        between=round_range([acquired.between for acquired in seen]),
        units=seen[0].units,
    )


def round_range(sizes: Sequence[float | None]) -> Pair | None:
    """Return half of the smallest and twice the largest size, to one digit; None where one is unknown."""
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    return float(f"{min(known) / 2:.1g}"), float(f"{max(known) * 2:.1g}")


def differences(acquired: Acquisition, expected: Expected) -> Iterator[str]:
    """Yield each difference from the expected properties, such as "its modality is MR, where the recipe has CT"."""
    dicom, scan = acquired.format == "dicom", acquired.format in SCANS
    for what, value, known in (
        ("format", acquired.format, expected.formats),
        ("modality", acquired.modality, expected.modalities * dicom),
        ("plane", acquired.plane, expected.planes * scan),
    ):
        if known and value not in known:
            there = " or ".join(name or "none" for name in known)
            yield f"its {what} is {value or 'not stated'}, where the recipe has {there}"
    rescaled = expected.rescaled * dicom
    if rescaled and ANSWERS[not acquired.rescaled] not in rescaled:
        yield (
            "its values are rescaled to a unit, where the recipe's are not"
            if acquired.rescaled
            else "its values have no rescaling to a unit, where the recipe's have"
        )
    if expected.rates and acquired.rate not in expected.rates:
        rates = " or ".join(f"{rate:g}" for rate in expected.rates)
        yield f"it has {acquired.rate or 0:g} Hz, where the recipe has {rates}"
    if expected.units and acquired.units != expected.units:
        here, there = (
            ", ".join(unit or "none" for unit in units)
            for units in (acquired.units, expected.units)
        )
        yield f"its channels are in {here}, where the recipe has {there}"
    if expected.pixel:
        yield from outside_range("its pixels are", acquired.pixel, expected.pixel)
    if expected.between:
        yield from outside_range("from slice to slice are", acquired.between, expected.between)


def outside_range(what: str, size: float | None, known: Pair) -> Iterator[str]:
    """Yield a text where a distance is unknown, or outside the expected range."""
    low, high = known
    if size is None:
        yield f"it does not say how large its pixels are, where the recipe has {low:g} to {high:g} mm"
    elif not low <= size <= high:
        yield f"{what} {size:.3g} mm, where the recipe has {low:g} to {high:g}"


def photometric_notes(seen: Sequence[Acquisition], expected: Expected) -> list[str]:
    """Return notes on pictures whose grey values or colours are stored in another way, and are converted."""
    if not expected.photometric:
        return []
    others = Counter(acquired.photometric for acquired in seen if acquired.format == "dicom")
    return [
        f"{count} of {len(seen)} pictures are {name or 'of no stated interpretation'}, which the recipe's were not: "
        "converted as the standard has it"
        for name, count in others.items()
        if name not in expected.photometric
    ]
