"""Labels, classes and patients of a source's samples, as far as they can be determined, and questions on the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partitions.common.errors import DataError
from partitions.common.names import Names
from partitions.importing.dicom_series import holds_dicom
from partitions.importing.discovery import class_folders, is_joined, only_csv
from partitions.importing.files import files_below, place_of
from partitions.importing.images import SampleSource, is_sample, kind_of
from partitions.importing.options import ImportOptions
from partitions.importing.proposal.inventory import Inventory
from partitions.importing.signals.recording import with_ending
from partitions.importing.tables import label_columns, labels_of, list_columns, read_lines
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
    header: Names = ()
    lines: Lines = NO_LINES
    folders: Counter[str] = field(default_factory=Counter)
    deeper: bool = False
    scans: bool = False

    def __str__(self) -> str:
        """Return the layout in one line."""
        if self.kind == "list":
            return f"the csv {self.table and self.table.name} lists {len(self.files)} files"
        if self.kind == "dicom":
            labels = f"labels are in {self.table.name}" if self.table else "there is no csv"
            return f"a folder of DICOM files; {labels}"
        if self.kind == "classes":
            below = ", with folders below them" if self.deeper else ""
            return f"pictures in {len(self.folders)} folders of the first level{below}; there is no csv"
        return "pictures or volumes without a csv, and not in folders of the first level"


@dataclass
class Roles:
    """A draft's entries on labels and patients, with reasons and questions. ``made``: fields of a PictureRecipe."""

    made: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    questions: dict[str, str] = field(default_factory=dict)


def find_layout(source: Path, options: ImportOptions) -> SourceLayout:
    """Return the layout of a source. Raises DataError."""
    table = Path(options.labels_from) if options.labels_from else None
    if source.is_file():
        return list_layout(source, options)
    own = None if table else only_csv(source)
    if own and not is_joined(own, source):
        return list_layout(own, options)
    files = list(files_below(source))
    placed = [(place_of(source, i, len(files)), path) for i, path in enumerate(files)]
    if holds_dicom(source):
        table = table or own
        lines = (
            read_lines(table, options.take.separator, options.take.encoding)
            if table
            else NO_LINES
        )
        return SourceLayout("dicom", source, placed, table, tuple(lines.header), lines)
    if table:
        raise DataError(
            f"--labels-from goes with a folder of DICOM files, and {source} has none"
        )
    folders: Counter[str] = Counter()
    deeper = scans = False
    for _, folder in class_folders(source):
        for path in filter(is_sample, files_below(folder)):
            folders[folder.name] += 1
            deeper |= path.parent != folder
            scans |= kind_of(path) != "picture"
    return SourceLayout(
        "classes" if folders else "loose",
        source,
        placed,
        folders=folders,
        deeper=deeper,
        scans=scans,
    )


def list_layout(table: Path, options: ImportOptions) -> SourceLayout:
    """Return the layout of a csv that lists files. Raises DataError where it lists none."""
    lines = read_lines(table, options.take.separator, options.take.encoding)
    if "file" not in lines.columns:
        raise DataError(
            f"{table} has no column file; --propose of pictures wants a folder, or a csv that lists files"
        )
    files = [(where, with_ending(table.parent / row["file"])) for where, row in lines]
    return SourceLayout("list", table, files, table, tuple(lines.header), lines)


def find_roles(layout: SourceLayout, options: ImportOptions, found: Inventory) -> Roles:
    """Return labels and patients, or questions. Raises DataError or UserError for an option with a missing name."""
    roles = Roles()
    if layout.table:
        labels_of_table(layout, options, roles)
    elif layout.kind == "dicom":
        labels_of_dicom(options, roles, found)
    else:
        labels_of_folders(layout, options, roles)
    patients_of(layout, options, roles, found)
    if not options.labels:
        withhold_rare(layout, roles)
    return roles


def withhold_rare(layout: SourceLayout, roles: Roles) -> None:
    """Ask for all classes where some that were found are of few patients, and name none."""
    counts: Mapping[str, int] = layout.folders
    if layout.table and (label := roles.made.get("label")):
        cells = {cell: cell for cell in layout.lines.columns[label[0]].different}
        counts = patients_by(layout.lines, label[0], cells, roles.made.get("patient", ""))
    if roles.made.get("classes") and (rare := sum(count < FEWEST for count in counts.values())):
        del roles.made["classes"]
        roles.questions["classes"] = (
            f"{rare} of the classes are of fewer than {FEWEST} patients; their names may be people's, and are not "
            "shown. Correct them, or run --propose again with --labels, which names all classes of the federation"
        )


# Labels


def task_of_table(
    layout: SourceLayout, columns: Names, options: ImportOptions, roles: Roles
) -> None:
    """Add the task and the classes that the labels of a csv have, or a question."""
    try:
        samples = [
            SampleSource(a[0], labels_of(a, columns, options.take.decimal), "", "")
            for a in layout.lines
        ]
        task = find_import_task(
            samples, options.task, options.labels, options.survival is not None
        )
        roles.made["task"] = task
        roles.reasons["task"] = (
            "as the labels are written; --task where they are something else"
        )
        if task in ONE_CLASS:
            _, names = number_labels(samples, options.labels)
            roles.made["classes"] = names
            where = (
                "as asked for"
                if options.labels
                else "in alphabetical order; --labels names those of all hospitals"
            )
            roles.reasons["classes"] = (
                f"{where}: {count_values(Counter(sample.labels[0] for sample in samples))}"
            )
    except DataError as error:
        roles.questions["label"] = str(error)


def labels_of_table(layout: SourceLayout, options: ImportOptions, roles: Roles) -> None:
    """Add the label columns of a csv, or a question."""
    assert layout.table
    header = list(layout.header)
    label = options.survival or options.label
    key = join_key(header) if layout.kind == "dicom" else "file"
    if not key:
        raise DataError(
            f"{layout.table} has no column file, study, accession or patient by which its labels belong to the files; "
            f"there are: {list_columns(header)}"
        )
    roles.made["labels_by"] = names_what(key) or "file"
    roles.reasons["labels-by"] = f"the csv's column {key} says whose a label is"
    if not label and "label" not in header and "mask" in header:
        roles.made |= {"task": "segmentation", "classes": tuple(options.labels)}
        roles.reasons["task"] = "the column mask names outlines"
        return
    if not label and "label" not in header:
        free = [
            n
            for n in header
            if n not in (key, "split", "mask") and not names_what(n) and not names_patients(n)
        ]
        roles.questions["label"] = (
            f"which column says what is to be learned? {'; '.join(about_columns(free, layout.lines))}. "
            'Write label = ["COLUMN"], or run --propose again with --label COLUMN'
        )
        return
    columns = label_columns(layout.table, header, label, ("label",))
    roles.made["label"] = columns
    roles.reasons["label"] = "as asked for" if label else "the column that is called so"
    task_of_table(layout, columns, options, roles)


def about_columns(columns: Sequence[str], lines: Lines) -> Iterator[str]:
    """Yield a csv's columns, each with its number of different values."""
    for name in columns[:MOST_COLUMNS]:
        yield f"{name} ({len(lines.columns[name].different)} different values)"
    if len(columns) > MOST_COLUMNS:
        yield f"and {len(columns) - MOST_COLUMNS} more"


def count_values(values: Counter[str]) -> str:
    """Return the count of each value, without small counts."""
    return ", ".join(
        f"{name} {count if count >= FEWEST else f'fewer than {FEWEST}'}"
        for name, count in values.most_common(MOST_LEVELS)
    )


def labels_of_dicom(options: ImportOptions, roles: Roles, found: Inventory) -> None:
    """Add the labels of a folder of DICOM files without a csv."""
    if options.outlines:
        roles.made |= {"labels_by": "outlines", "task": "segmentation"}
        roles.reasons["labels-by"] = "the outlines that --outlines names"
    elif options.labels:
        roles.made |= {
            "labels_by": "folder",
            "classes": tuple(options.labels),
            "task": "multiclass",
        }
        roles.reasons["labels-by"] = "--labels names folders as the classes"
    else:
        outlined = found.objects["SEG"] + found.objects["RTSTRUCT"]
        drawn = f"; or where the {outlined} SEG and RTSTRUCT objects are the labels, with --volume and --outlines NAMES"
        roles.questions["label"] = (
            "nothing says what is to be learned. Run --propose again with --labels-from FILE.csv, a csv with a column "
            "study, accession or patient and one of labels; or, where folders of the first level are the classes, with "
            f"--labels A,B{drawn if outlined else ''}"
        )


def labels_of_folders(layout: SourceLayout, options: ImportOptions, roles: Roles) -> None:
    """Add the labels of pictures in folders."""
    roles.made["labels_by"] = "folder" if layout.kind == "classes" else "file"
    roles.reasons["labels-by"] = "folder: its name is the class; file: a csv has labels"
    by_csv = (
        "Otherwise write a csv with columns file, label, patient, and run --propose of that"
    )
    names = sorted(layout.folders)
    if layout.kind == "loose" or len(names) > MOST_LEVELS or len(names) < 2:
        there = (
            f"{len(names)} folders of the first level are hardly the classes"
            if names
            else "nothing names a class"
        )
        roles.questions["label"] = f"what is to be learned? {there}. {by_csv}"
    elif options.labels:
        if strange := set(names) - set(options.labels):
            raise DataError(
                f"{layout.source} has {len(strange)} folders besides {', '.join(options.labels)}"
            )
        roles.made |= {"classes": tuple(options.labels), "task": "multiclass"}
        roles.reasons["classes"] = f"as asked for: {count_values(layout.folders)}"
    elif layout.scans:
        roles.questions["label"] = (
            f"are the {len(names)} folders of the first level the classes? Then run --propose again with --labels, "
            f"which names them all; their names may be patients', and are not shown. {by_csv}"
        )
    else:
        roles.made |= {"classes": tuple(names), "task": "multiclass"}
        roles.reasons["classes"] = (
            f"the folders of the first level: {count_values(layout.folders)}"
        )
        roles.questions["classes"] = (
            f"are these folders the classes of all hospitals, in this order: {', '.join(names)}? {by_csv}"
        )


# Patients


def patients_of(
    layout: SourceLayout, options: ImportOptions, roles: Roles, found: Inventory
) -> None:
    """Add what identifies patients, or a question."""
    asked = options.take.patient
    if asked is None:
        roles.made["patient"], roles.reasons["patient"] = (
            "",
            "--no-patient: each sample is of another patient",
        )
    elif layout.table:
        patients_of_table(layout, options, roles, found)
    elif layout.kind == "dicom":
        patients_of_headers(found, roles)
    elif asked == "folder" or not asked:
        roles.made["patient"] = asked
        if asked:
            roles.reasons["patient"] = "folders below the classes are patients, as asked for"
        else:
            below = (
                'Write patient = "folder" where the folders below the classes are patients. '
                * layout.deeper
            )
            roles.questions["patient"] = f"whose is each file? {below}{each('a folder')}"
    else:
        raise DataError(
            f"--patient {asked[:40]} names a column, and there is no csv; of folders it is --patient folder"
        )


def patients_of_table(
    layout: SourceLayout, options: ImportOptions, roles: Roles, found: Inventory
) -> None:
    """Add a csv's column of patients, or a question."""
    assert layout.table
    header = layout.header
    used = (*roles.made.get("label", ()), "file", "split", "mask")
    if options.take.patient:
        name = patient_column(layout.lines, options.take.patient, used)
    else:
        joined = (
            next((n for n in header if names_what(n) == "patient"), "")
            if layout.kind == "dicom"
            else ""
        )
        name = joined or ("patient" if "patient" in header else "")
    if name:
        whose = Counter(layout.lines.columns[name])
        roles.made["patient"] = name
        roles.reasons["patient"] = (
            f"{len(whose)} patients in {whose.total()} lines; {whose['']} lines name none"
        )
    elif likely := [n for n in header if n not in used and names_patients(n)]:
        roles.questions["patient"] = (
            f"does {few(likely)} say whose each file is? {each('that column')}"
        )
    elif found.kinds["DICOM pictures"]:
        patients_of_headers(found, roles)
    else:
        roles.questions["patient"] = (
            f"no column says whose each file is. {each('such a column')}"
        )


def patients_of_headers(found: Inventory, roles: Roles) -> None:
    """Add patients by DICOM's PatientID, or a question."""
    roles.made["patient"] = ""
    if len(found.patients) > 1 and not found.nameless:
        roles.reasons["patient"] = (
            f"no column: PatientID tells {len(found.patients)} patients apart"
        )
        return
    what = (
        "have no PatientID"
        if found.nameless
        else "have the same PatientID, as anonymisation makes it"
    )
    count = found.nameless or found.kinds["DICOM pictures"]
    if len(found.studies) > 1:
        roles.questions["patient"] = (
            f"{count} files {what}: whose are they? {each('a column patient in the csv')}"
        )


def each(what: str) -> str:
    """Return how to state the patients of files."""
    return (
        f"With --patient, or patient = ..., {what} keeps a patient's files in one part; leave it empty only where each "
        "file is of another patient: otherwise patients are both trained and tested on"
    )
