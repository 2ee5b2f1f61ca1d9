"""Command ``survey``: statistics of the data before training."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError
from server.cli.research import add_set, assignments


def add_commands(commands: Any) -> None:
    """Add the commands of this group to the parser."""
    p = commands.add_parser(
        "survey",
        help="statistics of every hospital's data before a training, and what is odd in one of them",
        description="Counts, missing values, means, deviations and histograms of each column and hospital, as each "
        "hospital's policy lets them leave, and outliers of one hospital: another unit, sign, date or code. The last "
        "line printed is the directory of survey.json, survey.csv and survey.html.",
    )
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument("--data", metavar="FILE|FOLDER", type=Path, help="a hospital's .npz file, or a folder of such")
    where.add_argument("--connection", metavar="NAME", help="the silos of a federation")
    where.add_argument("--dataset", metavar="D", help="a data set by name, divided as for a simulation")
    p.add_argument(
        "--policy",
        metavar="FILE",
        help="--data: answer as a hospital with this policy.toml would (default: nothing is held back)",
    )
    p.add_argument(
        "--harmonize",
        metavar="COLUMN[,COLUMN...]|all",
        default="",
        help="ComBat: also ask for exact sums of these columns of numbers, and write combat.toml for silofl import "
        "--harmonize; a hospital's policy must have combat = true",
    )
    p.add_argument(
        "--covariates",
        metavar="COLUMN[,COLUMN...]",
        default="",
        help="--harmonize: columns whose effects are kept, such as age,sex; other differences between hospitals go, "
        "also those of their patients",
    )
    p.add_argument(
        "--no-shrink",
        action="store_true",
        help="--harmonize: each hospital's own shift and spread, as one column needs, without empirical Bayes",
    )
    add_set(p, "--dataset: partition, silos, seed ...; --connection: study=NAME, where hospitals want a study")
    p.add_argument("--out", metavar="DIR", type=Path, help="a new directory (default: runs/TIME-survey)")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from client.site.trust.policy import PUBLIC
    from server.report.sections.survey import survey_text
    from server.results.run_directory import default_out
    from server.results.survey.files import read_survey
    from server.simulation.survey import survey, survey_deployed

    if args.policy and not args.data:
        raise UserError("--policy goes with --data")
    if args.set and args.data:
        raise UserError("--set goes with --dataset or --connection")
    if args.data and not args.data.exists():
        raise UserError(f"there is no {args.data}: name an .npz file of silofl import, or a folder of such")
    if not args.harmonize and (args.covariates or args.no_shrink):
        raise UserError("--covariates and --no-shrink go with --harmonize")
    asked = {"survey.harmonize": args.harmonize, "survey.covariates": args.covariates}
    asked = {**asked, "survey.shrink": not args.no_shrink} if args.harmonize else {}
    values = {**assignments(args.set), **asked}
    if args.connection:
        out = survey_deployed(values, args.out, args.connection)
    else:
        values |= {"dataset": args.dataset} if args.dataset else {}
        out = survey(values, args.out or default_out("survey"), args.data, args.policy or PUBLIC)
    print("\n".join(survey_text(read_survey(out))), file=sys.stderr)
    print(out)
