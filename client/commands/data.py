"""Commands on a hospital's data: ``import``, ``schema``, ``predict``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError

KEYS = ("file", "patient", "study", "accession")  # as in client/tables/new_pictures.py


def add_import(commands: Any) -> None:
    """Add ``import``."""
    p = commands.add_parser(
        "import",
        help="make a silo's data file from pictures, scans or a table",
        description="Read a folder of pictures or of DICOM files, a csv that names pictures, DICOM or NIfTI files, or "
        "a table, and write one data file. Nothing of a scan's header is written or shown; one that cannot be read is "
        "called by its place among all files of the folder: find SOURCE -xtype f | LC_ALL=C sort | sed -n 17p",
    )
    p.add_argument("source", metavar="SOURCE", help="a folder, or a csv")
    p.add_argument("--out", metavar="FILE.npz", help="the file to write, and FILE.recipe.toml beside it")
    p.add_argument(
        "--label", metavar="COLUMN", help="a csv: the label's column, or several: A,B (default: the column label)"
    )
    patient = p.add_mutually_exclusive_group()
    patient.add_argument(
        "--patient",
        metavar="COLUMN",
        default="",
        help="the column that says whose a sample is (default: patient), or folder: folders below those of the "
        "classes; a patient's samples go to one part, and the file has numbers, not names",
    )
    patient.add_argument(
        "--no-patient", action="store_true", help="no column tells patients apart: each row is of another"
    )
    p.add_argument(
        "--subgroup",
        metavar="COLUMN[:LIMITS]",
        default="",
        help="a csv: the column by which this hospital looks at its scores, such as sex, or age:40,60,80 in bands",
    )
    p.add_argument("--time", metavar="COLUMN", help="survival: the column of times ...")
    p.add_argument("--event", metavar="COLUMN", help="... and that of events, 1 or 0 (censored)")
    p.add_argument(
        "--task", metavar="TASK", default="auto", help="what there is to learn, where the labels do not tell"
    )
    p.add_argument("--labels", metavar="A,B...", help="all classes in order, the same in every hospital")
    add_scan_options(p)
    add_table_options(p)
    p.add_argument("--seed", metavar="S", type=int, default=42, help="seed of the split (default: 42)")
    p.add_argument("--overwrite", action="store_true", help="replace FILE.npz, and with it who is for testing")
    p.add_argument(
        "--cohort",
        metavar="NAME",
        default="",
        help="a name for these patients, which share a privacy budget: the same in each new version of the file",
    )
    p.set_defaults(run=import_data)


def add_scan_options(p: argparse.ArgumentParser) -> None:
    """Add the options of ``import`` for pictures and scans."""
    p.add_argument(
        "--labels-from",
        metavar="FILE.csv",
        help="DICOM: a csv with labels and a column study (StudyInstanceUID), accession (AccessionNumber) or patient "
        "(PatientID); default: the csv in the folder",
    )
    p.add_argument("--size", metavar="PIXELS", type=int, help="resize pictures to PIXELS x PIXELS")
    p.add_argument(
        "--window",
        metavar="CENTRE,WIDTH",
        help="scans: from CENTRE - WIDTH/2, black, to CENTRE + WIDTH/2, white, in Hounsfield units of a CT; "
        "--window=-600,1500 (default: the file's own)",
    )
    p.add_argument(
        "--spacing",
        metavar="MM",
        help="scans: a pixel is MM wide and high; --size then cuts, or widens; of a volume also Z,Y,X",
    )
    p.add_argument("--slices", metavar="N", type=int, default=1, help="scans: slices of each volume (default: 1)")
    p.add_argument(
        "--volume",
        metavar="D,H,W",
        help="scans: whole volumes of D x H x W voxels, slices from feet to head, in place of slices; stretched, or "
        "with --spacing cut and widened about their centre",
    )
    p.add_argument(
        "--outlines",
        metavar="A,B...",
        help="DICOM volumes: these outlines of SEG and RTSTRUCT objects are the classes 1, 2, ...; A? may be missing",
    )
    p.add_argument(
        "--series",
        metavar="PATTERN",
        default="",
        help="DICOM: part of a series' description, or with * and ? all of it",
    )


def add_table_options(p: argparse.ArgumentParser) -> None:
    """Add the options of ``import`` for tables and texts."""
    p.add_argument("--text", metavar="COLUMN", default="", help="a csv: the column of texts, which become tokens")
    p.add_argument(
        "--vocabulary",
        metavar="hashed:N|FILE",
        help="texts: hash words into N numbers, or a file of one word per line, or BERT's vocab.txt; the same in every "
        "hospital (default: hashed:65536)",
    )
    p.add_argument("--length", metavar="N", type=int, help="texts: tokens that are kept of each (default: 200)")
    p.add_argument("--columns", metavar="A,B...", help="a csv: these columns of numbers (default: all; of texts: none)")
    p.add_argument("--separator", metavar="SIGN", default="", help="a csv: ',', ';', '|' or tab (default: by line 1)")
    p.add_argument(
        "--decimal", metavar="SIGN", default="", help="a csv: , where 1,5 is a number (default: as it shows)"
    )
    add_recipe_options(p)


def add_recipe_options(p: argparse.ArgumentParser) -> None:
    """Add the options of ``import`` for the recipe of a table."""
    p.add_argument(
        "--recipe", metavar="FILE", type=Path, help="read the source as this recipe says, in place of other options"
    )
    p.add_argument(
        "--harmonize",
        metavar="COMBAT.toml",
        type=Path,
        help="--recipe: harmonise columns as silofl survey --harmonize found, and write that into the recipe beside "
        "FILE.npz, which import and predict repeat",
    )
    p.add_argument("--silo", metavar="NAME", default="", help="--harmonize: this hospital's name in it")
    p.add_argument(
        "--propose",
        action="store_true",
        help="print what the source holds and a first draft of its recipe, explained, with questions; write nothing",
    )
    p.add_argument(
        "--as-gaps",
        action="store_true",
        help="a table: cells that do not fit the recipe are missing values, each named",
    )
    p.add_argument(
        "--schema",
        metavar="BUNDLE|FOLDER|FILE",
        type=Path,
        help="a table: make the columns that all hospitals have, as the federation's schema says",
    )
    p.add_argument(
        "--map", metavar="NAME=COLUMN", action="append", default=[], help="--schema: the csv's column for one of it"
    )
    p.add_argument(
        "--codes",
        metavar="NAME:CELL=CATEGORY",
        action="append",
        default=[],
        help="--schema: which of a column's categories, or of the classes, a cell means",
    )
    p.add_argument("--thousands", metavar="SIGN", default="", help="a csv: the sign in 1.234,5 (default: as it shows)")
    p.add_argument(
        "--encoding", metavar="NAME", default="", help="a csv: its encoding (default: UTF-8, or as it shows)"
    )
    p.add_argument(
        "--dates", metavar="FORMAT", default="", help="a csv: how dates are written, for example %%d/%%m/%%Y"
    )
    p.add_argument(
        "--gaps", metavar="CELL", action="append", default=[], help="a csv: a cell that means missing; may be repeated"
    )


def add_schema(commands: Any) -> None:
    """Add ``schema``."""
    p = commands.add_parser(
        "schema",
        help="make the schema of all hospitals from the recipe of one",
        description="Write the columns, categories and classes that every hospital's table becomes. Nothing of the "
        "recipe that is one hospital's own is in it: names in its csv, codes, signs, values for gaps.",
    )
    p.add_argument("recipe", metavar="RECIPE", type=Path, help="OURS.recipe.toml, from silofl import")
    p.add_argument("--out", metavar="FILE.toml", type=Path, required=True, help="the schema to write")
    p.add_argument("--overwrite", action="store_true", help="replace FILE.toml")
    p.set_defaults(run=schema)


def add_predict(commands: Any) -> argparse.ArgumentParser:
    """Add ``predict``, without ``--serve``, which belongs to the server (``server/cli/models.py``)."""
    p: argparse.ArgumentParser = commands.add_parser("predict", help="apply an exported model to new patients")
    p.add_argument("--model", metavar="FILE", required=True, help="a model from silofl export")
    p.add_argument(
        "--data",
        metavar="FILE",
        help="a csv of new patients, a folder of pictures or scans, or one of these, read as the model's recipe says; "
        "or an .npz file: its test part, or all of x",
    )
    p.add_argument(
        "--out",
        metavar="CSV",
        help="where to write the patient's key (else index), label and a probability p_NAME for each class (default: "
        "standard output)",
    )
    p.add_argument(
        "--key",
        choices=KEYS,
        default="",
        help="pictures and scans: call them by this (default: of DICOM the patient, and else the file)",
    )
    p.add_argument(
        "--recipe", metavar="FILE", type=Path, help="a csv or pictures: this recipe, where the model's card has none"
    )
    p.add_argument("--as-gaps", action="store_true", help="a csv: cells that do not fit are missing values, each named")
    p.add_argument(
        "--masks",
        metavar="FILE.npz|FOLDER",
        help="of a model of outlines: where to write the masks; for volumes a folder of NIfTI files and, of DICOM "
        "series, SEG objects, on the voxels of the source",
    )
    p.set_defaults(run=predict)
    return p


def import_data(args: argparse.Namespace) -> None:
    from client.tables.importing import import_from, propose

    if args.propose:
        print(propose(args), end="")
        return
    if not args.out:
        raise UserError("--out FILE.npz is missing: the data file to write")
    for line in import_from(args):
        print(line)


def schema(args: argparse.Namespace) -> None:
    from client.tables.importing import write_schema

    made = write_schema(args.recipe, args.out, args.overwrite)
    print(f"{args.out}: {made}")


def predict(args: argparse.Namespace) -> None:
    from client.export import read_model
    from client.prediction.predict import predict_file, uncertainty
    from partitions.common.files import write_atomically

    masks, model = Path(args.masks) if args.masks else None, Path(args.model)
    text = predict_file(model, Path(args.data), masks, args.recipe, args.as_gaps, args.key)
    if args.out:
        write_atomically(Path(args.out), text)
        print(args.out)
    else:
        print(text, end="")
    for note in uncertainty(read_model(model)[0]):
        print(f"note: {note}", file=sys.stderr)
