"""Commands on a hospital's data: ``import``, ``schema``, ``predict``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from client.commands.table import (
    Command,
    OneOf,
    Titled,
    choice,
    file_option,
    flag,
    option,
    several,
    text_option,
)
from partitions.common.errors import UserError

KEYS = ("file", "patient", "study", "accession")  # as in client/prediction/new_samples.py


def import_data(args: argparse.Namespace) -> None:
    from client.importing import import_from, propose
    from partitions.common.output import print_document

    if args.propose:
        print_document(propose(args))
        return
    if not args.out:
        raise UserError("--out FILE.npz is missing: the data file to write")
    print("\n".join(import_from(args)))


def schema(args: argparse.Namespace) -> None:
    from client.importing import write_schema

    written = write_schema(args.recipe, args.out, args.overwrite)
    print(f"{args.out}: {written}")


def predict(args: argparse.Namespace) -> None:
    from client.export import read_model
    from client.prediction.predict import predict_file, uncertainty
    from partitions.common.files import write_atomically
    from partitions.common.output import print_document

    masks, model = Path(args.masks) if args.masks else None, Path(args.model)
    text = predict_file(
        model, Path(args.data), masks, args.recipe, args.as_gaps, args.key, args.network
    )
    if args.out:
        write_atomically(Path(args.out), text)
        print(args.out)
    else:
        print_document(text)
    for note in uncertainty(read_model(model, args.network)[0]):
        print(f"note: {note}", file=sys.stderr)


RECIPE = (
    file_option(
        "--recipe", "FILE", "read the source as this recipe says, in place of other options"
    ),
    flag(
        "--propose",
        "print what the source holds and a first draft of its recipe, explained, with questions; write nothing",
    ),
    flag(
        "--as-gaps", "a table: cells that do not fit the recipe are missing values, each named"
    ),
    file_option(
        "--schema",
        "BUNDLE|FOLDER|FILE",
        "a table: make the columns that all hospitals have, as the federation's schema says",
    ),
    several("--map", "NAME=COLUMN", "--schema: the csv's column for one of it"),
    several(
        "--codes",
        "NAME:CELL=CATEGORY",
        "--schema: which of a column's categories, or of the classes, a cell means",
    ),
)

TEXTS = (
    text_option("--text", "COLUMN", "a csv: the column of texts, which become tokens"),
    option(
        "--vocabulary",
        "hashed:N|FILE",
        "texts: hash words into N numbers, or a file of one word per line, or BERT's vocab.txt; the same in "
        "every hospital (default: hashed:65536)",
    ),
    option("--length", "N", "texts: tokens that are kept of each (default: 200)", type=int),
)

TABLE = (
    option(
        "--columns", "A,B...", "a csv: these columns of numbers (default: all; of texts: none)"
    ),
    text_option("--separator", "SIGN", "a csv: ',', ';', '|' or tab (default: by line 1)"),
    text_option("--decimal", "SIGN", "a csv: , where 1,5 is a number (default: as it shows)"),
    text_option("--thousands", "SIGN", "a csv: the sign in 1.234,5 (default: as it shows)"),
    text_option("--encoding", "NAME", "a csv: its encoding (default: UTF-8, or as it shows)"),
    text_option("--dates", "FORMAT", "a csv: how dates are written, for example %d/%m/%Y"),
    several("--gaps", "CELL", "a csv: a cell that means missing; may be repeated"),
)

SCANS = (
    flag(
        "--skip-bad",
        "leave out files that cannot be read, and name each; all are decoded once more for that, before any is written",
    ),
    file_option(
        "--labels-from",
        "FILE.csv",
        "DICOM: a csv with labels and a column study (StudyInstanceUID), accession (AccessionNumber) or "
        "patient (PatientID); default: the csv in the folder",
    ),
    option("--size", "PIXELS", "resize pictures to PIXELS x PIXELS", type=int),
    option(
        "--window",
        "CENTRE,WIDTH",
        "scans: from CENTRE - WIDTH/2, black, to CENTRE + WIDTH/2, white, in Hounsfield units of a CT; "
        "--window=-600,1500 (default: the file's own)",
    ),
    option(
        "--spacing",
        "MM",
        "scans: a pixel is MM wide and high; --size then cuts, or widens; of a volume also Z,Y,X",
    ),
    option("--slices", "N", "scans: slices of each volume", type=int, default=1),
    option(
        "--volume",
        "D,H,W",
        "scans: whole volumes of D x H x W voxels, slices from feet to head, in place of slices; stretched, or"
        " with --spacing cut and widened about their centre",
    ),
    option(
        "--outlines",
        "A,B...",
        "DICOM volumes: these outlines of SEG and RTSTRUCT objects are the classes 1, 2, ...; A? may be missing",
    ),
    text_option(
        "--series", "PATTERN", "DICOM: part of a series' description, or with * and ? all of it"
    ),
)

SIGNALS = (
    option(
        "--channels",
        "A,B...",
        "signals: these channels in this order, by name (default: those of the first file)",
    ),
    option("--rate", "HZ", "signals: resample to this rate", type=float),
    option(
        "--seconds",
        "S",
        "signals: the first S seconds; zeros follow where a signal is shorter",
        type=float,
    ),
)

PREDICT = (  # --serve belongs to the server: server/cli/models.py
    option("--model", "FILE", "a model from silofl export", required=True),
    text_option("--network", "MODULE:FACTORY", "of a model of your own network: run this code"),
    option(
        "--data",
        "FILE",
        "a csv of new patients, a folder of pictures or scans, or one of these, read as the model's "
        "recipe says; or an .npz file: its test part, or all of x",
    ),
    option(
        "--out",
        "CSV",
        "where to write the patient's key (else index), label and a probability p_NAME for each class "
        "(default: standard output)",
    ),
    choice(
        "--key",
        KEYS,
        "pictures and scans: call them by this (default: of DICOM the patient, and else the file)",
        "",
    ),
    file_option(
        "--recipe", "FILE", "a csv or pictures: this recipe, where the model's card has none"
    ),
    flag("--as-gaps", "a csv: cells that do not fit are missing values, each named"),
    option(
        "--masks",
        "FILE.npz|FOLDER",
        "of a model of outlines: where to write the masks; for volumes a folder of NIfTI files and, of"
        " DICOM series, SEG objects, on the voxels of the source",
    ),
)

COMMANDS = (
    Command(
        "import",
        "make a silo's data file from pictures, scans, signals or a table",
        import_data,
        (
            option("source", "SOURCE", "a folder, or a csv"),
            option("--out", "FILE.npz", "the file to write, and FILE.recipe.toml beside it"),
            option(
                "--label",
                "COLUMN",
                "a csv: the label's column, or several: A,B (default: the column label)",
            ),
            OneOf(
                (
                    text_option(
                        "--patient",
                        "COLUMN",
                        "the column that says whose a sample is (default: patient), or folder: folders below "
                        "those of the classes; a patient's samples go to one part, and the file has numbers, "
                        "not names",
                    ),
                    flag(
                        "--no-patient", "no column tells patients apart: each row is of another"
                    ),
                )
            ),
            text_option(
                "--subgroup",
                "COLUMN[:LIMITS]",
                "a csv: the column by which this hospital looks at its scores, such as sex, or age:40,60,80 in bands",
            ),
            option("--time", "COLUMN", "survival: the column of times ..."),
            option("--event", "COLUMN", "... and that of events, 1 or 0 (censored)"),
            option(
                "--task",
                "TASK",
                "what there is to learn, where the labels do not tell",
                default="auto",
            ),
            option("--labels", "A,B...", "all classes in order, the same in every hospital"),
            option(
                "--unlabelled",
                "A,B...",
                "findings or outlines of the federation that this source is not labelled with",
            ),
            option("--seed", "S", "seed of the split", type=int, default=42),
            flag("--overwrite", "replace FILE.npz, and with it who is for testing"),
            text_option(
                "--cohort",
                "NAME",
                "a name for these patients, which share a privacy budget: the same in each new version of the file",
            ),
            Titled("tables", TABLE),
            Titled("a recipe, or a schema", RECIPE),
            Titled("pictures and scans", SCANS),
            Titled("signals", SIGNALS),
            Titled("texts", TEXTS),
        ),
        examples=(
            "silofl import ours.csv --label outcome --patient pid --out ours.npz",
            "silofl import scans/ --labels-from labels.csv --size 64 --out ours.npz",
            "silofl import ours.csv --propose",
        ),
        description="Read a folder of pictures or of DICOM files, a csv that names pictures, DICOM or NIfTI "
        "files, WFDB or EDF signals, or a table, and write one data file. Nothing of a scan's header is written or "
        "shown; one that cannot be read is called by its place among all files of the folder: find"
        " SOURCE -xtype f | LC_ALL=C sort | sed -n 17p",
    ),
    Command(
        "schema",
        "make the schema of all hospitals from the recipe of one",
        schema,
        (
            file_option("recipe", "RECIPE", "OURS.recipe.toml, from silofl import"),
            file_option("--out", "FILE.toml", "the schema to write", required=True),
            flag("--overwrite", "replace FILE.toml"),
        ),
        examples=("silofl schema ours.recipe.toml --out schema.toml",),
        description="Write the columns, categories and classes that every hospital's table becomes. Nothing of"
        " the recipe that is one hospital's own is in it: names in its csv, codes, signs, values "
        "for gaps.",
    ),
)
