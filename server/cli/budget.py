"""Command ``budget``: the cost of differential privacy."""

from __future__ import annotations

import argparse
import json

from client.commands.table import Command, file_option, flag
from partitions.common.errors import UserError


def budget(args: argparse.Namespace) -> None:
    from client.site.budget.page import budget_page, budgets, run_page
    from client.studies import place_of

    if args.where is not None and (args.where / "config.toml").is_file():
        from server.results.history import History, budgets_of
        from server.results.run_directory import read_toml

        if args.policy is not None:
            raise UserError(
                "--policy: a run directory has no budget; name a silo's state directory"
            )
        unit = str(read_toml(args.where / "config.toml").get("dp.unit", "record"))
        found = budgets_of(History(args.where / "history.csv"), unit)
        text = run_page(found)
    else:
        place = place_of(args.where, args.policy)
        found = budgets(place.state, place.policy)
        text = budget_page(found, place.name, place.state)
    print(json.dumps(found, indent=1) if args.json else text)


COMMANDS = (
    Command(
        "budget",
        "what differential privacy has cost a site's cohorts, and what is left",
        budget,
        (
            file_option(
                "where",
                "STATE_DIR|RUN",
                "a silo's state directory, or a run directory (default: the only silo here)",
                nargs="?",
            ),
            file_option(
                "--policy",
                "FILE",
                "this hospital's policy.toml (default: the silo's, as far as known)",
            ),
            flag("--json", "as JSON"),
        ),
        examples=("silofl budget", "silofl budget runs/first --json"),
        description="At a hospital: what all runs together have spent of each cohort's privacy budget "
        "(epsilon), run by run, what is left, and whether the ledger is whole. Of a run directory:"
        " what the run has cost each silo.",
    ),
)
