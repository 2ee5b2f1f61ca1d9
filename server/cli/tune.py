"""Command ``tune``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from client.commands.table import Command, choice, option, pairs
from partitions.common.errors import UserError
from partitions.common.names import split_names
from server.cli.options import DATA_OPTIONS, RUN_OPTIONS, run_values

if TYPE_CHECKING:
    from server.tuning.trials import Book


def print_costs(book: Book) -> None:
    """Print each method's best trial, what the search has cost, and the next command."""
    from server.rendering import fill

    costs = book.costs()
    best = {
        name: (book.path / f"best-{name}.toml").read_text().splitlines()[0] for name in costs
    }
    spent = book.privacy.get("all", {})
    text = fill("cli/costs.txt", costs=costs, best=best, spent=spent, next=book.path)
    print(text)


def tune_command(args: argparse.Namespace) -> None:
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise UserError(
            "silofl tune needs Optuna, which is not installed: pip install -e '.[tuning]'"
        ) from None
    from server.simulation.workers import engine_of, keep_workers
    from server.tuning.search import Request, tune
    from server.tuning.space import read_space
    from strategies.base.run_settings import defaults

    values = run_values(args)
    out = values.pop("out", None)
    if not out:
        raise UserError("--out DIR is needed here: a search is resumed from its directory")
    names = split_names(values.pop("strategy", defaults()["strategy"]))
    if len(set(names)) < len(names):
        raise UserError(f"--strategy {','.join(names)} names one of them twice")
    seed = str(values.setdefault("seed", defaults()["seed"]))
    if "," in seed:
        raise UserError(
            f"--seed {seed}: one seed is needed here; compare what was found with several seeds afterwards"
        )
    request = Request(
        values, names, read_space(args.space, names), args.trials, args.sampler, args.objective
    )
    try:
        engine = engine_of(args.workers)
        with keep_workers(args.workers):
            book = tune(request, Path(str(out)).expanduser(), engine)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on with the search") from None
    print_costs(book)
    print(book.path)


COMMANDS = (
    Command(
        "tune",
        "search the settings of methods by their validation scores",
        tune_command,
        (
            *RUN_OPTIONS,
            *DATA_OPTIONS,
            pairs(
                "--space",
                "KEY=FORM",
                "a setting and its values: KEY=log(LO,HI), uniform(LO,HI), int(LO,HI), logint(LO,HI) or "
                "[A,B,...]; or a TOML file of those",
            ),
            option("--trials", "N", "trials of each method", type=int, default=20),
            choice(
                "--sampler",
                ("random", "tpe", "halving"),
                "how values are chosen; halving: at random, and the better third goes on with three times the rounds",
                "tpe",
            ),
            choice(
                "--objective",
                ("mean", "worst"),
                "validation score over the silos, at the round that a report would show",
                "mean",
            ),
            option(
                "--workers",
                "N",
                "trials side by side, each in a process of its own, or ray",
                default="1",
            ),
        ),
        examples=(
            "silofl tune --strategy fedprox --space 'learning-rate=log(0.001,0.3)' --trials 20 --out tuning",
        ),
        description="Try settings of one or more methods in simulation, each method with equally many trials, "
        "and write DIR/trials.csv and, per method, DIR/best-STRATEGY.toml for simulate --config. "
        "Test data are not read. The same command goes on with a search that was interrupted. The "
        "last line printed is DIR.",
    ),
)
