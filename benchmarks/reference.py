"""The reference table: every method on every table with natural centres, tuned alike, with hospitals left out.

    SILOFL_DATA=DIR python -m benchmarks.reference --out FOLDER [--form long] [--methods A,B] [--sets A,B] [--runs N]

A **cell** is one data set, method and seed, with all hospitals or without some of them. Its settings come from a
random search of its own: the trials of ``silofl tune --sampler random``, as many for every method, ranked by validation
data of the hospitals that train. So nothing of a test part, nor of a hospital that is left out, is in a choice.

``FOLDER/cells/SET/METHOD.jsonl`` gets a line for each run that has ended. The same command goes on where it was
interrupted, and several may run side by side: each takes the files that no other has. ``FOLDER/plan.json`` is what all
runs have in common; a folder with another plan is refused. At the end, and with ``--page`` alone, the page is written
(``reference_page.py``).

A method that refuses a data set is left out, with its reason. Cells are the same bits anywhere where one thread
computes (``threads = 1``), but for their seconds: a simulation makes the noise of differential privacy of the seed.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.reference_cells import (
    ALONE,
    COMMON,
    FIRST,
    FORMS,
    LEARNING_RATE,
    NETWORK,
    SETS,
    TREES,
    TableWorker,
    ordered_methods,
)
from benchmarks.reference_page import write_page
from partitions.common.errors import UserError
from partitions.common.files import write_atomically
from partitions.common.names import unknown_name
from server.report.methods import alone
from server.results.reading import read_json


def check_plan(folder: Path, name: str) -> None:
    """Write what all runs have in common, or compare it with what is there. Raises UserError if it is another."""
    plan = {"form": name, **asdict(FORMS[name]), "common": COMMON, "sets": SETS}
    plan |= {"network": NETWORK, "trees": TREES, "alone": ALONE}
    plan["searched"] = LEARNING_RATE
    file = folder / "plan.json"
    before = read_json(file)
    if before is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(plan, indent=1) + "\n")
    elif before != plan:
        raise UserError(
            f"{file} is another plan (form {before.get('form')}, or settings that have changed since): give --out a "
            "new folder"
        )


def read_names(text: str, option: str, known: Sequence[str]) -> list[str]:
    """Return the names of an option, in the table's order; all, if none is given. Raises UserError."""
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise unknown_name(option, name, known)
    return [name for name in known if name in wanted or not wanted]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reference", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the cells")
    parser.add_argument("--form", choices=FORMS, default="short", help="size of the table")
    parser.add_argument("--methods", default="", help="names with commas; default: all")
    parser.add_argument("--sets", default="", help="names with commas; default: all")
    parser.add_argument("--runs", type=int, default=-1, help="end after this many; -1: all")
    parser.add_argument(
        "--page", type=Path, help="run nothing; write the page into this folder"
    )
    args = parser.parse_args(arguments)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    try:
        methods = read_names(args.methods, "--methods", ordered_methods())
        datasets = read_names(args.sets, "--sets", list(SETS))
        check_plan(args.out, args.form)
        if args.page is None:
            TableWorker(args.out, FORMS[args.form], args.runs).work(datasets, methods)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_page(args.out, args.page or args.out, FORMS[args.form])
    return 0


if __name__ == "__main__":
    assert alone() == FIRST[0]
    sys.exit(main())
