"""Commands on an exported model, ``export`` and ``predict``, and ``budget``: the cost of differential privacy."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from client.commands import data
from client.commands import study as hospital
from client.commands.table import Command, Titled, choice, file_option, flag, option
from partitions.common.errors import UserError
from server.cli.options import HOST, OF_SEVERAL, TOKEN_FILE

if TYPE_CHECKING:
    from client.exporting.model_card import Card

PORT = 8643  # default port of `predict --serve`


def predict(args: argparse.Namespace) -> None:
    if not args.serve:
        if not args.data:
            raise UserError(
                "--data FILE is missing: whom to predict; or --serve answers over HTTP"
            )
        if args.token_file or args.host != "127.0.0.1" or args.port != PORT:
            raise UserError("--host, --port and --token-file belong to --serve")
        data.predict(args)
        return
    from server.serving import serve_model
    from server.watch.access import token_for

    if args.data or args.out or args.masks or args.as_gaps or args.key:
        raise UserError(
            "--serve: leave --data, --out, --masks, --key, --as-gaps out; requests may say ?as-gaps=1, ?key=study"
        )
    token = token_for(args.host, args.token_file)
    serve_model(Path(args.model), args.recipe, args.host, args.port, token, args.network)


def print_export(card: Card, out: Path, which: str) -> None:
    """Print what was computed for an exported model, and which one it is."""
    from client.export import onnx_file
    from client.exporting.calibration import in_words
    from client.prediction.new_samples import describe_disclosed
    from partitions.recipes.pictures import parse_any
    from server.rendering import fill

    older = onnx_file(out)
    text = fill(
        "cli/exported.txt",
        card=card,
        out=out,
        which=which,
        in_words=in_words,
        older=older if older != out and older.exists() else None,
        disclosed=describe_disclosed(parse_any(card.recipe)) if card.recipe else "",
    )
    print(text, end="")


def export(args: argparse.Namespace) -> None:
    from client.export import export_model

    source, out = Path(args.source), Path(args.out)
    if args.which == "shared":
        from server.results.models import export_shared

        of_one = args.silo, args.run_id, args.no_recipe, args.temperature, args.conformal
        if any(of_one) or args.onnx:
            left = "--silo, --run-id, --no-recipe, --temperature, --conformal and --onnx"
            raise UserError(f"--which shared: leave {left} out: it is of all silos")
        card = export_shared(source, out, args.strategy, args.seed, args.round)
    elif not args.silo:
        raise UserError(f"--which {args.which}: --silo NAME is needed here")
    else:
        which = args.silo, args.which, out, args.strategy, args.seed, args.run_id, args.round
        extras = {
            "temperature": args.temperature,
            "conformal": args.conformal,
            "coverage": args.coverage,
            "onnx": args.onnx,
        }
        card = export_model(source, *which, recipe=not args.no_recipe, **extras)
    print_export(card, out, args.which)


def drift(args: argparse.Namespace) -> None:
    from server import drift as drifting
    from server.rendering import fill

    if args.summary:
        summary = drifting.write_training_summary(args.model, args.summary)
        out = drifting.summary_file(args.model)
        print(
            f"{out}: {summary.samples} training samples; it has counts of patients, so it stays here"
        )
        return
    if args.data is None:
        raise UserError("--data FILE is missing: the new patients; or --summary OURS.npz")
    report = drifting.measure_drift(args.model, args.data)
    print(
        json.dumps(report, indent=1) if args.json else fill("cli/drift.txt", **report),
        end="\n" * args.json,
    )


def lineage(args: argparse.Namespace) -> None:
    import hashlib
    from dataclasses import asdict

    from client.cli import print_checks
    from client.export import card_file, read_model
    from client.exporting.lineage import lineage_checks
    from partitions.silo_file import Check

    card, _ = read_model(args.model, args.network)
    if card.lineage is None:
        raise UserError(
            f"{args.model}: its card names no audit line: silofl export makes one at the hospital that trained it"
        )
    digest = hashlib.sha256(card_file(args.model).read_bytes()).hexdigest()
    checks = [Check("model and card", True, f"{card_file(args.model)} {digest}")]
    checks += lineage_checks(card.lineage, args.state_dir, args.data, args.study, args.app)
    if args.json:
        print(
            json.dumps(
                {"lineage": card.lineage.model_dump(), "checks": [asdict(c) for c in checks]},
                indent=1,
            )
        )
    else:
        print_checks(checks, as_json=False)
    if failed := [check.name for check in checks if not check.ok]:
        raise UserError(f"{args.model}: {len(failed)} links do not hold: {', '.join(failed)}")


def budget(args: argparse.Namespace) -> None:
    from client.commands.budget import budget_page, budgets, run_page
    from client.studies import silo_at

    if args.where is not None and (args.where / "config.toml").is_file():
        from server.results.history import History, budgets_of
        from server.results.run_directory import read_toml

        if args.policy is not None:
            raise UserError(
                "--policy: a run directory has no budget; name a silo's state directory"
            )
        unit = str(read_toml(args.where / "config.toml").get("dp.unit", "record"))
        cohorts = budgets_of(History.stored(args.where / "history.csv"), unit)
        text = run_page(cohorts)
    else:
        place = silo_at(args.where, args.policy)
        cohorts = budgets(place.state, place.policy)
        text = budget_page(cohorts, place.name, place.state)
    print(json.dumps(cohorts, indent=1) if args.json else text)


SERVE = (
    flag(
        "--serve",
        "answer over HTTP until Ctrl-C, in place of --data: POST /predict takes JSON rows, or by a recipe of "
        "pictures one picture or scan, or a zip of a series",
    ),
    Titled(
        "with --serve",
        (option("--port", "P", "0: a free one", type=int, default=PORT), HOST, TOKEN_FILE),
    ),
)

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
    Command(
        "export",
        "save a silo's model, or the shared one, as safetensors",
        export,
        (
            option("source", "RUN|STATE_DIR", "a run directory, or a silo's state directory"),
            option(
                "--silo", "NAME", "for example hospital-03; not for --which shared", default=""
            ),
            choice(
                "--which",
                ("best", "last", "reported", "shared"),
                "which model, as above",
                "best",
            ),
            option(
                "--round",
                "R",
                "reported or shared: the round that the report names, if it is asked for",
                type=int,
            ),
            *OF_SEVERAL,
            option(
                "--run-id", "ID", "which of several runs that had the same name", default=""
            ),
            file_option(
                "--temperature",
                "DATA",
                "the silo's data file: scale the model's probabilities by one number, fitted on its validation"
                " part, which predict then uses; not for --which shared",
            ),
            file_option(
                "--conformal",
                "DATA",
                "the silo's data file: its test part says how wide a set of classes, or an interval, has to "
                "be, which predict then adds; not for --which shared",
            ),
            option(
                "--coverage",
                "SHARE",
                "--conformal: how often it holds",
                type=float,
                default=0.9,
            ),
            flag(
                "--onnx",
                "write FILE.onnx beside it, with scaling and temperature inside, checked by onnxruntime; not "
                "for --which shared",
            ),
            option(
                "--out", "FILE", "the .safetensors file; its card is FILE.json", required=True
            ),
            flag("--no-recipe", "leave the recipe of the silo's data out of the card"),
        ),
        examples=(
            "silofl export runs/first --silo hospital-03 --which reported --out ours.safetensors",
            "silofl export runs/first --which shared --out shared.safetensors",
        ),
        description="Save one model of a run with its card, which says which it is. best and last are the "
        "silo's personal model: the best on its validation data (the default), or the last. "
        "reported is the silo's model whose score the report prints. shared is the one model of "
        "all silos, from the server's run directory.",
    ),
    Command(
        "drift",
        "whether new patients differ from those that a model learned from",
        drift,
        (
            file_option("model", "MODEL", "an exported model, .safetensors"),
            file_option(
                "--data", "FILE", "the new patients: as of silofl predict; .npz has labels too"
            ),
            file_option(
                "--summary",
                "OURS.npz",
                "first, once: count the data file that the model learned from",
            ),
            flag("--json", "as JSON"),
        ),
        examples=(
            "silofl drift ours.safetensors --summary ours.npz",
            "silofl drift ours.safetensors --data new.csv",
        ),
        description="Compare inputs, predictions and, where there are labels, labels, errors and calibration of new "
        "patients with a summary of the model's own data.",
    ),
    Command(
        "lineage",
        "where a model comes from, and whether each link holds",
        lineage,
        (
            file_option("model", "MODEL", "an exported model, .safetensors"),
            *hospital.STATE_DIR,
            file_option("--data", "FILE", "the data file that it learned from"),
            file_option("--study", "FILE", "the study, study.toml"),
            file_option("--app", "FOLDER", "a checkout: is its app the one that trained?"),
            option(
                "--network", "MODULE:FUNCTION", "a network of your own that may run", default=""
            ),
            flag("--json", "as JSON"),
        ),
        examples=("silofl lineage ours.safetensors --data ours.npz --study study.toml",),
        description="Print the chain from a model's card to the line of the audit log, run, study, data and code, and "
        "verify each link whose other end is named. Exit code 2 where one does not hold.",
    ),
    Command(
        "predict",
        "apply an exported model to new patients",
        predict,
        (*data.PREDICT, *SERVE),
        examples=(
            "silofl predict --model ours.safetensors --data new.csv --out answers.csv",
            "silofl predict --model ours.safetensors --serve",
        ),
    ),
)
