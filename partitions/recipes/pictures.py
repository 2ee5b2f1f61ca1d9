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

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from partitions.common.errors import DataError
from partitions.labels import TASKS
from partitions.recipes.reading import Acquisition, ReadOptions
from partitions.recipes.recipe import VERSION, Recipe, loaded, parse_recipe, read, written
from partitions.recipes.values import number, refuse_unknown, table_of, texts, typed
from partitions.schema import Feature, few

KIND = "pictures"
FORMATS = ("picture", "dicom", "nifti")
LABELS_BY = ("file", "folder", "study", "accession", "patient", "outlines")
PLANES = ("axial", "coronal", "sagittal", "")
ANSWERS = ("yes", "no")
# Defined terms of (0008,0060), DICOM PS3.3, C.7.3.1.1.1. All other values become "other".
MODALITIES = frozenset(
    re.findall(
        r"\w+",
        "AR AU BI BMD CD CF CR CT CTPROTOCOL DD DG DM DOC DS DX EC ECG EPS ES FA FID FS GM HC HD IO IVOCT IVUS KER LEN "
        "LP LS MA MG MR MS NM OAM OCT OP OPM OPR OPT OPV OSS OT PX RF RG RTIMAGE SM SMR SR ST TG TM US VA XA XC PT",
    )
)
GREY = ("MONOCHROME1", "MONOCHROME2")
YBR = ("YBR_FULL", "YBR_FULL_422", "YBR_PARTIAL_420", "YBR_ICT", "YBR_RCT")
PHOTOMETRIC = frozenset((*GREY, "PALETTE COLOR", "RGB", *YBR))
TOP = ("version", "kind", "questions", "seed", "labels-by", "label", "task", "classes", "outputs", "patient")
MADE = ("shape", "dtype", "window", "spacing", "slices", "series", "resize", "outlines", "binary-masks")
LISTS = ("formats", "modalities", "planes", "photometric", "rescaled")
RANGES = {"pixel-mm": "pixel", "slice-mm": "between"}
COMMENTS = (
    "What is made of each picture.",
    "What the pictures were. Others are refused where they differ: add here what the model may be used for.",
)


@dataclass(frozen=True)
class Expected:
    """The properties of the recipe's pictures, each as a list of values; "" for a header without a value.

    ``pixel``, ``between``: mm of a pixel, and between slices, from .. to; None where they are not checked.
    """

    formats: tuple[str, ...] = ()
    modalities: tuple[str, ...] = ()
    planes: tuple[str, ...] = ()
    photometric: tuple[str, ...] = ()
    rescaled: tuple[str, ...] = ()
    pixel: tuple[float, float] | None = None
    between: tuple[float, float] | None = None

    @property
    def content(self) -> dict[str, Any]:
        """The expected properties for TOML and JSON."""
        known = {key: getattr(self, key) for key in LISTS} | {key: getattr(self, own) for key, own in RANGES.items()}
        return {key: list(own) for key, own in known.items() if own}


@dataclass(frozen=True)
class PictureRecipe:
    """A recipe of pictures; ``shape``: (h, w, c) of each in a data file, or (d, h, w, c) of a volume."""

    shape: tuple[int, ...]
    dtype: str
    reading: ReadOptions = field(default_factory=ReadOptions)
    expected: Expected = field(default_factory=Expected)
    labels_by: str = "file"
    label: tuple[str, ...] = ()
    task: str = "auto"
    classes: tuple[str, ...] = ()
    outputs: int = 0
    patient: str = ""
    seed: int = 42

    @property
    def features(self) -> tuple[Feature, ...]:
        """No features, because pictures have no columns."""
        return ()

    @property
    def content(self) -> dict[str, Any]:
        """The recipe for TOML and JSON."""
        top: dict[str, Any] = {"version": VERSION, "kind": KIND, "seed": self.seed, "labels-by": self.labels_by}
        top |= {"label": list(self.label), "task": self.task}
        top |= {"classes": list(self.classes)} if self.classes else {}
        top |= {"outputs": self.outputs} if self.outputs else {}
        top |= {"patient": self.patient} if self.patient else {}
        own: ReadOptions = self.reading
        made: dict[str, Any] = {"shape": list(self.shape), "dtype": self.dtype}
        made |= {"resize": True} if own.size else {}
        made |= {"window": list(own.window)} if own.window else {}
        made |= {"spacing": own.spacing} if own.spacing else {}
        made |= {"spacing": list(own.voxel)} if own.voxel else {}
        made |= {"slices": own.slices} if own.slices > 1 else {}
        made |= {"series": own.series} if own.series else {}
        made |= {"outlines": list(own.outlines)} if own.outlines else {}
        made |= {"binary-masks": True} if own.binary_masks else {}
        return top | {"pictures": made, "expected": self.expected.content}

    @property
    def json(self) -> str:
        """Return the recipe as JSON, for data files and model cards."""
        return json.dumps(self.content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)

    def toml(
        self, about: str = "", reasons: Mapping[str, str] = MappingProxyType({}), open_: Sequence[str] = ()
    ) -> str:
        """Return the recipe as TOML. ``reasons``: a comment above a key; ``open_``: questions of a draft."""
        content = self.content
        tables = {key: content.pop(key) for key in ("pictures", "expected")}
        content = ({"questions": list(open_)} if open_ else {}) | content
        content |= {"patient": self.patient} if "patient" in (*open_, *reasons) else {}

        def entries(table: Mapping[str, Any]) -> Iterator[str]:
            for key, value in table.items():
                yield from commented(reasons.get(key, ""))
                yield f"{key} = {written(value)}"

        lines = [*commented(about), *entries(content)]
        for (name, table), comment in zip(tables.items(), COMMENTS, strict=True):
            lines += ["", f"# {comment}", f"[{name}]", *entries(table)]
        return "\n".join(lines) + "\n"


def commented(text: str) -> Iterator[str]:
    """Yield a text's lines as TOML comments, without control characters."""
    for line in text.splitlines():
        yield "".join(c if c.isprintable() else "?" for c in f"# {line}").rstrip()


AnyRecipe = Recipe | PictureRecipe


def load_any(path: Path) -> AnyRecipe:
    """Load the recipe of a table or of pictures from a .toml file. Raises DataError, one line that names the file."""
    return loaded(path, parse_any)


def read_any(text: str) -> AnyRecipe:
    """Read the recipe of a table or of pictures from JSON text. Raises DataError, one line."""
    return read(text, parse_any)


def parse_any(content: object) -> AnyRecipe:
    """Parse the recipe of a TOML or JSON mapping. Raises DataError, one line, for invalid content."""
    if isinstance(content, Mapping) and "kind" in content:
        return parse_pictures(content)
    return parse_recipe(content)


def parse_pictures(content: Mapping[str, Any]) -> PictureRecipe:
    """Parse the recipe of pictures. Raises DataError, one line."""
    refuse_unknown(content, (*TOP, "pictures", "expected"), "a recipe of pictures")
    if content["kind"] != KIND or content.get("version") != VERSION:
        raise DataError(f'a recipe of version {VERSION} has no kind, or kind = "{KIND}"')
    if open_ := texts(content.get("questions", []), "questions"):
        raise DataError(
            f"it is a draft with {len(open_)} open questions ({few(open_)}): answer each in it, then delete its name "
            "from `questions`"
        )
    made, expected = (table_of(content.get(key, {}), f"[{key}]") for key in ("pictures", "expected"))
    refuse_unknown(made, MADE, "[pictures]")
    refuse_unknown(expected, (*LISTS, *RANGES), "[expected]")
    shape = shape_of(made.get("shape"))
    recipe = PictureRecipe(
        shape,
        typed(made, "dtype", ""),
        parse_reading(made, shape),
        parse_expected(expected),
        labels_by=typed(content, "labels-by", "file"),
        label=texts(content.get("label", []), "label"),
        task=typed(content, "task", "auto"),
        classes=texts(content.get("classes", []), "classes"),
        outputs=typed(content, "outputs", 0),
        patient=typed(content, "patient", ""),
        seed=typed(content, "seed", 42),
    )
    check_in("dtype", recipe.dtype, ("uint8", "float32"))
    check_in("labels-by", recipe.labels_by, LABELS_BY)
    check_in("task", recipe.task, ("auto", *TASKS))
    return recipe


def check_in(key: str, value: str, allowed: Sequence[str]) -> None:
    """Raise DataError for a value that is not in ``allowed``."""
    if value not in allowed:
        raise DataError(f"{key} is {value[:40]!r}; it is one of {', '.join(map(repr, allowed))}")


def shape_of(value: object) -> tuple[int, ...]:
    """Parse a shape (h, w, c) or (d, h, w, 1). Raises DataError."""
    shape = numbers(value, "shape", 4 if isinstance(value, list) and len(value) == 4 else 3)
    channels = (1,) if len(shape) == 4 else (1, 3)
    if not all(own.is_integer() and 1 <= own < 1 << 15 for own in shape) or shape[-1] not in channels:
        raise DataError("shape is height, width and channels, for example [224, 224, 1]; of volumes depth before them")
    return tuple(map(int, shape))


def parse_reading(made: Mapping[str, Any], shape: tuple[int, ...]) -> ReadOptions:
    """Parse the read options for pictures of this shape. Raises DataError."""
    resize = typed(made, "resize", False)
    if resize and shape[0] != shape[1]:
        raise DataError("resize makes squares; shape has another height than width")
    window = numbers(made["window"], "window", 2) if "window" in made else None
    voxel = numbers(made["spacing"], "spacing", 3) if isinstance(made.get("spacing"), list) else None
    return ReadOptions(
        size=shape[1] if resize else None,
        window=(window[0], window[1]) if window else None,
        spacing=number(made["spacing"], "spacing") if "spacing" in made and not voxel else None,
        slices=typed(made, "slices", 1),
        series=typed(made, "series", ""),
        volume=(shape[0], shape[1], shape[2]) if len(shape) == 4 else None,
        voxel=(voxel[0], voxel[1], voxel[2]) if voxel else None,
        outlines=texts(made.get("outlines", []), "outlines"),
        binary_masks=typed(made, "binary-masks", False),
    )


def parse_expected(table: Mapping[str, Any]) -> Expected:
    """Parse the expected properties of pictures. Raises DataError."""
    known: dict[str, tuple[str, ...] | frozenset[str]] = {
        "formats": FORMATS,
        "modalities": MODALITIES | {"other", ""},
        "planes": PLANES,
        "photometric": PHOTOMETRIC | {"other", ""},
        "rescaled": ANSWERS,
    }
    listed = {key: texts(table.get(key, []), key) for key in LISTS}
    for key, names in listed.items():
        if strange := [name for name in names if name not in known[key]]:
            raise DataError(f"{key} has {strange[0][:40]!r}; there are: {', '.join(filter(None, sorted(known[key])))}")
    ranges = {own: range_of(table, key) for key, own in RANGES.items()}
    return Expected(**listed, pixel=ranges["pixel"], between=ranges["between"])


def range_of(table: Mapping[str, Any], key: str) -> tuple[float, float] | None:
    """Parse a range of mm; None where there is none. Raises DataError."""
    if key not in table:
        return None
    low, high = numbers(table[key], key, 2)
    if not 0 < low <= high:
        raise DataError(f"{key} is the smallest and the largest distance, in mm")
    return low, high


def numbers(value: object, what: str, count: int) -> tuple[float, ...]:
    """Parse a list of ``count`` numbers. Raises DataError."""
    if not isinstance(value, list) or len(value) != count:
        raise DataError(f"{what} is a list of {count} numbers")
    return tuple(number(own, what) for own in value)


# Properties of pictures, and their check


def expect(seen: Sequence[Acquisition]) -> Expected:
    """Return the properties that a recipe expects of other pictures, from those of its own."""
    return Expected(
        formats=found(own.format for own in seen),
        modalities=found(own.modality for own in seen if own.format == "dicom"),
        planes=found(own.plane for own in seen if own.format != "picture"),
        photometric=found(own.photometric for own in seen if own.format == "dicom"),
        rescaled=found(ANSWERS[not own.rescaled] for own in seen if own.format == "dicom"),
        pixel=rounded([own.pixel for own in seen]),
        between=rounded([own.between for own in seen]),
    )


def found(values: Iterator[str]) -> tuple[str, ...]:
    """Return the different values, sorted."""
    return tuple(sorted(set(values)))


def rounded(sizes: Sequence[float | None]) -> tuple[float, float] | None:
    """Return half of the smallest and twice the largest size, to one digit; None where one is unknown."""
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    return float(f"{min(known) / 2:.1g}"), float(f"{max(known) * 2:.1g}")


def differences(own: Acquisition, expected: Expected) -> Iterator[str]:
    """Yield each difference from the expected properties, such as "its modality is MR, where the recipe has CT"."""
    stated = [("format", own.format, expected.formats)]
    if own.format == "dicom":
        stated.append(("modality", own.modality, expected.modalities))
    if own.format != "picture":
        stated.append(("plane", own.plane, expected.planes))
    for what, value, known in stated:
        if known and value not in known:
            there = " or ".join(name or "none" for name in known)
            yield f"its {what} is {value or 'not stated'}, where the recipe has {there}"
    if own.format == "dicom" and expected.rescaled and ANSWERS[not own.rescaled] not in expected.rescaled:
        yield (
            "its values are rescaled to a unit, where the recipe's are not"
            if own.rescaled
            else "its values have no rescaling to a unit, where the recipe's have"
        )
    if expected.pixel:
        yield from outside("its pixels are", own.pixel, expected.pixel)
    if expected.between:
        yield from outside("from slice to slice are", own.between, expected.between)


def outside(what: str, size: float | None, known: tuple[float, float]) -> Iterator[str]:
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
    others = Counter(own.photometric for own in seen if own.format == "dicom")
    return [
        f"{count} of {len(seen)} pictures are {name or 'of no stated interpretation'}, which the recipe's were not: "
        "converted as the standard has it"
        for name, count in others.items()
        if name not in expected.photometric
    ]
