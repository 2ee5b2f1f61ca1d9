"""Command ``plan``: what a study can find out, before it starts."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from client.commands.table import Command, OneOf, file_option, flag, option
from partitions.common.errors import UserError

if TYPE_CHECKING:
    from server.planning.power import Design


def plan_command(args: argparse.Namespace) -> None:
    from server.planning.plan import make_plan, plan_json, plan_text, write_plan

    metric, design = args.metric, design_of(args)
    unit = 100 if metric == "accuracy" else 1
    if not 0 < args.effect < math.inf:
        raise UserError(f"--effect {args.effect:g}: the smallest gain worth having is above 0")
    plan = make_plan(metric, design, args.effect / unit)
    print(plan_json(plan) if args.json else "\n".join(plan_text(plan)))
    if args.out:
        write_plan(plan, args.out)
        print(args.out)


def design_of(args: argparse.Namespace) -> Design:
    """Return the design that the options describe. Raises UserError where they contradict each other."""
    from server.planning.plan import (
        ACCURACY,
        SPREADS,
        patients_tested,
        read_pilot,
        surveyed_sizes,
    )
    from server.planning.power import Design

    if (args.metric == ACCURACY) == bool(args.patient_sd):
        raise UserError(
            "--patient-sd goes with another --metric than accuracy, a mean over patients such as the log loss: the "
            "standard deviation of one patient's difference between the two methods"
        )
    check_ranges(args)
    unit = 100 if args.metric == ACCURACY else 1
    base, spread = args.base, args.spread
    if args.pilot:
        if args.metric != ACCURACY:
            raise UserError("--pilot has accuracies; without --metric")
        pilot = read_pilot(args.pilot, args.method, args.baseline)
        tested = pilot.tested
        base = 100 * pilot.base if base is None else base
        spread = f"{100 * pilot.spread}" if spread is None else spread
    else:
        patients = sizes_in(args.sizes) if args.sizes else surveyed_sizes(args.survey)
        tested = patients_tested(patients, args.test_share)
    spread = spread or "middle"
    if spread in SPREADS and args.metric != ACCURACY:
        raise UserError(f"--spread {spread}: of {args.metric} a number is needed, in its units")
    try:
        deviation = SPREADS[spread] if spread in SPREADS else float(spread) / unit
    except ValueError:
        raise UserError(f"--spread {spread}: {', '.join(SPREADS)}, or a number") from None
    if not 0 <= deviation < math.inf:
        raise UserError(f"--spread {spread}: {', '.join(SPREADS)}, or a number from 0")
    base = 100 * Design.base if base is None else base
    return Design(
        tested,
        deviation,
        base / 100,
        args.seeds,
        args.comparisons,
        not args.same_split,
        args.patient_sd,
    )


def check_ranges(args: argparse.Namespace) -> None:
    """Raise UserError for a number that no study has."""
    for name, value, low, high in (
        ("--base", args.base, 1, 99),
        ("--seeds", args.seeds, 1, 50),
        ("--comparisons", args.comparisons, 1, 1000),
        ("--test-share", args.test_share, 0.01, 1),
        ("--patient-sd", args.patient_sd, 0, 1e9),
    ):
        if value is not None and not low <= value <= high:
            raise UserError(f"{name} {value:g}: from {low:g} to {high:g}")


def sizes_in(text: str) -> list[int]:
    """Return the numbers of ``120,80,...``. Raises UserError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 10**9 for part in parts):
        raise UserError(f"--sizes {text}: each hospital's patients, such as 120,80,200")
    return [int(part) for part in parts]


COMMANDS = (
    Command(
        "plan",
        "what a study can find out: power, detectable gain and harm, what it would take",
        plan_command,
        (
            OneOf(
                (
                    option("--sizes", "N,N,...", "each hospital's patients"),
                    file_option("--survey", "DIR", "the hospitals of a survey"),
                    file_option("--pilot", "RUN", "the hospitals, gains and scores of a run"),
                ),
                required=True,
            ),
            option(
                "--effect",
                "POINTS",
                "smallest mean gain worth having",
                type=float,
                required=True,
            ),
            option(
                "--spread",
                "low|middle|high|POINTS",
                "standard deviation of the hospitals' true gains: 1, 3 or 10 points, or a number (default: the "
                "pilot's, or middle)",
            ),
            option(
                "--base",
                "PERCENT",
                "the baseline's accuracy (default: the pilot's, or 60)",
                type=float,
            ),
            option("--method", "A", "--pilot: the method", default="fedavg"),
            option("--baseline", "B", "--pilot: what it is compared with", default="local"),
            option(
                "--test-share",
                "S",
                "share of the patients that are tested",
                type=float,
                default=0.2,
            ),
            option("--seeds", "N", "seeds", type=int, default=3),
            flag("--same-split", "all seeds test the same patients"),
            option("--comparisons", "N", "methods that share the 5 %%", type=int, default=1),
            option(
                "--metric", "NAME", "another score, a mean over patients", default="accuracy"
            ),
            option(
                "--patient-sd",
                "SD",
                "--metric: standard deviation of one patient's difference",
                type=float,
                default=0.0,
            ),
            flag("--json", "print JSON"),
            file_option("--out", "DIR", "a new folder for plan.html and plan.json"),
        ),
        examples=(
            "silofl plan --sizes 120,80,200,150,90,60 --effect 3",
            "silofl plan --pilot runs/pilot --method ditto --effect 2 --comparisons 5 --out runs/plan",
        ),
        description="Simulates studies of hospitals of these sizes, with the intervals of the report. A gain is the "
        "mean over hospitals, in percentage points of accuracy unless --metric names another score.",
    ),
)
