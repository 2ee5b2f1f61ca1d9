"""The reference table: hypotheses on real hospitals that were named before, curves over few patients, all methods.

    SILOFL_DATA=DIR python -m benchmarks.reference --out FOLDER [--form long] [--methods A,B] [--sets A,B] [--runs N]

Each cohort's hospitals are its own. Each patient is tested once a seed (five folds). ``reference_cells.py`` has the
design, ``reference_gains.py`` the statistics.

``FOLDER/cells/SET/NETWORK/METHOD.jsonl`` gets a line for each run that has ended. The same command goes on where it was
interrupted, and several may run side by side: each takes the files that no other has. ``FOLDER/plan.json`` is what all
runs have in common; a folder with another plan is refused. At the end, and with ``--page`` alone, the page is written
(``reference_page.py``).

A method that refuses a data set is left out, with its reason. Cells are the same bits anywhere where one thread
computes (``threads = 1``).
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
    COMMON,
    FORMS,
    NETWORKS,
    RATES,
    SETS,
    TableWorker,
    all_cells,
    ordered_methods,
)
from benchmarks.reference_page import write_page
from partitions.common.errors import UserError
from partitions.common.files import write_atomically
from partitions.common.names import unknown_name
from server.results.reading import read_json
from strategies import strategies


def check_plan(folder: Path, name: str) -> None:
    """Write what all runs have in common, or compare it with what is there. Raises UserError if it is another."""
    searched = {method: of.search for method, of in sorted(strategies().items()) if of.search}
    plan = {"form": name, **asdict(FORMS[name]), "common": COMMON, "sets": SETS}
    plan |= {"networks": NETWORKS, "rates": RATES, "searched": searched}
    plan = json.loads(json.dumps(plan))
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
    parser.add_argument("--form", choices=FORMS, default="long", help="size of the table")
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
            wanted = [c for c in all_cells() if c.dataset in datasets and c.method in methods]
            TableWorker(args.out, FORMS[args.form], args.runs).work(wanted)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_page(args.out, args.page or args.out, args.form)
    return 0


if __name__ == "__main__":
    sys.exit(main())
