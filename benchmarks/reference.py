"""The reference table: hypotheses on real hospitals that were named before, curves over few patients, all methods.

    SILOFL_DATA=DIR python -m benchmarks.reference --out FOLDER [--form long] [--methods A B] [--sets A B] [--runs N]
        [--from docs]

Each cohort's hospitals are its own. Each patient is tested once a seed (five folds). ``reference_cells.py`` has the
design, ``reference_gains.py`` the statistics.

``FOLDER/cells/SET/NETWORK/METHOD.jsonl`` gets a line for each run that has ended. The same command goes on where it was
interrupted, and several may run side by side: each takes the files that no other has. ``--from`` goes on from the csv
files of a page. ``FOLDER/reference-table-plan.json`` is what all runs have in common; a folder with another plan is
refused. At the end, and with ``--page`` alone, the page is written (``reference_page.py``).

A method that refuses a data set is left out, with its reason. Cells are the same bits anywhere where one thread
computes (``threads = 1``).
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.common import command_line
from benchmarks.reference_cells import (
    COMMON,
    FORMS,
    NETWORKS,
    RATES,
    SETS,
    STABLE,
    all_cells,
    execute_missing,
    ordered_methods,
)
from benchmarks.reference_page import PLAN, restore_cells, stem, write_page
from partitions.common.errors import UserError
from partitions.common.files import write_atomically
from server.results.reading import read_json
from strategies import strategies


def check_plan(file: Path, name: str, *, published: bool = False) -> None:
    """Write what all runs have in common, or compare it with what is there. Raises UserError if it is another."""
    searched = {method: of.search for method, of in sorted(strategies().items()) if of.search}
    plan = {"form": name, **asdict(FORMS[name]), "common": COMMON, "sets": SETS}
    stable = {" ".join(of): times for of, times in STABLE.items()}
    plan |= {"networks": NETWORKS, "rates": RATES, "stable": stable, "searched": searched}
    text = json.dumps(plan, indent=1) + "\n"
    before = read_json(file)
    if before is None and not published:
        write_atomically(file, text)
    elif before != json.loads(text):
        raise UserError(
            f"{file} is not the plan of form {name} with today's settings: give another --form or --out, or leave out "
            "--from"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the cells")
    parser.add_argument("--form", choices=FORMS, default="long", help="size of the table")
    methods = ordered_methods()
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--runs", type=int, help="end after this many; default: all")
    parser.add_argument(
        "--from", dest="published", type=Path, help="folder of a page to go on from"
    )
    parser.add_argument(
        "--page", type=Path, help="run nothing; write the page into this folder"
    )
    args = parser.parse_args(arguments)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    try:
        if args.published:
            plan = args.published / f"{stem(args.form)}-plan.json"
            check_plan(plan, args.form, published=True)
        check_plan(args.out / PLAN, args.form)
        if args.published:
            restore_cells(args.published, args.out, args.form)
        if args.page is None:
            wanted = (
                c for c in all_cells() if c.dataset in args.sets and c.method in args.methods
            )
            runs = execute_missing(args.out, FORMS[args.form], wanted)
            for _ in itertools.islice(runs, args.runs):
                pass
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_page(args.out, args.page or args.out, args.form)
    return 0


if __name__ == "__main__":
    sys.exit(main())
