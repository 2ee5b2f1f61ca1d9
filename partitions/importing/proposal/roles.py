"""Labels, classes and patients of a source's samples, as far as they can be determined, and questions on the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partitions.common.errors import DataError
from partitions.common.names import Names
from partitions.importing.dicom_series import holds_dicom
from partitions.importing.discovery import check_folders, class_folders, is_joined, only_csv
from partitions.importing.files import files_below, placed_files
from partitions.importing.options import ImportOptions
from partitions.importing.proposal.inventory import Inventory
from partitions.importing.readers.reader import SampleSource
from partitions.importing.readers.registry import is_sample, kind_of
from partitions.importing.readers.wfdb import with_ending
from partitions.importing.table_labels import label_columns, line_labels, list_columns
from partitions.importing.tables import read_lines
from partitions.importing.targets import find_import_task, join_key, names_what, number_labels
from partitions.labels import ONE_CLASS
from partitions.recipes.draft import FEWEST, MOST_LEVELS, patients_by
from partitions.recipes.lines import NO_LINES, Lines
from partitions.recipes.people import names_patients, patient_column
from partitions.schema import few

MOST_COLUMNS = 12  # in a question


@dataclass(frozen=True)
class SourceLayout:
    """The layout of a source. ``kind``: ``list`` (a csv names files), ``dicom``, ``classes`` or ``loose``.

    * ``table``: the csv; ``files``: all files, each with its place for messages.
    * ``folders``: pictures in each folder of the first level (below train, val and test); ``deeper``: whether there are
      folders below these; ``scans``: whether the files are scans.
    """

    kind: str
    source: Path
    files: list[tuple[str, Path]]
    table: Path | None = None
    lines: Lines = NO_LINES
    folders: Counter[str] = field(default_factory=Counter)
    deeper: bool = False
    scans: bool = False

    def __str__(self) -> str:
        """Return the layout in one line."""
        name = self.table.name if self.table else ""
        below = ", with folders below them" * self.deeper
        return {
            "list": f"the csv {name} lists {len(self.files)} files",
            "dicom": f"a folder of DICOM files; {f'labels are in {name}' if name else 'there is no csv'}",
            "classes": f"pictures in {len(self.folders)} folders of the first level{below}; there is no csv",
            "loose": "pictures or volumes without a csv, and not in folders of the first level",
        }[self.kind]


@dataclass
class Roles:
    """A draft's entries on labels and patients, with reasons and questions. ``fields``: of a PictureRecipe."""

    fields: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    questions: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, **fields: Any) -> None:
        """Add entries, with the reason for the first one."""
        self.fields |= fields
        self.reasons[next(iter(fields)).replace("_", "-")] = reason


def find_layout(source: Path, options: ImportOptions) -> SourceLayout:
    """Return the layout of a source. Raises DataError."""
    table = options.labels_from
    table_inside = source if source.is_file() else None if table else only_csv(source)
    if table_inside and (table_inside == source or not is_joined(table_inside, source)):
        lines = read_lines(table_inside, options.take)
        if "file" not in lines.columns:
            raise DataError(
                f"{table_inside} has no column file; --propose of pictures wants a folder, or a csv that lists files"
            )
        files = [
            (where, with_ending(table_inside.parent / row["file"])) for where, row in lines
        ]
        return SourceLayout("list", table_inside, files, table_inside, lines)
    placed = placed_files(source)
    if holds_dicom(source):
        table = table or table_inside
        lines = read_lines(table, options.take) if table else NO_LINES
        return SourceLayout("dicom", source, placed, table, lines)
    if table:
        raise DataError(
            f"--labels-from goes with a folder of DICOM files, and {source} has none"
        )
    below = {
        path: folder
        for _, folder in class_folders(source)
        for path in filter(is_sample, files_below(folder))
    }
    return SourceLayout(
        "classes" if below else "loose",
        source,
        placed,
        folders=Counter(folder.name for folder in below.values()),
        deeper=any(path.parent != folder for path, folder in below.items()),
        scans=any(kind_of(path) != "picture" for path in below),
    )


def find_roles(layout: SourceLayout, options: ImportOptions, inventory: Inventory) -> Roles:
    """Return labels and patients, or questions. Raises DataError or UserError for an option with a missing name."""
    roles = Roles()
    if layout.table:
        labels_of_table(layout, options, roles)
    elif layout.kind == "dicom":
        labels_of_dicom(options, roles, inventory)
    else:
        labels_of_folders(layout, options, roles)
    patients_of(layout, options, roles, inventory)
    if options.labels or not roles.fields.get("classes"):
        return roles
    # Some classes that were found may be of few patients: ask for all of them, and name none
    counts: Mapping[str, int] = layout.folders
    if layout.table and (label := roles.fields.get("label")):
        counts = patients_by(layout.lines, label[0], str, roles.fields.get("patient", ""))
    if rare := sum(count < FEWEST for count in counts.values()):
        del roles.fields["classes"]
        roles.questions["classes"] = (
            f"{rare} of the classes are of fewer than {FEWEST} patients; their names may be people's, and are not "
            "shown. Correct them, or run --propose again with --labels, which names all classes of the federation"
        )
    return roles


# Labels


def labels_of_table(layout: SourceLayout, options: ImportOptions, roles: Roles) -> None:
    """Add the label columns of a csv, its task and classes, or a question."""
    assert layout.table
    header = layout.lines.header
    label = options.survival or options.label
    key = join_key(header) if layout.kind == "dicom" else "file"
    if not key:
        raise DataError(
            f"{layout.table} has no column file, study, accession or patient by which its labels belong to the files; "
            f"there are: {list_columns(header)}"
        )
    by = names_what(key) or "file"
    roles.add(f"the csv's column {key} says whose a label is", labels_by=by)
    if label or "label" in header:
        columns = label_columns(layout.table, header, label, ("label",))
        roles.add("as asked for" if label else "the column that is called so", label=columns)
        task_of_table(layout, columns, options, roles)
    elif "mask" in header:
        classes = tuple(options.labels)
        roles.add("the column mask names outlines", task="segmentation", classes=classes)
    else:
        free = [
            f"{n} ({len(layout.lines.columns[n].different)} different values)"
            for n in header
            if n not in (key, "split", "mask") and not names_what(n) and not names_patients(n)
        ]
        more = [f"and {len(free) - MOST_COLUMNS} more"] * (len(free) > MOST_COLUMNS)
        roles.questions["label"] = (
            f"which column says what is to be learned? {'; '.join(free[:MOST_COLUMNS] + more)}. "
            'Write label = ["COLUMN"], or run --propose again with --label COLUMN'
        )


def task_of_table(
    layout: SourceLayout, columns: Names, options: ImportOptions, roles: Roles
) -> None:
    """Add the task and the classes that the labels of a csv have, or a question."""
    try:
        samples = [
            SampleSource(line[0], line_labels(line, columns, options.take.decimal))
            for line in layout.lines
        ]
        survival = options.survival is not None
        task = find_import_task(samples, options.task, options.labels, survival)
        roles.add("as the labels are written; --task where they are something else", task=task)
        if task in ONE_CLASS:
            _, names = number_labels(samples, options.labels)
            counts = count_values(Counter(sample.labels[0] for sample in samples))
            where = "in alphabetical order; --labels names those of all hospitals"
            where = "as asked for" if options.labels else where
            roles.add(f"{where}: {counts}", classes=names)
    except DataError as error:
        roles.questions["label"] = str(error)


def count_values(values: Counter[str]) -> str:
    """Return the count of each value, without small counts."""
    return ", ".join(
        f"{name} {count if count >= FEWEST else f'fewer than {FEWEST}'}"
        for name, count in values.most_common(MOST_LEVELS)
    )


def labels_of_dicom(options: ImportOptions, roles: Roles, inventory: Inventory) -> None:
    """Add the labels of a folder of DICOM files without a csv."""
    if options.outlines:
        why = "the outlines that --outlines names"
        roles.add(why, labels_by="outlines", task="segmentation")
    elif options.labels:
        why, classes = "--labels names folders as the classes", tuple(options.labels)
        roles.add(why, labels_by="folder", classes=classes, task="multiclass")
    else:
        outlined = inventory.objects["SEG"] + inventory.objects["RTSTRUCT"]
        drawn = f"; or where the {outlined} SEG and RTSTRUCT objects are the labels, with --volume and --outlines NAMES"
        roles.questions["label"] = (
            "nothing says what is to be learned. Run --propose again with --labels-from FILE.csv, a csv with a column "
            "study, accession or patient and one of labels; or, where folders of the first level are the classes, with "
            f"--labels A,B{drawn if outlined else ''}"
        )


def labels_of_folders(layout: SourceLayout, options: ImportOptions, roles: Roles) -> None:
    """Add the labels of pictures in folders."""
    by = "folder" if layout.kind == "classes" else "file"
    roles.add("folder: its name is the class; file: a csv has labels", labels_by=by)
    by_csv = (
        "Otherwise write a csv with columns file, label, patient, and run --propose of that"
    )
    names = sorted(layout.folders)
    if not 2 <= len(names) <= MOST_LEVELS:
        hardly = f"{len(names)} folders of the first level are hardly the classes"
        there = hardly if names else "nothing names a class"
        roles.questions["label"] = f"what is to be learned? {there}. {by_csv}"
    elif options.labels:
        check_folders(layout.source, names, options.labels)
        why, classes = f"as asked for: {count_values(layout.folders)}", tuple(options.labels)
        roles.add(why, classes=classes, task="multiclass")
    elif layout.scans:
        roles.questions["label"] = (
            f"are the {len(names)} folders of the first level the classes? Then run --propose again with --labels, "
            f"which names them all; their names may be patients', and are not shown. {by_csv}"
        )
    else:
        why = f"the folders of the first level: {count_values(layout.folders)}"
        roles.add(why, classes=tuple(names), task="multiclass")
        roles.questions["classes"] = (
            f"are these folders the classes of all hospitals, in this order: {', '.join(names)}? {by_csv}"
        )


# Patients


def patients_of(
    layout: SourceLayout, options: ImportOptions, roles: Roles, inventory: Inventory
) -> None:
    """Add what identifies patients, or a question."""
    column = options.take.patient
    if column is None:
        roles.add("--no-patient: each sample is of another patient", patient="")
    elif layout.table:
        patients_of_table(layout, column, roles, inventory)
    elif layout.kind == "dicom":
        patients_of_headers(inventory, roles)
    elif column == "folder":
        roles.add("folders below the classes are patients, as asked for", patient=column)
    elif not column:
        roles.fields["patient"] = ""
        below = 'Write patient = "folder" where the folders below the classes are patients. '
        below *= layout.deeper
        roles.questions["patient"] = f"whose is each file? {below}{each('a folder')}"
    else:
        raise DataError(
            f"--patient {column[:40]} names a column, and there is no csv; of folders it is --patient folder"
        )


def patients_of_table(
    layout: SourceLayout, column: str, roles: Roles, inventory: Inventory
) -> None:
    """Add a csv's column of patients, or a question."""
    header = layout.lines.header
    used = (*roles.fields.get("label", ()), "file", "split", "mask")
    if column:
        name = patient_column(layout.lines, column, used)
    else:
        joined = [n for n in header if layout.kind == "dicom" and names_what(n) == "patient"]
        name = next(iter(joined), "patient" if "patient" in header else "")
    if name:
        whose = Counter(layout.lines.columns[name])
        why = f"{len(whose)} patients in {whose.total()} lines; {whose['']} lines name none"
        roles.add(why, patient=name)
    elif likely := [n for n in header if n not in used and names_patients(n)]:
        roles.questions["patient"] = (
            f"does {few(likely)} say whose each file is? {each('that column')}"
        )
    elif inventory.kinds["DICOM pictures"]:
        patients_of_headers(inventory, roles)
    else:
        roles.questions["patient"] = (
            f"no column says whose each file is. {each('such a column')}"
        )


def patients_of_headers(inventory: Inventory, roles: Roles) -> None:
    """Add patients by DICOM's PatientID, or a question."""
    roles.fields["patient"] = ""
    if len(inventory.patients) > 1 and not inventory.nameless:
        why = f"no column: PatientID tells {len(inventory.patients)} patients apart"
        roles.add(why, patient="")
    elif len(inventory.studies) > 1:
        same = f"{inventory.kinds['DICOM pictures']} files have the same PatientID, as anonymisation makes it"
        what = f"{inventory.nameless} files have no PatientID" if inventory.nameless else same
        roles.questions["patient"] = (
            f"{what}: whose are they? {each('a column patient in the csv')}"
        )


def each(what: str) -> str:
    """Return how to state the patients of files."""
    return (
        f"With --patient, or patient = ..., {what} keeps a patient's files in one part; leave it empty only where each "
        "file is of another patient: otherwise patients are both trained and tested on"
    )
