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
    inventory = Inventory(total)
    for where, path in tqdm(files, desc="looking", unit="", total=total):
        try:
            inspect_file(inventory, path, where)
        except DataError as error:
            inventory.fault(error, where)
    return inventory


def inspect_file(inventory: Inventory, path: Path, where: str) -> None:
    """Add one file to the inventory. Raises DataError where it cannot be read."""
    name = path.name.lower()
    if is_signal(path):
        with redacted_errors(where, "a signal"):
            inspect_signal(inventory, path)
    elif is_dicom(path):
        inspect_dicom(inventory, path, where)
    elif name.endswith(NIFTI):
        with redacted_errors(where, "NIfTI"):
            inspect_nifti(inventory, path)
    elif name.endswith((".dcm", ".dicom", ".ima")):
        raise DataError(f"{where}: it is called like a DICOM file and is none")
    elif is_picture(path):
        inspect_picture(inventory, path, where)
    elif not path.is_file():
        raise DataError(f"{where}: there is no such file")
    else:
        inventory.kinds["csv files" if name.endswith(".csv") else "other files"] += 1


def inspect_picture(inventory: Inventory, path: Path, where: str) -> None:
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
    inventory.kinds["pictures"] += 1
    for what, value in (
        ("format", kind),
        ("size", f"{width} x {height}"),
        ("bits", f"{bits}-bit {colour}"),
        *([("pages", "several, of which the first is read")] if frames > 1 else []),
    ):
        inventory.count(what, value)


def inspect_nifti(inventory: Inventory, path: Path) -> None:
    """Add a NIfTI volume."""
    image = load_nifti(path)
    inventory.kinds["NIfTI volumes"] += 1
    inventory.slices = max(inventory.slices, min(image.shape[:3]))
    shape = tuple(image.shape)
    zooms = [abs(float(mm)) for mm in image.header.get_zooms()[:3]]
    inventory.count("size", " x ".join(map(str, shape[:3])))
    inventory.count("numbers", str(image.get_data_dtype()))
    if len(shape) > 3:
        inventory.count("times", "several, of which slices take the first and volumes none")
    inventory.pixels.append(min(zooms))
    inventory.count("spacing", " x ".join(f"{mm:.3g}" for mm in zooms) + " mm")


def inspect_signal(inventory: Inventory, path: Path) -> None:
    """Add a recording, from its header."""
    recording = open_recording(path)
    inventory.kinds["signals"] += 1
    inventory.patients.update(filter(None, [pseudonym(recording.patient)]))
    seconds = max(n / rate for n, rate in zip(recording.steps, recording.rates, strict=True))
    for what, value in (
        ("format", recording.format),
        ("channels", ", ".join(recording.names)),
        ("units", ", ".join(unit or "none" for unit in sorted(set(recording.units)))),
        ("rate", ", ".join(f"{rate:g}" for rate in sorted(set(recording.rates))) + " Hz"),
        ("length", f"{seconds:g} s"),
    ):
        inventory.count(what, value)


def inspect_dicom(inventory: Inventory, path: Path, where: str) -> None:
    """Add a DICOM file, from its header."""
    header = dicom.read_header(path, where)
    if isinstance(header, str):
        inventory.kinds["DICOM files without a picture"] += 1
        inventory.objects[header] += 1
        return
    info = dicom.probe(path, where, ReadOptions())
    inventory.kinds["DICOM pictures"] += 1
    key = header.identity
    inventory.patients |= {key["patient"]} - {""}
    inventory.nameless += not key["patient"]
    study = key["study"] or f"file {inventory.kinds['DICOM pictures']}"
    inventory.studies.add(study)
    series = f"{study} {key['series']}"
    inventory.series[series] += header.frames
    inventory.slices = max(inventory.slices, inventory.series[series])
    for what, value in info.seen:
        inventory.count(what, value)
    if info.acquired.pixel:
        inventory.pixels.append(info.acquired.pixel)


# As lines


def lines_of(inventory: Inventory) -> Iterator[str]:
    """Yield the inventory line by line."""
    yield f"{inventory.total} files: {', '.join(f'{count} {kind}' for kind, count in inventory.kinds.items())}"
    if inventory.studies:
        yield from lines_of_series(inventory)
    for what, values in inventory.values.items():
        yield f"{what}: {rank_values(values)}"
    if inventory.pixels:
        low, high = min(inventory.pixels), max(inventory.pixels)
        yield (
            f"a pixel: {low:.3g} mm"
            if f"{low:.3g}" == f"{high:.3g}"
            else f"a pixel: {low:.3g} to {high:.3g} mm"
        )
    if inventory.objects:
        yield f"without a picture, by modality: {rank_values(inventory.objects)}"
    for reason, places in inventory.faults.items():
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        yield f"DOES NOT FIT ({len(places)}): {reason}: {', '.join(places[:3])}{more}"


def lines_of_series(inventory: Inventory) -> Iterator[str]:
    """Yield lines on DICOM's patients, studies and series."""
    counts = inventory.series.values()
    each = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    people = (
        f"{len(inventory.patients)} patients (PatientID)"
        if inventory.patients
        else "no PatientID"
    )
    yield f"{people}, {len(inventory.studies)} studies, {len(inventory.series)} series of {each} slices"
    if inventory.nameless and inventory.patients:
        yield f"{inventory.nameless} pictures have no PatientID"


def rank_values(values: Counter[str]) -> str:
    """Return the most frequent values with their numbers."""
    more = len(values) - MOST_SHOWN
    shown = ", ".join(f"{value} ({count})" for value, count in values.most_common(MOST_SHOWN))
    return shown + (f", and {more} others" if more > 0 else "")
