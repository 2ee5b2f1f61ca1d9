"""Inventory of all files in a folder or a csv's list, from their headers, damaged files included.

It has counts, codes that DICOM defines, sizes and distances; identifiers become pseudonyms, which are counted. It has
no name of a scan or of a folder of scans, and no text of a header.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.importing import dicom
from partitions.importing.dicom_file import is_dicom
from partitions.importing.files import pseudonym, redacted_errors
from partitions.importing.images import NIFTI, is_picture, open_picture
from partitions.importing.signals import is_signal, open_recording
from partitions.importing.volumes.grid import load_nifti
from partitions.recipes.reading import ReadOptions

MOST_SHOWN = 6  # different values in a line
COLOURS = {"P": "palette", **dict.fromkeys(("1", "L", "LA", "I", "F"), "grey")}
OTHER_BITS = {"1": 1, "I": 32, "F": 32}  # all others have 8


@dataclass
class Inventory:
    """Counts and properties of files.

    * ``kinds``: files of each kind; ``series``: files of each series.
    * ``values``: values in headers by property, with numbers of files.
    * ``pixels``: mm of a pixel's smaller side.
    * ``faults``: reasons why files cannot be read, with their places.
    """

    total: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    values: dict[str, Counter[str]] = field(default_factory=dict)
    patients: set[str] = field(default_factory=set)
    studies: set[str] = field(default_factory=set)
    series: Counter[str] = field(default_factory=Counter)  # slices of each; frames count
    slices: int = 1  # of the longest series or volume
    nameless: int = 0  # DICOM pictures without a PatientID
    # DICOM files without a picture, by modality
    objects: Counter[str] = field(default_factory=Counter)
    pixels: list[float] = field(default_factory=list)
    faults: dict[str, list[str]] = field(default_factory=dict)

    def count(self, what: str, value: str) -> None:
        """Count a file with this value of a property."""
        self.values.setdefault(what, Counter())[value] += 1

    def fault(self, error: DataError, where: str) -> None:
        """Add the fault of a file that cannot be read; its place is stored separately from the text."""
        self.faults.setdefault(str(error).removeprefix(f"{where}: "), []).append(where)


def take_inventory(files: Iterable[tuple[str, Path]], total: int) -> Inventory:
    """Return the inventory of these files. ``files``: each with its place, for messages."""
    found = Inventory(total)
    for where, path in tqdm(files, desc="looking", unit="", total=total):
        try:
            inspect_file(found, path, where)
        except DataError as error:
            found.fault(error, where)
    return found


def inspect_file(found: Inventory, path: Path, where: str) -> None:
    """Add one file to the inventory. Raises DataError where it cannot be read."""
    name = path.name.lower()
    if is_signal(path):
        with redacted_errors(where, "a signal"):
            inspect_signal(found, path)
    elif is_dicom(path):
        inspect_dicom(found, path, where)
    elif name.endswith(NIFTI):
        with redacted_errors(where, "NIfTI"):
            inspect_nifti(found, path)
    elif name.endswith((".dcm", ".dicom", ".ima")):
        raise DataError(f"{where}: it is called like a DICOM file and is none")
    elif is_picture(path):
        inspect_picture(found, path, where)
    elif not path.is_file():
        raise DataError(f"{where}: there is no such file")
    else:
        found.kinds["csv files" if name.endswith(".csv") else "other files"] += 1


def inspect_picture(found: Inventory, path: Path, where: str) -> None:
    """Add a PNG or similar picture."""
    try:
        with open_picture(path, where) as picture:
            kind, mode, (width, height) = picture.format or "?", picture.mode, picture.size
            frames = getattr(picture, "n_frames", 1)
            if kind == "PNG":
                picture.verify()  # its parts have check sums; nothing is decoded
    except DataError as error:
        raise DataError(str(error).replace(f"{path.name} ", "it ", 1)) from None
    bits, colour = (
        (16, "grey")
        if mode.startswith("I;16")
        else (OTHER_BITS.get(mode, 8), COLOURS.get(mode, "colour"))
    )
    found.kinds["pictures"] += 1
    for what, value in (
        ("format", kind),
        ("size", f"{width} x {height}"),
        ("bits", f"{bits}-bit {colour}"),
        *([("pages", "several, of which the first is read")] if frames > 1 else []),
    ):
        found.count(what, value)


def inspect_nifti(found: Inventory, path: Path) -> None:
    """Add a NIfTI volume."""
    image = load_nifti(path)
    found.kinds["NIfTI volumes"] += 1
    found.slices = max(found.slices, min(image.shape[:3]))
    shape = tuple(image.shape)
    zooms = [abs(float(mm)) for mm in image.header.get_zooms()[:3]]
    found.count("size", " x ".join(map(str, shape[:3])))
    found.count("numbers", str(image.get_data_dtype()))
    if len(shape) > 3:
        found.count("times", "several, of which slices take the first and volumes none")
    found.pixels.append(min(zooms))
    found.count("spacing", " x ".join(f"{mm:.3g}" for mm in zooms) + " mm")


def inspect_signal(found: Inventory, path: Path) -> None:
    """Add a recording, from its header."""
    recording = open_recording(path)
    found.kinds["signals"] += 1
    found.patients.update(filter(None, [pseudonym(recording.patient)]))
    seconds = max(n / rate for n, rate in zip(recording.steps, recording.rates, strict=True))
    for what, value in (
        ("format", recording.format),
        ("channels", ", ".join(recording.names)),
        ("units", ", ".join(unit or "none" for unit in sorted(set(recording.units)))),
        ("rate", ", ".join(f"{rate:g}" for rate in sorted(set(recording.rates))) + " Hz"),
        ("length", f"{seconds:g} s"),
    ):
        found.count(what, value)


def inspect_dicom(found: Inventory, path: Path, where: str) -> None:
    """Add a DICOM file, from its header."""
    header = dicom.read_header(path, where)
    if isinstance(header, str):
        found.kinds["DICOM files without a picture"] += 1
        found.objects[header] += 1
        return
    info = dicom.probe(path, where, ReadOptions())
    found.kinds["DICOM pictures"] += 1
    key = header.identity
    found.patients |= {key["patient"]} - {""}
    found.nameless += not key["patient"]
    study = key["study"] or f"file {found.kinds['DICOM pictures']}"
    found.studies.add(study)
    series = f"{study} {key['series']}"
    found.series[series] += header.frames
    found.slices = max(found.slices, found.series[series])
    for what, value in info.seen:
        found.count(what, value)
    if info.acquired.pixel:
        found.pixels.append(info.acquired.pixel)


# As lines


def lines_of(found: Inventory) -> Iterator[str]:
    """Yield the inventory line by line."""
    yield f"{found.total} files: {', '.join(f'{count} {kind}' for kind, count in found.kinds.items())}"
    if found.studies:
        yield from lines_of_series(found)
    for what, values in found.values.items():
        yield f"{what}: {rank_values(values)}"
    if found.pixels:
        low, high = min(found.pixels), max(found.pixels)
        yield (
            f"a pixel: {low:.3g} mm"
            if f"{low:.3g}" == f"{high:.3g}"
            else f"a pixel: {low:.3g} to {high:.3g} mm"
        )
    if found.objects:
        yield f"without a picture, by modality: {rank_values(found.objects)}"
    for reason, places in found.faults.items():
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        yield f"DOES NOT FIT ({len(places)}): {reason}: {', '.join(places[:3])}{more}"


def lines_of_series(found: Inventory) -> Iterator[str]:
    """Yield lines on DICOM's patients, studies and series."""
    counts = found.series.values()
    each = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    people = f"{len(found.patients)} patients (PatientID)" if found.patients else "no PatientID"
    yield f"{people}, {len(found.studies)} studies, {len(found.series)} series of {each} slices"
    if found.nameless and found.patients:
        yield f"{found.nameless} pictures have no PatientID"


def rank_values(values: Counter[str]) -> str:
    """Return the most frequent values with their numbers."""
    more = len(values) - MOST_SHOWN
    shown = ", ".join(f"{value} ({count})" for value, count in values.most_common(MOST_SHOWN))
    return shown + (f", and {more} others" if more > 0 else "")
