"""``silofl import``: its options, the data file, and the recipe beside it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from client.site.trust.bundle import read_bundle
from partitions.common.errors import Problems, UserError
from partitions.common.files import write_atomically
from partitions.common.names import composed, unknown_name
from partitions.importing.files import Faults
from partitions.importing.options import SEPARATORS, ImportOptions, Take
from partitions.importing.proposal.draft import propose_pictures
from partitions.importing.readers.formats import table_format
from partitions.importing.source import import_source, reading
from partitions.importing.table_draft import draft_recipe, shared_recipe
from partitions.importing.tables import read_lines
from partitions.labels import TASKS
from partitions.recipes.cells import is_number
from partitions.recipes.draft import explain, without_cells
from partitions.recipes.pictures import AnyRecipe, load_any
from partitions.recipes.recipe import Recipe, load_recipe
from partitions.recipes.shared import Mapped, schema_of, schema_toml
from partitions.schema import Schema, few, load_schema, read_schema

# Options that a recipe replaces, with their values when they are not used.
REPLACED: dict[str, Any] = {
    **dict.fromkeys(("label", "time", "event", "labels", "vocabulary", "length", "columns")),
    **dict.fromkeys(
        ("size", "window", "spacing", "volume", "outlines", "channels", "rate", "seconds")
    ),
    **dict.fromkeys(
        ("patient", "text", "separator", "decimal", "thousands", "encoding", "dates", "series"),
        "",
    ),
    "no_patient": False,
    "task": "auto",
    "gaps": [],
    "slices": 1,
    "seed": 42,
}
OF_SCHEMA = (
    "label",
    "time",
    "event",
    "labels",
    "labels_from",
    "vocabulary",
    "length",
    "columns",
    "text",
    "task",
)
PATHS = ("source", "out", "vocabulary")
ABOUT = """How silofl makes a data file of a table. Correct what is wrong, then use it:
silofl import FILE.csv --recipe THIS.toml --out FILE.npz
A statistic fills gaps; it is taken from the training part, at the import. Ranges and units are yours to add:
unit = "mg/dl"   range = [0, 400]   factor = 18.02 (converts: cell * factor + offset)"""


def options_of(args: argparse.Namespace) -> ImportOptions:
    """Return the options of a command line. Raises UserError if they conflict."""
    for key, value in vars(args).items():  # names and cells, as they are read from files
        if key not in PATHS and isinstance(value, str):
            setattr(args, key, composed(value))
        elif isinstance(value, list):
            setattr(args, key, [composed(text) for text in value])
    _check_options(args)
    if args.recipe:
        return _options_with_recipe(args)
    if args.as_gaps:
        raise UserError(
            "--as-gaps goes with --recipe; --gaps CELL names a cell that means missing"
        )
    return replace(
        kept_of(args),
        **{
            key: getattr(args, key)
            for key in (
                "size",
                "label",
                "labels_from",
                "seed",
                "task",
                "slices",
                "series",
                "rate",
                "seconds",
            )
        },
        labels=[name.strip() for name in args.labels.split(",")] if args.labels else [],
        survival=(args.time, args.event) if args.time else None,
        window=parse_window(args.window) if args.window else None,
        **spacing_of(args),
        outlines=names_in(args.outlines),
        channels=names_in(args.channels),
        take=take_of(args),
    )


def kept_of(args: argparse.Namespace) -> ImportOptions:
    """Return the options that no recipe replaces."""
    faults = Faults(args.skip_bad)
    return ImportOptions(
        overwrite=args.overwrite,
        cohort=args.cohort,
        subgroup=args.subgroup,
        unlabelled=names_in(args.unlabelled),
        faults=faults,
    )


def names_in(text: str | None) -> tuple[str, ...]:
    """Return the names in an option, which commas separate."""
    return tuple(filter(None, map(str.strip, (text or "").split(","))))


def _check_options(args: argparse.Namespace) -> None:
    """Raise UserError if options conflict, with or without a recipe."""
    if args.task not in ("auto", *TASKS):
        raise unknown_name("task", args.task, TASKS)
    if bool(args.time) != bool(args.event) or (args.time and args.label):
        raise UserError("survival needs --time and --event, and no --label")
    if not args.text and (args.vocabulary is not None or args.length is not None):
        raise UserError("--vocabulary and --length are of texts: name their column with --text")
    if args.recipe and (args.schema or args.map or args.codes):
        raise UserError(
            "--schema, --map and --codes make a recipe: leave out --recipe, or them"
        )


def _options_with_recipe(args: argparse.Namespace) -> ImportOptions:
    """Return the options beside --recipe: those that a recipe of this kind does not replace."""
    if needless := [key for key, default in REPLACED.items() if getattr(args, key) != default]:
        raise UserError(
            f"--{needless[0].replace('_', '-')} beside --recipe: the recipe says that; change it there"
        )
    recipe, kept = load_any(args.recipe), kept_of(args)
    if isinstance(recipe, Recipe):
        if args.labels_from:
            raise UserError(
                "--labels-from is of pictures and scans: the labels of a table are in it"
            )
        return replace(kept, recipe=recipe, as_gaps=args.as_gaps)
    if args.as_gaps:
        raise UserError("--as-gaps is of a table: pictures have no cells")
    return replace(kept, pictures=recipe, labels_from=args.labels_from)


def take_of(args: argparse.Namespace) -> Take:
    """Return the table options of a command line."""
    same = ("text", "vocabulary", "length", "decimal", "thousands", "encoding", "dates")
    return Take(
        **{key: value for key in same if (value := getattr(args, key)) is not None},
        columns=names_in(args.columns),
        patient=None if args.no_patient else args.patient,
        separator=SEPARATORS.get(args.separator, args.separator),
        gaps=tuple(args.gaps),
    )


def mapped_of(args: argparse.Namespace) -> Mapped:
    """Return the mapping in --map and --codes. Raises UserError."""
    columns: dict[str, str] = {}
    cells: dict[str, dict[str, str]] = {}
    for pair in args.map:
        name, sign, source = pair.partition("=")
        if not sign or not name or not source or name in columns:
            raise UserError(
                f"--map {pair}: the schema's column and yours are wanted once, for example sex=Geschlecht"
            )
        columns[name] = source
    for pair in args.codes:
        name, sign, rest = pair.partition(":")
        cell, equals, level = rest.rpartition("=")
        if not sign or not equals or not name or not level:
            raise UserError(
                f"--codes {pair}: COLUMN:CELL=CATEGORY is wanted, for example sex:W=female"
            )
        cells.setdefault(name, {})[cell] = level
    return Mapped(columns, cells)


def with_schema(args: argparse.Namespace, options: ImportOptions) -> ImportOptions:
    """Return the options with the recipe from the federation's schema, if --schema names one."""
    mapped = mapped_of(args)
    if not args.schema:
        if mapped != Mapped():
            raise UserError("--map and --codes go with --schema")
        return options
    if needless := [key for key in OF_SCHEMA if getattr(args, key) != REPLACED.get(key)]:
        raise UserError(
            f"--{needless[0].replace('_', '-')} beside --schema: the schema says that"
        )
    source = Path(args.source)
    if not source.is_file():
        raise UserError(f"--schema is of a csv table; {source} is none")
    with reading(source):
        recipe = shared_recipe(source, schema_at(args.schema), mapped, options)
    return replace(kept_of(args), recipe=recipe)


def propose(args: argparse.Namespace) -> str:
    """Return the first draft of a recipe as TOML, with comments. Raises UserError, DataError."""
    options, path = options_of(args), Path(args.source)
    if args.recipe or args.out:
        raise UserError(
            "--propose prints a draft, and takes no --recipe and no --out: send it to a file with >"
        )
    if not path.exists():
        raise UserError(
            f"there is no {path}; name a folder of pictures or scans, or a csv file"
        )
    options = with_schema(args, options)
    if path.is_dir():
        with reading(path):
            return propose_pictures(path, options)
    if options.recipe:
        return options.recipe.toml(ABOUT)
    with reading(path):
        lines = read_lines(path, options.take)
        if "file" in lines.columns:
            return propose_pictures(path, options)
        recipe, notes, problems = draft_recipe(lines, options)
    whose = (
        f"{recipe.patient} says whose each row is"
        if recipe.patient
        else "each row is of another patient"
    )
    roles = f"The label is {', '.join(recipe.label)}. For the parts, {whose}. Missing are the cells of `gaps`."
    questions = [f"QUESTION. {text}" for text in problems]
    ask = [
        "Answer each question below, in the csv or here in place of '?': until then nothing is imported."
    ]
    draft = recipe.toml("\n".join([ABOUT, roles, *notes, *(ask * bool(questions)), *questions]))
    return without_cells(draft, lines) if questions else draft


def describe_mapping(recipe: Recipe) -> Iterator[str]:
    """Describe how a csv's columns and cells become those of the schema, one line for each with another name."""
    for column in recipe.used:
        codes = ", ".join(f"{cell} = {level}" for cell, level in column.values.items())
        if column.source or codes:
            yield f"{column.origin}: {'; '.join(filter(None, (f'becomes {column.name}', codes)))}"
    if recipe.label_values:
        yield f"{recipe.label[0]}: {', '.join(f'{cell} = {level}' for cell, level in recipe.label_values.items())}"
    if left := [
        column.source
        for column in recipe.columns
        if column.kind == "skip" and not column.format
    ]:
        yield f"left out, as the schema does not have them: {few(left, 20)}"


def import_from(args: argparse.Namespace) -> Iterator[str]:
    """Make the data file, and a table's recipe beside it; yield the lines to print."""
    out, source = Path(args.out), Path(args.source)
    beside, problems = out.with_suffix(".recipe.toml"), Problems()
    if args.recipe is None and beside.exists() and not args.overwrite:
        problems.add(
            f"{beside} is there already: use it with --recipe {beside}, name another file, or --overwrite"
        )
    with problems.complete(source):
        options = with_schema(args, options_of(args))
    recipe = options.recipe or options.pictures
    if args.recipe and recipe and is_open(recipe) and args.recipe.resolve() == beside.resolve():
        problems.add(
            f"{beside} is what --out {out} writes, with the values for gaps: give the draft another name"
        )
    imported = import_source(source, out, replace(options, problems=problems))
    yield from str(imported).splitlines()
    if imported.recipe and args.recipe is None:
        describe = describe_mapping if args.schema else explain
        yield from (f"column {line}" for line in describe(imported.recipe))
    yield from (f"note: {note}" for note in imported.notes)
    new = "NEW.csv" if imported.recipe else "NEW"
    if args.recipe is None or imported.used != recipe:
        write_atomically(beside, imported.used.toml(f"How {out.name} was made."))
        yield f"{beside}: the recipe; silofl import {new} --recipe {beside} repeats it"
    if imported.divided:
        yield "the split is written into the file: no run can change it"
    made_from = table_format(source) if source.is_file() and imported.recipe else None
    yield f"{out}, of {made_from.title}" if made_from else str(out)


def is_open(recipe: AnyRecipe) -> bool:
    """Return whether a recipe has columns whose gaps have no value yet."""
    return isinstance(recipe, Recipe) and any(
        column.fill != "refuse" and column.fill_value is None for column in recipe.used
    )


def spacing_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of --volume and --spacing. Raises UserError."""
    sides = [part.strip() for part in (args.volume or "").split(",")]
    if args.volume and (
        len(sides) != 3 or not all(part.isascii() and part.isdigit() for part in sides)
    ):
        raise UserError(
            f"--volume is {args.volume[:40]!r}; it is depth, height and width, for example 32,128,128"
        )
    wide = [part.strip() for part in (args.spacing or "").split(",")]
    if args.spacing and (len(wide) not in (1, 3) or not all(map(is_number, wide))):
        raise UserError(
            f"--spacing is {args.spacing[:40]!r}; it is mm, for example 1.5, or of a volume 3,1,1"
        )
    mm = [float(part) for part in wide] if args.spacing else []
    if not args.volume:
        return {"spacing": mm[0]} if len(mm) == 1 else {"voxel": tuple(mm)} if mm else {}
    return {"volume": tuple(map(int, sides)), "voxel": tuple(mm * 3)[:3] if mm else None}


def parse_window(text: str) -> tuple[float, float]:
    """Parse CENTRE,WIDTH as two numbers."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(map(is_number, parts)):
        raise UserError(
            f"--window is {text[:40]!r}; it is a centre and a width, for example --window=40,400"
        )
    return float(parts[0]), float(parts[1])


def schema_at(where: Path) -> Schema:
    """Return the schema of a bundle, its folder, or a file. Raises UserError if there is none."""
    if where.suffix in (".toml", ".yaml", ".yml", ".json"):
        return load_schema(where)
    text = read_bundle(where).get("schema.json")
    if text is None:
        raise UserError(f"{where} has no schema: its federation declares none")
    return read_schema(text.decode(errors="replace"))


def write_schema(recipe: Path, out: Path, overwrite: bool) -> Schema:
    """Write the schema of all hospitals, from the recipe of one. Raises UserError, DataError."""
    if out.suffix != ".toml":
        raise UserError(f"{out} does not end in .toml")
    if out.exists() and not overwrite:
        raise UserError(f"{out} is there already; name another file, or say --overwrite")
    shared = schema_of(load_recipe(recipe))
    write_atomically(out, schema_toml(shared))
    return shared
