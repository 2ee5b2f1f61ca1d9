"""Inventory of all files in a folder or a csv's list, from their headers, damaged files included.

It has counts, codes that DICOM defines, sizes and distances; identifiers become pseudonyms, which are counted. It has
no name of a scan or of a folder of scans, and no text of a header.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from partitions.common.errors import DataError
from partitions.common.names import Names
from partitions.common.output import text_page
from partitions.importing.readers.dicom_file import is_dicom
from partitions.importing.readers.pictures import is_picture
from partitions.importing.readers.reader import FileSummary
from partitions.importing.readers.registry import reader_of

MOST_SHOWN = 6  # different values in a line


@dataclass
class Inventory:
    """Counts and properties of files.

    * ``kinds``: files of each kind; ``series``: files of each series.
    * ``values``: values in headers by property, with numbers of files.
    * ``pixels``: mm of a pixel's smaller side.
    * ``faults``: reasons why files cannot be read, with their places.
    """

    total: int
    kinds: Counter[str] = field(default_factory=Counter)
    values: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    patients: set[str] = field(default_factory=set)
    studies: set[str] = field(default_factory=set)
    series: Counter[str] = field(default_factory=Counter)  # slices of each; frames count
    slices: int = 1  # of the longest series or volume
    nameless: int = 0  # DICOM pictures without a PatientID
    # DICOM files without a picture, by modality
    objects: Counter[str] = field(default_factory=Counter)
    pixels: list[float] = field(default_factory=list)
    faults: dict[str, list[str]] = field(default_factory=dict)

    def add(self, file: FileSummary) -> None:
        """Add what a file holds."""
        self.kinds[file.kind] += 1
        self.objects.update(filter(None, [file.without]))
        for what, value in file.values:
            self.values[what][value] += 1
        self.pixels += [file.pixel] if file.pixel else []
        patient, length = file.identity.get("patient", ""), file.slices
        self.patients |= {patient} - {""}
        if "study" in file.identity:
            self.nameless += not patient
            study = file.identity["study"] or f"file {self.kinds[file.kind]}"
            self.studies.add(study)
            series = f"{study} {file.identity['series']}"
            self.series[series] += length
            length = self.series[series]
        self.slices = max(self.slices, length)

    @property
    def places(self) -> Names:
        """The places of the files that cannot be read."""
        return tuple(where for places in self.faults.values() for where in places)

    def fault(self, error: DataError, where: str) -> None:
        """Add the fault of a file that cannot be read; its place is stored separately from the text."""
        self.faults.setdefault(str(error).removeprefix(f"{where}: "), []).append(where)


def take_inventory(files: Sequence[tuple[str, Path]]) -> Inventory:
    """Return the inventory of these files. ``files``: each with its place, for messages."""
    inventory = Inventory(len(files))
    for where, path in tqdm(files, desc="looking", unit=""):
        reader = reader_of(path)
        try:
            if reader.name == "dicom" and not is_dicom(path):
                raise DataError(f"{where}: it is called like a DICOM file and is none")
            if reader.name != "picture" or is_picture(path):
                inventory.add(reader.describe(path, where))
            elif path.is_file():
                csv = path.suffix.lower() == ".csv"
                inventory.kinds["csv files" if csv else "other files"] += 1
            else:
                raise DataError(f"{where}: there is no such file")
        except DataError as error:
            inventory.fault(error, where)
    return inventory


LINES = """\
{% set series, patients = inventory.series.values()|list, inventory.patients %}
{{ inventory.total }} files: {% for kind, count in inventory.kinds.items() %}
{{ count }} {{ kind }}{{ ", " if not loop.last }}
{%- endfor +%}
{% if inventory.studies %}
{{ patients|length ~ " patients (PatientID)" if patients else "no PatientID" }}, {{ inventory.studies|length }} studies,
{{- " " }}{{ series|length }} series of {{ series|min }}{{ " to " ~ series|max if series|min < series|max }} slices
{% if inventory.nameless and patients %}
{{ inventory.nameless }} pictures have no PatientID
{% endif %}
{% endif %}
{% for what, values in inventory.values.items() %}
{{ what }}: {{ ranked(values) }}
{% endfor %}
{% if inventory.pixels %}
{% set low, high = "%.3g"|format(inventory.pixels|min), "%.3g"|format(inventory.pixels|max) %}
a pixel: {{ low }}{{ " to " ~ high if low != high }} mm
{% endif %}
{% if inventory.objects %}
without a picture, by modality: {{ ranked(inventory.objects) }}
{% endif %}
{% for reason, places in inventory.faults.items() %}
DOES NOT FIT ({{ places|length }}): {{ reason }}: {{ places[:3]|join(", ") }}
{{- " and %d more"|format(places|length - 3) if places|length > 3 }}
{% endfor %}"""


def inventory_lines(inventory: Inventory) -> list[str]:
    """Return the inventory line by line."""
    return text_page(LINES, inventory=inventory, ranked=rank_values).splitlines()


def rank_values(values: Counter[str]) -> str:
    """Return the most frequent values with their numbers."""
    more = len(values) - MOST_SHOWN
    shown = ", ".join(f"{value} ({count})" for value, count in values.most_common(MOST_SHOWN))
    return shown + (f", and {more} others" if more > 0 else "")
