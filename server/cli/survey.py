"""Command ``survey``: statistics of the data before training."""

from __future__ import annotations

import argparse

from client.commands.table import Command, OneOf, file_option, option, pairs
from partitions.common.errors import UserError
from server.cli.options import assignments, connection_of

SUMS = dict.fromkeys(
    ("secure-aggregation", "survey.times", "survey.by")
)  # of a sum over hospitals


def survey_command(args: argparse.Namespace) -> None:
    from client.protocol.policy import PUBLIC
    from server.report.survey import survey_text
    from server.results.run_directory import default_out
    from server.results.survey import read_survey
    from server.simulation.survey import survey, survey_deployed

    if args.policy and not args.data:
        raise UserError("--policy goes with --data")
    values = assignments(args.set)
    if args.data and values.keys() - SUMS.keys():
        raise UserError(
            f"--set goes with --dataset or --federation; with --data it has {', '.join(SUMS)}"
        )
    if args.data and not args.data.exists():
        raise UserError(
            f"there is no {args.data}: name an .npz file of silofl import, or a folder of such"
        )
    if args.federation:
        out = survey_deployed(values, args.out, connection_of(args.federation))
    else:
        values |= {"dataset": args.dataset} if args.dataset else {}
        out = survey(
            values, args.out or default_out("survey"), args.data, args.policy or PUBLIC
        )
    print("\n".join(survey_text(read_survey(out))))
    print(out)


COMMANDS = (
    Command(
        "survey",
        "statistics of every hospital's data before a training, and what is odd in one of them",
        survey_command,
        (
            OneOf(
                (
                    file_option(
                        "--data", "FILE|FOLDER", "a hospital's .npz file, or a folder of such"
                    ),
                    option("--federation", "NAME|FEDERATION.yaml", "the silos of a federation"),
                    option("--dataset", "D", "a data set by name, divided as for a simulation"),
                ),
                required=True,
            ),
            option(
                "--policy",
                "FILE",
                "--data: answer as a hospital with this policy.toml would (default: nothing is held back)",
            ),
            pairs(
                "--set",
                "KEY=VALUE",
                "--dataset: partition, silos, seed ...; --federation: study=NAME, where hospitals want a study; "
                "secure-aggregation=true survey.times=365,730 survey.by=COLUMN: sums over all hospitals alone",
            ),
            file_option("--out", "DIR", "a new directory (default: runs/TIME-survey)"),
        ),
        examples=(
            "silofl survey --data hospitals/",
            "silofl survey --federation demo --out runs/survey",
            "silofl survey --federation demo --set study=look secure-aggregation=true survey.times=365,730",
        ),
        description="Counts, missing values, means, deviations and histograms of each column and hospital, as "
        "each hospital's policy lets them leave, and outliers of one hospital: another unit, sign,"
        " date or code. With secure-aggregation=true the server opens sums over all hospitals alone: a table of "
        "all patients, and survival curves with the log-rank test. The last line printed is the directory of "
        "survey.json, survey.csv and survey.html.",
    ),
)
